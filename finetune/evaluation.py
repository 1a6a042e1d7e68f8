"""Model + rows -> logits of every row -> metrics, the same whatever the number of processes or the batch size."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from transformers import PreTrainedModel

from finetune.data.loader import EvalLoader
from finetune.distributed import on_main_process
from finetune.loss import example_losses
from finetune.metrics import Metrics


@dataclass(frozen=True)
class Evaluation:
    """What the model says of each dev row, and the metrics of that.

    ``logits`` is float32 ``[rows, num_labels]`` in file order; ``metrics`` holds ``loss`` and every configured metric;
    ``seconds`` is the wall time.
    """

    logits: NDArray[np.float32]
    metrics: dict[str, float]
    seconds: float


def predict_logits(
    accelerator: Accelerator,
    model: PreTrainedModel,
    loader: EvalLoader,
    each_round: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> NDArray[np.float32]:
    """Logits ``[rows, num_labels]`` of all rows in file order, on every rank.

    Each rank computes its share; the shares are filled up to one size, gathered once, and placed by row number. What
    fills them up goes to a row of its own, which is cut off.

    Args:
        accelerator: of the job.
        model: not wrapped for training.
        loader: this rank's batches.
        each_round: entered around each batch, equally often on every rank; may raise on all of them.
    """
    model.train(False)
    rows: list[NDArray[np.int64]] = []
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        batches = iter(loader)
        for _ in range(loader.rounds):
            with each_round():
                for batch_rows, batch in islice(batches, 1):
                    logits.append(model(**batch.inputs).logits.float())
                    rows.append(batch_rows)
    num_rows, num_labels = len(loader.examples), int(model.config.num_labels or 1)
    own = torch.cat([*logits, torch.zeros(0, num_labels, device=accelerator.device)])
    own_rows = torch.from_numpy(np.concatenate([*rows, np.zeros(0, np.int64)])).to(accelerator.device)
    missing = loader.largest_share - len(own)
    placed = torch.empty(num_rows + 1, num_labels, device=accelerator.device)  # the last row takes the padding
    own = torch.cat([own, own.new_zeros(missing, num_labels)])
    own_rows = torch.cat([own_rows, own_rows.new_full((missing,), num_rows)])
    placed[accelerator.gather(own_rows)] = accelerator.gather(own)
    return placed[:num_rows].cpu().numpy()


def evaluate(
    accelerator: Accelerator,
    model: PreTrainedModel,
    loader: EvalLoader,
    metrics: Metrics,
    problem_type: str,
    thresholds: NDArray[np.float64] | None = None,
    each_round: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Evaluation:
    """Compute the metrics over exactly the rows of ``loader``; the same values on every rank.

    ``thresholds`` are the probabilities ``[num_labels]`` from which on each label of a multi-label row is given.
    """
    started = time.perf_counter()
    logits = predict_logits(accelerator, model, loader, each_round)
    values = on_main_process(
        accelerator, lambda: _judge(logits, loader.examples.labels, metrics, problem_type, thresholds)
    )
    return Evaluation(logits, values, time.perf_counter() - started)


def _judge(
    logits: NDArray[np.float32],
    labels: NDArray[Any],
    metrics: Metrics,
    problem_type: str,
    thresholds: NDArray[np.float64] | None,
) -> dict[str, float]:
    losses = example_losses(torch.from_numpy(logits), torch.from_numpy(labels), problem_type)
    return {"loss": float(losses.double().sum()) / len(losses), **metrics.compute(logits, labels, thresholds)}
