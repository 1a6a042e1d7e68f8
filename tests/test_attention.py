"""Attention against torch's own, over padded texts and over texts in one row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from finetune.attention import (
    attend_by_groups,
    attend_from_first,
    attend_nested,
    attention,
    has_nested_attention,
    mask_of_segments,
)
from finetune.data.segments import Segments

TRAINED, EVALUATED = nn.Identity().train(), nn.Identity().eval()
LENGTHS = np.array([5, 40, 1, 17, 16, 70, 3])


@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # torch's own, and the one for dropout, which drops nothing here
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("heads", [2, 1])  # of keys and values
def test_attention_is_torchs(is_masked: bool, dropout: float, heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, count, 5, 4, requires_grad=True) for count in (2, heads, heads))
    mask = torch.zeros(3, 1, 5, 5).masked_fill(torch.rand(3, 1, 5, 5) < 0.3, -1e9) if is_masked else None
    module = nn.Identity().train()
    module.num_key_value_groups = 2 // heads
    module.is_causal = False
    found, _ = attention(module, query, key, value, mask, dropout=dropout)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), (query, key, value)),
        torch.autograd.grad(expected.sin().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_attention_drops_weights_in_training_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 200, 8), torch.randn(1, 1, 200, 8)
    value = torch.ones(1, 1, 200, 8)
    found, weights = attention(EVALUATED, query, key, value, None, dropout=0.5)
    torch.testing.assert_close(found, torch.ones_like(found))
    found, weights = attention(TRAINED, query, key, value, None, dropout=0.5)
    assert weights is not None
    assert (weights == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert found.mean().item() == pytest.approx(1, abs=0.02)  # the mean is kept


@pytest.mark.parametrize("has_bias", [True, False])
def test_attention_of_first_tokens_alone(has_bias: bool) -> None:
    """Against keys and values of all tokens, with the same weights dropped."""
    torch.manual_seed(0)
    query, key, value = layers = [nn.Linear(8, 8, bias=has_bias) for _ in range(3)]
    hidden = torch.randn(3, 5, 8, requires_grad=True)
    mask = torch.zeros(3, 1, 5)
    mask[1, :, 3:] = torch.finfo(torch.float32).min
    kept = (torch.rand(3, 2, 5) < 0.7).float() / 0.7

    class Dropout(nn.Module):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return weights * kept

    found = attend_from_first(hidden[:, :1], hidden, mask, query, key, value, 2, Dropout())
    queries, keys, values = (layer(hidden).view(3, 5, 2, 4).transpose(1, 2) for layer in layers)
    weights = ((queries[:, :, 0, None] @ keys.transpose(2, 3)) / 2 + mask[:, None]).softmax(-1)[:, :, 0] * kept
    expected = (weights[:, :, None] @ values).reshape(3, 1, 8)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, *(parameter for layer in layers for parameter in layer.parameters())]
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def text_by_text(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """``[tokens, heads, width]``, by torch."""
    parts = zip(*(each.split(LENGTHS.tolist()) for each in (query, key, value)), strict=True)
    texts = [
        F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in text), scale=scale).transpose(0, 1)
        for text in parts
    ]
    return torch.cat(texts)


@pytest.mark.parametrize("attend", [attend_by_groups, attend_nested])
def test_texts_in_one_row_see_themselves_alone(attend: Callable[..., torch.Tensor]) -> None:
    assert has_nested_attention(torch.device("cpu"))
    torch.manual_seed(0)
    inputs = tuple(torch.randn(int(LENGTHS.sum()), 3, 8, requires_grad=True) for _ in range(3))
    found = attend(*inputs, Segments.of(LENGTHS), 0.7, 0.0)
    expected = text_by_text(*inputs, 0.7)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_in_bfloat16_under_autocast() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(int(LENGTHS.sum()), 2, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_by_groups(*inputs, Segments.of(LENGTHS), 0.4, 0.0)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), text_by_text(*inputs, 0.4), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_gradients_are_those_of_small_changes(probability: float) -> None:
    """Of the same dropout each time, in float64."""
    lengths = np.array([3, 18, 1])

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return attend_by_groups(*inputs, Segments.of(lengths), 0.5, probability)

    torch.manual_seed(0)
    inputs = tuple(torch.randn(22, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(attend, inputs)


def test_weights_are_dropped_in_one_row_too() -> None:
    torch.manual_seed(0)
    lengths = np.array([100, 150])
    query, key = torch.randn(250, 2, 8), torch.randn(250, 2, 8)
    value = torch.eye(250)[:, None, :].repeat(1, 2, 1)  # so that the outputs are the weights
    inputs = [each.transpose(0, 1)[None] for each in (query, key, value)]
    mask = mask_of_segments(Segments.of(lengths), torch.float32, torch.device("cpu"))
    weights, _ = attention(EVALUATED, *inputs, mask, dropout=0.25)
    dropped, _ = attention(TRAINED, *inputs, mask, dropout=0.25)
    inside = weights > 0
    assert int(inside.sum()) == 2 * (100**2 + 150**2)
    assert (dropped[inside] == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    is_kept = dropped != 0
    torch.testing.assert_close(dropped[is_kept], weights[is_kept] / 0.75)


def test_what_is_more_than_softmax_attention_is_refused() -> None:
    inputs = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    mask = mask_of_segments(Segments.of(np.array([5, 3])), torch.float32, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="position_bias"):
        attention(TRAINED, *inputs, mask, position_bias=torch.zeros(1, 2, 8, 8))
