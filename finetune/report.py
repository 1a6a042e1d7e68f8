"""``report.html``: a run folder as one page that opens anywhere, made from the files of that folder alone.

The page loads nothing and runs nothing. It is built as an element tree, so that every label, path and command is
escaped by construction, and its charts are inline SVG, so that they follow the page's light or dark colours.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeGuard, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from finetune.errors import CheckpointError
from finetune.run_folder import write_text

MAX_POINTS = 500  # drawn of a line
MAX_DOTS = 60  # points up to which each gets a dot that tells its value; longer lines are smoothed
MAX_SCATTER = 2_000  # rows drawn of a regression
MAX_MATRIX = 30  # classes up to which the confusion matrix is drawn whole
MAX_ROWS = 20  # mistakes and confused pairs listed
BINS = 10  # of the reliability diagram
COLOURS = 6
DASH = "–"
ROW_NOTE = "Row 1 is the first data row of predictions.tsv, which has the dev rows in their order."

T = TypeVar("T")
Content = ET.Element | str | None
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Line = tuple[Floats, Floats]  # optimizer steps, values


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html``, whole or not at all, and return its path.

    Raises:
        CheckpointError: there is no results.json, a file of the folder is damaged, or the page cannot be written.
    """
    page = _page(_read_run(run_dir))
    path = run_dir / "report.html"
    write_text(path, page)
    return path


# The files


@dataclass(frozen=True)
class Predictions:
    """``predictions.tsv``. Regression has no ``names``, and no columns in ``probability``."""

    names: list[str]
    labels: list[str]
    predicted: list[str]
    probability: Floats

    def class_ids(self) -> tuple[Ids, Ids]:
        """The true and the predicted class of each row."""
        ids = {name: number for number, name in enumerate(self.names)}
        try:
            true, predicted = (np.array([ids[cell] for cell in cells]) for cells in (self.labels, self.predicted))
        except KeyError as error:
            raise CheckpointError(
                f"predictions.tsv is damaged: class {error} has no probability column. Restore it, or delete it to "
                "leave its sections out of the report"
            ) from error
        return true, predicted

    def label_flags(self, cells: Sequence[str], separator: str) -> Flags:
        """``[rows, names]``: which labels each cell lists."""
        ids = {name: number for number, name in enumerate(self.names)}
        flags = np.zeros((len(cells), len(self.names)), bool)
        for row, cell in enumerate(cells):
            flags[row, [ids[part.strip()] for part in cell.split(separator) if part.strip() in ids]] = True
        return flags


@dataclass(frozen=True)
class Run:
    """What the files of a run folder say; a file that is not there is empty."""

    name: str
    results: Mapping[str, Any]
    launch: Mapping[str, Any]
    config: Mapping[str, Any]
    config_text: str
    history: Sequence[Mapping[str, Any]]
    predictions: Predictions | None

    def setting(self, name: str) -> Any:
        """A value of the run config, by its dotted name."""
        section, key = name.split(".")
        return (self.config.get(section) or {}).get(key)

    def logged(self, name: str) -> Line:
        """Optimizer steps and values of a metric; steps where it was not a number are left out."""
        points = [(entry["step"], entry[name]) for entry in self.history if is_number(entry.get(name))]
        steps, values = np.array(points, float).reshape(-1, 2).T
        return steps, values


def _read_run(run_dir: Path) -> Run:
    if not (run_dir / "results.json").is_file():
        raise CheckpointError(
            f"{run_dir / 'results.json'} does not exist: give the folder of a finished run (its train.output_dir); an "
            "interrupted run gets it when it is continued to its end"
        )
    config: dict[str, Any] = _read(run_dir / "config.yaml", yaml.safe_load, {})
    return Run(
        name=(config.get("tracking") or {}).get("run_name") or run_dir.resolve().name,
        results=_read(run_dir / "results.json", json.load, {}),
        launch=_read(run_dir / "launch.json", json.load, {}),
        config=config,
        config_text=_read(run_dir / "config.yaml", lambda file: file.read(), ""),
        history=_read(run_dir / "metrics.jsonl", lambda file: list(_whole_lines(file)), []),
        predictions=_read(run_dir / "predictions.tsv", _read_predictions, None),
    )


def _read(path: Path, parse: Callable[[TextIO], T], missing: T) -> T:
    """The content of a file, or ``missing`` where there is no file or nothing in it."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:  # a label may hold other line ends
            return parse(file) or missing
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is damaged: {reason}. Restore it, or run the training again") from error


def _whole_lines(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """The entries of a JSONL file; a process killed while writing leaves half a line."""
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _read_predictions(file: TextIO) -> Predictions | None:
    header, first = file.readline().rstrip("\r\n").split("\t"), file.readline()
    if header[:2] != ["label", "prediction"]:
        raise ValueError("its first columns are not label and prediction")
    if not first:
        return None
    names = [column.removeprefix("probability_") for column in header[2:]]
    labels: list[str] = []
    predicted: list[str] = []

    def probabilities() -> Iterator[str]:
        """Keep the texts of each line and pass its numbers on, so that no more than one line is in memory twice."""
        for number, line in enumerate(chain([first], file), start=2):
            if line.count("\t") + 1 != len(header):
                raise ValueError(f"line {number} does not have the {len(header)} columns of its header")
            label, prediction, *numbers = line.rstrip("\r\n").split("\t", 2)
            labels.append(label)
            predicted.append(prediction)
            yield numbers[0] if numbers else "nan"

    probability = np.loadtxt(probabilities(), delimiter="\t", comments=None, ndmin=2)
    return Predictions(names, labels, predicted, probability)


# The page


def _page(run: Run) -> str:
    footer = tag("footer", "Written by finetune from the files of the run folder.")
    main = tag(
        "main", _headline(run), _metrics(run), _training(run), *_dev_rows(run), _launch(run), _config(run), footer
    )
    # Serialised as XML, which escapes in attributes too; HTML then needs every end tag.
    body = ET.tostring(tag("body", main), encoding="unicode", short_empty_elements=False)
    return HEAD.format(title=escape(_printable(run.name)), style=STYLE) + body + "\n</html>\n"


def _headline(run: Run) -> ET.Element:
    """Name, best metric with its interval, and one line of context."""
    results = run.results
    name = results.get("metric_for_best_model") or "best metric"
    best = (results.get("metrics") or {}).get(name) or {"value": results.get("best_metric")}
    interval = f"{_level(run)} interval {_interval(best)}" if is_number(best.get("low")) else ""
    context = (
        f"{_integer(results.get('dev_rows'))} dev rows",
        f"{_integer(results.get('train_rows'))} training rows",
        run.setting("model.name_or_path"),
        f"best at step {_integer(results.get('best_step'))} of {_integer(results.get('global_step'))}",
        results.get("stop_reason"),
        _duration(results.get("wall_seconds")),
    )
    return tag(
        "header",
        tag("p", "finetune report", class_="eyebrow"),
        tag("h1", run.name),
        tag(
            "p",
            tag("span", _number(best.get("value")), class_="big"),
            tag("span", tag("b", name), interval, class_="beside"),
            class_="best",
        ),
        tag("p", " · ".join(str(part) for part in context if part), class_="context"),
    )


def _level(run: Run) -> str:
    return f"{100 * (run.results.get('interval_level') or 0.95):g} %"


def _interval(metric: Mapping[str, Any]) -> str:
    return f"{_number(metric.get('low'))} – {_number(metric.get('high'))}"


def _metrics(run: Run) -> ET.Element | None:
    rows = [
        [heading(name), number(_number(metric.get("value"))), number(_interval(metric)), interval_bar(name, metric)]
        for name, metric in (run.results.get("metrics") or {}).items()
        if metric
    ]
    columns = ["metric", "value#", f"{_level(run)} interval#", ""]
    return section("Metrics", table(columns, rows), note="The best model on all dev rows.")


def _training(run: Run) -> ET.Element | None:
    """Everything that was logged over the optimizer steps."""
    best = run.results.get("best_step")
    names = dict.fromkeys(name for entry in run.history for name in entry if name.startswith("eval/"))
    metrics = {name.removeprefix("eval/"): run.logged(name) for name in names if name != "eval/loss"}
    # Scores share their axes; an error such as mse has a scale of its own.
    scores = {name: line for name, line in metrics.items() if np.all(np.abs(line[1]) <= 1)}
    errors = {name: line for name, line in metrics.items() if name not in scores}
    loss = {"training": run.logged("train/loss"), "dev": run.logged("eval/loss")}
    large = [
        line_chart("Loss", loss, best=best, smooth=True),
        line_chart("Dev metrics", scores, best=best, zero=False),
        *(line_chart(f"Dev {name}", {name: line}, best=best) for name, line in errors.items()),
    ]
    small = [
        line_chart("Learning rate", {"learning rate": run.logged("train/learning_rate")}, size=SMALL),
        line_chart("Gradient norm", {"gradient norm": run.logged("train/grad_norm")}, size=SMALL, smooth=True),
        line_chart("Examples/s", {"examples/s": run.logged("perf/examples_per_second")}, size=SMALL, smooth=True),
    ]
    is_smoothed = len(loss["training"][0]) > MAX_DOTS
    note = "Pale: logged values; strong: the mean of each and its neighbours." if is_smoothed else None
    return section("Training", figures("large", large), figures("small", small), note=note)


def _dev_rows(run: Run) -> list[ET.Element | None]:
    """The sections that look at classes and single dev rows."""
    found = run.predictions
    default = "single_label_classification" if run.results.get("labels") else "regression"
    problem_type = run.setting("data.problem_type") or default
    kind = "label" if problem_type == "multi_label_classification" else "class"
    if found is None:
        return [_per_class(run, kind)]
    if problem_type == "regression":
        return _regression(found)
    if problem_type == "multi_label_classification":
        return [_per_class(run, kind), _label_mistakes(found, run.setting("data.label_separator") or ",")]
    ids = found.class_ids()
    return [_confusion(found.names, *ids), _per_class(run, kind), _mistakes(found, *ids), _calibration(found, *ids)]


def _confusion(names: Sequence[str], true: Ids, predicted: Ids) -> ET.Element | None:
    counts = np.bincount(true * len(names) + predicted, minlength=len(names) ** 2).reshape(len(names), len(names))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    if len(names) > MAX_MATRIX:
        return _confused_pairs(names, counts, shares)

    def cell(row: int, column: int) -> ET.Element:
        if not counts[row, column]:
            return tag("td")
        return tag(
            "td",
            tag("b", _integer(counts[row, column])),
            tag("small", _percent(shares[row, column])),
            class_="hit" if row == column else "miss",
            style=f"--a:{shares[row, column] ** 0.5:.2f}",  # a root, so that 5 % of a row are still seen
            title=f"true {names[row]}, predicted {names[column]}",
        )

    corner = tag("td", "true ↓ predicted →", class_="corner")
    head = tag("tr", corner, *(tag("th", tag("span", name), scope="col", title=name) for name in names))
    body = [
        tag("tr", tag("th", name, scope="row", title=name), *(cell(row, column) for column in range(len(names))))
        for row, name in enumerate(names)
    ]
    size = "matrix" if len(names) <= 8 else "matrix many"
    matrix = tag("table", tag("thead", head), tag("tbody", *body), class_=size)
    note = "Dev rows, and their share of all rows of the true class. Blue: right, orange: wrong."
    return section("Confusion matrix", tag("div", matrix, class_="scroll"), note=note)


def _confused_pairs(names: Sequence[str], counts: Ids, shares: Floats) -> ET.Element | None:
    worst = _greatest(counts, (counts > 0) & ~np.eye(len(names), dtype=bool))
    rows = [
        [
            names[true],
            names[predicted],
            number(_integer(counts[true, predicted])),
            bar(_percent(shares[true, predicted]), shares[true, predicted]),
        ]
        for true, predicted in np.transpose(np.unravel_index(worst, counts.shape)).tolist()
    ]
    note = f"The pairs most often confused, of {len(names)} classes; share of all rows of the true class."
    return section("Confused classes", table(["true", "predicted", "rows#", "share"], rows), note=note)


def _greatest(scores: NDArray[Any], among: Flags) -> Ids:
    """Flat positions of the greatest scores, greatest first; the earlier of equal ones first."""
    positions = np.flatnonzero(among & np.isfinite(scores))
    return positions[np.argsort(-scores.ravel()[positions], kind="stable")][:MAX_ROWS]


def _per_class(run: Run, kind: str) -> ET.Element | None:
    thresholds: Mapping[str, float] = run.results.get("thresholds") or {}
    tuned = run.results.get("metrics_at_thresholds") or {}
    note = None
    if thresholds:
        values = ", ".join(f"{name} {_number(value)}" for name, value in tuned.items())
        note = (
            f"Each label has the probability threshold with its best F1 on these dev rows, so the values flatter "
            f"({values}; the metrics above are at 0.5): "
            + ", ".join(f"{name} {value:.3f}" for name, value in thresholds.items())
        )
    classes = run.results.get("per_class") or []
    most = max((row.get("support") or 0 for row in classes), default=0) or 1
    rows = [
        [
            heading(str(row.get("label"))),
            number(_number(row.get("precision"))),
            number(_number(row.get("recall"))),
            bar(_number(row.get("f1")), row.get("f1")),
            bar(_integer(row.get("support")), (row.get("support") or 0) / most),
        ]
        for row in classes
    ]
    drawn = table([kind, "precision#", "recall#", "F1", "dev rows"], rows)
    if len(rows) > MAX_MATRIX:
        drawn = tag("details", tag("summary", f"All {len(rows)}"), drawn)
    return section(f"By {kind}", drawn, note=note)


def _mistakes(found: Predictions, true: Ids, predicted: Ids) -> ET.Element | None:
    """The wrong rows that the model was most sure of: worth reading first, since their labels may be wrong."""
    every = np.arange(len(true))
    of_prediction, of_label = found.probability[every, predicted], found.probability[every, true]
    wrong = true != predicted
    rows = [
        [
            number(_integer(row + 1)),
            found.labels[row],
            found.predicted[row],
            bar(_number(of_prediction[row]), of_prediction[row]),
            bar(_number(of_label[row]), of_label[row]),
        ]
        for row in _greatest(of_prediction, wrong).tolist()
    ]
    columns = ["row#", "label", "prediction", "its probability", "the label's"]
    note = f"{len(rows)} of {_plural(wrong.sum(), 'mistake')} in {_plural(len(true), 'dev row')}. {ROW_NOTE}"
    return section("Most confident mistakes", table(columns, rows), note=note)


def _label_mistakes(found: Predictions, separator: str) -> ET.Element | None:
    """The same for several labels a row, where each label is a decision of its own."""
    true, predicted = (found.label_flags(cells, separator) for cells in (found.labels, found.predicted))
    wrong = true != predicted
    worst = _greatest(np.where(predicted, found.probability, 1 - found.probability), wrong)
    rows = [
        [
            number(_integer(row + 1)),
            found.labels[row],
            found.predicted[row],
            f"{'wrong' if predicted[row, label] else 'missing'}: {found.names[label]}",
            bar(_number(found.probability[row, label]), found.probability[row, label]),
        ]
        for row, label in np.transpose(np.unravel_index(worst, wrong.shape)).tolist()
    ]
    columns = ["row#", "labels", "prediction", "mistake", "its probability"]
    note = f"{len(rows)} of {_plural(wrong.sum(), 'wrong decision')} in {_plural(len(true), 'dev row')}. {ROW_NOTE}"
    return section("Most confident mistakes", table(columns, rows), note=note)


def _calibration(found: Predictions, true: Ids, predicted: Ids) -> ET.Element | None:
    """Whether a probability of 0.8 is right in 8 of 10 rows, and how the true classes fare."""
    every = np.flatnonzero(np.isfinite(found.probability).all(axis=1))
    if not len(every):
        return None
    bins = reliability(found.probability[every, predicted[every]], (true == predicted)[every])
    error = f"{bins.expected_error:.4f}"
    axes = Axes(UNIT, UNIT, x_name="probability of the prediction")
    columns = [axes.column(low, low + 1 / BINS, share) for low, share in zip(bins.low, bins.accuracy, strict=True)]
    dots = [
        axes.dot(x, y, f"{_plural(count, 'row')}: mean probability {x:.3f}, right {y:.3f}", "s1")
        for x, y, count in zip(bins.confidence, bins.accuracy, bins.rows, strict=True)
    ]
    summary = f"Reliability diagram of {_plural(len(every), 'row')}, expected calibration error {error}"
    line = axes.line(bins.confidence, bins.accuracy, "line s1")
    diagram = figure("Share of right predictions", axes.draw(summary, *columns, axes.diagonal(), line, *dots))

    edges, ids = unit_bins(found.probability[every, true[every]], 2 * BINS)
    counts = np.bincount(ids, minlength=2 * BINS)
    axes = Axes(UNIT, value_scale(counts), x_name="probability of the true class")
    columns = [
        axes.column(low, high, count, f"{_plural(count, 'row')} from {low:.2f} to {high:.2f}")
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    ]
    summary = f"Histogram of the probability of the true class of {_plural(len(every), 'row')}"
    histogram = figure("Dev rows", axes.draw(summary, *columns))

    note = (
        f"Left: the rows in {BINS} bins of the probability of their prediction. On the dashed line probabilities can "
        "be taken at their word; below it the model is too sure of itself. The expected calibration error is the mean "
        "gap, weighted by rows (Guo et al., On Calibration of Modern Neural Networks, ICML 2017, arXiv:1706.04599)."
    )
    result = tag("p", "Expected calibration error ", tag("b", error))
    return section("Calibration", result, figures("large", [diagram, histogram]), note=note)


@dataclass(frozen=True)
class Reliability:
    """The bins that have rows: lower edge, number of rows, mean probability, share of right predictions."""

    low: Floats
    rows: Ids
    confidence: Floats
    accuracy: Floats

    @property
    def expected_error(self) -> float:
        """Mean gap between probability and share of right predictions, over all rows."""
        return float(np.average(np.abs(self.accuracy - self.confidence), weights=self.rows))


def reliability(confidence: Floats, is_right: Flags) -> Reliability:
    """Compare the probabilities of predictions with how often they are right."""
    edges, ids = unit_bins(confidence, BINS)
    rows, total, right = (np.bincount(ids, weights, minlength=BINS) for weights in (None, confidence, is_right))
    filled = rows > 0
    return Reliability(edges[:-1][filled], rows[filled], total[filled] / rows[filled], right[filled] / rows[filled])


def unit_bins(values: Floats, count: int) -> tuple[Floats, Ids]:
    """Edges of equally wide bins between 0 and 1, and the bin of each value: open below, closed above (Guo et al.)."""
    edges = np.round(np.linspace(0, 1, count + 1), 6)  # the floats that 0.15 and 0.3 are read as
    return edges, np.digitize(values, edges[1:-1], right=True)


def _regression(found: Predictions) -> list[ET.Element | None]:
    true, predicted = (np.array([float(cell) for cell in cells]) for cells in (found.labels, found.predicted))
    errors = np.abs(predicted - true)
    known = np.flatnonzero(np.isfinite(errors))
    if not len(known):
        return []
    shown = known[:: math.ceil(len(known) / MAX_SCATTER)]
    scale = value_scale(np.concatenate([true[known], predicted[known]]), zero=False)
    axes = Axes(scale, scale, size=(520, 440), x_name="true value")
    summary = f"Scatter plot of predicted against true value of {_plural(len(shown), 'dev row')}"
    cloud = figure("Prediction", axes.draw(summary, axes.diagonal(), axes.cloud(true[shown], predicted[shown])))
    note = f"{_integer(len(shown))} of {_plural(len(true), 'dev row')}. On the dashed line the prediction is right."
    rows = [
        [number(text) for text in (_integer(row + 1), found.labels[row], found.predicted[row], _number(errors[row]))]
        for row in _greatest(errors, errors > 0).tolist()
    ]
    return [
        section("Predicted against true", figures("large", [cloud]), note=note),
        section("Largest errors", table(["row#", "label#", "prediction#", "error#"], rows), note=ROW_NOTE),
    ]


def _launch(run: Run) -> ET.Element | None:
    launch, results = run.launch, run.results
    if not launch:
        return None
    memory = results.get("peak_memory_bytes")
    processes = _plural(launch.get("num_processes"), "process")
    facts: dict[str, Content] = {
        "profile": launch.get("profile") or "none",
        "processes": f"{processes} on {_plural(launch.get('num_machines'), 'machine')}",
        "global batch": (
            f"{_integer(launch.get('global_batch_size'))} = {_integer(launch.get('per_device_train_batch_size'))} per "
            f"device × {processes} × {_integer(launch.get('gradient_accumulation_steps'))} accumulation "
            f"({launch.get('gradient_accumulation_source')})"
        ),
        "precision": "float32" if launch.get("mixed_precision") == "no" else launch.get("mixed_precision"),
        "device": f"{launch.get('device_name')}, {_plural(launch.get('threads_per_process'), 'CPU thread')} a process",
        "time": (
            f"{_duration(results.get('training_seconds'))} training, "
            f"{_duration(results.get('evaluation_seconds'))} evaluation"
        ),
        "speed": (
            f"{_number(results.get('examples_per_second'), 1)} examples/s, "
            f"{_integer(results.get('tokens_per_second'))} tokens/s, "
            f"{_percent(results.get('padding_fraction'))} padding"
        ),
        "peak memory": f"{_number(memory / 2**30, 2)} GiB" if memory else None,
        "seed": f"{launch.get('seed')}; by process: {', '.join(map(str, launch.get('rank_seeds') or []))}",
        "started": launch.get("started"),
        "versions": ", ".join(f"{name} {version}" for name, version in (launch.get("packages") or {}).items()),
        "python": f"{launch.get('python')} on {launch.get('platform')}",
        "git commit": tag("code", launch["git_commit"]) if launch.get("git_commit") else None,
        "command": tag("code", shlex.join(launch.get("command") or [])),
    }
    rows = [tag("tr", heading(name), tag("td", fact)) for name, fact in facts.items() if fact is not None]
    return section("Launch", tag("table", tag("tbody", *rows), class_="facts"))


def _config(run: Run) -> ET.Element | None:
    text = tag("details", tag("summary", "config.yaml"), tag("pre", tag("code", run.config_text)))
    return section("Run config", text if run.config_text else None, note="Every setting, with the defaults.")


# Words and numbers


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: float | None, decimals: int = 4) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.2g}" if 0 < abs(value) < 0.5 * 10**-decimals else f"{value:,.{decimals}f}"


def _integer(value: float | None) -> str:
    return _number(value, 0)


def _plural(count: float | None, noun: str) -> str:
    return f"{_integer(count)} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return DASH
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _short(value: float, digits: int = 3) -> str:
    """A number as short as it can be: 0.5, 5e-5, 20,000."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


# Elements


def tag(name: str, /, *content: Content, **attributes: object) -> ET.Element:
    """An element; ``class_`` and ``text_anchor`` become ``class`` and ``text-anchor``, None content is left out."""
    named = {key.rstrip("_").replace("_", "-"): _printable(str(value)) for key, value in attributes.items()}
    element = ET.Element(name, named)
    for part in content:
        if isinstance(part, ET.Element):
            element.append(part)
        elif part and len(element):
            element[-1].tail = (element[-1].tail or "") + _printable(part)
        elif part:
            element.text = (element.text or "") + _printable(part)
    return element


def _printable(text: str) -> str:
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
            axes.append(tag("text", _short(value), x=self.left - 7, y=at + 4, text_anchor="end"))
        for value in self.x_scale.ticks:
            axes.append(tag("text", _short(value), x=self.x(value), y=self.bottom + 16, text_anchor="middle"))
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
        ends = [f"{_short(values[at], 4)} at step {steps[at]:,.0f}" for at in (0, -1)]
        summary.append(f"{name} from {ends[0]} to {ends[1]}")
        kept = thin(values)
        if len(steps) <= MAX_DOTS:
            marks.append(axes.line(steps, values, f"line {colour}"))
            texts = (
                f"{name} {_short(value, 4)} at step {step:,.0f}" for step, value in zip(steps, values, strict=True)
            )
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
        tag("text", _short(scale.low), x=left - 6, y=13, text_anchor="end"),
        tag("text", _short(scale.high), x=right + 6, y=13),
    ]
    if is_number(low) and is_number(high):
        start, end = scale.place(low, left, right), scale.place(high, left, right)
        marks.append(tag("rect", x=start, y=5, width=f"{end - start:.1f}", height=8, class_="column"))
    marks.append(tag("rect", x=f"{scale.place(value, left, right) - 1:.1f}", y=2, width=2, height=14, class_="value"))
    return svg(360, 18, f"{name} {_number(value)}, interval {_interval(metric)}", *marks)


HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · finetune report</title>
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
