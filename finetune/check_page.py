"""The data report of ``finetune check`` as one page."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

from finetune.data.check import DataCheck, Finding, Severity, SplitFacts
from finetune.page import (
    Axes,
    Content,
    Scale,
    bar,
    decimal,
    document,
    figure,
    figures,
    heading,
    number,
    section,
    step_scale,
    table,
    tag,
    value_scale,
    whole,
)
from finetune.run_folder import write_text

NAMES: dict[Severity, str] = {"error": "Errors", "warning": "Warnings", "info": "Notes"}
MAX_CLASSES = 200  # shown in the table


def write_check_page(path: Path, report: DataCheck) -> None:
    """Write the page, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    footer = tag("footer", "Written by finetune check.")
    parts = [*_findings(report), _rows(report), _classes(report), _lengths(report), _baselines(report)]
    write_text(path, document("Data check · finetune", tag("main", _headline(report), *parts, footer)))


def _headline(report: DataCheck) -> ET.Element:
    counts = [(len(report.of(severity)), name) for severity, name in NAMES.items()]
    first = next(((count, name.lower()) for count, name in counts if count), (0, "findings"))
    beside = ", ".join(f"{count} {name.lower()}" for count, name in counts if count and name.lower() != first[1])
    big = tag("div", str(first[0]), class_="big")
    files = (f"{name}: {', '.join(facts.files)}" for name, facts in report.splits.items())
    return tag(
        "header",
        tag("p", "finetune check", class_="eyebrow"),
        tag("h1", "Data check"),
        tag(
            "div",
            big,
            tag("div", tag("b", first[1]), beside, class_="beside"),
            class_="best",
        ),
        tag("p", " · ".join(files), class_="context"),
    )


def _findings(report: DataCheck) -> list[ET.Element | None]:
    return [
        section(name, tag("ul", *map(_finding, found)) if (found := report.of(severity)) else None)
        for severity, name in NAMES.items()
    ]


def _finding(finding: Finding) -> ET.Element:
    places = [tag("li", tag("code", place)) for place in finding.places]
    remedy = tag("p", finding.remedy, class_="context") if finding.remedy else None
    message = tag("span", finding.message, style="white-space: pre-wrap")
    return tag("li", message, tag("ul", *places) if places else None, remedy)


def _rows(report: DataCheck) -> ET.Element | None:
    columns = [
        "split",
        "rows#",
        "repeated rows#",
        "near copies#",
        "contradicting texts#",
        "empty texts#",
        "unknown tokens#",
    ]
    rows = [
        [
            heading(name),
            *(
                number(whole(value))
                for value in (
                    facts.rows, facts.repeated_rows, facts.near_copies, facts.conflicting_texts, facts.empty_texts,
                )
            ),
            number("–" if facts.unknown_share is None else f"{facts.unknown_share:.2%}"),
        ]
        for name, facts in report.splits.items()
    ]  # fmt: skip
    leaks = report.leaks
    note = (
        f"Dev rows that are in train: {leaks['exact']:,} exactly, {leaks['normalised']:,} normalised."
        if leaks
        else None
    )
    return section("Rows", table(columns, rows), note=note)


def _classes(report: DataCheck) -> ET.Element | None:
    if not report.splits or not report.splits["train"].classes:
        return None
    train = report.splits["train"].classes
    most = max(train.values())
    ordered = sorted(train.items(), key=lambda item: -item[1])
    rows = []
    for name, count in ordered[:MAX_CLASSES]:
        row: list[Content] = [heading(name)]
        for split, facts in report.splits.items():
            in_split = facts.classes[name]
            row.append(bar(whole(in_split), count / most) if split == "train" else number(whole(in_split)))
            row.append(number(f"{in_split / facts.rows:.1%}"))
        rows.append(row)
    columns = ["class"]
    for split in report.splits:
        columns += ["train" if split == "train" else f"{split}#", "share#"]
    note = f"The {MAX_CLASSES} largest of {len(ordered):,}." if len(ordered) > MAX_CLASSES else None
    return section("Classes", table(columns, rows), note=note)


def _lengths(report: DataCheck) -> ET.Element | None:
    if not report.splits:
        return None
    unit = report.splits["train"].lengths.unit
    percents = list(report.splits["train"].lengths.percentiles)
    levels = list(report.splits["train"].lengths.cut)
    columns = ["split", *(f"{percent} %#" for percent in percents)]
    rows = [
        [heading(name), *(number(whole(value)) for value in facts.lengths.percentiles.values())]
        for name, facts in report.splits.items()
    ]
    splits = report.splits.values()
    cut = [
        [
            heading(str(level)),
            *(number(f"{share:.1%}") for facts in splits for share in facts.lengths.cut[level]),
        ]
        for level in levels
    ]
    cut_columns = ["max_length"]
    cut_columns += [f"{name}: {what}#" for name in report.splits for what in ("rows cut", "tokens lost")]
    charts = figures("large", [_histogram(name, facts) for name, facts in report.splits.items()])
    note = f"max_length is {report.max_length}." if report.max_length else None
    return section(f"Lengths in {unit}", charts, table(columns, rows), table(cut_columns, cut), note=note)


def _histogram(name: str, facts: SplitFacts) -> ET.Element:
    edges, counts = facts.lengths.edges, facts.lengths.counts
    last = step_scale(edges[-1])
    axes = Axes(Scale(0, edges[-1], last.ticks), value_scale(np.array(counts)), x_name=facts.lengths.unit)
    columns = [
        axes.column(low, high, count, f"{count:,} rows with {low:g} to {high:g} {facts.lengths.unit}")
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return figure(f"{name}: rows by length", axes.draw(f"rows of {name} by length in {facts.lengths.unit}", *columns))


def _baselines(report: DataCheck) -> ET.Element | None:
    if not report.baselines:
        return None
    names = list(report.baselines[0].metrics)
    rows = [
        [
            heading(each.name),
            *(number(decimal(value)) for value in each.metrics.values()),
            number(f"{each.interval[0]:.4f} – {each.interval[1]:.4f}" if each.interval else "–"),
        ]
        for each in report.baselines
    ]
    columns = ["baseline", *(f"{name}#" for name in names), "95 % interval of accuracy#"]
    return section(
        "What a model must beat", table(columns, rows), note="On the dev rows; fitted on at most 20,000 rows."
    )
