"""Sums of loss, examples, tokens and seconds, divided once when they are logged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from finetune.data.loader import StepInputs


@dataclass
class Counts:
    """Over all ranks; ``weight`` sums what the examples count in the loss; ``seconds`` are those of training alone."""

    examples: int = 0
    weight: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Add another span of training."""
        self.examples += other.examples
        self.weight += other.weight
        self.tokens += other.tokens
        self.computed_tokens += other.computed_tokens
        self.seconds += other.seconds

    def rates(self) -> dict[str, float]:
        """Examples and real tokens per second, and the share of computed tokens that was padding."""
        seconds = max(self.seconds, 1e-9)
        return {
            "perf/examples_per_second": self.examples / seconds,
            "perf/tokens_per_second": self.tokens / seconds,
            "perf/padding_fraction": 1 - self.tokens / max(self.computed_tokens, 1),
        }


class Throughput:
    """Counts since the last log line and over the whole run.

    The loss stays on the device until it is logged: reading it earlier would make the host wait for every step.
    """

    def __init__(self) -> None:
        self.total = Counts()
        self.evaluation_seconds = 0.0
        self._since_log = Counts()
        self._loss_sum: torch.Tensor | float = 0.0
        self._clock = time.perf_counter()

    def start(self) -> None:
        """Set the clock: what passed before was not training."""
        self._clock = time.perf_counter()

    def count(self, inputs: StepInputs, loss_sum: torch.Tensor) -> None:
        """Count one optimizer step; ``loss_sum`` is this rank's weighted sum of example losses."""
        self._add(Counts(inputs.examples, inputs.weight, inputs.tokens, inputs.computed_tokens, self._lap()))
        self._loss_sum = self._loss_sum + loss_sum

    def summarise(self, accelerator: Accelerator) -> dict[str, float]:
        """Weighted mean loss over the examples of all ranks and the rates since the last call; a collective."""
        loss_sum = accelerator.reduce(torch.as_tensor(self._loss_sum), "sum").item()
        self._add(Counts(seconds=self._lap()))
        metrics = {"train/loss": loss_sum / self._since_log.weight, **self._since_log.rates()}
        self._since_log, self._loss_sum = Counts(), 0.0
        return metrics

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Time spent inside counts as evaluation."""
        self._add(Counts(seconds=self._lap()))
        yield
        self.evaluation_seconds += self._lap()

    def _add(self, counts: Counts) -> None:
        """To the total at once: training may end between two log lines."""
        self._since_log.add(counts)
        self.total.add(counts)

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds
