"""AdamW with its parameter groups, and a learning rate counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import get_scheduler

from finetune.config import OptimConfig

DEFAULT_LEARNING_RATE = 2e-5
DEFAULT_HEAD_LEARNING_RATE = 1e-3  # for a new head on a frozen encoder


def resolve_learning_rate(config: OptimConfig, global_batch: int, frozen: bool) -> tuple[float, str]:
    """Peak learning rate, and how it came about in words.

    Linear scaling follows Goyal et al. 2017 (arXiv:1706.02677), square-root scaling Krizhevsky 2014 (arXiv:1404.5997);
    the latter is the usual choice for Adam.
    """
    default = DEFAULT_HEAD_LEARNING_RATE if frozen else DEFAULT_LEARNING_RATE
    rate = default if config.learning_rate is None else config.learning_rate
    ratio = global_batch / config.base_batch_size
    if config.scale_learning_rate == "none":
        return rate, "as set" if config.learning_rate is not None else "default"
    factor = ratio if config.scale_learning_rate == "linear" else math.sqrt(ratio)
    return rate * factor, f"{rate:g} x {factor:g} ({config.scale_learning_rate} scaling, base {config.base_batch_size})"


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: weight decay for weights, none for biases and normalisation layers.

    Normalisation layers are recognised by the type of their module: their parameters' names differ between
    architectures (``LayerNorm.weight``, ``ln_1.weight``, ``sa_layer_norm.weight``).
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for module, name, parameter in _own_parameters(model):
        exempted = name == "bias" or name.endswith("_bias") or is_normalisation(module)
        (exempt if exempted else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each trainable parameter once, with the module that owns it."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield module, name, parameter


def is_normalisation(module: nn.Module) -> bool:
    """torch's normalisation layers, and the classes of their own that models define (LlamaRMSNorm, T5LayerNorm)."""
    types = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    return isinstance(module, types) or type(module).__name__.endswith("Norm")


def build_optimizer(
    model: nn.Module, config: OptimConfig, learning_rate: float, mixed_precision: str = "no"
) -> torch.optim.AdamW:
    """AdamW over :func:`parameter_groups`, in torch's fused implementation.

    Not fused in float16: there the gradient scaler hands the decision to skip an update to a fused optimizer, and
    nobody else learns of it, so the schedule would go on.
    """
    fused = mixed_precision != "fp16"
    return torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=learning_rate, fused=fused)


def clip_grad_norm(
    accelerator: Accelerator, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """Scale all gradients down to a common norm of ``max_norm``, where theirs is larger; 0: leave them as they are.

    On CPUs a fused optimizer does the scaling, while it reads the gradients anyway: one pass over them less.

    Args:
        parameters: all that the optimizer updates.
        optimizer: not wrapped.

    Returns:
        The norm before, on the device.
    """
    if accelerator.device.type != "cpu" or not optimizer.defaults.get("fused"):
        norm: torch.Tensor = accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
        return norm
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    # What it divides gradients by; the name is the one that gradient scalers give it.
    optimizer.grad_scale = (norm / max_norm).clamp(min=1.0) if max_norm else None  # type: ignore[attr-defined]
    return norm


class LearningRateSchedule:
    """The learning rate of every optimizer step: warm-up, then what ``optim.lr_scheduler_type`` says.

    It wraps the bare optimizer, since a scheduler prepared by Accelerate advances once per process.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int, greater_is_better: bool
    ) -> None:
        warmup = config.warmup_steps
        self.warmup_steps = math.ceil(config.warmup_ratio * total_steps - 1e-9) if warmup is None else warmup
        kinds = {"constant": "constant_with_warmup", "plateau": "constant_with_warmup"}
        self._by_step = get_scheduler(
            kinds.get(config.lr_scheduler_type, config.lr_scheduler_type), optimizer, self.warmup_steps, total_steps
        )
        self._peaks = list(self._by_step.base_lrs)
        self._plateau: ReduceLROnPlateau | None = None
        if config.lr_scheduler_type == "plateau":
            # torch's own rule, run on a stand-in whose learning rate is the factor that applies to the real one.
            self._factor = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            self._plateau = ReduceLROnPlateau(
                self._factor,
                mode="max" if greater_is_better else "min",
                factor=config.plateau_factor,
                patience=config.plateau_patience,
                threshold=0.0,
                min_lr=min(1.0, config.min_learning_rate / max(self._peaks)) if max(self._peaks) else 0.0,
            )

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self._by_step.get_last_lr()[0])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain numbers only."""
        state: dict[str, Any] = {"by_step": self._by_step.state_dict()}
        if self._plateau is not None:
            state |= {"plateau": self._plateau.state_dict(), "factor": self._factor.param_groups[0]["lr"]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; sets the learning rate of the optimizer too."""
        self._by_step.load_state_dict(state["by_step"])
        if self._plateau is not None:
            self._plateau.load_state_dict(state["plateau"])
            self._factor.param_groups[0]["lr"] = state["factor"]
        for group, rate in zip(self._by_step.optimizer.param_groups, self._by_step.get_last_lr(), strict=True):
            group["lr"] = rate

    def step(self) -> None:
        """Advance by one optimizer step."""
        self._by_step.step()

    def evaluated(self, metric: float) -> None:
        """Tell the schedule the metric of an evaluation; ``plateau`` lowers the rate when it stalls."""
        if self._plateau is not None:
            self._plateau.step(metric)
            factor = self._factor.param_groups[0]["lr"]
            self._by_step.base_lrs = [peak * factor for peak in self._peaks]
            for group, peak in zip(self._by_step.optimizer.param_groups, self._by_step.base_lrs, strict=True):
                group["lr"] = peak * min(1.0, self._by_step.last_epoch / max(1, self.warmup_steps))
            self._by_step._last_lr = [group["lr"] for group in self._by_step.optimizer.param_groups]
