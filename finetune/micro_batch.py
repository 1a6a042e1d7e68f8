"""The largest micro-batch that fits into memory at the same global batch (``train.auto_micro_batch``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from finetune.data.batching import BatchSizes
from finetune.data.loader import Collator
from finetune.errors import TrainingError

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fitting_micro_batch(
    accelerator: Accelerator, model: nn.Module, losses: Losses, collate: Collator, sizes: BatchSizes
) -> BatchSizes:
    """Try the heaviest micro-batch, the longest rows; halve it, at more accumulation, until it fits on every rank.

    Args:
        accelerator: of the job; all ranks call this at once.
        model: as prepared by Accelerate.
        losses: ``(logits, labels)`` -> loss of each example.
        collate: makes tensors of training rows.
        sizes: what was asked for.

    Raises:
        TrainingError: on every rank, when a single example does not fit.
    """
    while True:
        fits = _fits(accelerator, model, losses, collate, sizes.per_device)
        if all(gather_object([fits]) if accelerator.num_processes > 1 else [fits]):
            return sizes
        if sizes.per_device == 1:
            raise TrainingError(
                "out of memory with one example at a time: lower data.max_length, freeze the encoder "
                "(model.freeze_encoder), use mixed_precision bf16 in the launch profile, or a smaller model"
            )
        sizes = halved(sizes)


def halved(sizes: BatchSizes) -> BatchSizes:
    """The largest per-device batch of at most half the size that divides the same share of the global batch."""
    share = sizes.per_device * sizes.accumulation
    per_device = next(size for size in range(sizes.per_device // 2, 0, -1) if share % size == 0)
    return replace(sizes, per_device=per_device, accumulation=share // per_device)


def _fits(accelerator: Accelerator, model: nn.Module, losses: Losses, collate: Collator, size: int) -> bool:
    """Whether a forward and a backward pass over the ``size`` longest rows fit; leaves no trace but warm caches."""
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), accelerator.no_sync(model):
            _one_pass(accelerator, model, losses, collate, size)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad()
        clear_device_cache(garbage_collection=True)
    return True


def _one_pass(accelerator: Accelerator, model: nn.Module, losses: Losses, collate: Collator, size: int) -> None:
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [torch.empty_like(parameter) for parameter in trained for _ in range(2)]  # AdamW makes them later
    longest = np.argsort(-collate.examples.texts.lengths, kind="stable")[:size]
    micro = collate(longest).to(accelerator.device)
    accelerator.backward(losses(model(**micro.inputs).logits, micro.labels).sum())
    del moments


@contextmanager
def out_of_memory_explained(sizes: BatchSizes) -> Iterator[None]:
    """Say what to set when memory runs out inside."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        half = max(1, sizes.per_device // 2)
        raise TrainingError(
            f"out of memory with micro-batches of {sizes.per_device}: the same global batch fits with "
            f"--train.per_device_train_batch_size {half} and --train.gradient_accumulation_steps "
            f"{sizes.accumulation * -(-sizes.per_device // half)}, or by itself with --train.auto_micro_batch true; "
            "in an evaluation, lower eval.per_device_eval_batch_size"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of the machine."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
