"""Label texts <-> what the model is trained on: class ids, 0/1 vectors, or numbers."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.data.tsv import Table
from finetune.errors import DataError

SHOWN = 5  # places that an error lists before it counts the rest
# Punctuation that adds nothing to a name when it stands around it. Not + - # and the like: C, C++ and C# differ.
_AROUND = " \t.,;:!?\"'`´‘’“”„«»‹›()[]{}《》〈〉「」『』【】、。・…"
_is_number = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?").fullmatch


@dataclass(frozen=True)
class Labels:
    """The label names in id order, learned from the training rows alone.

    ``names`` is empty for regression.
    """

    problem_type: str
    names: tuple[str, ...] = ()
    separator: str = ","

    @property
    def num_labels(self) -> int:
        """Outputs of the model's head."""
        return len(self.names) or 1

    def encode(self, table: Table) -> NDArray[np.float32] | NDArray[np.int64]:
        """Labels of all rows.

        Returns:
            int64 ``[rows]`` class ids (single_label_classification), float32 ``[rows, num_labels]`` of 0 and 1
            (multi_label_classification), or float32 ``[rows]`` (regression).

        Raises:
            DataError: a label that the training rows do not have, or a value that is not a finite number.
        """
        column = _column(table)
        if self.problem_type == "regression":
            return _numbers(column, table)
        names = pa.array(self.names, pa.string())
        if self.problem_type == "single_label_classification":
            ids = pc.index_in(column, value_set=names)
            self._refuse_unknown(ids, column, None, table)
            return np.asarray(ids.to_numpy(zero_copy_only=False), dtype=np.int64)
        rows, parts = _split(column, self.separator)
        ids = pc.index_in(parts, value_set=names)
        self._refuse_unknown(ids, parts, rows, table)
        vectors = np.zeros((len(column), len(self.names)), np.float32)
        vectors[rows, ids.to_numpy(zero_copy_only=False)] = 1.0
        return vectors

    def _refuse_unknown(self, ids: pa.Array, texts: pa.Array, rows: NDArray[np.int64] | None, table: Table) -> None:
        unknown = np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))
        if not len(unknown):
            return
        alike = {_alike(name): name for name in self.names}
        shown = []
        for position in unknown[:SHOWN]:
            name = texts[int(position)].as_py()
            known = alike.get(_alike(name))
            place = table.where(int(position if rows is None else rows[position]))
            shown.append(f"{place}: {name!r}" + (f" (the training rows have {known!r})" if known is not None else ""))
        more = f"\n  and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        raise DataError(
            f"{len(unknown)} label(s) that the training rows do not have:\n  "
            + "\n  ".join(shown)
            + more
            + f"\nThe training labels are {', '.join(self.names[:20])}{', …' if len(self.names) > 20 else ''}: "
            "correct these rows, or add such rows to data.train_file"
        )


def learn_labels(table: Table, problem_type: str, separator: str = ",") -> Labels:
    """The labels of the training rows: sorted as text, or as numbers when all are integers.

    Raises:
        DataError: fewer than two classes, which no classifier can learn.
    """
    if problem_type == "regression":
        return Labels(problem_type)
    column = _column(table)
    parts = column if problem_type == "single_label_classification" else _split(column, separator)[1]
    names = sort_labels(pc.unique(parts).to_pylist())
    if len(names) < 2 and problem_type == "single_label_classification":
        raise DataError(
            f"{table.files[0]}: all {len(column)} rows have the same label {names[0]!r}: a classifier needs at least "
            "two classes (is data.label_column right?)"
        )
    if not names:
        raise DataError(f"{table.files[0]}: no row has a label (is data.label_column right?)")
    return Labels(problem_type, tuple(names), separator)


def sort_labels(names: Sequence[str]) -> list[str]:
    """Numerically when all names are integers, else by code point: the same on every machine and locale."""
    if all(re.fullmatch(r"[+-]?[0-9]{1,4000}", name) for name in names):  # int() refuses more than 4300 digits
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def similar_labels(names: Sequence[str]) -> list[list[str]]:
    """Groups of names that a person may have meant as one, each in the order of ``names``.

    They differ in case, width, Unicode normal form, invisible characters, blanks, hyphens, underscores or surrounding
    punctuation alone, or are the same number.
    """
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(_alike(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _alike(name: str) -> object:
    """What names that may be meant as one have in common."""
    plain = "".join(char for char in unicodedata.normalize("NFKC", name) if unicodedata.category(char) != "Cf").strip()
    bare = plain.strip(_AROUND)
    for text in (plain, bare):
        if _is_number(text):
            return Decimal(text)  # not float, in which long ids run together
    joined = re.sub(r"(?<=[^\W\d])[\s_-]+(?=\w)|(?<=\w)[\s_-]+(?=[^\W\d])", "", bare or plain)
    return unicodedata.normalize("NFKC", joined.casefold())


def label_warnings(table: Table, labels: Labels) -> list[str]:
    """One sentence for each group of :func:`similar_labels`, with rows and the first place of each name."""
    groups = similar_labels(labels.names)
    if not groups:
        return []
    column = _column(table)
    rows: NDArray[np.int64] | None = None
    if labels.problem_type == "multi_label_classification":
        rows, column = _split(column, labels.separator)
    warnings = []
    for group in groups[:SHOWN]:
        said = []
        for name in group[:SHOWN]:
            found = np.flatnonzero(pc.equal(column, name).to_numpy(zero_copy_only=False))
            places = found if rows is None else rows[found]
            first = f", first {table.where(int(places[0]))}" if len(places) else ""
            said.append(f"{_told(name, group)} ({len(found):,} row{'' if len(found) == 1 else 's'}{first})")
        more = f" and {len(group) - SHOWN} more" if len(group) > SHOWN else ""
        warnings.append(f"labels that may be meant as one: {', '.join(said)}{more}")
    if len(groups) > SHOWN:
        warnings.append(f"labels that may be meant as one: {len(groups) - SHOWN} more such groups")
    return warnings


def _told(name: str, others: Sequence[str]) -> str:
    """A name in quotes; with its code points escaped where another one looks the same."""
    shown = [unicodedata.normalize("NFC", other) for other in others]
    return repr(name) if shown.count(unicodedata.normalize("NFC", name)) == 1 else f"{name!r} = {name!a}"


def _column(table: Table) -> pa.Array:
    """The labels of the rows, also where the table is a selection of the rows on disk."""
    return table.dataset.select_columns(["label"]).with_format("arrow")[:].column("label").combine_chunks()


def _split(column: pa.Array, separator: str) -> tuple[NDArray[np.int64], pa.Array]:
    """Rows and label texts of a multi-label column; blanks around labels and empty labels are dropped."""
    lists = pc.split_pattern(column, separator)
    parts = pc.utf8_trim_whitespace(pc.list_flatten(lists))
    rows = pc.list_parent_indices(lists)
    filled = pc.not_equal(parts, "")
    return rows.filter(filled).to_numpy().astype(np.int64), parts.filter(filled)


def _numbers(column: pa.Array, table: Table) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite and is refused
        values = np.fromiter((_number(text.as_py()) for text in column), np.float64, len(column)).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        shown = [f"{table.where(int(row))}: {column[int(row)].as_py()!r}" for row in bad[:SHOWN]]
        shown += [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        raise DataError("labels that are not finite numbers (data.problem_type regression):\n  " + "\n  ".join(shown))
    return values


def _number(text: str) -> float:
    """NaN for what is no number; Python would take ``1_000`` for one."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan
