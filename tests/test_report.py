"""The report is read back as a page: parsed, and its numbers compared with ones worked out by hand."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from finetune.errors import CheckpointError
from finetune.page import LARGE, MAX_POINTS, Axes, is_number, smoothed, step_scale, thin, value_scale
from finetune.report import reliability, write_report

SCRIPT, POLITICS, ROCK = "<script>alert(1)</script>", "政治", 'pop & "rock"'
NAMES = [SCRIPT, POLITICS, ROCK]
# label, prediction, probabilities: two right, two wrong.
ROWS = [
    (SCRIPT, SCRIPT, 0.9, 0.05, 0.05),
    (POLITICS, SCRIPT, 0.8, 0.15, 0.05),
    (POLITICS, POLITICS, 0.05, 0.85, 0.1),
    (ROCK, SCRIPT, 0.6, 0.1, 0.3),
]
HISTORY: list[dict[str, Any]] = [
    {"step": 10, "train/loss": 2.0, "train/learning_rate": 5e-5, "train/grad_norm": 1.5},
    {"step": 10, "eval/loss": 1.5, "eval/accuracy": 0.4, "perf/eval_seconds": 1.0},
    {"step": 20, "train/loss": 1.0, "train/learning_rate": 0.0, "train/grad_norm": None},
    {"step": 20, "eval/loss": 0.5, "eval/accuracy": 0.5, "perf/eval_seconds": 1.0},
]
LAUNCH = {
    "profile": "accelerate_configs/ddp2.yaml",
    "num_processes": 2,
    "num_machines": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 3,
    "gradient_accumulation_source": "launch profile",
    "global_batch_size": 48,
    "mixed_precision": "no",
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "threads_per_process": 1,
    "seed": 42,
    "rank_seeds": [42, 43],
    "command": ["finetune", "train", "--tracking.run_name", "two words"],
    "started": "2026-12-01T04:47:58+00:00",
    "python": "3.11.7",
    "platform": "Linux",
    "packages": {"torch": "2.13.0", "accelerate": "1.15.0"},
    "git_commit": "0123abc",
}


def write_run(
    folder: Path,
    *,
    names: Sequence[str] = NAMES,
    rows: Iterable[Sequence[Any]] = ROWS,
    problem_type: str = "single_label_classification",
    history: Sequence[Mapping[str, Any]] = HISTORY,
    run_name: str | None = None,
    **results: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "data": {"problem_type": problem_type, "label_separator": ","},
        "model": {"name_or_path": "roberta-large"},
        "tracking": {"run_name": run_name},
    }
    content = {
        "metric_for_best_model": "accuracy",
        "best_metric": 0.5,
        "best_step": 20,
        "metrics": {
            "accuracy": {"value": 0.5, "low": 0.25, "high": 0.75},
            "loss": {"value": 1.5, "low": 1.25, "high": 1.75},
            "custom": {"value": 0.125, "low": None, "high": None},
        },
        "interval_level": 0.95,
        "labels": list(names),
        "per_class": [
            {"label": name, "precision": 0.25, "recall": 1.0, "f1": 0.4, "support": support}
            for name, support in zip(names, range(10, 10 * len(names) + 1, 10), strict=True)
        ],
        "stop_reason": "all steps done",
        "global_step": 20,
        "train_rows": 12345,
        "dev_rows": 4,
        "wall_seconds": 125.4,
        "training_seconds": 7384.0,
        "evaluation_seconds": 3.25,
        "examples_per_second": 480.06,
        "tokens_per_second": 12345.6,
        "padding_fraction": 0.25,
        "peak_memory_bytes": 3 * 2**29,
        **results,
    }
    header = ["label", "prediction", *(f"probability_{name}" for name in names)]
    table = [header, *([*row[:2], *(f"{share:.6f}" for share in row[2:])] for row in rows)]
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    (folder / "launch.json").write_text(json.dumps(LAUNCH), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in history), encoding="utf-8")
    lines = "".join("\t".join(map(str, row)) + "\n" for row in table)
    (folder / "predictions.tsv").write_text(lines, encoding="utf-8", newline="\n")
    return folder


class Page(HTMLParser):
    """A page as an element tree; a tag that is not closed in its place fails."""

    VOID = ("meta",)

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.builder = ET.TreeBuilder()
        self.open: list[str] = []
        self.feed(self.html)
        assert not self.open
        self.root = self.builder.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in self.VOID:
            self.builder.end(tag)
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.builder.data(data)

    def titles(self) -> list[str]:
        return [text(heading) for heading in self.root.iter("h2")]

    def section(self, title: str) -> ET.Element:
        return next(found for found in self.root.iter("section") if text(found.find("h2")) == title)

    def figure(self, title: str) -> ET.Element:
        return next(found for found in self.root.iter("figure") if text(found.find("figcaption/b")) == title)

    def rows(self, title: str) -> list[list[str]]:
        """The texts of the cells of a section's table, without its head."""
        return [[text(cell) for cell in row] for row in self.section(title).iter("tr")][1:]


def text(element: ET.Element | None) -> str:
    assert element is not None
    return "".join(element.itertext())


def report(folder: Path) -> Page:
    return Page(write_report(folder))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return report(write_run(tmp_path / "my run"))


def test_headline(page: Page) -> None:
    header = page.root.find(".//header")
    assert header is not None
    assert [text(part) for part in header] == [
        "finetune report",
        "my run",
        "0.5000accuracy95 % interval 0.2500 – 0.7500",
        "4 dev rows · 12,345 training rows · roberta-large · best at step 20 of 20 · all steps done · 2 min 5 s",
    ]
    assert text(page.root.find(".//title")) == "my run · finetune report"


def test_sections_in_order(page: Page) -> None:
    assert page.titles() == [
        "Metrics",
        "Training",
        "Confusion matrix",
        "By class",
        "Most confident mistakes",
        "Calibration",
        "Launch",
        "Run config",
    ]


def test_run_name_of_the_tracker_comes_first(tmp_path: Path) -> None:
    assert text(report(write_run(tmp_path, run_name="情感 <b>")).root.find(".//h1")) == "情感 <b>"


def test_metrics_with_their_intervals_as_bars(page: Page) -> None:
    assert [row[:3] for row in page.rows("Metrics")] == [
        ["accuracy", "0.5000", "0.2500 – 0.7500"],
        ["loss", "1.5000", "1.2500 – 1.7500"],
        ["custom", "0.1250", "– – –"],
    ]
    accuracy, loss, custom = page.section("Metrics").iter("svg")
    # A scale of 288 units from 36: scores on 0 to 1, the loss on 0 to 2.
    bars = [[rect.get("x") for rect in drawing.iter("rect")] for drawing in (accuracy, loss, custom)]
    assert bars == [["108.0", "179.0"], ["216.0", "251.0"], ["71.0"]]
    assert [rect.get("width") for rect in accuracy.iter("rect")] == ["144.0", "2"]
    assert accuracy.get("aria-label") == "accuracy 0.5000, interval 0.2500 – 0.7500"


def test_loss_of_training_and_dev_on_the_same_axes(page: Page) -> None:
    figure = page.figure("Loss")
    assert [text(key) for key in figure.findall("figcaption/span")] == ["training", "dev"]
    # Steps 0 to 20 lie at 46 to 498, losses 0 to 2 at 226 to 20.
    lines = [line.get("points") for line in figure.iter("polyline")]
    assert lines == ["272,20 498,123", "272,71.5 498,174.5"]
    assert "best: step 20" in [text(label) for label in figure.iter("text")]
    assert [text(title) for title in figure.iter("title")] == [
        "training 2 at step 10",
        "training 1 at step 20",
        "dev 1.5 at step 10",
        "dev 0.5 at step 20",
    ]
    label = next(figure.iter("svg")).get("aria-label")
    assert label == (
        "Loss over optimizer steps; training from 2 at step 10 to 1 at step 20; "
        "dev from 1.5 at step 10 to 0.5 at step 20"
    )


def test_null_values_are_left_out_of_charts(page: Page) -> None:
    assert [line.get("points") for line in page.figure("Gradient norm").iter("polyline")] == ["318,20"]
    assert "Examples/s" not in [text(caption) for caption in page.root.iter("figcaption")]


def test_scores_share_axes_and_errors_have_their_own(tmp_path: Path) -> None:
    history = [{"step": 5, "eval/pearson": -0.5, "eval/f1_macro": 1.0, "eval/mse": 3.0}]
    page = report(write_run(tmp_path, history=history))
    assert [text(key) for key in page.figure("Dev metrics").findall("figcaption/span")] == ["pearson", "f1_macro"]
    assert len(list(page.figure("Dev mse").iter("polyline"))) == 1


def test_long_lines_are_thinned_and_smoothed(tmp_path: Path) -> None:
    history = [{"step": step, "train/loss": 1.0, "train/learning_rate": step * 1e-8} for step in range(1, 5001)]
    history[1234]["train/loss"] = 9.0
    page = report(write_run(tmp_path, history=history))
    logged, mean = page.figure("Loss").iter("polyline")
    assert "pale" in logged.get("class", "")
    assert all(len(line.get("points", "").split()) <= MAX_POINTS for line in (logged, mean))
    assert ",40.6 " in logged.get("points", "")  # 9 of 10 between 226 and 20: the peak is kept
    assert ",40.6 " not in mean.get("points", "")
    assert len(list(page.figure("Learning rate").iter("polyline"))) == 1
    assert not list(page.section("Training").iter("circle"))


def test_confusion_matrix(page: Page) -> None:
    assert page.rows("Confusion matrix") == [
        [SCRIPT, "1100 %", "", ""],
        [POLITICS, "150 %", "150 %", ""],
        [ROCK, "1100 %", "", ""],
    ]
    cells = [cell for cell in page.section("Confusion matrix").iter("td") if cell.get("title")]
    assert [(cell.get("class"), cell.get("style")) for cell in cells] == [
        ("hit", "--a:1.00"),
        ("miss", "--a:0.71"),
        ("hit", "--a:0.71"),
        ("miss", "--a:1.00"),
    ]
    assert cells[1].get("title") == f"true {POLITICS}, predicted {SCRIPT}"


def test_many_classes_are_listed_as_confused_pairs(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(31)]
    shares = [1 / 31] * 31
    pairs = [(3, 7)] * 2 + [(3, 3)] * 2 + [(9, 1)] * 3 + [(number, 0) for number in range(1, 31)]
    rows = [(names[true], names[predicted], *shares) for true, predicted in pairs]
    page = report(write_run(tmp_path, names=names, rows=rows))
    assert "Confusion matrix" not in page.titles()
    listed = page.rows("Confused classes")
    assert listed[:3] == [
        ["class 9", "class 1", "3", "75 %"],
        ["class 3", "class 7", "2", "40 %"],
        ["class 1", "class 0", "1", "100 %"],
    ]
    assert len(listed) == 20
    assert len(page.rows("By class")) == 31
    assert page.section("By class").find("details") is not None


def test_classes_in_the_order_given(page: Page) -> None:
    assert page.rows("By class") == [
        [SCRIPT, "0.2500", "1.0000", "0.4000", "10"],
        [POLITICS, "0.2500", "1.0000", "0.4000", "20"],
        [ROCK, "0.2500", "1.0000", "0.4000", "30"],
    ]
    bars = [cell.get("style") for cell in page.section("By class").iter("td") if cell.get("class") == "bar"]
    assert bars == ["--w:40.0%", "--w:33.3%", "--w:40.0%", "--w:66.7%", "--w:40.0%", "--w:100.0%"]


def test_mistakes_surest_first(page: Page) -> None:
    assert page.rows("Most confident mistakes") == [
        ["2", POLITICS, SCRIPT, "0.8000", "0.1500"],
        ["4", ROCK, SCRIPT, "0.6000", "0.3000"],
    ]
    assert text(page.section("Most confident mistakes").find("p")).startswith("2 of 2 mistakes in 4 dev rows.")


def test_mistakes_as_sure_keep_the_order_of_the_file_and_end_at_20(tmp_path: Path) -> None:
    rows = [("a", "b", 0.4, 0.6)] * 24 + [("a", "b", 0.3, 0.7)]
    listed = report(write_run(tmp_path, names=["a", "b"], rows=rows)).rows("Most confident mistakes")
    assert [row[0] for row in listed] == ["25", *map(str, range(1, 20))]


def test_calibration(page: Page) -> None:
    # Bins (0.5, 0.6]: 1 row, gap 0.6. (0.7, 0.8]: 1 row, gap 0.8. (0.8, 0.9]: 2 rows, gap 1 - 0.875.
    # (0.6 + 0.8 + 2 x 0.125) / 4 = 0.4125
    section = page.section("Calibration")
    assert "Expected calibration error 0.4125" in text(section)
    assert "Guo et al." in text(section)
    assert [text(title) for title in page.figure("Share of right predictions").iter("title")] == [
        "1 row: mean probability 0.600, right 0.000",
        "1 row: mean probability 0.800, right 0.000",
        "2 rows: mean probability 0.875, right 1.000",
    ]
    # Of the true classes: 0.9, 0.15, 0.85, 0.3; bins are closed above.
    assert [text(title) for title in page.figure("Dev rows").iter("title")] == [
        "1 row from 0.10 to 0.15",
        "1 row from 0.25 to 0.30",
        "1 row from 0.80 to 0.85",
        "1 row from 0.85 to 0.90",
    ]


def test_rows_without_probabilities_are_left_out(tmp_path: Path) -> None:
    nan = float("nan")
    page = report(write_run(tmp_path / "some", names=["a", "b"], rows=[("a", "b", nan, nan), ("a", "b", 0.2, 0.8)]))
    assert page.rows("Most confident mistakes") == [["2", "a", "b", "0.8000", "0.2000"]]
    assert "Expected calibration error 0.8000" in text(page.section("Calibration"))
    page = report(write_run(tmp_path / "none", names=["a", "b"], rows=[("a", "b", nan, nan)]))
    assert not {"Most confident mistakes", "Calibration"} & set(page.titles())


def test_launch_facts(page: Page) -> None:
    assert {text(row[0]): text(row[1]) for row in page.section("Launch").iter("tr")} == {
        "profile": "accelerate_configs/ddp2.yaml",
        "processes": "2 processes on 1 machine",
        "global batch": "48 = 8 per device × 2 processes × 3 accumulation (launch profile)",
        "precision": "float32",
        "device": "NVIDIA H200, 1 CPU thread a process",
        "time": "2 h 3 min training, 3.2 s evaluation",
        "speed": "480.1 examples/s, 12,346 tokens/s, 25 % padding",
        "peak memory": "1.50 GiB",
        "seed": "42; by process: 42, 43",
        "started": "2026-12-01T04:47:58+00:00",
        "versions": "torch 2.13.0, accelerate 1.15.0",
        "python": "3.11.7 on Linux",
        "git commit": "0123abc",
        "command": "finetune train --tracking.run_name 'two words'",
    }


def test_config_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    page = report(folder)
    assert text(page.section("Run config").find("details/pre")) == (folder / "config.yaml").read_text(encoding="utf-8")


def test_several_labels_a_row(tmp_path: Path) -> None:
    rows = [
        ("a,b", "a", 0.9, 0.3),  # b is missing, at 0.3: sure of it by 0.7
        ("", "a,b", 0.6, 0.95),  # both are wrong
        ("a, b", "a,b", 0.9, 0.9),
    ]
    page = report(write_run(tmp_path, names=["a", "b"], rows=rows, problem_type="multi_label_classification"))
    assert page.titles() == ["Metrics", "Training", "By label", "Most confident mistakes", "Launch", "Run config"]
    assert page.rows("Most confident mistakes") == [
        ["2", "", "a,b", "wrong: b", "0.9500"],
        ["1", "a,b", "a", "missing: b", "0.3000"],
        ["2", "", "a,b", "wrong: a", "0.6000"],
    ]
    assert "3 of 3 wrong decisions in 3 dev rows." in text(page.section("Most confident mistakes"))


def test_regression(tmp_path: Path) -> None:
    rows = [("0", "1"), ("4.5", "2"), ("3", "3"), ("1", "nan")]
    page = report(write_run(tmp_path, names=[], rows=rows, problem_type="regression"))
    assert page.titles() == ["Metrics", "Training", "Predicted against true", "Largest errors", "Launch", "Run config"]
    assert page.rows("Largest errors") == [["2", "4.5", "2", "2.5000"], ["1", "0", "1", "1.0000"]]
    (cloud,) = page.figure("Prediction").iter("path")
    # Both axes go from 0 to 5: 46 to 498, and 406 to 20.
    assert cloud.get("d") == "M46 328.8h0M452.8 251.6h0M317.2 174.4h0"


def test_regression_draws_a_sample_of_many_rows(tmp_path: Path) -> None:
    rows = [(number, number + 0.5) for number in range(5000)]
    (cloud,) = (
        report(write_run(tmp_path, names=[], rows=rows, problem_type="regression")).figure("Prediction").iter("path")
    )
    assert cloud.get("d", "").count("M") == 1667


@pytest.mark.parametrize(
    ("problem_type", "names", "row"),
    [
        ("single_label_classification", ["a", "b"], ("a", "a", 1.0, 0.0)),
        ("multi_label_classification", ["a"], ("", "", 0.25)),
        ("regression", [], ("2", "2")),
    ],
)
def test_one_dev_row(tmp_path: Path, problem_type: str, names: list[str], row: tuple[Any, ...]) -> None:
    page = report(write_run(tmp_path, names=names, rows=[row], problem_type=problem_type, history=HISTORY[:1]))
    assert not {"Most confident mistakes", "Largest errors"} & set(page.titles())
    assert len(list(page.root.iter("svg"))) >= 4


def test_labels_are_escaped(page: Page) -> None:
    assert "<script" not in page.html.lower()
    assert SCRIPT in text(page.root)
    assert POLITICS in page.html
    assert ROCK in text(page.root)
    assert {element.get("title") for element in page.root.iter("th")} >= set(NAMES)


def test_characters_that_no_page_may_hold(tmp_path: Path) -> None:
    classes = [{"label": "\x00\ud800a", "precision": None, "recall": None, "f1": None, "support": None}]
    page = report(write_run(tmp_path, per_class=classes))
    assert page.rows("By class") == [["\ufffd\ufffda", "–", "–", "–", "–"]]


def test_label_with_other_line_ends(tmp_path: Path) -> None:
    name = "one\x0btwo\u2028three"
    rows = [(name, "b", 0.4, 0.6), ("b", "b", 0.4, 0.6)]
    page = report(write_run(tmp_path, names=[name, "b"], rows=rows))
    assert page.rows("Most confident mistakes") == [["1", "one\ufffdtwo\u2028three", "b", "0.6000", "0.4000"]]


def test_page_loads_and_runs_nothing(page: Page) -> None:
    elements = list(page.root.iter())
    assert not {"script", "link", "img", "iframe", "object", "embed", "a"} & {element.tag for element in elements}
    names = {name for element in elements for name in element.attrib}
    assert not {name for name in names if "href" in name or "src" in name or name.startswith("on")}
    assert "http://" not in page.html
    assert "https://" not in page.html
    style = text(page.root.find(".//style"))
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style


def test_charts_are_well_formed_and_have_a_text(page: Page) -> None:
    drawings = re.findall(r"<svg .*?</svg>", page.html, re.DOTALL)
    assert len(drawings) == 9
    assert all(ET.fromstring(drawing).get("aria-label") for drawing in drawings)
    numbers = re.findall(r'(?:points|d|x|y|x1|y1|cx|cy|width|height)="([^"]*)"', "".join(drawings))
    assert not [found for found in numbers if "nan" in found or "inf" in found]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("metrics.jsonl", {"Training"}),
        ("predictions.tsv", {"Confusion matrix", "Most confident mistakes", "Calibration"}),
        ("launch.json", {"Launch"}),
        ("config.yaml", {"Run config"}),
    ],
)
@pytest.mark.parametrize("is_empty", [True, False])
def test_sections_of_missing_files_are_left_out(
    tmp_path: Path, page: Page, name: str, missing: set[str], is_empty: bool
) -> None:
    folder = write_run(tmp_path)
    if not is_empty:
        (folder / name).unlink()
    elif name == "predictions.tsv":
        (folder / name).write_text("label\tprediction\tprobability_a\n", encoding="utf-8")
    else:
        (folder / name).write_text("{}" if name == "launch.json" else "", encoding="utf-8")
    assert set(page.titles()) - set(report(folder).titles()) == missing


def test_results_without_a_single_value(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    results = dict.fromkeys(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    (folder / "launch.json").write_text(json.dumps(dict.fromkeys(LAUNCH)), encoding="utf-8")
    page = report(folder)
    assert "– dev rows · – training rows · roberta-large · best at step – of – · –" in text(page.root)
    assert page.titles()[:2] == ["Training", "Confusion matrix"]


def test_half_a_line_at_the_end_of_the_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 30, "train/lo')
    assert next(report(folder).figure("Loss").iter("polyline")).get("points") == "272,20 498,123"


def test_no_finished_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"results\.json does not exist: give the folder of a finished run"):
            write_report(folder)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("results.json", "{", "Expecting property name"),
        ("launch.json", '{"a": ', "Expecting value"),
        ("config.yaml", "data: [", "while parsing"),
        ("predictions.tsv", "", "first columns"),
        ("predictions.tsv", "text\tlabel\na\tb\n", "first columns"),
        ("predictions.tsv", "label\tprediction\tprobability_a\na\ta\t0.5\na\ta\n", "line 3 .* 3 columns"),
        ("predictions.tsv", "label\tprediction\tprobability_a\na\ta\tsure\n", "sure"),
        ("predictions.tsv", "label\tprediction\tprobability_a\nb\ta\t0.5\n", "class 'b' has no probability column"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, reason: str) -> None:
    folder = write_run(tmp_path)
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is damaged: .*{reason}.*Restore it"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "report.html").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=r"report\.html cannot be written"):
        write_report(folder)
    assert sorted(folder.iterdir()) == before


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    first = write_report(folder).read_bytes()
    before = sorted(folder.iterdir())
    assert write_report(folder).read_bytes() == first
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_many_dev_rows_stay_a_small_page(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(30)]
    shares = np.random.default_rng(0).dirichlet(np.ones(30), 100_000)
    predicted = shares.argmax(axis=1)
    rows = ((names[row % 30], names[predicted[row]], *shares[row]) for row in range(100_000))
    folder = write_run(tmp_path, names=names, rows=rows)
    path = write_report(folder)
    assert path.stat().st_size < 300_000


def test_bins_are_closed_above() -> None:
    confidence = np.array([0.0, 0.1, 0.1000001, 0.3, 0.6, 0.7, 1.0])
    bins = reliability(confidence, np.array([1, 0, 1, 1, 0, 1, 1], bool))
    assert bins.low == pytest.approx([0.0, 0.1, 0.2, 0.5, 0.6, 0.9])
    assert bins.rows.tolist() == [2, 1, 1, 1, 1, 1]
    assert bins.accuracy.tolist() == [0.5, 1, 1, 0, 1, 1]
    assert bins.confidence == pytest.approx([0.05, 0.1000001, 0.3, 0.6, 0.7, 1.0])


@pytest.mark.parametrize(
    ("values", "zero", "ticks"),
    [
        ([0.2, 1.9], True, [0, 0.5, 1, 1.5, 2]),
        ([0.72, 0.8], False, [0.72, 0.74, 0.76, 0.78, 0.8]),
        ([5e-5], True, [0, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5]),
        ([0.0, 0.0], True, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([10.0], False, [9, 9.5, 10, 10.5, 11]),
        ([0.0], False, [-1, -0.5, 0, 0.5, 1]),
        ([-3.0, 12.0], True, [-5, 0, 5, 10, 15]),
        ([480, 521], True, [0, 200, 400, 600]),
    ],
)
def test_scale_of_values(values: list[float], zero: bool, ticks: list[float]) -> None:
    scale = value_scale(np.array(values), zero=zero)
    assert list(scale.ticks) == ticks
    assert (scale.low, scale.high) == (ticks[0], ticks[-1])


@pytest.mark.parametrize(
    ("last", "ticks"), [(1, [0, 1]), (3, [0, 1, 2, 3]), (20, [0, 5, 10, 15, 20]), (6250, [0, 2000, 4000, 6000])]
)
def test_scale_of_steps_has_whole_marks(last: int, ticks: list[int]) -> None:
    scale = step_scale(last)
    assert list(scale.ticks) == ticks
    assert (scale.low, scale.high) == (0, last)


def test_axes_place_values_on_the_page() -> None:
    axes = Axes(step_scale(100), value_scale(np.array([0.0, 1.0])), size=LARGE)
    assert (axes.x(0), axes.x(50), axes.x(100)) == (46, 272, 498)
    assert (axes.y(0), axes.y(0.5), axes.y(1)) == (226, 123, 20)


@pytest.mark.parametrize("length", [1, MAX_POINTS, MAX_POINTS + 1, 12_345])
def test_thinning_keeps_ends_and_peaks(length: int) -> None:
    values = np.random.default_rng(length).normal(size=length)
    kept = thin(values)
    assert len(kept) <= MAX_POINTS
    assert (np.diff(kept) > 0).all()
    assert {0, length - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())


def test_smoothing_is_the_mean_of_the_neighbours_there_are() -> None:
    values = np.zeros(90)
    values[[0, 45]] = 6.0  # 90 // 30 | 1 = 3 values each
    means = smoothed(values)
    assert means[[0, 1, 2, 43, 44, 45, 46, 47]].tolist() == [3, 2, 0, 0, 2, 2, 2, 0]


def test_what_counts_as_a_number() -> None:
    assert [is_number(value) for value in (0, 1.5, None, "1", float("nan"), float("inf"))] == [True, True] + [False] * 4
