"""Work that one process does for all, with errors that reach every rank instead of leaving the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from finetune.errors import FinetuneError, TrainingError

Result = TypeVar("Result")


def compress_gradients(model: DistributedDataParallel, kind: str) -> None:
    """Let the processes exchange gradients as ``bf16`` or ``fp16``; ``none`` leaves them as they are."""
    if kind != "none":
        compress = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[kind]
        # In a function of another name, since torch wants NCCL for the hook that it knows as bfloat16's: gloo can too.
        model.register_comm_hook(dist.group.WORLD, lambda group, bucket: compress(group, bucket))


def communication_seconds(model: nn.Module) -> dict[str, float]:
    """What the exchange of gradients takes in a step, and how much of it the backward pass does not hide.

    By DistributedDataParallel's own clocks, over the first ten steps and every hundredth after them; empty for a model
    that is not wrapped by it.
    """
    if not isinstance(model, DistributedDataParallel):
        return {}
    nanoseconds = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    total, hidden = (nanoseconds.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap"))
    return {"communication_seconds_per_step": total, "communication_waited_seconds_per_step": total - hidden}


def on_main_process(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run ``work`` on rank 0 and return its (picklable) result on every rank.

    An exception of ``work`` is raised on every rank: a :class:`FinetuneError` as it is, anything else on the other
    ranks as a :class:`TrainingError` that names it.
    """
    outcome: list[tuple[Result | None, Exception | None]] = [(None, None)]
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None)]
        except Exception as caught:  # raised again below, on all ranks
            error = caught
            outcome = [(None, _portable(caught))]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    result, sent = outcome[0]
    if error or sent:
        raise error or sent  # type: ignore[misc]
    return result  # type: ignore[return-value]


def on_every_process(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run ``work`` on every rank at once; what it raises on any of them is raised on all."""
    return _in_turns(accelerator, work, turns=(True,), mine=True)


def first_on_each_node(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run ``work`` on one process of each machine first; the others follow and find its results in the cache.

    What it raises on any rank is raised on all.
    """
    return _in_turns(accelerator, work, turns=(True, False), mine=accelerator.is_local_main_process)


def _in_turns(accelerator: Accelerator, work: Callable[[], Result], turns: tuple[bool, ...], mine: bool) -> Result:
    result: Result | None = None
    for turn in turns:
        error: Exception | None = None
        if mine == turn:
            try:
                result = work()
            except Exception as caught:  # raised again below, on all ranks
                error = caught
        errors = [_portable(error) if error else None]
        if accelerator.num_processes > 1:
            errors = gather_object(errors)
        raised = error or next((each for each in errors if each), None)
        if raised:
            raise raised
    return result  # type: ignore[return-value]


def disconnect(accelerator: Accelerator) -> None:
    """Leave the process group; call it where nothing refers to the model any more.

    A DistributedDataParallel that outlives the group's Python object is its last owner, and its destructor holds the
    interpreter lock while it waits for gloo's thread, which may be waiting for the lock to free the tensors of the
    last collective: with torch 2.13 one run in ten never ended. So models are freed first, and the group after them.
    """
    accelerator.free_memory()
    accelerator.end_training()


def _portable(error: Exception) -> FinetuneError:
    """An exception that certainly survives pickling."""
    if isinstance(error, FinetuneError):
        return type(error)(str(error))
    return TrainingError(f"another process failed: {type(error).__name__}: {error}")
