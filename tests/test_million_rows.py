"""The file that scale is measured on: the same for a seed, and with as many copies as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import REPOSITORY


def make(path: Path, *options: str) -> tuple[list[list[str]], dict[str, Any]]:
    """The rows as cells, and what the script says of them."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "make_million_rows.py"), str(path), *options]
    said = json.loads(subprocess.check_output(command, text=True))
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    assert header == "text\tlabel"
    return [row.split("\t") for row in rows], said


def test_copies_are_those_that_it_says(tmp_path: Path) -> None:
    """Of 2,050 rows 20 are hundredth ones, two of them thousandth ones, and 21 stand at 50, 150, …, 2,050."""
    rows, said = make(tmp_path / "rows.tsv", "--rows", "2050")
    assert said == {
        "rows": 2050, "classes": 5, "unique": 2009, "duplicate": 18, "conflict": 2, "near_duplicate": 21,
    }  # fmt: skip
    assert len(rows) == 2050
    texts, plain = [text for text, _ in rows], [text.lower().rstrip(".") for text, _ in rows]
    assert len(set(map(tuple, rows))) == 2050 - 18
    assert len(set(texts)) == 2050 - 18 - 2
    assert len(set(plain)) == 2009
    assert len({label for _, label in rows}) == 5
    assert all(4 <= len(text.split()) - 1 <= 24 for text in texts)
    assert rows[999][0] == rows[998][0] and rows[999][1] != rows[998][1]
    assert rows[199] == rows[198]
    assert rows[49] == [f"{rows[48][0].upper()}.", rows[48][1]]


def test_the_rows_follow_from_the_seed(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(files, ("7", "7", "8"), strict=True):
        make(path, "--rows", "300", "--seed", seed)
    first, again, other = (path.read_bytes() for path in files)
    assert first == again
    assert first != other
