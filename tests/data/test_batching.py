"""Global batches and their micro-batches: tables worked out by hand, and properties checked by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.batching import (
    BatchSizes,
    epoch_order,
    evaluation_batches,
    micro_batches,
    resolve_batch_sizes,
    steps_per_epoch,
    stratified_split,
    training_length,
)
from finetune.errors import ConfigError


@pytest.mark.parametrize(
    ("per_device", "accumulation", "global_batch", "processes", "expected"),
    [
        # No global batch: 16 and 1 where nothing is said.
        (None, None, None, 1, (16, 1)),
        (None, None, None, 4, (16, 1)),
        (8, None, None, 2, (8, 1)),
        (None, 10, None, 2, (16, 10)),
        (8, 10, None, 2, (8, 10)),
        # One of two is derived.
        (None, 4, 64, 2, (8, 4)),
        (None, 1, 64, 1, (64, 1)),
        (4, None, 64, 2, (4, 8)),
        (64, None, 64, 1, (64, 1)),
        # All three agree.
        (8, 4, 64, 2, (8, 4)),
        # Both derived: the fewest micro-batches whose size is at most 16 and divides the share of a process.
        (None, None, 16, 1, (16, 1)),
        (None, None, 1, 1, (1, 1)),
        (None, None, 8, 8, (1, 1)),
        (None, None, 17, 1, (1, 17)),
        (None, None, 32, 1, (16, 2)),
        (None, None, 32, 2, (16, 1)),
        (None, None, 36, 1, (12, 3)),
        (None, None, 40, 2, (10, 2)),
        (None, None, 100, 1, (10, 10)),
        (None, None, 102, 3, (2, 17)),
    ],
)
def test_resolve_batch_sizes(
    per_device: int | None,
    accumulation: int | None,
    global_batch: int | None,
    processes: int,
    expected: tuple[int, int],
) -> None:
    sizes = resolve_batch_sizes(per_device, accumulation, global_batch, processes, "somewhere")
    assert (sizes.per_device, sizes.accumulation) == expected
    assert sizes.num_processes == processes
    assert sizes.global_batch == expected[0] * expected[1] * processes


@pytest.mark.parametrize(
    ("per_device", "accumulation", "global_batch", "processes", "nearest", "named"),
    [
        (None, None, 9, 4, 8, "by 4 process(es):"),
        (None, None, 11, 4, 12, "by 4 process(es):"),
        (None, None, 10, 4, 8, "by 4 process(es):"),  # as far from 12: the smaller
        (None, None, 2, 4, 4, "by 4 process(es):"),
        (None, None, 407, 8, 408, "by 8 process(es):"),  # not 400, though 50 would have made 5 x 10
        (7, None, 32, 2, 28, "by 2 process(es) x per-device batch size 7:"),
        (7, None, 36, 2, 42, "by 2 process(es) x per-device batch size 7:"),
        (7, None, 3, 2, 14, "by 2 process(es) x per-device batch size 7:"),
        (None, 10, 64, 2, 60, "by 2 process(es) x gradient accumulation 10 (profile ddp2_accum10):"),
        (None, 10, 5, 2, 20, "by 2 process(es) x gradient accumulation 10 (profile ddp2_accum10):"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(
    per_device: int | None, accumulation: int | None, global_batch: int, processes: int, nearest: int, named: str
) -> None:
    source = "default" if accumulation is None else "profile ddp2_accum10"
    with pytest.raises(ConfigError) as refusal:
        resolve_batch_sizes(per_device, accumulation, global_batch, processes, source)
    message = str(refusal.value)
    assert f"train.global_batch_size {global_batch} cannot be shared {named}" in message
    assert message.endswith(f"the nearest that can is {nearest}")
    sizes = resolve_batch_sizes(per_device, accumulation, nearest, processes, source)  # and it really can
    assert sizes.global_batch == nearest


def test_three_sizes_that_contradict_each_other_are_all_named() -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_batch_sizes(8, 10, 320, 2, "profile ddp2_accum10")
    message = str(refusal.value)
    assert "train.global_batch_size is 320" in message
    assert (
        "2 process(es) x per-device batch size 8 x gradient accumulation 10 (profile ddp2_accum10) make 160" in message
    )
    assert "leave out train.per_device_train_batch_size" in message


@given(st.integers(1, 600), st.integers(1, 9))
def test_derived_sizes_are_the_fewest_rounds_that_fit(global_batch: int, processes: int) -> None:
    if global_batch % processes:
        with pytest.raises(ConfigError):
            resolve_batch_sizes(None, None, global_batch, processes, "default")
        return
    share = global_batch // processes
    fitting = [size for size in range(1, 17) if share % size == 0]
    sizes = resolve_batch_sizes(None, None, global_batch, processes, "default")
    assert (sizes.per_device, sizes.accumulation) == (max(fitting), share // max(fitting))


ROWS = (1, 2, 3, 5, 7, 8, 16, 31, 37)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("per_device", [1, 2, 4])
def test_micro_batches_hold_every_row_of_a_step_once(per_device: int, accumulation: int, processes: int) -> None:
    sizes = BatchSizes(per_device, processes, accumulation)
    generator = np.random.default_rng(per_device + 10 * accumulation + 100 * processes)
    for count in {min(rows, sizes.global_batch) for rows in (*ROWS, sizes.global_batch)}:
        lengths = generator.integers(1, 60, size=200).astype(np.int32)
        rows = generator.choice(200, size=count, replace=False)
        rounds = micro_batches(rows, sizes, lengths)
        seen = [int(row) for ranks in rounds for part in ranks for row in part]
        assert sorted(seen) == sorted(rows.tolist())
        assert len(rounds) == math.ceil(count / (per_device * processes))
        assert len(rounds) <= accumulation
        for ranks in rounds:
            assert len(ranks) == processes
            counts = [len(part) for part in ranks]
            assert max(counts) <= per_device
            assert max(counts) - min(counts) <= 1
        assert [lengths[row] for row in seen] == sorted((lengths[row] for row in rows), reverse=True)


def test_micro_batches_by_hand() -> None:
    lengths = np.array([3, 9, 4, 7, 1, 9, 2, 5], np.int32)
    rows = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    # By length: 1 and 5 (9 each, in the order given), 3 (7), 7 (5), 2 (4), 0 (3), 6 (2), 4 (1).
    rounds = micro_batches(rows, BatchSizes(2, 2, 2), lengths)
    assert [[part.tolist() for part in ranks] for ranks in rounds] == [[[1, 5], [3, 7]], [[2, 0], [6, 4]]]
    # Three rows need one round of 2 x 2; the second rank has one.
    rounds = micro_batches(np.array([4, 1, 0]), BatchSizes(2, 2, 2), lengths)
    assert [[part.tolist() for part in ranks] for ranks in rounds] == [[[1, 0], [4]]]
    # Five rows need two rounds: 2 + 1, 1 + 1.
    rounds = micro_batches(np.array([0, 1, 2, 3, 4]), BatchSizes(2, 2, 2), lengths)
    assert [[part.tolist() for part in ranks] for ranks in rounds] == [[[1, 3], [2]], [[0], [4]]]
    # Fewer rows than ranks: some have nothing.
    rounds = micro_batches(np.array([6, 7]), BatchSizes(2, 4, 1), lengths)
    assert [[part.tolist() for part in ranks] for ranks in rounds] == [[[7], [6], [], []]]


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_epoch_order_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, seed, epoch)
    assert sorted(order.tolist()) == list(range(num_rows))
    assert order.tolist() == epoch_order(num_rows, seed, epoch).tolist()


def test_epoch_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(epoch_order(40, seed, epoch)) for seed, epoch in itertools.product(range(4), range(4))}
    assert len(orders) == 16
    assert tuple(range(40)) not in orders


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(0, 1000), st.integers(0, 5), st.lists(st.integers(1, 64), min_size=1))
def test_the_rows_of_a_step_do_not_depend_on_how_they_are_shared(
    num_rows: int, seed: int, epoch: int, some_lengths: list[int]
) -> None:
    """A global batch of 20 over 1 x 1, 1 x 2, 2 x 1, 2 x 5, 4 x 5 processes x accumulation."""
    lengths = np.resize(np.array(some_lengths, np.int32), num_rows)
    seen = []
    for per_device, processes, accumulation in ((20, 1, 1), (10, 1, 2), (10, 2, 1), (2, 2, 5), (1, 4, 5)):
        sizes = BatchSizes(per_device, processes, accumulation)
        order = epoch_order(num_rows, seed, epoch)
        steps = []
        for start in range(0, num_rows, sizes.global_batch):
            rounds = micro_batches(order[start : start + sizes.global_batch], sizes, lengths)
            steps.append({int(row) for ranks in rounds for part in ranks for row in part})
        seen.append(steps)
    assert all(steps == seen[0] for steps in seen)
    assert len(seen[0]) == math.ceil(num_rows / 20)
    assert set().union(*seen[0]) == set(range(num_rows))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 11, 16, 33])
def test_evaluation_batches_hold_every_row_once(num_rows: int, batch_size: int, processes: int) -> None:
    lengths = np.random.default_rng(num_rows).integers(1, 50, size=num_rows).astype(np.int32)
    shares = evaluation_batches(lengths, batch_size, processes)
    assert len(shares) == processes
    batches = [batch for share in shares for batch in share]
    assert sorted(int(row) for batch in batches for row in batch) == list(range(num_rows))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert len(batches) == math.ceil(num_rows / batch_size)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    # No shorter row is in an earlier batch than a longer one: neighbours in length are padded together.
    for share in shares:
        for earlier, later in itertools.pairwise(share):
            assert lengths[earlier].min() >= lengths[later].max()


def test_steps_per_epoch_counts_the_short_last_one() -> None:
    assert [steps_per_epoch(rows, 8) for rows in (1, 7, 8, 9, 16, 17)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("num_rows", "global_batch", "epochs", "max_steps", "evals_per_epoch", "expected"),
    [
        # 10 rows, batch 2 x accumulation 4: two steps an epoch, the second with 2 rows.
        (10, 8, 3, None, 1, (2, 6, {2, 4, 6})),
        (10, 8, 3, None, 2, (2, 6, {1, 2, 3, 4, 5, 6})),
        (10, 8, 3, None, 5, (2, 6, {1, 2, 3, 4, 5, 6})),
        (10, 8, 3, None, 1e12, (2, 6, {1, 2, 3, 4, 5, 6})),
        (10, 8, 3, None, 0.5, (2, 6, {4, 6})),
        (10, 8, 3, None, 1 / 3, (2, 6, {6})),
        (10, 8, 3, None, 1e-9, (2, 6, {6})),
        # 100 rows in batches of 10: an evaluation every 2, 2.5, 3.33, 4 steps.
        (100, 10, 1, None, 5, (10, 10, {2, 4, 6, 8, 10})),
        (100, 10, 1, None, 4, (10, 10, {2, 5, 8, 10})),
        (100, 10, 1, None, 3, (10, 10, {3, 7, 10})),
        (100, 10, 1, None, 2.5, (10, 10, {4, 8, 10})),
        # Fractions of an epoch are rounded up to whole steps.
        (100, 10, 0.5, None, 1, (10, 5, {5})),
        (100, 10, 0.51, None, 1, (10, 6, {6})),
        (100, 10, 2.5, None, 1, (10, 25, {10, 20, 25})),
        (100, 10, 0.3, None, 1, (10, 3, {3})),  # 0.3 x 10 is 3, whatever binary fractions say
        (70, 10, 1.1, None, 1, (7, 8, {7, 8})),
        (1000, 10, 1.1, None, 1, (100, 110, {100, 110})),  # 1.1 x 100 is 110.00000000000001
        (10, 8, 1e-12, None, 1, (2, 1, {1})),  # never no step at all: training would not end
        # max_steps takes the place of the epochs.
        (100, 10, 3, 4, 1, (10, 4, {4})),
        (100, 10, 1, 25, 1, (10, 25, {10, 20, 25})),
        (100, 10, 1, 1, 5, (10, 1, {1})),
    ],
)
def test_training_length(
    num_rows: int,
    global_batch: int,
    epochs: float,
    max_steps: int | None,
    evals_per_epoch: float,
    expected: tuple[int, int, set[int]],
) -> None:
    length = training_length(num_rows, global_batch, epochs, max_steps, evals_per_epoch)
    assert (length.steps_per_epoch, length.total_steps, set(length.evaluation_steps)) == expected


@given(st.integers(1, 60), st.floats(0.01, 8), st.floats(0.05, 20))
def test_the_last_step_is_evaluated_and_none_after_it(per_epoch: int, epochs: float, evals: float) -> None:
    length = training_length(per_epoch, 1, epochs, None, evals)
    assert max(length.evaluation_steps) == length.total_steps
    assert min(length.evaluation_steps) >= 1
    expected = min(epochs * evals, length.total_steps)  # at most one a step, and one more for the last
    assert expected - 2 <= len(length.evaluation_steps) <= expected + 2


def split_counts(labels: list[int], share: float) -> dict[int, tuple[int, int]]:
    """``{class: (rows in train, rows in dev)}``."""
    ids = np.array(labels, np.int64)
    train, dev = stratified_split(ids, len(ids), share, seed=1)
    assert sorted([*train.tolist(), *dev.tolist()]) == list(range(len(ids)))
    assert train.tolist() == sorted(train)
    assert dev.tolist() == sorted(dev)
    return {name: (int((ids[train] == name).sum()), int((ids[dev] == name).sum())) for name in set(labels)}


def test_stratified_split_by_hand() -> None:
    # A tenth of 30, 20, 4, 2 and 1 rows: 3, 2, at least 1, at least 1, and none of a class with a single row.
    labels = [0] * 30 + [1] * 20 + [2] * 4 + [3] * 2 + [4]
    assert split_counts(labels, 0.1) == {0: (27, 3), 1: (18, 2), 2: (3, 1), 3: (1, 1), 4: (1, 0)}
    assert split_counts(labels, 0.5) == {0: (15, 15), 1: (10, 10), 2: (2, 2), 3: (1, 1), 4: (1, 0)}
    assert split_counts(labels, 0.99) == {0: (1, 29), 1: (1, 19), 2: (1, 3), 3: (1, 1), 4: (1, 0)}


def test_split_without_classes_is_drawn_from_all_rows_by_the_seed() -> None:
    train, dev = stratified_split(None, 20, 0.25, seed=3)
    assert (len(train), len(dev)) == (15, 5)
    assert sorted([*train.tolist(), *dev.tolist()]) == list(range(20))
    again = stratified_split(None, 20, 0.25, seed=3)[1]
    assert again.tolist() == dev.tolist()
    others = {tuple(stratified_split(None, 20, 0.25, seed=seed)[1]) for seed in range(10)}
    assert len(others) > 5
    assert (15, 16, 17, 18, 19) not in others


def test_too_few_rows_give_an_empty_dev_split() -> None:
    train, dev = stratified_split(np.array([0, 1, 2]), 3, 0.5, seed=0)
    assert (train.tolist(), dev.tolist()) == ([0, 1, 2], [])


def test_texts_that_share_rows_are_dealt_out() -> None:
    """Eight texts of 8 to 1 tokens for two: 8 + 5 + 4 + 1 and 7 + 6 + 3 + 2."""
    lengths = np.arange(9, dtype=np.int32)
    (round_,) = micro_batches(np.array([1, 2, 3, 4, 5, 6, 7, 8]), BatchSizes(4, 2, 1), lengths, is_packed=True)
    assert [sorted(part.tolist()) for part in round_] == [[1, 4, 5, 8], [2, 3, 6, 7]]


@pytest.mark.parametrize("count", [1, 5, 16, 31, 32])
def test_dealt_out_shares_have_about_the_same_size(count: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 100).astype(np.int32)
    rows = np.random.default_rng(1).permutation(100)[:count]
    rounds = micro_batches(rows, BatchSizes(4, 2, 4), lengths, is_packed=True)
    parts = [part for round_ in rounds for part in round_]
    assert sorted(np.concatenate(parts).tolist()) == sorted(rows.tolist())
    assert max(map(len, parts)) <= 4 and max(map(len, parts)) - min(map(len, parts)) <= 1
    if count == 32:
        tokens = [int(lengths[part].sum()) for part in parts]
        assert max(tokens) - min(tokens) <= 30  # of 120; neighbours in length would differ by 200
