"""Training and dev rows: from two files, or held back from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_tsv

from finetune.config import DataConfig
from finetune.data.splits import read_options, read_splits
from finetune.errors import DataError

ROWS = [(f"text {row}", "abc"[row % 3]) for row in range(30)]


def config(folder: Path, rows: Any = ROWS, **changes: Any) -> DataConfig:
    return DataConfig(train_file=str(write_tsv(folder / "train.tsv", rows)), cache_dir=str(folder / "cache"), **changes)


def test_two_files(tmp_path: Path) -> None:
    dev = write_tsv(tmp_path / "dev.tsv", [("dev 0", "c"), ("dev 1", "a")])
    splits = read_splits(config(tmp_path, validation_file=str(dev)), seed=1)
    assert list(splits.train.dataset["text"]) == [text for text, _ in ROWS]
    assert list(splits.dev.dataset["text"]) == ["dev 0", "dev 1"]
    assert splits.labels.names == ("a", "b", "c")
    assert splits.train_labels.tolist() == [0, 1, 2] * 10
    assert splits.dev_labels.tolist() == [2, 0]


def test_labels_are_learned_from_the_training_rows_alone(tmp_path: Path) -> None:
    dev = write_tsv(tmp_path / "dev.tsv", [("dev 0", "a"), ("dev 1", "d")])
    with pytest.raises(DataError, match=r"dev\.tsv:3: 'd'"):
        read_splits(config(tmp_path, validation_file=str(dev)), seed=1)


def test_rows_are_held_back_class_by_class(tmp_path: Path) -> None:
    splits = read_splits(config(tmp_path, validation_split=0.2), seed=1)
    train, dev = list(splits.train.dataset["text"]), list(splits.dev.dataset["text"])
    order = [text for text, _ in ROWS]
    assert sorted(train + dev) == sorted(order)
    assert train == [text for text in order if text in set(train)]  # file order
    assert dev == [text for text in order if text in set(dev)]
    assert np.bincount(splits.dev_labels).tolist() == [2, 2, 2]
    assert np.bincount(splits.train_labels).tolist() == [8, 8, 8]
    for table, encoded in ((splits.train, splits.train_labels), (splits.dev, splits.dev_labels)):
        assert [splits.labels.names[index] for index in encoded] == list(table.dataset["label"])
        numbers = [int(text.split()[1]) for text in table.dataset["text"]]
        for row, number in enumerate(numbers):
            assert table.where(row).endswith(f"train.tsv:{number + 2}")


def test_the_seed_decides_which_rows_are_held_back(tmp_path: Path) -> None:
    held_back = [
        tuple(read_splits(config(tmp_path, validation_split=0.2), seed=seed).dev.dataset["text"])
        for seed in (1, 1, 2, 3)
    ]
    assert held_back[0] == held_back[1]
    assert len(set(held_back)) == 3


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_other_problem_types_hold_back_rows_at_random(tmp_path: Path, problem_type: Any) -> None:
    rows = [(f"text {row}", str(row)) for row in range(20)]
    splits = read_splits(config(tmp_path, rows, problem_type=problem_type, validation_split=0.25), seed=1)
    assert (len(splits.train_labels), len(splits.dev_labels)) == (15, 5)
    if problem_type == "regression":
        assert splits.dev_labels.tolist() == [float(text.split()[1]) for text in splits.dev.dataset["text"]]
    else:
        assert splits.dev_labels.sum(axis=1).tolist() == [1] * 5


PAIRS = {
    "single_label_classification": (["b", "a", "b"], ["a"], ("a", "b"), [1, 0, 1], [0]),
    "multi_label_classification": (["b;a", "", "b"], [""], ("a", "b"), [[1, 1], [0, 0], [0, 1]], [[0, 0]]),
    "regression": (["1.5", "-2", "1e1"], ["0"], (), [1.5, -2.0, 10.0], [0.0]),
}


@pytest.mark.parametrize("problem_type", PAIRS)
@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_pairs_of_every_kind(tmp_path: Path, problem_type: Any, suffix: str) -> None:
    train, dev, names, train_labels, dev_labels = PAIRS[problem_type]

    def write(name: str, labels: list[str]) -> str:
        rows = [{"q": f"who {row}?", "a": f"me, {row}", "label": label} for row, label in enumerate(labels)]
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".jsonl":
            lists = problem_type == "multi_label_classification"
            for row in rows if lists else []:
                row["label"] = row["label"].split(";") if row["label"] else []  # type: ignore[assignment]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            between, quote = ("\t", "") if suffix == ".tsv" else (",", '"')
            cells = [["q", "a", "label"], *([f"{quote}{cell}{quote}" for cell in row.values()] for row in rows)]
            path.write_text("".join(between.join(line) + "\n" for line in cells))
        return str(path)

    splits = read_splits(
        DataConfig(
            train_file=write("train", train), validation_file=write("dev", dev), text_column="q", text_pair_column="a",
            problem_type=problem_type, label_separator=";", cache_dir=str(tmp_path / "cache"),
        ),
        seed=1,
    )  # fmt: skip
    assert splits.train.dataset["text"][:] == ["who 0?", "who 1?", "who 2?"]
    assert splits.train.dataset["text_pair"][:] == ["me, 0", "me, 1", "me, 2"]
    assert (splits.labels.names, len(splits.dev.dataset)) == (names, 1)
    assert splits.train_labels.tolist() == train_labels
    assert splits.dev_labels.tolist() == dev_labels


def test_nothing_to_hold_back(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 rows are too few to hold back dev rows: give data\.validation_file"):
        read_splits(config(tmp_path, [("one", "a"), ("two", "b")]), seed=1)


def test_every_setting_reaches_the_reader() -> None:
    options = read_options(
        DataConfig(
            text_column="t", text_pair_column="p", label_column="l", quoting="minimal", encoding="gbk", header=False,
            column_names=["t", "p", "l"], empty_text="drop",
        )
    )  # fmt: skip
    assert (options.text_column, options.text_pair_column, options.label_column) == ("t", "p", "l")
    assert (options.quoting, options.encoding, options.header) == ("minimal", "gbk", False)
    assert (options.column_names, options.empty_text) == (("t", "p", "l"), "drop")
    assert options.label_separator is None  # a row has one label
    several = DataConfig(problem_type="multi_label_classification", label_separator="|")
    assert read_options(several).label_separator == "|"
