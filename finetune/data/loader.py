"""Rows -> tensors on the device: the training steps and the evaluation batches of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from finetune.data.batching import (
    BatchSizes,
    Rows,
    epoch_order,
    evaluation_batches,
    micro_batches,
    steps_per_epoch,
)
from finetune.data.tokenize import TokenizedTexts

PAD_TO_MULTIPLE_OF = 8  # tensor cores and AMX tiles work on multiples of eight


@dataclass(frozen=True)
class Examples:
    """A split that is ready to be computed on, row by row in file order.

    ``weights`` float32 ``[rows]`` is what each row counts in the mean loss; None: all the same.
    """

    texts: TokenizedTexts
    labels: NDArray[Any]
    weights: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass
class MicroBatch:
    """What one forward and backward pass of this rank sees.

    ``inputs`` holds tensors ``[examples, tokens]`` for the model; ``labels`` ``[examples]`` or ``[examples,
    num_labels]``; ``weights`` float32 ``[examples]`` is what each example's loss counts: 1 or the weight of its class,
    and 0 for the stand-in of a rank that has no example left. ``rows`` int64 ``[examples]`` are theirs in the split.
    """

    rows: Rows
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``, copied without waiting where the memory is pinned."""
        return MicroBatch(
            self.rows,
            {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()},
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
        )

    def pin_memory(self) -> MicroBatch:
        """Called by the data loader, so that copies to a GPU do not wait."""
        return MicroBatch(
            self.rows,
            {name: tensor.pin_memory() for name, tensor in self.inputs.items()},
            self.labels.pin_memory(),
            self.weights.pin_memory(),
        )


@dataclass
class StepInputs:
    """This rank's micro-batches of one optimizer step, and what the step counts over all ranks.

    ``weight`` is the sum of the examples' weights, by which the sum of losses is divided.
    """

    micro_batches: list[MicroBatch]
    examples: int
    weight: float
    tokens: int
    computed_tokens: int

    def to(self, device: torch.device) -> StepInputs:
        """The same on ``device``."""
        return replace(self, micro_batches=[micro.to(device) for micro in self.micro_batches])

    def pin_memory(self) -> StepInputs:
        """Called by the data loader."""
        return replace(self, micro_batches=[micro.pin_memory() for micro in self.micro_batches])


class Collator:
    """Rows of a split -> padded tensors."""

    def __init__(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> None:
        self.examples = examples
        self.weights = np.ones(len(examples), np.float32) if examples.weights is None else examples.weights
        self._tokenizer = tokenizer
        self._longest = int(examples.texts.lengths.max(initial=1))

    def __call__(self, rows: Rows, counted: bool = True) -> MicroBatch:
        """Tensors of ``rows``; ``counted=False`` gives them weight 0."""
        columns = self.examples.texts.dataset[rows]
        features = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        pad = DataCollatorWithPadding(self._tokenizer, padding="max_length", max_length=self.padded_length(rows))
        inputs = dict(pad(features))
        labels = torch.from_numpy(self.examples.labels[rows])
        weights = torch.from_numpy(self.weights[rows]) if counted else torch.zeros(len(rows))
        return MicroBatch(rows, inputs, labels, weights)

    def padded_length(self, rows: Rows) -> int:
        """Tokens of each row once ``rows`` are padded together.

        Never more than the longest row of the split: a model may have no position for the next multiple of eight.
        """
        longest = max(int(self.examples.texts.lengths[rows].max()), 1)  # an empty text may have no token at all
        return min(-(-longest // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF, self._longest)


class _EpochSteps(Dataset[StepInputs]):
    """The steps of one epoch, by their position in it."""

    def __init__(self, collate: Collator, sizes: BatchSizes, rank: int, seed: int, epoch: int) -> None:
        self._collate, self._sizes, self._rank = collate, sizes, rank
        self._order = epoch_order(len(collate.examples), seed, epoch)

    def __getitem__(self, step: int) -> StepInputs:
        size, lengths = self._sizes.global_batch, self._collate.examples.texts.lengths
        rows = self._order[step * size : (step + 1) * size]
        rounds = micro_batches(rows, self._sizes, lengths)
        mine = [ranks[self._rank] for ranks in rounds]
        return StepInputs(
            [self._collate(part) if len(part) else self._collate(rows[:1], counted=False) for part in mine],
            examples=len(rows),
            weight=float(self._collate.weights[rows].sum(dtype=np.float64)),
            tokens=int(lengths[rows].sum()),
            computed_tokens=sum(
                len(part) * self._collate.padded_length(part) for ranks in rounds for part in ranks if len(part)
            ),
        )


class TrainLoader:
    """Iterates over the optimizer steps of an epoch, from any step on."""

    def __init__(
        self,
        examples: Examples,
        tokenizer: PreTrainedTokenizerBase,
        sizes: BatchSizes,
        *,
        rank: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._collate = Collator(examples, tokenizer)
        self._sizes, self._rank, self._seed, self._device = sizes, rank, seed, device
        self.steps_per_epoch = steps_per_epoch(len(examples), sizes.global_batch)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[StepInputs]:
        """This rank's inputs of each step of ``epoch``, starting at ``first_step``."""
        steps = _EpochSteps(self._collate, self._sizes, self._rank, self._seed, epoch)
        loader = DataLoader(
            steps,
            batch_size=None,
            sampler=range(first_step, self.steps_per_epoch),
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # or starting an epoch would advance the generator that dropout draws from
        )
        for inputs in loader:
            yield inputs.to(self._device)


class EvalLoader:
    """This rank's evaluation batches with their rows; together the ranks see every row exactly once."""

    def __init__(
        self,
        examples: Examples,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        *,
        rank: int,
        num_processes: int,
        device: torch.device,
    ) -> None:
        self.examples = examples
        self._collate = Collator(examples, tokenizer)
        shares = evaluation_batches(examples.texts.lengths, batch_size, num_processes)
        self._batches = shares[rank]
        self._device = device
        self.largest_share = max(sum(map(len, share)) for share in shares)
        """Rows of the rank that has most, so that all can gather arrays of one shape."""
        self.rounds = max(map(len, shares))
        """Batches of the rank that has most, so that all can take turns together."""

    def __iter__(self) -> Iterator[tuple[Rows, MicroBatch]]:
        for rows in self._batches:
            yield rows, self._collate(rows).to(self._device)

    def __len__(self) -> int:
        return len(self._batches)
