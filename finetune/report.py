"""``report.html``: a run folder as one page that opens anywhere, made from the files of that folder alone.

The page loads nothing and runs nothing. It is built as an element tree, so that every label, path and command is
escaped by construction, and its charts are inline SVG, so that they follow the page's light or dark colours.
"""

from __future__ import annotations

import json
import math
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from finetune.errors import CheckpointError
from finetune.page import (
    MAX_DOTS,
    SMALL,
    UNIT,
    Axes,
    Content,
    Floats,
    Ids,
    Line,
    bar,
    decimal,
    document,
    duration,
    figure,
    figures,
    heading,
    interval_bar,
    interval_text,
    is_number,
    line_chart,
    number,
    percent,
    plural,
    section,
    table,
    tag,
    value_scale,
    whole,
)  # fmt: skip
from finetune.run_folder import write_text

REPORT_FILE = "report.html"
MAX_SCATTER = 2_000  # rows drawn of a regression
MAX_MATRIX = 30  # classes up to which the confusion matrix is drawn whole
MAX_ROWS = 20  # mistakes and confused pairs listed
BINS = 10  # of the reliability diagram
ROW_NOTE = "Row 1 is the first data row of predictions.tsv, which has the dev rows in their order."

T = TypeVar("T")
Flags = NDArray[np.bool_]


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html``, whole or not at all, and return its path.

    Raises:
        CheckpointError: there is no results.json, a file of the folder is damaged, or the page cannot be written.
    """
    page = _page(_read_run(run_dir))
    path = run_dir / REPORT_FILE
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
        for position, line in enumerate(chain([first], file), start=2):
            if line.count("\t") + 1 != len(header):
                raise ValueError(f"line {position} does not have the {len(header)} columns of its header")
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
    return document(f"{run.name} · finetune report", main)


def _headline(run: Run) -> ET.Element:
    """Name, best metric with its interval, and one line of context."""
    results = run.results
    name = results.get("metric_for_best_model") or "best metric"
    best = (results.get("metrics") or {}).get(name) or {"value": results.get("best_metric")}
    interval = f"{_level(run)} interval {interval_text(best)}" if is_number(best.get("low")) else ""
    context = (
        f"{whole(results.get('dev_rows'))} dev rows",
        f"{whole(results.get('train_rows'))} training rows",
        run.setting("model.name_or_path"),
        f"best at step {whole(results.get('best_step'))} of {whole(results.get('global_step'))}",
        results.get("stop_reason"),
        duration(results.get("wall_seconds")),
    )
    return tag(
        "header",
        tag("p", "finetune report", class_="eyebrow"),
        tag("h1", run.name),
        tag(
            "p",
            tag("span", decimal(best.get("value")), class_="big"),
            tag("span", tag("b", name), interval, class_="beside"),
            class_="best",
        ),
        tag("p", " · ".join(str(part) for part in context if part), class_="context"),
    )


def _level(run: Run) -> str:
    return f"{100 * (run.results.get('interval_level') or 0.95):g} %"


def _metrics(run: Run) -> ET.Element | None:
    rows = [
        [heading(name), number(decimal(metric.get("value"))), number(interval_text(metric)), interval_bar(name, metric)]
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
            tag("b", whole(counts[row, column])),
            tag("small", percent(shares[row, column])),
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
            number(whole(counts[true, predicted])),
            bar(percent(shares[true, predicted]), shares[true, predicted]),
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
        values = ", ".join(f"{name} {decimal(value)}" for name, value in tuned.items())
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
            number(decimal(row.get("precision"))),
            number(decimal(row.get("recall"))),
            bar(decimal(row.get("f1")), row.get("f1")),
            bar(whole(row.get("support")), (row.get("support") or 0) / most),
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
            number(whole(row + 1)),
            found.labels[row],
            found.predicted[row],
            bar(decimal(of_prediction[row]), of_prediction[row]),
            bar(decimal(of_label[row]), of_label[row]),
        ]
        for row in _greatest(of_prediction, wrong).tolist()
    ]
    columns = ["row#", "label", "prediction", "its probability", "the label's"]
    note = f"{len(rows)} of {plural(wrong.sum(), 'mistake')} in {plural(len(true), 'dev row')}. {ROW_NOTE}"
    return section("Most confident mistakes", table(columns, rows), note=note)


def _label_mistakes(found: Predictions, separator: str) -> ET.Element | None:
    """The same for several labels a row, where each label is a decision of its own."""
    true, predicted = (found.label_flags(cells, separator) for cells in (found.labels, found.predicted))
    wrong = true != predicted
    worst = _greatest(np.where(predicted, found.probability, 1 - found.probability), wrong)
    rows = [
        [
            number(whole(row + 1)),
            found.labels[row],
            found.predicted[row],
            f"{'wrong' if predicted[row, label] else 'missing'}: {found.names[label]}",
            bar(decimal(found.probability[row, label]), found.probability[row, label]),
        ]
        for row, label in np.transpose(np.unravel_index(worst, wrong.shape)).tolist()
    ]
    columns = ["row#", "labels", "prediction", "mistake", "its probability"]
    note = f"{len(rows)} of {plural(wrong.sum(), 'wrong decision')} in {plural(len(true), 'dev row')}. {ROW_NOTE}"
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
        axes.dot(x, y, f"{plural(count, 'row')}: mean probability {x:.3f}, right {y:.3f}", "s1")
        for x, y, count in zip(bins.confidence, bins.accuracy, bins.rows, strict=True)
    ]
    summary = f"Reliability diagram of {plural(len(every), 'row')}, expected calibration error {error}"
    line = axes.line(bins.confidence, bins.accuracy, "line s1")
    diagram = figure("Share of right predictions", axes.draw(summary, *columns, axes.diagonal(), line, *dots))

    edges, ids = unit_bins(found.probability[every, true[every]], 2 * BINS)
    counts = np.bincount(ids, minlength=2 * BINS)
    axes = Axes(UNIT, value_scale(counts), x_name="probability of the true class")
    columns = [
        axes.column(low, high, count, f"{plural(count, 'row')} from {low:.2f} to {high:.2f}")
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    ]
    summary = f"Histogram of the probability of the true class of {plural(len(every), 'row')}"
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
    summary = f"Scatter plot of predicted against true value of {plural(len(shown), 'dev row')}"
    cloud = figure("Prediction", axes.draw(summary, axes.diagonal(), axes.cloud(true[shown], predicted[shown])))
    note = f"{whole(len(shown))} of {plural(len(true), 'dev row')}. On the dashed line the prediction is right."
    rows = [
        [number(text) for text in (whole(row + 1), found.labels[row], found.predicted[row], decimal(errors[row]))]
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
    processes = plural(launch.get("num_processes"), "process")
    facts: dict[str, Content] = {
        "profile": launch.get("profile") or "none",
        "processes": f"{processes} on {plural(launch.get('num_machines'), 'machine')}",
        "global batch": (
            f"{whole(launch.get('global_batch_size'))} = {whole(launch.get('per_device_train_batch_size'))} per "
            f"device × {processes} × {whole(launch.get('gradient_accumulation_steps'))} accumulation "
            f"({launch.get('gradient_accumulation_source')})"
        ),
        "precision": "float32" if launch.get("mixed_precision") == "no" else launch.get("mixed_precision"),
        "device": f"{launch.get('device_name')}, {plural(launch.get('threads_per_process'), 'CPU thread')} a process",
        "time": (
            f"{duration(results.get('training_seconds'))} training, "
            f"{duration(results.get('evaluation_seconds'))} evaluation"
        ),
        "speed": (
            f"{decimal(results.get('examples_per_second'), 1)} examples/s, "
            f"{whole(results.get('tokens_per_second'))} tokens/s, "
            f"{percent(results.get('padding_fraction'))} padding"
        ),
        "peak memory": f"{decimal(memory / 2**30, 2)} GiB" if memory else None,
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
