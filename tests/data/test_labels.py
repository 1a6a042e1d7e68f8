"""Label names, their order and their encodings, on real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, write_tsv

from finetune.data.labels import Labels, label_warnings, learn_labels, similar_labels, sort_labels
from finetune.data.tsv import ReadOptions, Table, read_table
from finetune.errors import DataError

CASES = Path(__file__).parent / "cases"
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"

ReadLabels = Callable[..., Table]


@pytest.fixture
def labelled(tmp_path: Path) -> ReadLabels:
    """A table with these labels, from a file."""

    def read(labels: Sequence[str], name: str = "train.tsv") -> Table:
        path = write_tsv(tmp_path / name, [(f"text {row}", label) for row, label in enumerate(labels)])
        return read_table(str(path), ReadOptions(), cache_dir=str(tmp_path / "cache"))

    return read


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["2", "5", "-1"], ["-1", "2", "5"]),
        (["10", "9"], ["9", "10"]),
        (["1", "01", "0"], ["0", "01", "1"]),  # equal numbers are two names
        (["+1", "-1", "0"], ["-1", "0", "+1"]),
        (["10", "9", "x"], ["10", "9", "x"]),  # one that is no integer: all as text
        (["1.5", "10", "9"], ["1.5", "10", "9"]),
        (["b", "B", "a", "_"], ["B", "_", "a", "b"]),  # by code point, not by locale
        (["体育", "财经", "娱乐", "A"], ["A", "体育", "娱乐", "财经"]),  # U+4F53, U+5A31, U+8D22
        (["٣", "10"], ["10", "٣"]),  # Arabic three is text
        (["9" * 5000, "10"], ["10", "9" * 5000]),  # more digits than Python turns into a number
    ],
)
def test_sort_labels(names: list[str], expected: list[str]) -> None:
    assert sort_labels(names) == expected
    assert sort_labels(names[::-1]) == expected


def test_ids_follow_the_sorted_names(labelled: ReadLabels) -> None:
    table = labelled(["2", "10", "-1", "2", "9"])
    labels = learn_labels(table, SINGLE)
    assert labels.names == ("-1", "2", "9", "10")
    assert labels.num_labels == 4
    ids = labels.encode(table)
    assert (ids.dtype, ids.tolist()) == (np.int64, [1, 3, 0, 1, 2])


def test_01_and_1_are_two_classes(labelled: ReadLabels) -> None:
    table = labelled(["1", "01", "1", "001"])
    labels = learn_labels(table, SINGLE)
    assert labels.names == ("001", "01", "1")
    assert labels.encode(table).tolist() == [2, 1, 2, 0]


def test_chinese_labels(labelled: ReadLabels) -> None:
    table = labelled(["财经", "体育", "娱乐", "体育"])
    labels = learn_labels(table, SINGLE)
    assert labels.names == ("体育", "娱乐", "财经")
    assert labels.encode(table).tolist() == [2, 0, 1, 0]


def test_a_selection_of_rows_is_encoded_as_such(labelled: ReadLabels) -> None:
    table = labelled(["c", "a", "b", "c"])
    labels = learn_labels(table, SINGLE)
    selected = replace(table, dataset=table.dataset.select([3, 1]))
    assert labels.encode(selected).tolist() == [2, 0]
    assert learn_labels(selected, SINGLE).names == ("a", "c")


@pytest.mark.parametrize("case", ["14_label_order", "16_label_not_contiguous"])
def test_cases_that_load(case: str, tmp_path: Path) -> None:
    folder = CASES / case
    expected = json.loads((folder / "expect.json").read_text(encoding="utf-8"))
    cache = str(tmp_path)
    train, dev = (read_table(str(folder / f"{name}.tsv"), ReadOptions(), cache_dir=cache) for name in ("train", "dev"))
    labels = learn_labels(train, SINGLE)
    assert list(labels.names) == expected["labels"]
    for name, table in (("train", train), ("dev", dev)):
        lines = (folder / f"expected_{name}.jsonl").read_text(encoding="utf-8").splitlines()
        wanted = [expected["labels"].index(json.loads(line)["label"]) for line in lines]
        assert labels.encode(table).tolist() == wanted


def test_case_19_unseen_dev_label(tmp_path: Path) -> None:
    folder = CASES / "19_unseen_dev_label"
    train, dev = (
        read_table(str(folder / f"{name}.tsv"), ReadOptions(), cache_dir=str(tmp_path)) for name in ("train", "dev")
    )
    labels = learn_labels(train, SINGLE)
    with pytest.raises(DataError) as refusal:
        labels.encode(dev)
    message = str(refusal.value)
    assert f"{folder / 'dev.tsv'}:5: 'mixed'" in message
    assert "1 label(s)" in message
    assert "The training labels are neg, pos" in message


def test_case_21_single_class(tmp_path: Path) -> None:
    table = read_table(str(CASES / "21_single_class" / "train.tsv"), ReadOptions(), cache_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"train\.tsv: all 6 rows have the same label 'only'.*at least two classes"):
        learn_labels(table, SINGLE)


def test_unknown_labels_are_listed_and_counted(labelled: ReadLabels) -> None:
    labels = Labels(SINGLE, ("a", "b"))
    with pytest.raises(DataError) as refusal:
        labels.encode(labelled(["a", "c", "b", "d", "e", "f", "A", "g", "h"], "dev.tsv"))
    message = str(refusal.value)
    assert "7 label(s) that the training rows do not have" in message
    for line, name in ((3, "c"), (5, "d"), (6, "e"), (7, "f"), (8, "A")):
        assert f"dev.tsv:{line}: '{name}'" in message
    assert "dev.tsv:9" not in message
    assert "and 2 more" in message


def test_multi_label_vectors(labelled: ReadLabels) -> None:
    table = labelled(["sport, news", "news", "news,sport,art", ",", "art,,art"])
    labels = learn_labels(table, MULTI)
    assert labels.names == ("art", "news", "sport")
    vectors = labels.encode(table)
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[0, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_multi_label_separator_is_not_a_pattern(labelled: ReadLabels) -> None:
    table = labelled(["a|b", "b", "c,d|a"])
    labels = learn_labels(table, MULTI, "|")
    assert labels.names == ("a", "b", "c,d")
    assert labels.encode(table).tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_unknown_label_inside_a_multi_label_row(labelled: ReadLabels) -> None:
    labels = learn_labels(labelled(["a,b", "b"]), MULTI)
    with pytest.raises(DataError, match=r"dev\.tsv:4: 'c'"):
        labels.encode(labelled(["a", "b,a", "b, c"], "dev.tsv"))


def test_multi_label_needs_a_label(labelled: ReadLabels) -> None:
    assert learn_labels(labelled(["a", "a"]), MULTI).names == ("a",)  # one label, given or not, can be learned
    with pytest.raises(DataError, match="no row has a label"):
        learn_labels(labelled([",", ",,"]), MULTI)


def test_regression(labelled: ReadLabels) -> None:
    table = labelled(["1", "-2.5", "1e-3", "+4"])
    labels = learn_labels(table, REGRESSION)
    assert (labels.names, labels.num_labels) == ((), 1)
    values = labels.encode(table)
    assert values.dtype == np.float32
    assert values.tolist() == [1.0, -2.5, float(np.float32(0.001)), 4.0]


@pytest.mark.parametrize("wrong", ["nan", "inf", "-Infinity", "four", "1,5", "0x10", "1e39", "1_000"])
def test_values_that_are_not_finite_numbers(labelled: ReadLabels, wrong: str) -> None:
    with pytest.raises(DataError, match="not finite numbers") as refusal:
        Labels(REGRESSION).encode(labelled(["1", wrong, "2"]))
    assert f"train.tsv:3: '{wrong}'" in str(refusal.value)
    assert "more" not in str(refusal.value)


def test_many_wrong_numbers_are_counted(labelled: ReadLabels) -> None:
    with pytest.raises(DataError) as refusal:
        Labels(REGRESSION).encode(labelled(["x"] * 7))
    assert "train.tsv:6: 'x'" in str(refusal.value)
    assert "train.tsv:7" not in str(refusal.value)
    assert "and 2 more" in str(refusal.value)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_order_does_not_depend_on_hashing(tmp_path: Path, hash_seed: str) -> None:
    names = [f"label {letter}" for letter in "qwertzuiopasdfgh"]
    path = write_tsv(tmp_path / "train.tsv", [("text", name) for name in names])
    program = (
        "import sys; from finetune.data.tsv import *; from finetune.data.labels import *\n"
        f"table = read_table({str(path)!r}, ReadOptions(), cache_dir={str(tmp_path)!r})\n"
        "print(*learn_labels(table, 'single_label_classification').names, sep='\\n')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == sorted(names)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["pos", "neg", "Pos", "POS"], [["pos", "Pos", "POS"]]),
        (["1", "1.0", "01", "2"], [["1", "1.0", "01"]]),
        (["1e1", "10", "-10"], [["1e1", "10"]]),
        (["ｐｏｓ", "pos"], [["ｐｏｓ", "pos"]]),  # full width
        (["not sure", "not_sure", "not-sure", "notsure"], [["not sure", "not_sure", "not-sure", "notsure"]]),
        (["C", "C++", "C#", "+", "-", "_"], []),
        (["1", "-1", "<1", ">1", "1-2", "12", "1.5", ".5", "5"], []),  # signs and ranges mean something
        (["1.0", "１", "'1'", "+1", "1e0"], [["1.0", "１", "'1'", "+1", "1e0"]]),
        (["10000000000000000001", "10000000000000000000"], []),  # one number to a float
        (["e\u0301", "é"], [["e\u0301", "é"]]),
        (["p\u200bos", "pos", "\ufeffpos"], [["p\u200bos", "pos", "\ufeffpos"]]),
        (["pos.", "pos", "(pos)", "“pos”", "《pos》"], [["pos.", "pos", "(pos)", "“pos”", "《pos》"]]),
        (["sci\u3000fi", "sci fi", "sci\xa0fi"], [["sci\u3000fi", "sci fi", "sci\xa0fi"]]),
        (["covid-19", "Covid 19", "step 1 1", "step 11"], [["covid-19", "Covid 19"]]),
        ([":)", ":(", "?", "!", "..."], []),
        (["nan", "inf", "-inf", "NaN"], [["nan", "NaN"]]),  # words like any other
        (["é", "e"], []),
        (["a", "b"], []),
    ],
)
def test_similar_labels(names: list[str], groups: list[list[str]]) -> None:
    assert similar_labels(names) == groups


def test_similar_labels_are_told_with_their_places(labelled: ReadLabels) -> None:
    table = labelled(["pos", "neg", "Pos", "neg", "pos"])
    (warning,) = label_warnings(table, learn_labels(table, SINGLE))
    assert warning.startswith("labels that may be meant as one: 'Pos' (1 row, first ")
    assert "train.tsv:4), 'pos' (2 rows, first " in warning
    assert warning.endswith("train.tsv:2)")
    assert label_warnings(labelled(["a", "b"]), Labels(SINGLE, ("a", "b"))) == []


def test_similar_labels_are_not_listed_without_end(labelled: ReadLabels) -> None:
    names = [case(f"{'abcdefgh'[row]}x") for row in range(7) for case in (str.lower, str.upper)]
    table = labelled([*names, *(" h" + "-" * row + "y" for row in range(7))])
    warnings = label_warnings(table, learn_labels(table, SINGLE))
    assert len(warnings) == 6  # of eight groups
    assert warnings[-1] == "labels that may be meant as one: 3 more such groups"
    (warning,) = label_warnings(table, Labels(SINGLE, tuple("h" + "-" * row + "y" for row in range(7))))
    assert warning.count("(1 row, first ") == 5 and warning.endswith(" and 2 more")


def test_labels_that_look_the_same_are_told_apart(labelled: ReadLabels) -> None:
    table = labelled(["é", "e\u0301", "É"])
    (warning,) = label_warnings(table, learn_labels(table, SINGLE))
    assert "'e\u0301' = 'e\\u0301' (1 row" in warning and "'é' = '\\xe9' (1 row" in warning and "'É' (1 row" in warning


def test_an_unknown_label_beside_its_like(labelled: ReadLabels) -> None:
    labels = learn_labels(labelled(["pos", "1.0"]), SINGLE)
    with pytest.raises(DataError) as refusal:
        labels.encode(labelled(["Pos", "1", "mixed"], "dev.tsv"))
    lines = str(refusal.value).splitlines()
    assert lines[1].endswith("dev.tsv:2: 'Pos' (the training rows have 'pos')")
    assert lines[2].endswith("dev.tsv:3: '1' (the training rows have '1.0')")
    assert lines[3].endswith("dev.tsv:4: 'mixed'")


def test_similar_labels_inside_rows_of_several(labelled: ReadLabels) -> None:
    table = labelled(["x", "y,Z", "z"])
    (warning,) = label_warnings(table, learn_labels(table, MULTI))
    assert "'Z' (1 row, first " in warning and "train.tsv:3), 'z'" in warning


def test_numbers_of_a_regression_are_never_alike(labelled: ReadLabels) -> None:
    table = labelled(["1", "1.0"])
    assert label_warnings(table, learn_labels(table, REGRESSION)) == []
