"""One pass over the texts of a table: what tells copies apart from texts that only look alike, and lengths."""

from __future__ import annotations

import hashlib
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import datasets
import numpy as np
from numpy.typing import NDArray

from finetune.data.tsv import Table

BATCH = 10_000
CACHE_VERSION = 1  # of what is stored of a table: raise it when that changes


@dataclass(frozen=True)
class Scan:
    """A few numbers of each row: uint64 hashes of the text as it stands and of its :func:`normalised` form, and its
    length in characters; a pair counts as one text."""

    exact: NDArray[np.uint64]
    near: NDArray[np.uint64]
    characters: NDArray[np.int32]
    visible: NDArray[np.int32]


def normalised(text: str) -> str:
    """A text without case, width, punctuation and blanks: what two copies have in common that were typed twice."""
    plain = (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
    return plain.translate(_dropped()) or plain.strip()


@cache
def _dropped() -> dict[int, None]:
    """Punctuation, separators, control and format characters. Marks stay: they are vowels in Indic scripts."""
    kinds = {code: unicodedata.category(chr(code)) for code in range(sys.maxunicode + 1)}
    return {code: None for code, kind in kinds.items() if kind[0] in "PZ" or kind in ("Cc", "Cf")}


def scan(table: Table, cache_dir: str | None = None) -> Scan:
    """Hash and measure each row, once for the same rows: the result is kept in the cache."""
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "finetune"
    path = folder / f"scan-{CACHE_VERSION}-{table.dataset._fingerprint}.npz"
    try:
        with np.load(path) as stored:
            found = Scan(**stored)
        if len(found.exact) == len(table.dataset):
            return found
    except (OSError, ValueError, TypeError, KeyError):
        pass  # not there, or damaged
    found = _scan(table)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{np.random.default_rng().integers(2**62)}.npz")
    np.savez(part, **vars(found))
    part.replace(path)
    return found


def _scan(table: Table) -> Scan:
    rows = len(table.dataset)
    found = Scan(np.empty(rows, np.uint64), np.empty(rows, np.uint64), *np.empty((2, rows), np.int32))
    for row, text in enumerate(texts(table.dataset)):
        plain = normalised(text)
        found.exact[row], found.near[row] = _hash(text), _hash(plain)
        found.characters[row], found.visible[row] = len(text), len(plain)
    return found


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def texts(dataset: datasets.Dataset) -> Iterator[str]:
    """Each row's text, or both of a pair with a tab between; a batch in memory at a time."""
    names = [name for name in ("text", "text_pair") if name in dataset.column_names]
    for batch in dataset.select_columns(names).with_format("arrow").iter(BATCH):
        columns = [batch.column(name).to_pylist() for name in names]
        yield from columns[0] if len(columns) == 1 else map("\t".join, zip(*columns, strict=True))
