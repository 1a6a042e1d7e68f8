"""Losses and gradient norms that are not numbers, each seen by itself."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finetune.errors import TrainingError
from finetune.finite import FiniteWatch, StepOutcome, is_nonfinite

ALONE: Any = SimpleNamespace(num_processes=1, scaler=None, reduce=lambda tensor, how: tensor)
ROWS = [np.array([4, 7]), np.array([2])]


def outcome(number: int, losses: list[float], norm: float | None) -> StepOutcome:
    grad_norm = None if norm is None else torch.tensor(norm)
    return StepOutcome(number, 0.5, ROWS, torch.tensor(losses), grad_norm)


def said(*steps: StepOutcome) -> str | None:
    """The message of a look at these steps, up to the remedy."""
    watch = FiniteWatch(lambda rows: [f"row {row}" for row in rows])
    for step in steps:
        watch.note(step)
    try:
        watch.check(ALONE, sum(float(step.losses.sum()) for step in steps))
    except TrainingError as error:
        return str(error).partition(": ")[0]
    return None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([outcome(1, [1.0, 2.0], 3.0), outcome(2, [1.0, 2.0], None)], None),
        # A loss that overflows where its gradient does not.
        ([outcome(1, [1.0, 2.0], 3.0), outcome(2, [1.0, math.inf], 3.0)], ("training loss", 2, "row 2")),
        ([outcome(5, [math.nan, 1.0], None)], ("training loss", 5, "row 4, row 7")),
        ([outcome(3, [1.0, 2.0], math.nan)], ("gradient norm", 3, "row 4, row 7, row 2")),
        # The earliest step tells the cause, and in it the loss.
        ([outcome(3, [1.0, 2.0], math.inf), outcome(4, [math.nan, 2.0], math.nan)],
         ("gradient norm", 3, "row 4, row 7, row 2")),
        ([outcome(3, [1.0, math.nan], math.nan), outcome(4, [math.nan] * 2, math.nan)], ("training loss", 3, "row 2")),
    ],
)  # fmt: skip
def test_what_is_said_of_steps(steps: list[StepOutcome], expected: tuple[str, int, str] | None) -> None:
    if expected is None:
        assert said(*steps) is None
    else:
        kind, number, rows = expected
        assert said(*steps) == (
            f"the {kind} is not finite at step {number} (learning rate 0.5), in the micro-batch of {rows}"
        )


def test_a_step_is_looked_at_once() -> None:
    watch = FiniteWatch(lambda rows: [])
    watch.note(outcome(1, [1.0, 1.0], math.nan))
    with pytest.raises(TrainingError):
        watch.check(ALONE, 2.0)
    watch.check(ALONE, 2.0)


def test_an_infinite_gradient_is_no_news_in_float16() -> None:
    scaled: Any = SimpleNamespace(**{**vars(ALONE), "scaler": object()})
    assert is_nonfinite(ALONE, outcome(1, [1.0], math.inf))
    assert not is_nonfinite(scaled, outcome(1, [1.0], math.inf))
    assert is_nonfinite(scaled, outcome(1, [math.nan], math.inf))
    assert not is_nonfinite(ALONE, outcome(1, [1.0], 1.0))
