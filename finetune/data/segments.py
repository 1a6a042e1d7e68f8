"""Texts that stand one after the other in a single row, and how attention takes them apart again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

LENGTHS_OF = 16  # attention pads texts to multiples of this many tokens
LOWEST = np.finfo(np.float32).min
GROUP_OVERHEAD = 6_000  # attention scores that take as long as one more group of texts


@dataclass(frozen=True)
class Group:
    """Texts that attention computes together: their numbers, int64 ``[texts]``, and the length they are padded to."""

    texts: NDArray[np.int64]
    length: int


def length_groups(lengths: NDArray[np.int64]) -> list[Group]:
    """Put texts of similar length together, at the least number of attention scores and groups.

    Args:
        lengths: tokens of each text, at least 1.
    """
    padded = -(-lengths // LENGTHS_OF) * LENGTHS_OF
    sizes, counts = np.unique(padded, return_counts=True)
    # Groups are runs of sizes: cost[end] is the least for all sizes before end, first[end] where its last run begins.
    before = np.concatenate([[0], np.cumsum(counts)])
    cost, first = np.zeros(len(sizes) + 1), np.zeros(len(sizes) + 1, np.int64)
    for end in range(1, len(sizes) + 1):
        costs = cost[:end] + (before[end] - before[:end]) * sizes[end - 1] ** 2 + GROUP_OVERHEAD
        first[end] = np.argmin(costs)
        cost[end] = costs[first[end]]
    groups, end = [], len(sizes)
    while end:
        start = first[end]
        texts = np.flatnonzero((padded >= sizes[start]) & (padded <= sizes[end - 1]))
        groups.append(Group(texts, int(sizes[end - 1])))
        end = start
    return groups


@dataclass(frozen=True)
class Block:
    """One group, as ``count`` matrices (texts x heads) of ``length`` rows.

    ``mask`` is float32 ``[count, 1, length]``, additive, and hides padding; None: there is none.
    """

    count: int
    length: int
    mask: torch.Tensor | None

    @property
    def scores(self) -> int:
        """Of all pairs of tokens."""
        return self.count * self.length**2


@dataclass(frozen=True)
class Places:
    """Where each head of each token is found among the padded texts of all groups, and back.

    ``take`` int64 ``[padded tokens x heads]`` counts (token, head); ``place`` int64 ``[tokens x heads]`` is its
    inverse; ``padding`` int64 are the places that no token fills (they repeat one).
    """

    take: torch.Tensor
    place: torch.Tensor
    padding: torch.Tensor
    blocks: list[Block]

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``[padded tokens x heads, width]`` -> ``[count, length, width]`` of each block, of the same memory."""
        width = values.shape[-1]
        parts = torch.split(values, [block.count * block.length for block in self.blocks])
        return [part.view(-1, block.length, width) for part, block in zip(parts, self.blocks, strict=True)]


@dataclass(frozen=True)
class Segments:
    """Texts in one row.

    ``lengths`` int64 ``[texts]``; ``boundaries`` int32 ``[texts + 1]``, on the device, is where each begins and the
    last one ends.
    """

    lengths: NDArray[np.int64]
    boundaries: torch.Tensor
    _places: dict[int, Places] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> Segments:
        """On the CPU."""
        boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(lengths, torch.from_numpy(boundaries))

    def to(self, device: torch.device, non_blocking: bool = False) -> Segments:
        """The same on ``device``."""
        if self.boundaries.device == device:
            return self
        return Segments(self.lengths, self.boundaries.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Segments:
        """Page-locked."""
        return Segments(self.lengths, self.boundaries.pin_memory())

    @property
    def shortest(self) -> int:
        """Tokens of the shortest text."""
        return int(self.lengths.min())

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(self.lengths.max())

    def places(self, heads: int) -> Places:
        """For attention by groups with so many heads; computed once."""
        if heads not in self._places:
            self._places[heads] = _find_places(self.lengths, heads)
        return self._places[heads]


def _find_places(lengths: NDArray[np.int64], heads: int) -> Places:
    starts = np.cumsum(lengths) - lengths
    take: list[NDArray[np.int64]] = []
    is_padding: list[NDArray[np.bool_]] = []
    blocks: list[Block] = []
    for group in length_groups(lengths):
        within = np.arange(group.length)
        hidden = within >= lengths[group.texts, None]  # [texts, length]
        tokens = starts[group.texts, None] + np.where(hidden, 0, within)
        take.append((tokens[:, None, :] * heads + np.arange(heads)[:, None]).ravel())
        is_padding.append(np.repeat(hidden, heads, axis=0).ravel())
        mask = np.where(hidden.repeat(heads, axis=0), LOWEST, np.float32(0))[:, None, :] if hidden.any() else None
        blocks.append(Block(len(hidden) * heads, group.length, None if mask is None else torch.from_numpy(mask)))
    taken, padding = np.concatenate(take), np.concatenate(is_padding)
    place = np.empty(int(lengths.sum()) * heads, np.int64)
    place[taken[~padding]] = np.flatnonzero(~padding)
    return Places(torch.from_numpy(taken), torch.from_numpy(place), torch.from_numpy(np.flatnonzero(padding)), blocks)
