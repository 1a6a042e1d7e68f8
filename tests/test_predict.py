"""A trained model on new rows: every row, its own columns, and the thresholds that were saved with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import reviews, write_tsv

from finetune.config import PredictConfig, PredictDataConfig, PredictEvalConfig
from finetune.errors import CheckpointError, ConfigError, DataError
from finetune.model import InputSettings, load_model, save_model
from finetune.predict import evaluate, predict
from finetune.run_folder import write_predictions

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
NAMES = {SINGLE: ("neg", "pos"), MULTI: ("long", "neg", "pos"), REGRESSION: ()}
TEXTS = [text for text, _ in reviews(9)]
Folder = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model_folder(bert: Path, tmp_path: Path) -> Folder:
    """A model as training would leave it, whose outputs differ from row to row."""

    def make(problem_type: str = SINGLE, thresholds: list[float] | None = None) -> Path:
        torch.manual_seed(0)  # or the head would depend on which tests ran before
        loaded = load_model(str(bert), label_names=NAMES[problem_type], problem_type=problem_type, max_length=16)
        with torch.no_grad():
            for module in loaded.model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.mul_(10)
        folder = tmp_path / f"model-{problem_type}"
        folder.mkdir(exist_ok=True)
        inputs = InputSettings("text", None, "label", 16, problem_type, ",", thresholds=thresholds)
        save_model(folder, loaded.model, loaded.tokenizer, inputs)
        return folder

    return make


def settings(file: Path, **evaluation: Any) -> PredictConfig:
    return PredictConfig(
        PredictDataConfig(file=str(file), cache_dir=str(file.parent / "cache")), PredictEvalConfig(**evaluation)
    )


def predicted(model: Path, file: Path, **evaluation: Any) -> list[dict[str, str]]:
    """The rows of the output of ``finetune predict``."""
    output = file.with_suffix(".out")
    predict(str(model), settings(file, **evaluation), str(output))
    header, *lines = [line.split("\t") for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(set(header)) == len(header)
    return [dict(zip(header, line, strict=True)) for line in lines]


# ---------------------------------------------------------------- the rows


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_columns_that_are_just_kept_may_hold_anything(model_folder: Folder, tmp_path: Path) -> None:
    """Labels as lists among them: nobody needs them to predict."""
    rows = [
        {"id": 7, "text": "good film", "label": ["pos", "long"], "more": None},
        {"id": "x", "text": "bad film", "label": [], "more": {"é": [1.5, True, None, "好"]}},
        {"id": True, "text": "", "label": "neg", "more": "plain"},
    ]
    for problem_type in (MULTI, SINGLE):
        found = predicted(model_folder(problem_type), write_json_lines(tmp_path / "rows.jsonl", rows))
        assert [row["text"] for row in found] == ["good film", "bad film", ""]
        assert [row["id"] for row in found] == ["7", "x", "true"]
        assert [row["label"] for row in found] == ['["pos", "long"]', "[]", "neg"]
        assert [row["more"] for row in found] == ["", '{"é": [1.5, true, null, "好"]}', "plain"]


def test_parquet_columns_that_are_just_kept(model_folder: Folder, tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["good", "bad"]),
        "label": pa.array([["pos"], None], pa.list_(pa.string())),
        "day": pa.array([0, None], pa.date32()),
        "score": pa.array([1.0, None]),
        "place": pa.array([{"row": 1}, None], pa.struct({"row": pa.int64()})),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = predicted(model_folder(), tmp_path / "rows.parquet")
    kept = [[row[name] for name in columns] for row in found]
    assert kept == [["good", '["pos"]', "1970-01-01", "1.0", '{"row": 1}'], ["bad", "", "", "", ""]]


@pytest.mark.parametrize("name", ["prediction", "probability_pos"])
def test_a_column_that_the_output_would_have_twice(model_folder: Folder, tmp_path: Path, name: str) -> None:
    file = write_tsv(tmp_path / "rows.tsv", [("good", "x")], ("text", name))
    with pytest.raises(ConfigError, match=rf"rows\.tsv has a column '{name}', and the output adds one of that name"):
        predict(str(model_folder()), settings(file), str(tmp_path / "out.tsv"))
    assert not (tmp_path / "out.tsv").exists()


def test_what_the_reader_noticed_is_said(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["text\tlabel", "", *(f'"{text}"\tpos' for text in TEXTS)]
    (tmp_path / "rows.tsv").write_text("\n".join(lines), encoding="utf-8")
    predict(str(model_folder()), settings(tmp_path / "rows.tsv"), str(tmp_path / "out.tsv"))
    said = " ".join(capsys.readouterr().out.split())
    assert "1 blank line skipped" in said
    assert "warning: " in said and "9 of 9 texts stand in double quotes" in said and "data.quoting: minimal" in said
    evaluate(str(model_folder()), settings(tmp_path / "rows.tsv"))
    said = " ".join(capsys.readouterr().out.split())
    assert "9 of 9 texts stand in double quotes" in said
    assert "9 rows of rows.tsv" in said
    assert "dev rows" not in said and "report.html" not in said


def test_texts_are_never_together_in_memory(model_folder: Folder, tmp_path: Path, monkeypatch: Any) -> None:
    """A list of a column would come from indexing the dataset."""
    file = write_tsv(tmp_path / "rows.tsv", [(text, "pos") for text in TEXTS])
    original = datasets.Dataset.__getitem__

    def by_row(dataset: datasets.Dataset, key: Any) -> Any:
        assert not isinstance(key, str) or key not in ("text", "label")
        return original(dataset, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", by_row)
    assert [row["text"] for row in predicted(model_folder(), file)] == TEXTS


def test_lines_are_written_as_they_come_and_all_or_none(tmp_path: Path) -> None:
    """The output is never whole in memory: what comes late finds the early rows on the disk."""

    def texts() -> Iterator[str]:
        for row in range(3000):
            if row == 2999:
                (staged,) = tmp_path.iterdir()
                assert staged.name != "out.tsv" and staged.stat().st_size > 10_000
            yield f"text {row}"

    columns: dict[str, Any] = {"text": texts()}
    arguments: dict[str, Any] = {"label_names": ["a"], "separator": ","}
    rows = {"predicted": np.zeros(3000, np.int64), "probability": np.ones((3000, 1))}
    write_predictions(tmp_path / "out.tsv", columns=columns, **rows, **arguments)
    (written,) = tmp_path.iterdir()
    assert written.read_text(encoding="utf-8").count("\n") == 3001
    before = written.read_bytes()
    with pytest.raises(ValueError):
        write_predictions(written, columns={"text": iter(["one"])}, **rows, **arguments)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


# ---------------------------------------------------------------- thresholds of several labels a row


def chosen(row: dict[str, str], thresholds: list[float]) -> str:
    """The labels of a row, from the probabilities that stand in it."""
    shares = [float(row[f"probability_{name}"]) for name in NAMES[MULTI]]
    assert all(abs(share - threshold) > 1e-6 for share, threshold in zip(shares, thresholds, strict=True))
    return ",".join(name for name, share, least in zip(NAMES[MULTI], shares, thresholds, strict=True) if share >= least)


def test_saved_thresholds_and_one_for_all(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tsv(tmp_path / "rows.tsv", [(text,) for text in TEXTS], ("text",))
    answers = {}
    for saved, of_all, expected, said in (
        (None, None, [0.5] * 3, "0.5 for every label: none are saved with the model"),
        ([0.9, 0.123, 0.5001], None, [0.9, 0.123, 0.5001], "each label's own, tuned on the dev rows of training"),
        ([0.9, 0.123, 0.5001], 0.3, [0.3] * 3, "0.3 for every label (eval.threshold)"),
    ):
        found = predicted(model_folder(MULTI, saved), file, threshold=of_all)
        assert [row["prediction"] for row in found] == [chosen(row, expected) for row in found]
        assert said in " ".join(capsys.readouterr().out.split())
        answers[said] = tuple(row["prediction"] for row in found)
    assert len(set(answers.values())) == 3, "the thresholds must make a difference, or nothing was tested"


def test_a_folder_written_before_there_were_thresholds(model_folder: Folder, tmp_path: Path) -> None:
    file = write_tsv(tmp_path / "rows.tsv", [(text,) for text in TEXTS], ("text",))
    model = model_folder(MULTI, [0.9, 0.123, 0.5001])
    content = json.loads((model / "finetune.json").read_text(encoding="utf-8"))
    del content["thresholds"]
    (model / "finetune.json").write_text(json.dumps(content), encoding="utf-8")
    assert [row["prediction"] for row in predicted(model, file)] == [
        chosen(row, [0.5] * 3) for row in predicted(model, file)
    ]


@pytest.mark.parametrize(
    "thresholds", [[0.5], [0.5] * 4, 0.5, "0.5", [0.5, 0.5, 1.5], [0.5, 0.5, None], [0.5, 0.5, True], {"pos": 0.5}]
)
def test_thresholds_that_do_not_fit(model_folder: Folder, tmp_path: Path, thresholds: Any) -> None:
    file = write_tsv(tmp_path / "rows.tsv", [("good",)], ("text",))
    with pytest.raises(CheckpointError, match=r"finetune\.json: thresholds must be 3 numbers from 0 to 1"):
        predict(str(model_folder(MULTI, thresholds)), settings(file), str(tmp_path / "out.tsv"))


@pytest.mark.parametrize("problem_type", [SINGLE, REGRESSION])
def test_a_threshold_for_a_model_that_has_no_use_for_it(
    model_folder: Folder, tmp_path: Path, problem_type: str
) -> None:
    file = write_tsv(tmp_path / "rows.tsv", [("good", "1")])
    with pytest.raises(ConfigError, match=rf"eval\.threshold is for models .* {problem_type}: leave it out"):
        evaluate(str(model_folder(problem_type)), settings(file, threshold=0.3))


def test_evaluation_of_rows_with_several_labels(model_folder: Folder, tmp_path: Path) -> None:
    """A row may have none; TSV cells and JSON lists are the same; the thresholds are those of prediction."""
    given = ["pos,long", "", "neg", "pos", "long", "", "neg,pos", "long,neg,pos", "pos"]
    model = model_folder(MULTI, [0.9, 0.123, 0.5001])
    file = write_tsv(tmp_path / "rows.tsv", list(zip(TEXTS, given, strict=True)))
    found = [set(filter(None, row["prediction"].split(","))) for row in predicted(model, file)]
    true = [set(filter(None, cell.split(","))) for cell in given]
    hits = sum(len(a & b) for a, b in zip(found, true, strict=True))
    expected = {
        "f1_micro": 2 * hits / sum(len(a) + len(b) for a, b in zip(found, true, strict=True)),
        "accuracy": sum(a == b for a, b in zip(found, true, strict=True)) / 9,
    }
    assert 0 < expected["f1_micro"] < 1
    lists = [{"text": text, "label": cell.split(",") if cell else []} for text, cell in zip(TEXTS, given, strict=True)]
    for rows in (file, write_json_lines(tmp_path / "rows.jsonl", lists)):
        metrics = evaluate(str(model), settings(rows))
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert evaluate(str(model), settings(file, threshold=0.5))["f1_micro"] != pytest.approx(expected["f1_micro"])


def test_evaluation_of_one_label_a_row_needs_each(model_folder: Folder, tmp_path: Path) -> None:
    model = str(model_folder())
    file = write_tsv(tmp_path / "rows.tsv", [("good", "pos"), ("bad", "")])
    with pytest.raises(DataError, match=r"rows\.tsv:3: empty label"):
        evaluate(model, settings(file))
    file = write_json_lines(tmp_path / "rows.jsonl", [{"text": "good", "label": ["pos"]}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the label is a list"):
        evaluate(model, settings(file))
    file = write_tsv(tmp_path / "rows.tsv", [("good", "pos"), ("bad", "Neg")])
    with pytest.raises(DataError, match=r"rows\.tsv:3: 'Neg' \(the training rows have 'neg'\)"):
        evaluate(model, settings(file))
