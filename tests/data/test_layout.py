"""Texts in rows: every text once and whole, and how little is padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.packing import lay_out


@pytest.mark.parametrize(
    ("lengths", "rows", "row_length", "row_of", "start_of"),
    [
        ([5, 3, 8], 2, 8, [1, 1, 0], [0, 5, 0]),  # nothing is padded
        ([3], 1, 8, [0], [0]),
        ([9, 9], 1, 24, [0, 0], [0, 9]),  # two rows of 16 would be 32
        ([5, 3, 2], 2, 8, [0, 0, 1], [0, 5, 0]),  # as many tokens as a row of 16, which attends to more
        ([9, 7, 9, 7], 2, 16, [0, 0, 1, 1], [0, 9, 0, 9]),
        ([10, 10, 4], 1, 24, [0, 0, 0], [0, 10, 20]),
    ],
)
def test_layouts_by_hand(
    lengths: list[int], rows: int, row_length: int, row_of: list[int], start_of: list[int]
) -> None:
    layout = lay_out(np.array(lengths, np.int32))
    assert (layout.rows, layout.row_length) == (rows, row_length)
    assert (layout.row_of.tolist(), layout.start_of.tolist()) == (row_of, start_of)
    assert layout.computed_tokens == rows * row_length


@given(st.lists(st.integers(1, 300), min_size=1, max_size=70))
def test_every_text_has_its_place(lengths: list[int]) -> None:
    layout = lay_out(np.array(lengths, np.int32))
    taken = np.zeros((layout.rows, layout.row_length), np.int64)
    for length, row, start in zip(lengths, layout.row_of, layout.start_of, strict=True):
        assert start + length <= layout.row_length
        taken[row, start : start + length] += 1
    assert taken.max() == 1 and taken.sum() == sum(lengths)
    assert (taken[:, 0] == 1).all()  # no row is empty
    assert layout.row_length % 8 == 0 and layout.row_length >= max(lengths)


def test_little_is_padded_in_random_batches_of_short_texts() -> None:
    """Lengths as those of tweets: 30 tokens in the middle, 64 at most."""
    lengths = np.clip(np.random.default_rng(0).lognormal(3.4, 0.45, 32 * 200), 4, 64).astype(np.int32)
    computed = sum(lay_out(lengths[start : start + 32]).computed_tokens for start in range(0, len(lengths), 32))
    assert 1 - lengths.sum() / computed < 0.05
    padded = sum(32 * int(lengths[start : start + 32].max()) for start in range(0, len(lengths), 32))
    assert 1 - lengths.sum() / padded > 0.3
