"""Rows -> tensors on the device: the training steps and the evaluation batches of this rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from finetune.data.batching import (
    BatchSizes,
    Rows,
    epoch_order,
    evaluation_batches,
    micro_batches,
    steps_per_epoch,
)
from finetune.data.packing import MULTIPLE_OF, Layout, lay_out, one_row
from finetune.data.segments import Segments
from finetune.data.tokenize import TokenizedTexts

FEW_SHAPES = 64  # what lengths are padded to a multiple of where each new shape costs a compilation
AHEAD = 2  # batches that are made while the device computes
Made = TypeVar("Made")


@dataclass(frozen=True)
class Examples:
    """A split that is ready to be computed on, row by row in file order.

    ``weights`` float32 ``[rows]`` is what each row counts in the mean loss; None: all the same. ``features`` float32
    ``[rows, hidden]``, where there are any, take the place of the texts: :mod:`finetune.features`.
    """

    texts: TokenizedTexts
    labels: NDArray[Any]
    weights: NDArray[np.float32] | None = None
    features: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass
class MicroBatch:
    """What one forward and backward pass of this rank sees.

    ``inputs`` holds tensors for the model, ``[examples, tokens]``, or ``[rows, tokens]`` with several texts a row
    (:class:`PackedRows`), and :class:`Segments` where all share one; ``labels`` ``[examples]`` or ``[examples,
    num_labels]``; ``weights`` float32 ``[examples]`` is what each example's loss counts: 1 or the weight of its class,
    and 0 for the stand-in of a rank that has no example left. ``rows`` int64 ``[examples]`` are theirs in the split.
    """

    rows: Rows
    inputs: dict[str, Any]
    labels: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``, copied without waiting where the memory is pinned."""
        return MicroBatch(
            self.rows,
            {name: values.to(device, non_blocking=True) for name, values in self.inputs.items()},
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
        )

    def pin_memory(self) -> MicroBatch:
        """Page-locked, so that copies to a GPU do not wait."""
        return MicroBatch(
            self.rows,
            {name: values.pin_memory() for name, values in self.inputs.items()},
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
        """Page-locked, so that copies to a GPU do not wait."""
        return replace(self, micro_batches=[micro.pin_memory() for micro in self.micro_batches])


@dataclass(frozen=True)
class PackedRows:
    """How texts share the rows of a model's input.

    ``first_position`` is the number that the model gives to the first position of a text; ``in_one`` puts all texts
    of a micro-batch into a single row, for attention that takes them apart.
    """

    first_position: int = 0
    in_one: bool = False


class Collator:
    """Rows of a split -> tensors, of padded texts or of texts that share rows.

    Texts that share rows come as ``input_ids`` and ``position_ids`` (and ``token_type_ids`` of pairs), int64 ``[rows,
    tokens]``; ``segment_ids``, int32 of the same shape, is 0 for padding and numbers the texts from 1, or ``segments``
    where all share one row, the last for its padding; ``first_tokens`` int64 ``[examples]`` is where each text begins
    when all rows are put in one.
    """

    def __init__(
        self,
        examples: Examples,
        tokenizer: PreTrainedTokenizerBase,
        packing: PackedRows | None = None,
        pad_to_multiple_of: int = MULTIPLE_OF,
    ) -> None:
        self.examples = examples
        self.packing = packing
        self._pad_to_multiple_of = pad_to_multiple_of
        self.weights = np.ones(len(examples), np.float32) if examples.weights is None else examples.weights
        self._tokenizer = tokenizer
        self._longest = int(examples.texts.lengths.max(initial=1))
        self._tokens = examples.texts.dataset.with_format("arrow")

    def __call__(self, rows: Rows, counted: bool = True) -> MicroBatch:
        """Tensors of ``rows``; ``counted=False`` gives them weight 0."""
        if self.examples.features is not None:
            inputs = {"features": torch.from_numpy(self.examples.features[rows])}
        else:
            inputs = self._padded(rows) if self.packing is None else self._packed(rows, self.packing)
        labels = torch.from_numpy(self.examples.labels[rows])
        weights = torch.from_numpy(self.weights[rows]) if counted else torch.zeros(len(rows))
        return MicroBatch(rows, inputs, labels, weights)

    def _padded(self, rows: Rows) -> dict[str, torch.Tensor]:
        columns = self.examples.texts.dataset[rows]
        features = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        pad = DataCollatorWithPadding(self._tokenizer, padding="max_length", max_length=self.padded_length(rows))
        inputs = dict(pad(features))
        if int(self.examples.texts.lengths[rows].min()) == self.padded_length(rows):
            del inputs["attention_mask"]  # which would hide nothing
        return inputs

    def _packed(self, rows: Rows, packing: PackedRows) -> dict[str, Any]:
        layout = self._layout(rows)
        lengths = self.examples.texts.lengths[rows].astype(np.int64)
        first_tokens = layout.row_of * layout.row_length + layout.start_of
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # 0, 1, 2, … of each text
        places = np.repeat(first_tokens, lengths) + within

        def spread(values: NDArray[Any], padding: int, kind: type[np.generic] = np.int64) -> torch.Tensor:
            flat = np.full(layout.computed_tokens, padding, kind)
            flat[places] = values
            return torch.from_numpy(flat.reshape(layout.rows, layout.row_length))

        if packing.in_one:
            padding = layout.computed_tokens - lengths.sum()
            texts: dict[str, Any] = {"segments": Segments.of(np.append(lengths, padding) if padding else lengths)}
        else:
            texts = {"segment_ids": spread(np.repeat(np.arange(1, len(rows) + 1), lengths), 0, np.int32)}
        columns = self._tokens[rows]
        inputs = {name: columns[name].combine_chunks().flatten().to_numpy() for name in columns.column_names}
        return {
            "input_ids": spread(inputs["input_ids"], int(self._tokenizer.pad_token_id)),
            **({"token_type_ids": spread(inputs["token_type_ids"], 0)} if "token_type_ids" in inputs else {}),
            "position_ids": spread(within + packing.first_position, packing.first_position),
            **texts,
            "first_tokens": torch.from_numpy(first_tokens),
        }

    def computed_tokens(self, rows: Rows) -> int:
        """Tokens that the model computes for ``rows``, padding included."""
        if self.examples.features is not None:
            return 0
        if self.packing is None:
            return len(rows) * self.padded_length(rows)
        return self._layout(rows).computed_tokens if len(rows) else 0

    def _layout(self, rows: Rows) -> Layout:
        assert self.packing is not None
        return (one_row if self.packing.in_one else lay_out)(self.examples.texts.lengths[rows])

    def padded_length(self, rows: Rows) -> int:
        """Tokens of each row once ``rows`` are padded together.

        Never more than the longest row of the split: a model may have no position for the next multiple of eight.
        """
        longest = max(int(self.examples.texts.lengths[rows].max(initial=0)), 1)  # an empty text may have no token
        multiple = self._pad_to_multiple_of
        return min(-(-longest // multiple) * multiple, self._longest)


def _made_ahead(make: Callable[[Rows], Made], orders: Iterable[Rows]) -> Iterator[Made]:
    """``make`` of each of ``orders``, in a thread that is a little ahead of whoever asks for them."""
    with ThreadPoolExecutor(1) as thread:
        waiting: deque[Future[Made]] = deque()
        for rows in orders:
            waiting.append(thread.submit(make, rows))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class TrainLoader:
    """Iterates over the optimizer steps of an epoch, from any step on.

    ``waited_seconds`` is how long training has waited for its inputs, which a thread makes while it computes.
    """

    def __init__(
        self,
        examples: Examples,
        tokenizer: PreTrainedTokenizerBase,
        sizes: BatchSizes,
        *,
        rank: int,
        seed: int,
        device: torch.device,
        packing: PackedRows | None = None,
        pad_to_multiple_of: int = MULTIPLE_OF,
    ) -> None:
        self._collate = Collator(examples, tokenizer, packing, pad_to_multiple_of)
        self._sizes, self._rank, self._seed, self._device = sizes, rank, seed, device
        self.steps_per_epoch = steps_per_epoch(len(examples), sizes.global_batch)
        self.waited_seconds = 0.0

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[StepInputs]:
        """This rank's inputs of each step of ``epoch``, starting at ``first_step``."""
        order = epoch_order(len(self._collate.examples), self._seed, epoch)
        size = self._sizes.global_batch
        steps = (order[step * size : (step + 1) * size] for step in range(first_step, self.steps_per_epoch))
        made = _made_ahead(self._step_inputs, steps)
        while True:
            started = time.perf_counter()
            inputs = next(made, None)
            self.waited_seconds += time.perf_counter() - started
            if inputs is None:
                return
            yield inputs.to(self._device)

    def _step_inputs(self, rows: Rows) -> StepInputs:
        collate, lengths = self._collate, self._collate.examples.texts.lengths
        rounds = micro_batches(rows, self._sizes, lengths, is_packed=collate.packing is not None)
        mine = [ranks[self._rank] for ranks in rounds]
        inputs = StepInputs(
            [collate(part) if len(part) else collate(rows[:1], counted=False) for part in mine],
            examples=len(rows),
            weight=float(collate.weights[rows].sum(dtype=np.float64)),
            tokens=int(lengths[rows].sum()) if collate.examples.features is None else 0,
            computed_tokens=sum(collate.computed_tokens(part) for ranks in rounds for part in ranks),
        )
        return inputs.pin_memory() if self._device.type == "cuda" else inputs


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
        packing: PackedRows | None = None,
        pad_to_multiple_of: int = MULTIPLE_OF,
    ) -> None:
        self.examples = examples
        self._collate = Collator(examples, tokenizer, packing, pad_to_multiple_of)
        shares = evaluation_batches(examples.texts.lengths, batch_size, num_processes)
        self._batches = shares[rank]
        self._device = device
        self.largest_share = max(sum(map(len, share)) for share in shares)
        """Rows of the rank that has most, so that all can gather arrays of one shape."""
        self.rounds = max(map(len, shares))
        """Batches of the rank that has most, so that all can take turns together."""

    def __iter__(self) -> Iterator[tuple[Rows, MicroBatch]]:
        for micro in _made_ahead(self._batch, self._batches):
            yield micro.rows, micro.to(self._device)

    def _batch(self, rows: Rows) -> MicroBatch:
        micro = self._collate(rows)
        return micro.pin_memory() if self._device.type == "cuda" else micro

    def __len__(self) -> int:
        return len(self._batches)
