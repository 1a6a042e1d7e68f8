"""Tensors of micro-batches against rows padded by hand; steps and evaluation batches over all ranks."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest import make_tokenizer

from finetune.data.batching import BatchSizes
from finetune.data.loader import Collator, EvalLoader, Examples, MicroBatch, PackedRows, StepInputs, TrainLoader
from finetune.data.tokenize import TokenizedTexts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer("bert")


def examples(rows: list[list[int]], labels: Any = None, token_types: list[list[int]] | None = None) -> Examples:
    """Rows of token ids as a split; row ``i`` has label ``i`` unless told otherwise."""
    columns = {"input_ids": rows, **({"token_type_ids": token_types} if token_types else {})}
    lengths = np.array([len(row) for row in rows], np.int32)
    dataset = datasets.Dataset.from_dict(columns)
    return Examples(TokenizedTexts(dataset, lengths, lengths), np.arange(len(rows)) if labels is None else labels)


def numbered(lengths: list[int]) -> Examples:
    """Row ``i`` repeats the token ``5 + i``, so that it can be told by any of its tokens."""
    return examples([[5 + row] * length for row, length in enumerate(lengths)])


LENGTHS = [3, 12, 7, 1, 9, 8, 2, 17, 5, 4, 11]


def test_collated_tensors(tokenizer: Any) -> None:
    split = examples([[2, 5, 3], [2, 3], [2] * 11], labels=np.array([7, 8, 9]))
    batch = Collator(split, tokenizer)(np.array([1, 0]))
    assert batch.inputs.keys() == {"input_ids", "attention_mask"}
    assert batch.inputs["input_ids"].dtype == torch.int64
    assert batch.inputs["input_ids"].tolist() == [[2, 3, 0, 0, 0, 0, 0, 0], [2, 5, 3, 0, 0, 0, 0, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    assert (batch.labels.dtype, batch.labels.tolist()) == (torch.int64, [8, 7])
    assert (batch.weights.dtype, batch.weights.tolist()) == (torch.float32, [1.0, 1.0])


def test_pairs_keep_their_token_types(tokenizer: Any) -> None:
    split = examples([[2, 5, 3, 6, 3], [2, 5, 3, 3]], token_types=[[0, 0, 0, 1, 1], [0, 0, 0, 1]])
    batch = Collator(split, tokenizer)(np.array([0, 1]))
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_labels_keep_their_kind(tokenizer: Any) -> None:
    rows = [[2, 3], [2, 5, 3]]
    vectors = np.array([[0, 1, 1], [1, 0, 0]], np.float32)
    batch = Collator(examples(rows, vectors), tokenizer)(np.array([1, 0]))
    assert (batch.labels.dtype, batch.labels.tolist()) == (torch.float32, [[1, 0, 0], [0, 1, 1]])
    numbers = np.array([0.5, -2.25], np.float32)
    batch = Collator(examples(rows, numbers), tokenizer)(np.array([1, 0]))
    assert (batch.labels.dtype, batch.labels.tolist()) == (torch.float32, [-2.25, 0.5])


@pytest.mark.parametrize(
    ("lengths", "rows", "padded"),
    [
        ([3, 20], [0], 8),
        ([8, 20], [0], 8),
        ([9, 20], [0], 16),
        ([3, 20], [0, 1], 20),  # not 24: the model may have no position beyond the longest row
        ([3, 24], [0, 1], 24),
        ([5, 3], [1], 5),
        ([0, 0], [0, 1], 1),  # a tokenizer without special tokens makes nothing of an empty text
    ],
)
def test_padded_length(tokenizer: Any, lengths: list[int], rows: list[int], padded: int) -> None:
    collate = Collator(examples([[5] * length for length in lengths]), tokenizer)
    assert collate.padded_length(np.array(rows)) == padded
    assert collate(np.array(rows)).inputs["input_ids"].shape == (len(rows), padded)


def steps_of(split: Examples, tokenizer: Any, sizes: BatchSizes, rank: int, first_step: int = 0) -> list[StepInputs]:
    loader = TrainLoader(split, tokenizer, sizes, rank=rank, seed=5, device=CPU)
    return list(loader.epoch(2, first_step))


def rows_of(batch: MicroBatch) -> list[int]:
    """Rows of a batch of :func:`numbered` that count."""
    firsts, weights = batch.inputs["input_ids"][:, 0].tolist(), batch.weights.tolist()
    return [token - 5 for token, weight in zip(firsts, weights, strict=True) if weight]


@pytest.mark.parametrize(("per_device", "processes", "accumulation"), [(4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_steps_of_all_ranks_hold_every_row_once(
    tokenizer: Any, per_device: int, processes: int, accumulation: int
) -> None:
    sizes, split = BatchSizes(per_device, processes, accumulation), numbered(LENGTHS)
    whole = steps_of(split, tokenizer, BatchSizes(4, 1, 1), 0)
    ranks = [steps_of(split, tokenizer, sizes, rank) for rank in range(processes)]
    assert [len(steps) for steps in ranks] == [3] * processes
    seen: list[int] = []
    for position in range(3):
        inputs = [steps[position] for steps in ranks]
        rows = [row for step in inputs for micro in step.micro_batches for row in rows_of(micro)]
        assert sorted(rows) == sorted(rows_of(whole[position].micro_batches[0]))
        assert len({len(step.micro_batches) for step in inputs}) == 1  # or the ranks' collectives would not match
        for step in inputs:
            assert step.examples == len(rows) == (3 if position == 2 else 4)
            assert step.tokens == sum(LENGTHS[row] for row in rows)
            assert all(len(micro.weights) <= per_device for micro in step.micro_batches)
        # Real tokens times the length that each batch was padded to, over the ranks.
        assert {step.computed_tokens for step in inputs} == {
            sum(
                micro.inputs["input_ids"].numel()
                for step in inputs
                for micro in step.micro_batches
                if micro.weights.sum() > 0
            )
        }
        seen += rows
    assert sorted(seen) == list(range(len(LENGTHS)))
    for steps in ranks:
        for step in steps:
            for micro in step.micro_batches:
                assert micro.labels.tolist() == [token - 5 for token in micro.inputs["input_ids"][:, 0].tolist()]


def test_tokens_by_hand(tokenizer: Any) -> None:
    """One step of rows with 3, 12, 7 and 1 tokens in two rounds: 12 + 7 padded to 12, and 3 + 1 padded to 8."""
    (step,) = steps_of(numbered([3, 12, 7, 1]), tokenizer, BatchSizes(2, 1, 2), 0)
    assert [rows_of(micro) for micro in step.micro_batches] == [[1, 2], [0, 3]]
    assert (step.examples, step.tokens, step.computed_tokens) == (4, 23, 2 * 12 + 2 * 8)


def test_a_rank_without_rows_gets_one_that_counts_nothing(tokenizer: Any) -> None:
    sizes, split = BatchSizes(2, 3, 2), numbered([4, 6])
    ranks = [steps_of(split, tokenizer, sizes, rank) for rank in range(3)]
    (first,), (second,), (third,) = ([micro for step in steps for micro in step.micro_batches] for steps in ranks)
    assert (rows_of(first), rows_of(second), rows_of(third)) == ([1], [0], [])
    assert third.weights.tolist() == [0.0]
    assert third.inputs["input_ids"].shape[0] == third.labels.shape[0] == 1
    assert all(steps[0].examples == 2 and steps[0].tokens == 10 for steps in ranks)
    assert all(steps[0].computed_tokens == 6 + 6 for steps in ranks)


@pytest.mark.parametrize("first_step", [1, 2, 3])
def test_an_epoch_goes_on_from_any_step(tokenizer: Any, first_step: int) -> None:
    split, sizes = numbered(LENGTHS), BatchSizes(2, 1, 2)
    whole, rest = (steps_of(split, tokenizer, sizes, 0, first) for first in (0, first_step))
    assert len(rest) == 3 - first_step
    for expected, got in zip(whole[first_step:], rest, strict=True):
        assert (got.examples, got.tokens, got.computed_tokens) == (
            expected.examples,
            expected.tokens,
            expected.computed_tokens,
        )
        for a, b in zip(expected.micro_batches, got.micro_batches, strict=True):
            assert a.inputs["input_ids"].tolist() == b.inputs["input_ids"].tolist()
            assert a.labels.tolist() == b.labels.tolist()


def test_starting_an_epoch_leaves_the_random_generator_alone(tokenizer: Any) -> None:
    """Or a run that was interrupted inside an epoch would drop out other units than one that was not."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    steps_of(numbered(LENGTHS), tokenizer, BatchSizes(4, 1, 1), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 16])
def test_evaluation_covers_every_row_once(tokenizer: Any, batch_size: int, processes: int) -> None:
    split = numbered(LENGTHS)
    seen: list[int] = []
    shares = []
    for rank in range(processes):
        loader = EvalLoader(split, tokenizer, batch_size, rank=rank, num_processes=processes, device=CPU)
        batches = list(loader)
        assert len(loader) == len(batches)
        for rows, batch in batches:
            assert rows.tolist() == rows_of(batch) == batch.labels.tolist()
            assert len(rows) <= batch_size
            mask = batch.inputs.get("attention_mask", torch.ones_like(batch.inputs["input_ids"]))  # none hides nothing
            assert mask.sum(dim=1).tolist() == [LENGTHS[row] for row in rows]
        shares.append(sum(len(rows) for rows, _ in batches))
        seen += [row for rows, _ in batches for row in rows.tolist()]
        assert loader.largest_share == max(
            sum(len(rows) for rows, _ in EvalLoader(
                split, tokenizer, batch_size, rank=other, num_processes=processes, device=CPU
            ))
            for other in range(processes)
        )  # fmt: skip
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert sum(shares) == len(LENGTHS)


# ---------------------------------------------------------------- texts that share rows


def test_packed_tensors(tokenizer: Any) -> None:
    split = examples([[2, 5, 3], [2, 6, 7, 8, 3], [2, 3]], labels=np.array([7, 8, 9]))
    batch = Collator(split, tokenizer, PackedRows(2))(np.array([2, 1, 0]))
    assert batch.inputs["input_ids"].tolist() == [[2, 6, 7, 8, 3, 2, 5, 3], [2, 3, 0, 0, 0, 0, 0, 0]]
    assert batch.inputs["position_ids"].tolist() == [[2, 3, 4, 5, 6, 2, 3, 4], [2, 3, 2, 2, 2, 2, 2, 2]]
    assert batch.inputs["segment_ids"].tolist() == [[2, 2, 2, 2, 2, 3, 3, 3], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.inputs["first_tokens"].tolist() == [8, 0, 5]
    assert batch.labels.tolist() == [9, 8, 7]
    assert batch.inputs.keys() == {"input_ids", "position_ids", "segment_ids", "first_tokens"}
    assert Collator(split, tokenizer, PackedRows()).computed_tokens(np.array([2, 1, 0])) == 16


def test_packed_pairs_keep_their_token_types(tokenizer: Any) -> None:
    split = examples([[2, 5, 3, 6, 3], [2, 3, 3]], token_types=[[0, 0, 0, 1, 1], [0, 0, 1]])
    batch = Collator(split, tokenizer, PackedRows())(np.array([0, 1]))
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 1]]


@pytest.mark.parametrize("sizes", [BatchSizes(4, 1, 1), BatchSizes(2, 2, 1), BatchSizes(2, 2, 2), BatchSizes(1, 3, 2)])
def test_packed_steps_have_the_rows_of_padded_ones(tokenizer: Any, sizes: BatchSizes) -> None:
    split = numbered(LENGTHS)
    steps: dict[bool, list[list[int]]] = {}
    for packing in (None, PackedRows()):
        ranks = [
            list(TrainLoader(split, tokenizer, sizes, rank=rank, seed=3, device=CPU, packing=packing).epoch(1))
            for rank in range(sizes.num_processes)
        ]
        steps[packing is not None] = [
            sorted(
                row
                for rank in same_step
                for micro in rank.micro_batches
                for row, weight in zip(micro.rows.tolist(), micro.weights.tolist(), strict=True)
                if weight
            )
            for same_step in zip(*ranks, strict=True)
        ]
        for rank in ranks[1:]:
            assert [step.computed_tokens for step in rank] == [step.computed_tokens for step in ranks[0]]
    assert steps[True] == steps[False]
    assert sorted(row for step in steps[True] for row in step) == list(range(len(LENGTHS)))


def test_an_error_while_a_batch_is_made_reaches_whoever_waits_for_it(tokenizer: Any) -> None:
    split = examples([[2, 5, 3]] * 9)
    broken = Examples(split.texts, split.labels[:5])
    loader = TrainLoader(broken, tokenizer, BatchSizes(9, 1, 1), rank=0, seed=3, device=CPU)
    with pytest.raises(IndexError):
        list(loader.epoch(0))
