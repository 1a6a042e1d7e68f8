"""Which texts share a row, so that hardly any padding is computed; pure functions of their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MULTIPLE_OF = 8  # tensor cores and AMX tiles work on multiples of eight
ROW_MULTIPLE_OF = 16  # of a row that holds all texts: lengths that come again are cheaper, and there are few this way
ATTENTION_EQUALS_REST = 1024  # tokens of a row at which attention takes as long as all the rest of a layer


@dataclass(frozen=True)
class Layout:
    """Where each text of a micro-batch stands: in which of ``rows`` rows, from which token on.

    ``row_of`` and ``start_of`` are int64 ``[texts]``; every row has ``row_length`` tokens, of which the last may be
    padding.
    """

    rows: int
    row_length: int
    row_of: NDArray[np.int64]
    start_of: NDArray[np.int64]

    @property
    def computed_tokens(self) -> int:
        """Padding included."""
        return self.rows * self.row_length


def lay_out(lengths: NDArray[np.int32]) -> Layout:
    """Pack texts into rows of one length at the least cost that first-fit decreasing finds.

    Row lengths from that of the longest text to twice that are tried, in steps of eight. Longer rows leave less
    padding, but attention compares every token with all tokens of its row, so it costs more.

    Args:
        lengths: tokens of each text, at least 1.
    """
    shortest_row = -(-int(lengths.max()) // MULTIPLE_OF) * MULTIPLE_OF
    candidates = range(shortest_row, 2 * shortest_row + 1, MULTIPLE_OF)
    return min((_first_fit(lengths, row_length) for row_length in candidates), key=_cost)


def one_row(lengths: NDArray[np.int32]) -> Layout:
    """All texts one after the other, for attention that takes them apart again.

    Args:
        lengths: tokens of each text, at least 1.
    """
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return Layout(1, -(-int(lengths.sum()) // ROW_MULTIPLE_OF) * ROW_MULTIPLE_OF, np.zeros_like(starts), starts)


def _cost(layout: Layout) -> float:
    """Of computing it, in tokens: those of a row of :data:`ATTENTION_EQUALS_REST` cost twice those of a short one."""
    return layout.computed_tokens * (1 + layout.row_length / ATTENTION_EQUALS_REST)


def _first_fit(lengths: NDArray[np.int32], row_length: int) -> Layout:
    """First-fit decreasing: at most 11/9 of the fewest rows, and one more (Johnson 1973)."""
    used: list[int] = []
    row_of, start_of = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for text in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[text])
        row = next((row for row, tokens in enumerate(used) if tokens + length <= row_length), len(used))
        if row == len(used):
            used.append(0)
        row_of[text], start_of[text] = row, used[row]
        used[row] += length
    return Layout(len(used), row_length, row_of, start_of)
