"""Sums of examples, tokens, seconds and loss against a clock that is set by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import finetune.throughput
from finetune.data.loader import StepInputs
from finetune.throughput import Counts, Throughput


class Clock:
    """Seconds pass only when a test says so."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(finetune.throughput, "time", stand_in)
    return stand_in


def two_equal_ranks() -> Any:
    """Each has the same sum of losses."""
    return SimpleNamespace(reduce=lambda tensor, how: {"sum": tensor * 2}[how], device=torch.device("cpu"))


def step(examples: int, tokens: int, computed: int, weight: float | None = None) -> StepInputs:
    return StepInputs([], examples, examples if weight is None else weight, tokens, computed)


def test_the_loss_is_divided_by_the_weight_of_its_examples() -> None:
    throughput = Throughput()
    throughput.count(step(8, 60, 80, weight=20.0), torch.tensor(3.0))
    throughput.count(step(4, 20, 20, weight=4.0), torch.tensor(1.5))
    assert throughput.summarise(two_equal_ranks())["train/loss"] == pytest.approx(2 * 4.5 / 24)


def test_rates_between_log_lines(clock: Clock) -> None:
    throughput = Throughput()
    clock.now += 50  # building the model is not training
    throughput.start()
    clock.now += 2
    throughput.count(step(8, 60, 80), torch.tensor(3.0))
    clock.now += 1
    throughput.count(step(4, 20, 20), torch.tensor(1.5))
    clock.now += 1
    first = throughput.summarise(two_equal_ranks())
    # 12 examples and 80 of 100 tokens in 4 seconds; losses 2 x (3 + 1.5).
    assert first == {
        "train/loss": pytest.approx(9 / 12),
        "perf/examples_per_second": pytest.approx(3),
        "perf/tokens_per_second": pytest.approx(20),
        "perf/padding_fraction": pytest.approx(0.2),
    }
    clock.now += 5
    throughput.count(step(10, 30, 40), torch.tensor(5.0))
    second = throughput.summarise(two_equal_ranks())
    assert second["train/loss"] == pytest.approx(1.0)  # nothing of the time before
    assert second["perf/examples_per_second"] == pytest.approx(2)
    assert second["perf/padding_fraction"] == pytest.approx(0.25)
    assert throughput.total == Counts(22, 22.0, 110, 140, 9.0)


def test_evaluation_is_not_training(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    clock.now += 3
    throughput.count(step(6, 10, 10), torch.tensor(6.0))
    clock.now += 1  # between the update and the evaluation
    with throughput.evaluating():
        clock.now += 20
    clock.now += 2
    throughput.count(step(6, 10, 10), torch.tensor(6.0))
    assert throughput.summarise(two_equal_ranks())["perf/examples_per_second"] == pytest.approx(2)
    assert throughput.evaluation_seconds == 20
    assert throughput.total.seconds == 6


def test_the_total_holds_steps_that_were_never_logged(clock: Clock) -> None:
    """Early stopping ends training between two log lines."""
    throughput = Throughput()
    throughput.start()
    clock.now += 4
    throughput.count(step(8, 30, 40), torch.tensor(1.0))
    assert throughput.total == Counts(8, 8.0, 30, 40, 4.0)
    assert throughput.total.rates() == {
        "perf/examples_per_second": 2,
        "perf/tokens_per_second": 7.5,
        "perf/padding_fraction": 0.25,
    }


def test_nothing_counted_divides_by_nothing() -> None:
    assert Counts().rates()["perf/examples_per_second"] == 0


def test_a_step_that_was_left_out_counts_in_the_speed_alone(clock: Clock) -> None:
    throughput = Throughput()
    throughput.start()
    clock.now += 2
    throughput.count_skipped(step(8, 60, 80))
    clock.now += 2
    assert "train/loss" not in throughput.summarise(two_equal_ranks())
    throughput.count_skipped(step(8, 60, 80))
    throughput.count(step(4, 20, 20), torch.tensor(1.0))
    assert throughput.summarise(two_equal_ranks())["train/loss"] == pytest.approx(0.5)
    assert throughput.total.examples == 20


def test_sums_go_on_after_a_restart(clock: Clock) -> None:
    first, second = Throughput(), Throughput()
    first.start()
    clock.now += 1
    first.count(step(8, 60, 80), torch.tensor(3.0))
    with first.saving():
        clock.now += 5
    second.restore(first.state())
    clock.now += 100
    second.start()
    clock.now += 3
    second.count(step(4, 20, 20), torch.tensor(1.5))
    assert second.checkpoint_seconds == 5
    assert second.summarise(two_equal_ranks()) == {
        "train/loss": pytest.approx(9 / 12),
        "perf/examples_per_second": pytest.approx(3),
        "perf/tokens_per_second": pytest.approx(20),
        "perf/padding_fraction": pytest.approx(0.2),
    }
