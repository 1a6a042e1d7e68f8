"""Attention of models that train here: of padded texts, and of texts that stand one after the other in one row.

Models are told to use it by name, :data:`ATTENTION`, through transformers' ``AttentionInterface``. Whoever has texts in
one row gives the model the mask of :func:`mask_of_segments`, which says where each of them is.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask

from finetune.data.segments import Places, Segments
from finetune.dropout import dropped_out, keep_mask

ATTENTION = "finetune_attention"
OTHER_TERMS = ("position_bias", "softcap", "s_aux")  # of architectures that compute more than softmax attention


def mask_of_segments(segments: Segments, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A mask ``[1, 1, 1, 1]`` that hides nothing, with the segments as its attribute."""
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    mask.segments = segments  # type: ignore[attr-defined]
    return mask


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention.

    Args:
        module: the attention layer, for its mode.
        query: ``[rows, heads, tokens, width]``; ``key`` and ``value`` likewise, perhaps of fewer heads.
        attention_mask: additive, ``[rows, 1, tokens, tokens]``, or from :func:`mask_of_segments`.
        scaling: of the scores; default: 1 / square root of the width.
        dropout: share of the attention weights that is dropped in training.

    Returns:
        ``[rows, tokens, heads, width]``, and the attention weights where they exist.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    probability = dropout if module.training else 0.0
    segments: Segments | None = getattr(attention_mask, "segments", None)
    has_more = any(kwargs.get(name) is not None for name in OTHER_TERMS)
    if segments is not None:
        if has_more:
            raise NotImplementedError(f"attention with one of {', '.join(OTHER_TERMS)}")
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        attend = attend_by_groups if query.device.type == "cpu" else attend_nested
        return attend(queries, keys, values, segments, scale, probability)[None], None
    if query.device.type != "cpu" or not probability or has_more:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=probability, scaling=scale, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    scores = torch.matmul(query * scale, repeat_kv(key, groups).transpose(2, 3))
    if attention_mask is not None:
        scores = scores.add_(attention_mask.to(scores.dtype))
    weights = dropped_out(_softmax(scores), probability)
    return torch.matmul(weights, repeat_kv(value, groups)).transpose(1, 2).contiguous(), weights


def attend_from_first(
    first: torch.Tensor,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    query: nn.Linear,
    key: nn.Linear,
    value: nn.Linear,
    heads: int,
    dropout: nn.Module,
) -> torch.Tensor:
    """Self-attention of the first token of each text, which is all that is left of it in a last layer.

    Keys and values of the other tokens are not computed: a score ``q · (K h)`` is ``(Kᵀ q) · h``, and the weighted sum
    of values ``Σ w (V h)`` is ``V (Σ w h)``.

    Args:
        first: those tokens, ``[texts, 1, hidden]``.
        hidden: all tokens that they may see, ``[texts, tokens, hidden]``.
        mask: additive, ``[texts, 1, tokens]``.
        dropout: of the weights.

    Returns:
        ``[texts, 1, hidden]``.
    """

    def by_head(of_layer: torch.Tensor) -> torch.Tensor:  # [heads x width, …] -> [heads, width, …]
        return of_layer.view(heads, -1, *of_layer.shape[1:])

    queries: torch.Tensor = query(first[:, 0]).view(len(first), heads, -1)  # [texts, heads, width]
    queries = queries * queries.shape[-1] ** -0.5
    through_keys = torch.einsum("thw,hwi->thi", queries, by_head(key.weight))
    scores = torch.matmul(through_keys, hidden.transpose(1, 2))
    if key.bias is not None:  # the same for all tokens: it changes no weight, but has its gradient, which is 0
        scores = scores + (queries * by_head(key.bias)).sum(-1, keepdim=True)
    if mask is not None:
        scores = scores + mask
    weights = dropout(torch.softmax(scores, -1, dtype=_wide(scores.dtype)).to(hidden.dtype))  # [texts, heads, tokens]
    seen = torch.matmul(weights, hidden)
    found = torch.einsum("thi,hwi->thw", seen, by_head(value.weight))
    if value.bias is not None:
        found = found + by_head(value.bias) * weights.sum(-1, keepdim=True)
    attended: torch.Tensor = found.reshape(len(first), 1, -1)
    return attended


def trains_in_one_row(device: torch.device) -> bool:
    """Whether texts can be taken apart in training, with dropout, on this device."""
    return device.type == "cpu" or has_nested_attention(device)


def has_nested_attention(device: torch.device) -> bool:
    """Whether :func:`attend_nested` works; torch says only once that nested tensors are young, and says it in here."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    devices = [device] if device.type == "cuda" else []
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            warnings.simplefilter("ignore")
            values = torch.randn(16, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            segments = Segments.of(np.array([10, 6])).to(device)
            attend_nested(values, values, values, segments, 0.1, 0.1).sum().backward()  # type: ignore[no-untyped-call]
    except Exception:  # of kernels that are missing here
        return False
    finally:
        logger.setLevel(level)
    return True


def attend_nested(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float, probability: float
) -> torch.Tensor:
    """Variable-length attention of torch, a flash kernel on GPUs; all ``[tokens, heads, width]``.

    Through nested tensors, since ``torch.nn.attention.varlen`` knows no dropout.
    """

    def nested(values: torch.Tensor) -> torch.Tensor:
        shortest, longest = segments.shortest, segments.longest  # or torch would read them from the GPU
        return torch.nested.nested_tensor_from_jagged(
            values.contiguous(), segments.boundaries, min_seqlen=shortest, max_seqlen=longest
        ).transpose(1, 2)

    found = F.scaled_dot_product_attention(
        nested(query), nested(key), nested(value), dropout_p=probability, scale=scale
    )
    return found.transpose(1, 2).values()


def attend_by_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float, probability: float
) -> torch.Tensor:
    """The same for CPUs: texts of similar length are padded together and computed group by group."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(dtype) for each in (query, key, value))
    places = segments.places(query.shape[1])
    found: torch.Tensor = _ByGroups.apply(query, key, value, places, scale, probability)  # type: ignore[no-untyped-call]
    return found


class _ByGroups(torch.autograd.Function):
    """Scores, softmax, dropout and sum of each group; one node, since each group would be a dozen."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        places: Places,
        scale: float,
        probability: float,
    ) -> torch.Tensor:
        padded = [_taken(each, places) for each in (query, key, value)]
        padded[0].mul_(scale)
        found = torch.empty_like(padded[2])
        counts = [block.scores for block in places.blocks]
        kept = torch.split(keep_mask(sum(counts), 1 - probability, query.dtype), counts) if probability else ()
        saved: list[torch.Tensor] = []
        parts = zip(places.blocks, *map(places.split, [*padded, found]), strict=True)
        for number, (block, queries, keys, values, out) in enumerate(parts):
            scores = torch.bmm(queries, keys.transpose(1, 2)).to(_wide(query.dtype))
            if block.mask is not None:
                scores += block.mask
            weights = torch.softmax(scores, -1).to(query.dtype)
            saved.append(weights)
            if kept:
                weights = weights * kept[number].view_as(weights)
                saved.append(weights)
            torch.bmm(weights, values, out=out)
        ctx.places, ctx.scale, ctx.heads, ctx.has_dropout = places, scale, query.shape[1], bool(kept)
        ctx.save_for_backward(*padded, *kept, *saved)
        return _placed(found, places, query.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        places: Places = ctx.places
        count = len(places.blocks)
        queries, keys, values, *rest = ctx.saved_tensors
        kept, saved = (rest[:count], rest[count:]) if ctx.has_dropout else ((), rest)
        padded = _taken(gradient, places).index_fill_(0, places.padding, 0)  # or padding would pass some on
        found = [torch.empty_like(each) for each in (queries, keys, values)]
        parts = zip(*map(places.split, [queries, keys, values, padded, *found]), strict=True)
        for number, (q, k, v, g, to_q, to_k, to_v) in enumerate(parts):
            weights, dropped = saved[2 * number : 2 * number + 2] if kept else (saved[number], saved[number])
            torch.bmm(dropped.transpose(1, 2), g, out=to_v)
            to_weights = torch.bmm(g, v.transpose(1, 2))
            if kept:
                to_weights *= kept[number].view_as(to_weights)
            to_scores = _softmax_backward(to_weights, weights)
            torch.bmm(to_scores, k, out=to_q)
            torch.bmm(to_scores.transpose(1, 2), q, out=to_k)
        found[0].mul_(ctx.scale)
        return (*(_placed(each, places, ctx.heads) for each in found), None, None, None)


def _softmax_backward(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In float32: torch's kernel for bfloat16 takes several times as long where lengths are no multiple of 32."""
    wide = _wide(weights.dtype)
    return torch._softmax_backward_data(gradient.to(wide), weights.to(wide), -1, wide).to(weights.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _taken(values: torch.Tensor, places: Places) -> torch.Tensor:
    """``[tokens, heads, width]`` -> ``[padded tokens x heads, width]``."""
    return values.reshape(-1, values.shape[-1]).index_select(0, places.take)


def _placed(values: torch.Tensor, places: Places, heads: int) -> torch.Tensor:
    """The other way round."""
    return values.index_select(0, places.place).view(-1, heads, values.shape[-1])


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(scores, -1, dtype=_wide(scores.dtype)).to(scores.dtype)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _softmax_backward(gradient, *ctx.saved_tensors)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    weights: torch.Tensor = _Softmax.apply(scores)  # type: ignore[no-untyped-call]
    return weights


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)
