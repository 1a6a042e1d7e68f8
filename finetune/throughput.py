"""Sums of loss, examples, tokens and seconds, divided once when they are logged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

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
            "perf/padding_fraction": 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0,
        }


class Throughput:
    """Counts since the last log line and over the whole run.

    The loss stays on the device until it is logged: reading it earlier would make the host wait for every step.
    """

    def __init__(self) -> None:
        self.total = Counts()
        self.evaluation_seconds = 0.0
        self.checkpoint_seconds = 0.0
        self.longest_step = 0.0
        self.longest_checkpoint = 0.0
        self._since_log = Counts()
        self._loss_sum: torch.Tensor | float = 0.0
        self._clock = time.perf_counter()

    def start(self) -> None:
        """Set the clock: what passed before was not training."""
        self._clock = time.perf_counter()

    def count(self, inputs: StepInputs, loss_sum: torch.Tensor) -> None:
        """Count one optimizer step; ``loss_sum`` is this rank's weighted sum of example losses."""
        self._count(inputs, inputs.weight)
        self._loss_sum = self._loss_sum + loss_sum

    def count_skipped(self, inputs: StepInputs) -> None:
        """Count a step whose loss says nothing."""
        self._count(inputs, 0.0)

    def _count(self, inputs: StepInputs, weight: float) -> None:
        seconds = self._lap()
        self.longest_step = max(self.longest_step, seconds)
        self._add(Counts(inputs.examples, weight, inputs.tokens, inputs.computed_tokens, seconds))

    def mean_loss(self, accelerator: Accelerator) -> float:
        """Weighted mean loss over the examples of all ranks since the last log line, 0 for none; a collective."""
        loss_sum = accelerator.reduce(torch.as_tensor(self._loss_sum, device=accelerator.device), "sum").item()
        return float(loss_sum / self._since_log.weight) if self._since_log.weight else 0.0

    def summarise(self, accelerator: Accelerator) -> dict[str, float]:
        """:meth:`mean_loss` (left out when no example counted) and the rates since the last call; a collective."""
        loss = {"train/loss": self.mean_loss(accelerator)} if self._since_log.weight else {}
        self._add(Counts(seconds=self._lap()))
        metrics = {**loss, **self._since_log.rates()}
        self._since_log, self._loss_sum = Counts(), 0.0
        return metrics

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Time spent inside counts as evaluation."""
        self._add(Counts(seconds=self._lap()))
        yield
        self.evaluation_seconds += self._lap()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time spent inside counts as checkpoints."""
        self._add(Counts(seconds=self._lap()))
        yield
        seconds = self._lap()
        self.longest_checkpoint = max(self.longest_checkpoint, seconds)
        self.checkpoint_seconds += seconds

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint: sums of this rank since the last log line, and totals."""
        return {
            "total": asdict(self.total),
            "since_log": asdict(self._since_log),
            "loss_sum": torch.as_tensor(self._loss_sum).cpu(),
            "evaluation_seconds": self.evaluation_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self.total, self._since_log = Counts(**state["total"]), Counts(**state["since_log"])
        self._loss_sum = state["loss_sum"]
        self.evaluation_seconds, self.checkpoint_seconds = state["evaluation_seconds"], state["checkpoint_seconds"]

    def _add(self, counts: Counts) -> None:
        """To the total at once: training may end between two log lines."""
        self._since_log.add(counts)
        self.total.add(counts)

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds
