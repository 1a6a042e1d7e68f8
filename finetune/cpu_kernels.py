"""Dropout and attention that suit CPUs: the same functions as torch's and HF's, faster in training.

A fifth of a small model's training step on a CPU went into torch's random numbers for dropout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

ATTENTION = "finetune_cpu"


def use_cpu_kernels(model: PreTrainedModel) -> None:
    """Replace the dropout of a model, and its attention where the architecture lets it be chosen. For training."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p).train(child.training))
    if model.config._attn_implementation in ("sdpa", "eager"):
        implementation = model.config._attn_implementation
        try:
            model.set_attn_implementation(ATTENTION)
        except ValueError:  # an architecture with an attention of its own
            model.set_attn_implementation(implementation)


class Dropout(nn.Dropout):
    """torch's layer with :func:`dropped_out`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        return dropped_out(values, self.p) if self.training else values


def dropped_out(values: torch.Tensor, probability: float) -> torch.Tensor:
    """Zero each value with ``probability`` (to the nearest 1/32768), and scale the others to keep the mean.

    Random numbers come from numpy's SFC64, seeded anew from torch's generator in each call, so that whoever restores
    that one gets the same again.
    """
    if probability == 0.0:
        return values
    result: torch.Tensor = _Masked.apply(values, keep_mask(values, 1 - probability))  # type: ignore[no-untyped-call]
    return result


def keep_mask(values: torch.Tensor, keep: float) -> torch.Tensor:
    """``1 / keep`` where a value stays, with probability ``keep``, else 0; of the shape and type of ``values``."""
    count = values.numel()
    seed = int(torch.empty((), dtype=torch.int64).random_())
    words = np.random.SFC64(seed).random_raw(-(-count // 4))  # 64 bits, for four values
    bits = torch.from_numpy(words.view(np.int16))[:count]
    is_kept = bits.bitwise_and_(0x7FFF).sub_(round(keep * 0x8000)).bitwise_right_shift_(15)  # -1: all bits, or 0: none
    if values.dtype in (torch.bfloat16, torch.float16):
        scale = torch.tensor(1 / keep, dtype=values.dtype).view(torch.int16).item()
        return is_kept.bitwise_and_(int(scale)).view(values.dtype).view(values.shape)
    return is_kept.to(values.dtype).mul_(-1 / keep).view(values.shape)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return values * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention, step by step: torch's own for CPUs falls back to a slower one when there is dropout.

    Args:
        module: the attention layer, for its mode.
        query: ``[rows, heads, tokens, width]``; ``key`` and ``value`` likewise.
        attention_mask: additive, ``[rows, 1, tokens, tokens]``.
        scaling: of the scores; default: 1 / square root of the width.
        dropout: share of the attention weights that is dropped in training.

    Returns:
        ``[rows, tokens, heads, width]``, and the attention weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.add_(attention_mask.to(scores.dtype))
    weights = F.softmax(scores, dim=-1)
    if module.training:
        weights = dropped_out(weights, dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)
