"""Parameter groups against the names of each architecture; learning rates against tables; AdamW against its formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForSequenceClassification

from finetune.config import OptimConfig
from finetune.optim import (
    LearningRateSchedule,
    build_optimizer,
    clip_grad_norm,
    is_normalisation,
    parameter_groups,
    resolve_learning_rate,
)


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if any(parameter is each for each in group["params"])}


def test_groups_of_real_architectures(any_checkpoint: Path) -> None:
    """In bert, roberta and distilbert, normalisation layers can be told by their names too."""
    model = AutoModelForSequenceClassification.from_pretrained(any_checkpoint, num_labels=3)
    decayed, exempt = parameter_groups(model, 0.25)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.25, 0.0)
    spelled = {name: name.lower().replace("_", "") for name, _ in model.named_parameters()}
    expected = {name for name, plain in spelled.items() if plain.endswith("bias") or "layernorm" in plain}
    assert names_of(model, exempt) == expected
    assert names_of(model, decayed) == {name for name, _ in model.named_parameters()} - expected
    assert sum(name.lower().endswith("norm.weight") for name in expected) == 1 + 2 * 2  # embeddings, 2 of each layer
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(model.parameters()))


class OwnRMSNorm(nn.Module):
    """A class of a model's own, whose parameter's name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(7, 4)
        self.first = OwnRMSNorm()
        self.second = nn.BatchNorm1d(4)
        self.third = nn.GroupNorm(2, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.normaliser = nn.Linear(4, 4, bias=False)  # no normalisation layer, whatever its name
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.output = nn.Linear(4, 7)
        self.output.weight = self.embeddings.weight  # tied: once


def test_groups_by_the_type_of_the_module() -> None:
    model = Odd()
    decayed, exempt = parameter_groups(model, 0.1)
    assert names_of(model, decayed) == {
        "embeddings.weight", "attention.in_proj_weight", "attention.out_proj.weight", "normaliser.weight",
    }  # fmt: skip
    assert names_of(model, exempt) == {
        "first.scale", "second.weight", "second.bias", "third.weight", "third.bias", "attention.in_proj_bias",
        "attention.out_proj.bias", "output.bias",
    }  # fmt: skip
    assert len(decayed["params"]) == 4


def test_an_empty_group_is_left_out() -> None:
    (only,) = parameter_groups(nn.LayerNorm(3), 0.1)
    assert only["weight_decay"] == 0.0
    (only,) = parameter_groups(nn.Linear(3, 3, bias=False), 0.1)
    assert only["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.LayerNorm(2), True),
        (nn.RMSNorm(2), True),
        (nn.BatchNorm2d(2), True),
        (OwnRMSNorm(), True),
        (nn.Linear(2, 2), False),
        (nn.Embedding(2, 2), False),
    ],
)
def test_is_normalisation(module: nn.Module, expected: bool) -> None:
    assert is_normalisation(module) is expected


@pytest.mark.parametrize("max_norm", [0.5, 1e3, 0.0])  # half of what it is; more; left alone
def test_clipping_against_torch(max_norm: float) -> None:
    """The fused optimizer scales the gradients itself; with torch's own, they are scaled before."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = torch.randn(20, 9)
    weights = {}
    for fused in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
        # eps is large, or the scale of the gradients would cancel out of an update
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, fused=fused)
        norms = []
        for _ in range(4):
            model(data).square().mean(1).sum().backward()
            norms.append(float(clip_grad_norm(accelerator, model.parameters(), optimizer, max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        assert min(norms) > 1
        weights[fused] = [*norms, *torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()]
    assert weights[True] == pytest.approx(weights[False], abs=1e-5)


def test_adamw_against_its_formula() -> None:
    """Loshchilov & Hutter 2019: decoupled decay, for weights and not for biases; three updates."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.fill_(0.5)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1), 0.01)
    values = {"w0": 1.0, "w1": -2.0, "b": 0.5}
    first, second = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for step, x in enumerate(([1.0, 2.0], [-1.0, 0.5], [3.0, 0.0]), start=1):
        optimizer.zero_grad()
        (model(torch.tensor([x])) * 2).sum().backward()
        optimizer.step()
        gradients = {"w0": 2 * x[0], "w1": 2 * x[1], "b": 2.0}
        for name, gradient in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            m, v = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
            decay = 0.0 if name == "b" else 0.1
            values[name] = values[name] * (1 - 0.01 * decay) - 0.01 * m / (math.sqrt(v) + 1e-8)
    assert model.weight.flatten().tolist() == pytest.approx([values["w0"], values["w1"]], abs=1e-6)
    assert model.bias.item() == pytest.approx(values["b"], abs=1e-6)


@pytest.mark.parametrize(
    ("config", "global_batch", "frozen", "rate", "words"),
    [
        (OptimConfig(), 64, False, 2e-5, "default"),
        (OptimConfig(), 64, True, 1e-3, "default"),
        (OptimConfig(learning_rate=3e-4), 64, True, 3e-4, "as set"),
        (OptimConfig(learning_rate=0.0), 64, False, 0.0, "as set"),
        (OptimConfig(learning_rate=1e-4, scale_learning_rate="linear"), 128, False, 4e-4, "0.0001 x 4 (linear"),
        (OptimConfig(learning_rate=1e-4, scale_learning_rate="sqrt"), 128, False, 2e-4, "0.0001 x 2 (sqrt"),
        (OptimConfig(learning_rate=1e-4, scale_learning_rate="linear"), 8, False, 2.5e-5, "0.0001 x 0.25 (linear"),
        (OptimConfig(scale_learning_rate="linear", base_batch_size=8), 24, False, 6e-5, "2e-05 x 3 (linear"),
        (OptimConfig(scale_learning_rate="sqrt", base_batch_size=4), 36, True, 3e-3, "0.001 x 3 (sqrt scaling, base 4"),
    ],
)  # fmt: skip
def test_resolve_learning_rate(config: OptimConfig, global_batch: int, frozen: bool, rate: float, words: str) -> None:
    got, origin = resolve_learning_rate(config, global_batch, frozen)
    assert got == pytest.approx(rate, rel=1e-12)
    assert origin.startswith(words)


def schedule_of(total_steps: int, peak: float = 1.0, greater_is_better: bool = True, **settings: Any) -> Any:
    """A schedule over two parameter groups, and its bare optimizer."""
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=peak)
    return LearningRateSchedule(optimizer, OptimConfig(**settings), total_steps, greater_is_better), optimizer


def rates(schedule: Any, optimizer: Any, steps: int) -> list[float]:
    """The learning rate of each of the next ``steps`` updates, and the one after."""
    seen = []
    for _ in range(steps):
        assert {group["lr"] for group in optimizer.param_groups} == {schedule.learning_rate}
        seen.append(schedule.learning_rate)
        optimizer.step()
        schedule.step()
    return [*seen, schedule.learning_rate]


def test_linear_by_hand() -> None:
    schedule, optimizer = schedule_of(10, 0.8, lr_scheduler_type="linear", warmup_ratio=0.2)
    assert schedule.warmup_steps == 2
    expected = [0, 0.4, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0]
    assert rates(schedule, optimizer, 10) == pytest.approx(expected, abs=1e-12)


def test_cosine_by_hand() -> None:
    schedule, optimizer = schedule_of(6, 2.0, lr_scheduler_type="cosine", warmup_steps=2)
    root = math.sqrt(2) / 2
    assert rates(schedule, optimizer, 6) == pytest.approx([0, 1, 2, 1 + root, 1, 1 - root, 0], abs=1e-12)


def test_constant_by_hand() -> None:
    schedule, optimizer = schedule_of(6, 0.5, lr_scheduler_type="constant", warmup_steps=2)
    assert rates(schedule, optimizer, 6) == [0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]
    schedule, optimizer = schedule_of(3, 0.5, lr_scheduler_type="constant", warmup_ratio=0.0)
    assert rates(schedule, optimizer, 3) == [0.5] * 4


@pytest.mark.parametrize(
    ("ratio", "steps", "total", "expected"),
    [
        (0.06, None, 100, 6),
        (0.06, None, 101, 7),
        (0.07, None, 100, 7),  # 0.07 x 100 is 7.000000000000001
        (0.06, None, 1, 1),
        (0.0, None, 100, 0),
        (1.0, None, 10, 10),
        (0.5, 3, 100, 3),
        (0.5, 0, 100, 0),
    ],
)
def test_warmup_steps(ratio: float, steps: int | None, total: int, expected: int) -> None:
    assert schedule_of(total, warmup_ratio=ratio, warmup_steps=steps)[0].warmup_steps == expected


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_evaluations_change_the_rate_only_of_plateau(kind: str) -> None:
    schedule, optimizer = schedule_of(4, lr_scheduler_type=kind, warmup_steps=0, plateau_patience=0)
    before = schedule.learning_rate
    for metric in (0.5, 0.4, 0.3):
        schedule.evaluated(metric)
    assert schedule.learning_rate == before
    assert optimizer.param_groups[0]["lr"] == before


def plateau(metrics: list[float], **settings: Any) -> list[float]:
    """Rates after each evaluation, one update between them, without warm-up."""
    schedule, optimizer = schedule_of(100, lr_scheduler_type="plateau", warmup_steps=0, **settings)
    seen = []
    for metric in metrics:
        optimizer.step()
        schedule.step()
        schedule.evaluated(metric)
        assert {group["lr"] for group in optimizer.param_groups} == {schedule.learning_rate}
        seen.append(schedule.learning_rate)
    return seen


def test_plateau_by_hand() -> None:
    # Patience 1: the second evaluation in a row without a new best halves the rate.
    assert plateau([0.5, 0.6, 0.6, 0.6, 0.6, 0.6], plateau_factor=0.5, plateau_patience=1) == [1, 1, 1, 0.5, 0.5, 0.25]
    # A new best starts the count again.
    assert plateau([0.5, 0.4, 0.6, 0.5, 0.5], plateau_factor=0.5, plateau_patience=1) == [1, 1, 1, 1, 0.5]
    assert plateau([0.5, 0.5, 0.5], plateau_factor=0.1, plateau_patience=0) == pytest.approx([1, 0.1, 0.01])
    # However small the improvement.
    assert plateau([0.5, 0.50001, 0.50002], plateau_patience=0) == [1, 1, 1]
    # Negative values, as a correlation may have.
    assert plateau([-0.5, -0.4, -0.45], plateau_factor=0.5, plateau_patience=0) == [1, 1, 0.5]


def test_plateau_of_a_loss() -> None:
    down = plateau([2.0, 1.5, 1.5, 1.4, 1.6], greater_is_better=False, plateau_factor=0.5, plateau_patience=0)
    assert down == [1, 1, 0.5, 0.5, 0.25]


def test_plateau_takes_nan_for_no_improvement() -> None:
    assert plateau([0.5, math.nan, 0.6], plateau_factor=0.5, plateau_patience=0) == [1, 0.5, 0.5]


def test_plateau_stops_at_the_least_rate() -> None:
    got = plateau([1.0] * 6, peak=0.8, plateau_factor=0.5, plateau_patience=0, min_learning_rate=0.15)
    assert got == pytest.approx([0.8, 0.4, 0.2, 0.15, 0.15, 0.15])
    # A least rate above the peak leaves the peak alone.
    assert plateau([1.0] * 3, peak=0.1, plateau_patience=0, min_learning_rate=0.5) == pytest.approx([0.1] * 3)
    assert plateau([1.0] * 3, peak=0.0, plateau_patience=0) == [0, 0, 0]


def test_plateau_during_warmup() -> None:
    """The lowered peak is what the warm-up climbs to."""
    schedule, optimizer = schedule_of(
        100, 0.8, lr_scheduler_type="plateau", warmup_steps=4, plateau_factor=0.5, plateau_patience=0
    )
    assert rates(schedule, optimizer, 2) == pytest.approx([0, 0.2, 0.4])
    schedule.evaluated(1.0)
    assert schedule.learning_rate == pytest.approx(0.4)
    schedule.evaluated(1.0)
    assert schedule.learning_rate == pytest.approx(0.2)
    assert rates(schedule, optimizer, 4) == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4])
