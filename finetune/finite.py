"""Losses and gradients that are not numbers: noticed at the next log line, told with their step and rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from finetune.data.batching import Rows
from finetune.errors import TrainingError

SHOWN = 10  # rows that a message names before it counts the rest
KINDS = ("training loss", "gradient norm")
REMEDY = (
    "look at these rows; lower optim.learning_rate; use mixed_precision bf16 or no in the launch profile instead of "
    "fp16; or leave such steps out with train.on_nonfinite: skip"
)


@dataclass
class StepOutcome:
    """What an optimizer step computed on this rank; tensors are on the device.

    ``number`` counts optimizer steps with this one; ``rows`` are those of each micro-batch, ``losses`` float32
    ``[micro-batches]`` their weighted sums; ``grad_norm`` is the same on all ranks, and None where it says nothing, as
    after a float16 step that only lowered the scale.
    """

    number: int
    learning_rate: float
    rows: Sequence[Rows]
    losses: torch.Tensor
    grad_norm: torch.Tensor | None


class FiniteWatch:
    """Remembers the outcome of each step until somebody looks, so that no step waits for the device.

    Args:
        where: file and line of training rows.
    """

    def __init__(self, where: Callable[[Rows], list[str]]) -> None:
        self._where = where
        self._steps: list[StepOutcome] = []

    def note(self, step: StepOutcome) -> None:
        """Remember a step."""
        self._steps.append(step)

    def check(self, accelerator: Accelerator, mean_loss: float) -> None:
        """Look at the steps noted since the last call; all ranks call it at once.

        Args:
            accelerator: of the job.
            mean_loss: over all these steps and all ranks: not finite when any loss was not.

        Raises:
            TrainingError: on every rank, when a loss or a gradient norm was not finite on any.
        """
        steps, self._steps = self._steps, []
        norms = [step.grad_norm for step in steps if step.grad_norm is not None]
        # Every rank comes to the same conclusion: the mean is over all ranks, and so are the gradients.
        if not math.isfinite(mean_loss) or (norms and not bool(torch.stack(norms).isfinite().all())):
            raise TrainingError(f"{self.describe(accelerator, steps)}: {REMEDY}")

    def describe(self, accelerator: Accelerator, steps: Sequence[StepOutcome]) -> str:
        """What is not finite in the earliest such step, with its rows on all ranks; a collective.

        A loss tells more than the gradients that came of it, so only its micro-batches are named then.
        """
        found = [what for step in steps if (what := self._bad_rows(step))][:1]
        everywhere: list[tuple[int, float, int, list[str]]] = found
        if accelerator.num_processes > 1:
            everywhere = gather_object(found)
        if not everywhere:
            return "the training loss is not finite"
        number, rate, kind = min((number, rate, kind) for number, rate, kind, _ in everywhere)
        places = [place for step, _, other, rows in everywhere if (step, other) == (number, kind) for place in rows]
        more = f" and {len(places) - SHOWN} more rows" if len(places) > SHOWN else ""
        return (
            f"the {KINDS[kind]} is not finite at step {number} (learning rate {rate:g}), in the micro-batch of "
            f"{', '.join(places[:SHOWN])}{more}"
        )

    def _bad_rows(self, step: StepOutcome) -> tuple[int, float, int, list[str]] | None:
        is_bad = (~step.losses.isfinite()).tolist()
        if any(is_bad):
            bad = [rows for rows, bad in zip(step.rows, is_bad, strict=True) if bad]
            return step.number, step.learning_rate, 0, self._where(np.concatenate(bad))
        if step.grad_norm is not None and not math.isfinite(float(step.grad_norm)):
            return step.number, step.learning_rate, 1, self._where(np.concatenate(list(step.rows)))
        return None


def is_nonfinite(accelerator: Accelerator, outcome: StepOutcome) -> bool:
    """Whether a loss of any rank or the gradient is not finite; waits for the device and for the other ranks.

    An infinite gradient is no news in float16: the scaler finds it, and lowers its scale.
    """
    bad = (~outcome.losses.isfinite()).sum()
    if accelerator.scaler is None and outcome.grad_norm is not None:
        bad = bad + ~outcome.grad_norm.isfinite()
    return bool(accelerator.reduce(bad, "sum"))
