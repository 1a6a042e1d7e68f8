"""The data report against numbers counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_tokenizer, write_tsv
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config import DataConfig
from finetune.data.check import DataCheck, check_data, find_copies, fit_baselines, unknown_share
from finetune.data.scan import Scan, normalised
from finetune.data.splits import Splits, read_splits
from finetune.data.tokenize import tokenize

CASES = Path(__file__).parent / "cases"
Rows = Sequence[tuple[str, str]]


@pytest.fixture
def splits(tmp_path: Path) -> Any:
    def read(train: Rows, dev: Rows | None = None, **changes: Any) -> Splits:
        config = DataConfig(
            train_file=str(write_tsv(tmp_path / "train.tsv", train)),
            validation_file=str(write_tsv(tmp_path / "dev.tsv", dev)) if dev is not None else None,
            cache_dir=str(tmp_path / "cache"),
            **changes,
        )
        return read_splits(config, seed=1)

    return read


def look(splits: Splits, **changes: Any) -> DataCheck:
    tables = {"train": splits.train, "dev": splits.dev}
    return check_data(tables, {"train": splits.train_labels, "dev": splits.dev_labels}, splits.labels, **changes)


def messages(report: DataCheck, code: str) -> list[str]:
    return [finding.message for finding in report.findings if finding.code == code]


def places(report: DataCheck, code: str) -> list[list[str]]:
    """Bare file names."""
    found = [finding.places for finding in report.findings if finding.code == code]
    return [[" ".join(word.rpartition("/")[2] for word in place.split(" ")) for place in each] for each in found]


FINE = [(f"a good film number {row} of many", "pos") for row in range(12)]
FINE += [(f"a bad film number {row} of many", "neg") for row in range(12)]


def test_clean_rows_have_no_findings(splits: Any) -> None:
    dev = [("some other text", "pos"), ("yet another one", "neg")]
    assert look(splits(FINE, dev)).findings == []


def test_case_31_duplicates_and_leaks(tmp_path: Path) -> None:
    folder = CASES / "31_duplicates_leak"
    config = DataConfig(
        train_file=str(folder / "train.tsv"), validation_file=str(folder / "dev.tsv"), cache_dir=str(tmp_path)
    )
    report = look(read_splits(config, seed=1))
    train, dev = report.splits["train"], report.splits["dev"]
    assert (train.rows, dev.rows) == (13, 5)
    assert (train.repeated_rows, train.conflicting_texts) == (2, 1)
    assert (dev.repeated_rows, dev.conflicting_texts) == (0, 0)
    assert report.leaks == {"exact": 2, "normalised": 3}
    assert messages(report, "leakage") == [
        "dev rows that are in train too: 2 as they stand, 3 (60.0%) without case, width, punctuation and blanks"
    ]
    assert places(report, "leakage") == [
        ["dev.tsv:2 is train.tsv:4", "dev.tsv:3 is train.tsv:5", "dev.tsv:4 is train.tsv:6"]
    ]
    assert places(report, "repeated_rows") == [["train.tsv:12", "train.tsv:13"]]
    assert places(report, "conflicting_labels") == [["train.tsv:3 and train.tsv:14"]]


def plain_copies(rows: Rows) -> tuple[list[int], list[int], list[list[int]]]:
    """Repeated rows, near copies and contradictions, found by looking at all rows before each."""
    repeated = [at for at, row in enumerate(rows) if row in rows[:at]]
    texts = [text for text, _ in rows]
    firsts = [at for at, text in enumerate(texts) if text not in texts[:at]]
    near = [
        at for at in firsts if normalised(texts[at]) in [normalised(texts[before]) for before in firsts if before < at]
    ]
    conflicts = []
    for at in firsts:
        same = [row for row, text in enumerate(texts) if text == texts[at]]
        labels = [rows[row][1] for row in same]
        if len(set(labels)) > 1:
            conflicts.append([row for place, row in enumerate(same) if labels[place] not in labels[:place]])
    return repeated, near, conflicts


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "A", "a.", "b", "b ", "c"]), st.sampled_from("xyz")), min_size=1, max_size=14
    )
)
def test_copies_are_those_that_a_plain_search_finds(rows: Rows) -> None:
    hashes = [np.array([hash(text) % 2**60 for text in each], np.uint64) for each in
              ([text for text, _ in rows], [normalised(text) for text, _ in rows])]  # fmt: skip
    none = np.zeros(len(rows), np.int32)
    found = find_copies(Scan(*hashes, none, none), np.array(["xyz".index(label) for _, label in rows]))
    repeated, near, conflicts = plain_copies(rows)
    assert found.repeated.tolist() == repeated
    assert found.near.tolist() == near
    assert [group.tolist() for group in found.conflicting] == conflicts


def test_rows_with_several_labels_and_numbers_are_compared_whole(splits: Any) -> None:
    rows = [("a", "x,y"), ("a", "y,x"), ("b", "x"), ("b", "x,y"), *[(f"text {row}", "x") for row in range(20)]]
    report = look(splits(rows, rows[4:6], problem_type="multi_label_classification"))
    assert (report.splits["train"].repeated_rows, report.splits["train"].conflicting_texts) == (1, 1)
    rows = [("a", "1"), ("a", "1.0"), ("b", "1"), ("b", "2")]
    report = look(splits(rows, [("c", "1")], problem_type="regression"))
    assert (report.splits["train"].repeated_rows, report.splits["train"].conflicting_texts) == (1, 1)
    assert not report.of("warning")[1:]  # two numbers for one text are no contradiction, repeated rows are worth a word


def test_classes(splits: Any) -> None:
    train = [
        *[(f"text {row}", "often") for row in range(120)],
        ("one", "once"),
        *[(f"t{row}", "rare") for row in range(9)],
    ]
    report = look(
        splits(train, [*[(f"d{row}", "often") for row in range(30)], *[(f"r{row}", "rare") for row in range(30)]])
    )
    assert report.splits["train"].classes == {"often": 120, "once": 1, "rare": 9}
    assert report.splits["dev"].classes == {"often": 30, "once": 0, "rare": 30}
    assert messages(report, "rare_classes") == ["2 of 3 classes have fewer than 10 training rows: once 1, rare 9"]
    assert messages(report, "missing_in_dev") == ["1 of 3 classes have no dev row: once"]
    assert messages(report, "imbalance") == ["the largest class has 120 times the training rows of the smallest"]
    assert messages(report, "shifted_classes") == ["rare is 6.9% of the training rows but 50.0% of the dev rows"]


def test_short_empty_and_long_texts(splits: Any) -> None:
    train = [*FINE, ("", "pos"), ("!", "neg"), ("x", "pos"), ("word " * 4001, "neg")]
    report = look(splits(train, FINE[:1], empty_text="keep"))
    assert report.splits["train"].empty_texts == 1
    assert places(report, "empty_texts") == [["train.tsv:26"]]
    assert places(report, "short_texts") == [["train.tsv:27", "train.tsv:28"]]
    assert places(report, "long_texts") == [["train.tsv:29"]]
    assert any("1 row with an empty text kept" in message for message in messages(report, "reader"))


def test_similar_labels_and_quoted_texts_are_warnings(splits: Any) -> None:
    report = look(splits([(f'"text {row}"', ("Pos", "pos")[row % 2]) for row in range(24)], [("a", "pos")]))
    assert messages(report, "similar_labels")[0].startswith("labels that may be meant as one: 'Pos' (12 rows")
    assert "24 of 24 texts stand in double quotes" in messages(report, "reader")[0]


def with_tokens(splits: Splits, folder: Path, max_length: int, kind: str = "bert") -> DataCheck:
    tokenizer: Any = make_tokenizer(kind)
    tokens = {
        name: tokenize(table.dataset, tokenizer, max_length=max_length, cache_dir=str(folder))
        for name, table in (("train", splits.train), ("dev", splits.dev))
    }
    return look(splits, tokens=tokens, tokenizer=tokenizer, max_length=max_length)


def test_lengths_in_tokens(splits: Any, tmp_path: Path) -> None:
    """[CLS] and [SEP] and 1, 2, 3, 10 and 70 words."""
    train = [(" ".join(["good"] * count), "ab"[count % 2]) for count in (1, 2, 3, 10, 70)]
    lengths = with_tokens(splits(train, [("bad", "a")]), tmp_path, 8).splits["train"].lengths
    assert lengths.unit == "tokens"
    assert (lengths.percentiles[50], lengths.percentiles[100]) == (5, 72)
    total = 3 + 4 + 5 + 12 + 72
    assert lengths.cut == {8: (0.4, (4 + 64) / total), 64: (0.2, 8 / total), 128: (0, 0), 256: (0, 0), 512: (0, 0)}
    assert sum(lengths.counts) == 5
    assert len(lengths.edges) == len(lengths.counts) + 1


def test_unknown_tokens(splits: Any, tmp_path: Path) -> None:
    """Of 1 + 3 + 4 words, three are unknown; padding, [CLS] and [SEP] do not count."""
    train = [("好", "a"), ("好 我 书", "b"), ("好 我 书 我", "a")]
    report = with_tokens(splits(train, [("good film", "a")]), tmp_path, 16)
    assert report.splits["train"].unknown_share == pytest.approx(3 / 8)
    assert report.splits["dev"].unknown_share == 0
    (message,) = messages(report, "unknown_tokens")
    assert message == "train: 37.5% of the tokens are [UNK] (it does not know '我', among others)"


def test_unknown_tokens_of_pairs_and_of_bytes(tmp_path: Path) -> None:
    from finetune.data.tsv import ReadOptions, read_table

    path = write_tsv(tmp_path / "a.tsv", [("good zebra", "film", "x")], ("text", "text_pair", "label"))
    rows = read_table(str(path), ReadOptions(text_pair_column="text_pair"), cache_dir=str(tmp_path)).dataset
    for kind, expected in (("bert", 1 / 3), ("roberta", 0.0)):
        tokenizer: Any = make_tokenizer(kind)
        tokens = tokenize(rows, tokenizer, max_length=32, cache_dir=str(tmp_path))
        assert unknown_share(tokens, tokenizer, pairs=True) == pytest.approx(expected)


def test_baselines(splits: Any) -> None:
    """7 of 10 dev rows are of the class that is most frequent in training; words tell all of them."""
    train = [(f"{('good', 'bad')[row % 3 == 0]} {row}", ("pos", "neg")[row % 3 == 0]) for row in range(60)]
    dev = [("good it was", "pos")] * 7 + [("bad it was", "neg")] * 3
    majority, words = fit_baselines(splits(train, dev), seed=0)
    assert majority.name == "most frequent answer"
    assert majority.metrics == {"accuracy": 0.7, "f1_macro": pytest.approx((14 / 17 + 0) / 2)}
    assert majority.interval == pytest.approx((0.3968, 0.8922), abs=1e-4)  # Wilson 1927
    assert words.name == "TF-IDF of words + logistic regression"
    assert words.metrics == {"accuracy": 1.0, "f1_macro": 1.0}


def test_baseline_of_a_script_without_blanks(splits: Any) -> None:
    train = [(f"这本书很{('好', '坏')[row % 2]}看{row}", ("pos", "neg")[row % 2]) for row in range(40)]
    _, characters = fit_baselines(splits(train, [("电影很好", "pos"), ("电影很坏", "neg")]), seed=0)
    assert characters.name == "TF-IDF of characters + logistic regression"
    assert characters.metrics["accuracy"] == 1.0


def test_baselines_of_other_kinds_of_labels(splits: Any) -> None:
    train = [(f"{'long ' * (row % 5)}text", str(row % 5)) for row in range(50)]
    mean, words = fit_baselines(splits(train, [("text", "0"), ("text", "4")], problem_type="regression"), seed=0)
    assert mean.metrics == {"mse": 4.0}  # the mean is 2
    assert words.metrics["mse"] > 0
    train = [(f"{('good', 'bad')[row % 2]} text {row}", ("x,y", "x")[row % 2]) for row in range(40)]
    kind = "multi_label_classification"
    some, words = fit_baselines(splits(train, [("good text", "x,y"), ("bad text", "x")], problem_type=kind), seed=0)
    assert some.metrics["accuracy"] == 0.5  # x and y are given to half of the rows or more
    assert words.metrics == {"accuracy": 1.0, "f1_micro": 1.0, "f1_macro": 1.0}


def test_texts_without_words_have_no_second_baseline(splits: Any) -> None:
    assert len(list(fit_baselines(splits([("!", "a"), ("?", "b"), ("!!", "a")], [("?", "b")]), seed=0))) == 1


def test_copies_are_held_back_together(splits: Any) -> None:
    """No text is on both sides, also when it is written differently."""
    rows = [
        (text, "ab"[group % 2]) for group in range(20) for text in (f"Text {group}!", f"text {group}", f"text {group}")
    ]
    found = splits(rows)
    report = look(found)
    assert report.leaks == {"exact": 0, "normalised": 0}
    assert report.splits["dev"].rows % 3 == 0 and report.splits["dev"].rows == 6  # one of ten groups of each class
