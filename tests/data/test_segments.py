"""Texts in one row: grouped by length, and found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.packing import one_row
from finetune.data.segments import Segments, length_groups

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=50)


def test_a_row_by_hand() -> None:
    layout = one_row(np.array([5, 30, 7], np.int32))
    assert (layout.rows, layout.row_length, layout.computed_tokens) == (1, 48, 48)
    assert (layout.row_of.tolist(), layout.start_of.tolist()) == ([0, 0, 0], [0, 5, 35])


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([5, 16, 9], [([0, 1, 2], 16)]),
        ([5, 40, 5], [([0, 1, 2], 48)]),  # two short texts more cost less than one more group
        ([5, 64, *[5] * 30], [([1], 64), ([0, *range(2, 32)], 16)]),
        ([100] * 9 + [200] * 9 + [90], [(list(range(9, 18)), 208), ([*range(9), 18], 112)]),
    ],
)
def test_groups_by_hand(lengths: list[int], groups: list[tuple[list[int], int]]) -> None:
    found = length_groups(np.array(lengths))
    assert [(group.texts.tolist(), group.length) for group in found] == groups


@given(LENGTHS)
def test_no_other_groups_cost_less_than_all_apart_or_together(lengths: list[int]) -> None:
    def cost(groups: list[tuple[int, int]]) -> int:
        return sum(count * length**2 + 6_000 for count, length in groups)

    padded = [-(-length // 16) * 16 for length in lengths]
    found = length_groups(np.array(lengths))
    assert sorted(text for group in found for text in group.texts) == list(range(len(lengths)))
    assert all(max(padded[text] for text in group.texts) == group.length for group in found)
    found_cost = cost([(len(group.texts), group.length) for group in found])
    assert found_cost <= cost([(len(padded), max(padded))])
    assert found_cost <= cost([(padded.count(size), size) for size in set(padded)])


@given(LENGTHS, st.integers(1, 3))
def test_every_head_of_every_token_is_found_again(lengths: list[int], heads: int) -> None:
    segments = Segments.of(np.array(lengths))
    places = segments.places(heads)
    assert segments.places(heads) is places
    values = torch.arange(sum(lengths) * heads)
    padded = values[places.take]
    assert torch.equal(padded[places.place], values)
    is_padding = torch.ones(len(padded), dtype=torch.bool)
    is_padding[places.place] = False
    assert torch.equal(is_padding.nonzero().flatten(), places.padding)
    # A matrix holds one head of one text, token by token, and the mask hides what is behind it.
    seen = []
    text_of = np.repeat(np.arange(len(lengths)), lengths)
    for block, part in zip(places.blocks, places.split(padded[:, None]), strict=True):
        assert part.shape == (block.count, block.length, 1)
        for number, matrix in enumerate(part.squeeze(-1).tolist()):
            text, head = text_of[matrix[0] // heads], matrix[0] % heads
            length = lengths[text]
            first = sum(lengths[:text])
            assert matrix[:length] == [(first + token) * heads + head for token in range(length)]
            hidden = [False] * block.length if block.mask is None else (block.mask[number, 0] < -1e30).tolist()
            assert hidden == [token >= length for token in range(block.length)]
            seen.append((text, head))
    assert sorted(seen) == [(text, head) for text in range(len(lengths)) for head in range(heads)]


def test_boundaries() -> None:
    segments = Segments.of(np.array([5, 3, 9]))
    assert segments.boundaries.tolist() == [0, 5, 8, 17] and segments.boundaries.dtype == torch.int32
    assert (segments.shortest, segments.longest) == (3, 9)
    assert segments.to(torch.device("cpu")) is segments
    assert segments.to(torch.device("meta")).boundaries.device.type == "meta"
