"""Dropout that suits CPUs: torch's random numbers took a fifth of a small model's training step there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn


def use_fast_dropout(model: nn.Module) -> None:
    """Replace the dropout layers of a model that is trained on a CPU."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p).train(child.training))


class Dropout(nn.Dropout):
    """torch's layer with :func:`dropped_out`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        return dropped_out(values, self.p) if self.training else values


def dropped_out(values: torch.Tensor, probability: float) -> torch.Tensor:
    """Zero each value with ``probability`` (to the nearest 1/65536), and scale the others to keep the mean.

    Random numbers come from numpy's SFC64, seeded anew from torch's generator in each call, so that whoever restores
    that one gets the same again.
    """
    if probability == 0.0:
        return values
    mask = keep_mask(values.numel(), 1 - probability, values.dtype).view(values.shape)
    result: torch.Tensor = _Masked.apply(values, mask)  # type: ignore[no-untyped-call]
    return result


def keep_mask(count: int, keep: float, dtype: torch.dtype) -> torch.Tensor:
    """``[count]`` times ``1 / keep``, with probability ``keep``, or 0."""
    seed = int(torch.empty((), dtype=torch.int64).random_())
    words = np.random.SFC64(seed).random_raw(-(-count // 4))  # 64 bits, for four values
    limit = min(round(keep * 0x10000) - 0x8000, 0x7FFF)
    is_kept = torch.from_numpy(words.view(np.int16))[:count].lt_(limit)  # 1 or 0
    if dtype in (torch.bfloat16, torch.float16):
        scale = torch.tensor(1 / keep, dtype=dtype).view(torch.int16).item()
        return is_kept.mul_(int(scale)).view(dtype)
    return is_kept.to(dtype).mul_(1 / keep)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return values * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask, None
