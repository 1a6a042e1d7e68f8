"""Parts of a self-contained HTML page: elements that are escaped by construction, and charts as inline SVG.

The page loads nothing and runs nothing, and its charts follow its light or dark colours.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 500  # drawn of a line
MAX_DOTS = 60  # points up to which each gets a dot that tells its value; longer lines are smoothed
COLOURS = 6
DASH = "–"

Content = ET.Element | str | None
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Line = tuple[Floats, Floats]  # optimizer steps, values


def document(title: str, main: ET.Element) -> str:
    """The whole page as text."""
    # Serialised as XML, which escapes in attributes too; HTML then needs every end tag.
    body = ET.tostring(tag("body", main), encoding="unicode", short_empty_elements=False)
    return HEAD.format(title=escape(printable(title)), style=STYLE) + body + "\n</html>\n"


# Words and numbers


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def decimal(value: float | None, decimals: int = 4) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.2g}" if 0 < abs(value) < 0.5 * 10**-decimals else f"{value:,.{decimals}f}"


def whole(value: float | None) -> str:
    return decimal(value, 0)


def plural(count: float | None, noun: str) -> str:
    return f"{whole(count)} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return DASH
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def short(value: float, digits: int = 3) -> str:
    """A number as short as it can be: 0.5, 5e-5, 20,000."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def interval_text(metric: Mapping[str, Any]) -> str:
    return f"{decimal(metric.get('low'))} – {decimal(metric.get('high'))}"


# Elements


def tag(name: str, /, *content: Content, **attributes: object) -> ET.Element:
    """An element; ``class_`` and ``text_anchor`` become ``class`` and ``text-anchor``, None content is left out."""
    named = {key.rstrip("_").replace("_", "-"): printable(str(value)) for key, value in attributes.items()}
    element = ET.Element(name, named)
    for part in content:
        if isinstance(part, ET.Element):
            element.append(part)
        elif part and len(element):
            element[-1].tail = (element[-1].tail or "") + printable(part)
        elif part:
            element.text = (element.text or "") + printable(part)
    return element


def printable(text: str) -> str:
    """The text without the characters that no HTML page may hold."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def section(title: str, *content: ET.Element | None, note: str | None = None) -> ET.Element | None:
    """A section, or nothing where it has no content."""
    if all(part is None for part in content):
        return None
    return tag("section", tag("h2", title), note and tag("p", note, class_="note"), *content)


def table(columns: Sequence[str], rows: Sequence[Sequence[Content]]) -> ET.Element | None:
    """A table, or nothing without rows; the name of a column of numbers ends in ``#``."""
    if not rows:
        return None
    head = [tag("th", name.rstrip("#"), scope="col", class_="number" if name.endswith("#") else "") for name in columns]
    body = [tag("tr", *(part if _is_cell(part) else tag("td", part) for part in row)) for row in rows]
    return tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), class_="scroll")


def _is_cell(part: Content) -> bool:
    return isinstance(part, ET.Element) and part.tag in ("td", "th")


def heading(text: str) -> ET.Element:
    """The cell that names a row."""
    return tag("th", text, scope="row")


def number(text: str) -> ET.Element:
    """A cell that holds a number."""
    return tag("td", text, class_="number")


def bar(text: str, share: float | None) -> ET.Element:
    """A cell with a bar behind its text."""
    return tag("td", text, class_="bar", style=f"--w:{100 * share if is_number(share) else 0:.1f}%")


def figures(kind: str, drawn: Iterable[ET.Element | None]) -> ET.Element | None:
    """Figures side by side, or nothing where there is none."""
    parts = [part for part in drawn if part is not None]
    return tag("div", *parts, class_=f"figures {kind}") if parts else None


def figure(title: str, drawing: ET.Element, names: Sequence[str] = ()) -> ET.Element:
    """A chart under its title, with a legend where it has more than one line."""
    legend = [tag("span", name, class_=f"key s{position % COLOURS}") for position, name in enumerate(names)]
    return tag("figure", tag("figcaption", tag("b", title), *(legend if len(names) > 1 else ())), drawing)


# Charts


@dataclass(frozen=True)
class Scale:
    """A linear scale and the values that are marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value stands on the page, between the places of both ends."""
        return round(float(start + (value - self.low) / (self.high - self.low) * (end - start)), 1)


UNIT = Scale(0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1))
LARGE, SMALL = (520, 260), (340, 190)


def value_scale(values: NDArray[Any], *, zero: bool = True) -> Scale:
    """Round bounds around all values, and around zero where that is asked for."""
    low, high = float(values.min()), float(values.max())
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (0.0, 1.0) if zero else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))
    step = _round_step((high - low) / 5)
    ticks = _multiples(step, math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9))
    return Scale(ticks[0], ticks[-1], ticks)


def step_scale(last: float) -> Scale:
    """From zero to the last optimizer step, marked at whole steps."""
    step = max(_round_step(last / 6), 1)
    return Scale(0, last, _multiples(step, 0, int(last / step)))


def _round_step(least: float) -> float:
    """The first of 1, 2, 5, 10, 20, … and 0.5, 0.2, 0.1, … that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _multiples(step: float, first: int, last: int) -> tuple[float, ...]:
    return tuple(float(f"{count * step:.10g}") for count in range(first, last + 1))


class Axes:
    """The frame of one chart; its methods draw marks in data coordinates."""

    def __init__(self, x: Scale, y: Scale, *, size: tuple[int, int] = LARGE, x_name: str = "optimizer step") -> None:
        self.x_scale, self.y_scale, self.x_name = x, y, x_name
        self.width, self.height = size
        self.left, self.right, self.top, self.bottom = 46, self.width - 22, 20, self.height - 34

    def x(self, value: float) -> float:
        return self.x_scale.place(value, self.left, self.right)

    def y(self, value: float) -> float:
        return self.y_scale.place(value, self.bottom, self.top)

    def draw(self, summary: str, *marks: ET.Element) -> ET.Element:
        """The chart: axes, marks, and the text that stands for it."""
        axes = [tag("text", self.x_name, x=self.right, y=self.bottom + 31, text_anchor="end")]
        for value in self.y_scale.ticks:
            at = self.y(value)
            axes.append(tag("line", x1=self.left, x2=self.right, y1=at, y2=at, class_="grid"))
            axes.append(tag("text", short(value), x=self.left - 7, y=at + 4, text_anchor="end"))
        for value in self.x_scale.ticks:
            axes.append(tag("text", short(value), x=self.x(value), y=self.bottom + 16, text_anchor="middle"))
        base = tag("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis")
        return svg(self.width, self.height, summary, *axes, *marks, base)

    def line(self, xs: Floats, ys: Floats, style: str) -> ET.Element:
        return tag("polyline", points=" ".join(f"{x:g},{y:g}" for x, y in self._places(xs, ys)), class_=style)

    def dot(self, x: float, y: float, text: str, style: str) -> ET.Element:
        return tag("circle", tag("title", text), cx=self.x(x), cy=self.y(y), r=3, class_=f"dot {style}")

    def column(self, low: float, high: float, value: float, text: str = "") -> ET.Element:
        """An upright bar from zero, with a narrow gap to the next."""
        left, width, top = self.x(low) + 1, self.x(high) - self.x(low) - 2, self.y(value)
        shape = {"x": f"{left:.1f}", "y": top, "width": f"{width:.1f}", "height": f"{self.y(0) - top:.1f}"}
        return tag("rect", tag("title", text) if text else None, class_="column", **shape)

    def cloud(self, xs: Floats, ys: Floats) -> ET.Element:
        """Many dots as one path: a line of no length with round ends."""
        return tag("path", d="".join(f"M{x:g} {y:g}h0" for x, y in self._places(xs, ys)), class_="cloud")

    def diagonal(self) -> ET.Element:
        return tag("line", x1=self.left, y1=self.bottom, x2=self.right, y2=self.top, class_="mark")

    def mark_x(self, value: float, text: str) -> list[ET.Element]:
        """An upright dashed line with its name above."""
        at = self.x(value)
        anchor = "end" if at > (self.left + self.right) / 2 else "start"
        line = tag("line", x1=at, x2=at, y1=self.top, y2=self.bottom, class_="mark")
        return [line, tag("text", text, x=at, y=self.top - 7, text_anchor=anchor)]

    def _places(self, xs: Floats, ys: Floats) -> Iterator[tuple[float, float]]:
        return ((self.x(x), self.y(y)) for x, y in zip(xs, ys, strict=True))


def svg(width: int, height: int, summary: str, *marks: ET.Element) -> ET.Element:
    """A drawing; ``summary`` is what a screen reader says."""
    return tag("svg", *marks, viewBox=f"0 0 {width} {height}", width=width, role="img", aria_label=summary)


def line_chart(
    title: str,
    lines: Mapping[str, Line],
    *,
    best: float | None = None,
    zero: bool = True,
    smooth: bool = False,
    size: tuple[int, int] = LARGE,
) -> ET.Element | None:
    """Values over optimizer steps, or nothing where none was logged."""
    drawn = {name: line for name, line in lines.items() if len(line[0])}
    if not drawn:
        return None
    last = max(float(steps[-1]) for steps, _ in drawn.values())
    every = np.concatenate([values for _, values in drawn.values()])
    axes = Axes(step_scale(max(last, 1)), value_scale(every, zero=zero), size=size)
    marks = axes.mark_x(best, f"best: step {best:,}") if best else []
    summary = [f"{title} over optimizer steps"]
    for position, (name, (steps, values)) in enumerate(drawn.items()):
        colour = f"s{position % COLOURS}"
        ends = [f"{short(values[at], 4)} at step {steps[at]:,.0f}" for at in (0, -1)]
        summary.append(f"{name} from {ends[0]} to {ends[1]}")
        kept = thin(values)
        if len(steps) <= MAX_DOTS:
            marks.append(axes.line(steps, values, f"line {colour}"))
            texts = (f"{name} {short(value, 4)} at step {step:,.0f}" for step, value in zip(steps, values, strict=True))
            marks += [axes.dot(*point, colour) for point in zip(steps, values, texts, strict=True)]
        elif smooth:
            marks.append(axes.line(steps[kept], values[kept], f"line pale {colour}"))
            means = smoothed(values)
            kept = thin(means)
            marks.append(axes.line(steps[kept], means[kept], f"line {colour}"))
        else:
            marks.append(axes.line(steps[kept], values[kept], f"line {colour}"))
    return figure(title, axes.draw("; ".join(summary), *marks), list(drawn))


def thin(values: Floats) -> Ids:
    """Positions of at most ``MAX_POINTS`` values that keep every peak: the least and greatest of equal parts."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), MAX_POINTS // 2 - 1)
    kept = [part[at] for part in parts for at in (values[part].argmin(), values[part].argmax())]
    return np.unique([0, *kept, len(values) - 1])


def smoothed(values: Floats) -> Floats:
    """The mean of each value and its neighbours, over a thirtieth of the line."""
    window = np.ones(len(values) // 30 | 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def interval_bar(name: str, metric: Mapping[str, Any]) -> ET.Element | None:
    """A value and its interval on their scale: the whole of it for scores, so that their bars compare."""
    value, low, high = (metric.get(key) for key in ("value", "low", "high"))
    known = np.array([each for each in (value, low, high) if is_number(each)])
    if not is_number(value):
        return None
    whole = UNIT if known.min() >= 0 else Scale(-1, 1, ())
    scale = whole if np.abs(known).max() <= 1 else value_scale(known)
    left, right = 36, 324
    marks = [
        tag("line", x1=left, x2=right, y1=9, y2=9, class_="grid"),
        tag("text", short(scale.low), x=left - 6, y=13, text_anchor="end"),
        tag("text", short(scale.high), x=right + 6, y=13),
    ]
    if is_number(low) and is_number(high):
        start, end = scale.place(low, left, right), scale.place(high, left, right)
        marks.append(tag("rect", x=start, y=5, width=f"{end - start:.1f}", height=8, class_="column"))
    marks.append(tag("rect", x=f"{scale.place(value, left, right) - 1:.1f}", y=2, width=2, height=14, class_="value"))
    return svg(360, 18, f"{name} {decimal(value)}, interval {interval_text(metric)}", *marks)


HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
"""

# Colours that people with any colour vision tell apart: Okabe & Ito, "Color Universal Design", 2008.
STYLE = """
:root {
  --back: #fff; --text: #1b1f24; --faint: #59636e; --rule: #d8dee4; --panel: #f6f8fa;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9;
  --blue: 0 114 178; --orange: 230 120 0;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --back: #0f1419; --text: #e6e8eb; --faint: #9aa5b1; --rule: #2d363f; --panel: #171d24;
    --c0: #56b4e9; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7; --c4: #f0e442; --c5: #d55e00;
    --blue: 0 120 190; --orange: 213 94 0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--back); color: var(--text); print-color-adjust: exact;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", "PingFang SC", sans-serif;
}
main { max-width: 1100px; margin: 0 auto; padding: 40px 28px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 10px; font-size: 19px; }
section { margin-top: 44px; }
.eyebrow, .context, .note, footer { color: var(--faint); margin: 0; }
.eyebrow { font-size: 13px; }
.context { overflow-wrap: anywhere; }
.note { max-width: 80ch; margin: -6px 0 14px; font-size: 14px; }
footer { margin-top: 48px; padding-top: 12px; border-top: 1px solid var(--rule); font-size: 13px; }
.best { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 16px; margin: 14px 0 10px; }
.big { font-size: 60px; font-weight: 650; line-height: 1; letter-spacing: -0.02em; color: var(--c0); }
.beside b { display: block; font-size: 18px; }
.big, .number, .bar, .matrix, svg { font-variant-numeric: tabular-nums; }

.scroll { overflow-x: auto; }
.scroll + .scroll, .figures + .scroll { margin-top: 20px; }
table { border-collapse: collapse; font-size: 14px; }
th, td {
  max-width: 44ch; padding: 5px 20px 5px 0; text-align: left; border-bottom: 1px solid var(--rule);
  overflow-wrap: break-word;
}
thead th { color: var(--faint); font-weight: 500; white-space: nowrap; vertical-align: bottom; }
tbody th { font-weight: 600; }
th.number, .number { text-align: right; white-space: nowrap; }
td svg { display: block; min-width: 240px; max-width: 100%; height: auto; }
.bar {
  min-width: 130px; padding-left: 6px; white-space: nowrap;
  background: linear-gradient(rgb(var(--blue) / 0.3) 0 0) no-repeat left / calc(var(--w) * 0.9) 70%;
}
.facts td { max-width: none; padding-right: 0; overflow-wrap: anywhere; }
.facts th { color: var(--faint); font-weight: 500; white-space: nowrap; vertical-align: top; }

.matrix td, .matrix th { border: 0; padding: 4px 6px; }
.matrix td { min-width: 62px; text-align: center; line-height: 1.15; }
.matrix tbody td { border: 2px solid var(--back); background: var(--panel); }
.matrix .hit { background: rgb(var(--blue) / calc(var(--a) * 0.75)); }
.matrix .miss { background: rgb(var(--orange) / calc(var(--a) * 0.75)); }
.matrix .corner { color: var(--faint); font-size: 12px; text-align: right; vertical-align: bottom; }
.matrix b, .matrix small { display: block; white-space: nowrap; }
.matrix b { font-weight: 600; }
.matrix .corner, .matrix span, .matrix tbody th { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.matrix span { display: block; max-width: 120px; }
.matrix thead th { text-align: center; }
.matrix tbody th { max-width: 200px; text-align: right; font-weight: 500; }
.many { font-size: 11px; }
.many td { min-width: 28px; padding: 2px 1px; }
.many tbody td { border-width: 1px; }
.many small { font-size: 8.5px; letter-spacing: -0.02em; }
.many th { padding: 1px 6px; }
.many thead th { padding: 0 0 6px; }
.many span { writing-mode: vertical-rl; text-orientation: sideways; max-height: 150px; margin: 0 auto; }

.figures { display: grid; gap: 24px 28px; margin-top: 8px; }
.figures + .figures { margin-top: 28px; }
.large { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); }
figure { margin: 0; max-width: 560px; }
.small figure { max-width: 370px; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 16px; margin-bottom: 4px; font-size: 14px; }
.key { color: var(--faint); }
.key::before {
  content: ""; display: inline-block; width: 16px; height: 3px; margin-right: 6px; vertical-align: middle;
  background: var(--c);
}
figure svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--faint); }
.grid { stroke: var(--rule); }
.axis { stroke: var(--faint); }
.mark { stroke: var(--faint); stroke-dasharray: 4 4; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.pale { stroke-width: 1; stroke-opacity: 0.35; }
.dot { fill: var(--c); stroke: var(--back); }
.column { fill: rgb(var(--blue) / 0.45); }
.value { fill: var(--c0); }
.cloud { stroke: rgb(var(--blue) / 0.5); stroke-width: 5; stroke-linecap: round; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.s3 { --c: var(--c3); } .s4 { --c: var(--c4); } .s5 { --c: var(--c5); }

code { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { margin: 10px 0 0; padding: 14px 16px; overflow-x: auto; background: var(--panel); border-radius: 6px; }
summary { cursor: pointer; }

@media print {
  @page { margin: 14mm; }
  body { font-size: 13px; }
  main { padding: 0; max-width: none; }
  section { margin-top: 26px; }
  h2, .note { break-after: avoid; }
  tr, figure, header { break-inside: avoid; }
  .scroll { overflow: visible; }
  .many { zoom: 0.7; }
  .large { grid-template-columns: 1fr 1fr; }
  .small { grid-template-columns: 1fr 1fr 1fr; }
}
"""
