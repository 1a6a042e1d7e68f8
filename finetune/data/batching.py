"""Which rows make up each optimizer step, and which of them each process sees when.

Pure functions of (seed, epoch, number of rows, global batch): the rows of a step do not depend on how many processes
or micro-batches share them, which is why every launch profile trains the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigError

Rows = NDArray[np.int64]
DEFAULT_PER_DEVICE_BATCH_SIZE = 16


@dataclass(frozen=True)
class BatchSizes:
    """How a global batch is shared out: ``per_device x num_processes x accumulation``."""

    per_device: int
    num_processes: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        """Examples of one optimizer step."""
        return self.per_device * self.num_processes * self.accumulation


def resolve_batch_sizes(
    per_device: int | None, accumulation: int | None, global_batch: int | None, num_processes: int, source: str
) -> BatchSizes:
    """Fill in what was left open of per-device size, accumulation and global batch.

    Args:
        per_device: ``train.per_device_train_batch_size``.
        accumulation: gradient accumulation, wherever it was set.
        global_batch: ``train.global_batch_size``.
        num_processes: processes of the job.
        source: where the accumulation was set, for the message.

    Raises:
        ConfigError: the three contradict each other, or do not divide; names the nearest global batch that works.
    """
    if global_batch is None:
        return BatchSizes(per_device or DEFAULT_PER_DEVICE_BATCH_SIZE, num_processes, accumulation or 1)
    if per_device is None and accumulation is None and global_batch % num_processes == 0:
        share = global_batch // num_processes
        fewest = math.ceil(share / DEFAULT_PER_DEVICE_BATCH_SIZE)
        accumulation = next(count for count in range(fewest, share + 1) if share % count == 0)
    fixed = num_processes * (per_device or 1) * (accumulation or 1)
    given = f"{num_processes} process(es)"
    given += f" x per-device batch size {per_device}" if per_device else ""
    given += f" x gradient accumulation {accumulation} ({source})" if accumulation and source != "default" else ""
    if per_device and accumulation and fixed != global_batch:
        raise ConfigError(
            f"train.global_batch_size is {global_batch}, but {given} make {fixed}: "
            "leave out train.per_device_train_batch_size or the accumulation, and it is derived"
        )
    if global_batch % fixed:
        below, above = global_batch // fixed * fixed, math.ceil(global_batch / fixed) * fixed
        nearest = below if below and global_batch - below <= above - global_batch else above
        raise ConfigError(
            f"train.global_batch_size {global_batch} cannot be shared by {given}: the nearest that can is {nearest}"
        )
    rest = global_batch // fixed
    return BatchSizes(per_device or rest, num_processes, accumulation or rest)


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    """Optimizer steps of an epoch; the last one may have fewer examples, none is dropped."""
    return math.ceil(num_rows / global_batch)


def epoch_order(num_rows: int, seed: int, epoch: int) -> Rows:
    """The order of an epoch's rows; consecutive ``global_batch`` rows make a step."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def micro_batches(
    rows: Rows, sizes: BatchSizes, lengths: NDArray[np.int32], *, is_packed: bool = False
) -> list[list[Rows]]:
    """Cut the rows of one optimizer step into micro-batches ``[round][rank]``.

    The rows are ordered by length first, longest rounds first: neighbours have similar lengths, so little is padded,
    and the ranks of a round have about the same work. Texts that share rows (``is_packed``) need no such neighbours:
    they are dealt out, so that all micro-batches have about the same number of tokens. A short last batch takes as few
    rounds as it needs and is shared evenly; a rank may get no row at all when there are fewer rows than ranks.

    Args:
        rows: the rows of the step, at most ``sizes.global_batch``.
        sizes: how they are shared.
        lengths: tokens of every row of the data set.
        is_packed: whether several texts share a row.
    """
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    rounds = math.ceil(len(rows) / (sizes.per_device * sizes.num_processes))
    count = rounds * sizes.num_processes
    pieces = _dealt_out(ordered, count) if is_packed else np.array_split(ordered, count)
    return [pieces[start : start + sizes.num_processes] for start in range(0, count, sizes.num_processes)]


def _dealt_out(ordered: Rows, count: int) -> list[Rows]:
    """In turns, each turn from the other end: the sums of what each of ``count`` gets are about the same."""
    turn, place = np.divmod(np.arange(len(ordered)), count)
    owner = np.where(turn % 2, count - 1 - place, place)
    return [ordered[owner == each] for each in range(count)]


def evaluation_batches(lengths: NDArray[np.int32], batch_size: int, num_processes: int) -> list[list[Rows]]:
    """Rows of each rank's evaluation batches ``[rank][batch]``, ordered by length; every row exactly once."""
    ordered = np.argsort(-lengths, kind="stable")
    pieces = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    return [pieces[rank::num_processes] for rank in range(num_processes)]


@dataclass(frozen=True)
class TrainingLength:
    """How long training takes and when it is evaluated, in optimizer steps."""

    steps_per_epoch: int
    total_steps: int
    evaluation_steps: frozenset[int]


def training_length(
    num_rows: int, global_batch: int, num_train_epochs: float, max_steps: int | None, evals_per_epoch: float
) -> TrainingLength:
    """Convert epochs and fractions of epochs to optimizer steps, once.

    Evaluations are spread evenly from the start, at most one a step; the last step is always evaluated. ``max_steps``,
    where given, takes the place of ``num_train_epochs``. There is always at least one step.
    """
    per_epoch = steps_per_epoch(num_rows, global_batch)
    total = max_steps or max(1, math.ceil(num_train_epochs * per_epoch - 1e-9))
    interval = max(1.0, per_epoch / evals_per_epoch)
    spread = {round(turn * interval) for turn in range(1, math.floor(total / interval + 1e-9) + 1)}
    return TrainingLength(per_epoch, total, frozenset(spread | {total}))


def stratified_split(labels: NDArray[np.int64] | None, num_rows: int, share: float, seed: int) -> tuple[Rows, Rows]:
    """Split rows into ``(train, dev)``, each in file order.

    With ``labels`` (class ids) every class gives its share to dev, rounded, but always keeps a row in train; a class
    with two rows or more gives at least one. Without labels rows are drawn at random.
    """
    generator = np.random.default_rng([seed, num_rows])
    groups = [np.arange(num_rows)] if labels is None else [np.flatnonzero(labels == each) for each in np.unique(labels)]
    dev = []
    for rows in groups:
        count = min(max(round(len(rows) * share), 1), len(rows) - 1)
        dev.append(generator.permutation(rows)[:count])
    held_back = np.sort(np.concatenate(dev))
    return np.setdiff1d(np.arange(num_rows), held_back), held_back
