"""What makes two texts copies, and the pass over a table that finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import write_tsv

import finetune.data.scan as module
from finetune.data.scan import normalised, scan, texts
from finetune.data.tsv import ReadOptions, Table, read_table


def table(folder: Path, rows: list[str], pairs: list[str] | None = None) -> Table:
    columns = [rows, *([pairs] if pairs else []), ["x"] * len(rows)]
    header = ["text", *(["text_pair"] if pairs else []), "label"]
    path = write_tsv(folder / "rows.tsv", list(zip(*columns, strict=True)), header)
    options = ReadOptions(text_pair_column="text_pair" if pairs else None, empty_text="keep")
    return read_table(str(path), options, cache_dir=str(folder / "cache"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Good film!", "good  film"),
        ("ＧＯＯＤ　ｆｉｌｍ", "good film"),  # full width
        ("it's", "its"),
        ("STRASSE", "straße"),
        ("很好。", "很好"),
        ("a\u200bb", "ab"),  # zero width
        ("re-use", "reuse"),
        ("e\u0301t\u00e9", "\u00e9te\u0301"),  # composed or not
    ],
)
def test_copies_that_were_typed_twice(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("good film", "good films"),
        ("很好", "很坏"),
        ("का", "की"),  # vowel signs are marks, not punctuation
        ("👍", "👎"),
        ("!", "?"),  # nothing but punctuation: then it counts
        ("caf\u00e9", "cafe"),
        ("1", "2"),
        ("c++", "c"),
    ],
)
def test_texts_that_only_look_alike(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_numbers_of_each_row(tmp_path: Path) -> None:
    rows = ["Good film!", "good film", "good film", "好。", "..", ""]
    found = scan(table(tmp_path, rows), str(tmp_path))
    assert found.characters.tolist() == [10, 9, 9, 2, 2, 0]
    assert found.visible.tolist() == [8, 8, 8, 1, 2, 0]
    same = [[int(a == b) for b in found.exact] for a in found.exact]
    assert same == [[int(a == b) for b in rows] for a in rows]
    assert len(set(found.near[:3].tolist())) == 1
    assert len(set(found.near[2:].tolist())) == 4


def test_a_pair_is_one_text(tmp_path: Path) -> None:
    rows = table(tmp_path, ["a", "a", "ab"], ["bc", "b", "c"])
    assert list(texts(rows.dataset)) == ["a\tbc", "a\tb", "ab\tc"]
    found = scan(rows, str(tmp_path))
    assert len(set(found.exact.tolist())) == 3


def test_many_batches_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 4)
    rows = [f"text {row}" for row in range(11)]
    assert list(texts(table(tmp_path, rows).dataset)) == rows
    assert list(texts(table(tmp_path, rows).dataset.select([5, 2, 9]))) == ["text 5", "text 2", "text 9"]


def test_the_second_scan_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(tmp_path, ["a", "b"])
    first = scan(rows, str(tmp_path))
    calls = []
    monkeypatch.setattr(module, "_hash", lambda text: calls.append(text) or 0)
    second = scan(rows, str(tmp_path))
    assert not calls
    assert np.array_equal(first.exact, second.exact) and np.array_equal(first.visible, second.visible)
    scan(table(tmp_path, ["a", "c"]), str(tmp_path))
    assert calls

    (stored,) = [path for path in (tmp_path / "finetune").glob("scan-*.npz") if path.stat().st_size][:1]
    stored.write_bytes(b"damaged")
    assert len(scan(rows, str(tmp_path)).exact) == 2
