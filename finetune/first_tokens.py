"""Hooks that spare a model what its head does not read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from finetune.attention import ATTENTION, attend_from_first, mask_of_segments
from finetune.data.segments import LENGTHS_OF, Segments

# What stands behind the attention of a layer, and is given all that the rest of it works on: in BERT and in DistilBERT.
AFTER_ATTENTION = ("attention.output", "sa_layer_norm")
PACKED_INPUTS = {"segment_ids", "segments", "first_tokens", "position_ids", "token_type_ids"}


class Handle(Protocol):
    """What takes a change of a model back."""

    def remove(self) -> None:
        """Call it once."""


@dataclass
class _OwnAttention:
    model: PreTrainedModel
    before: str

    def remove(self) -> None:
        self.model.set_attn_implementation(self.before)


@dataclass
class _OwnForward:
    module: nn.Module

    def remove(self) -> None:
        del self.module.forward  # that of its class is left


class FirstTokens:
    """Hooks that spare a model what its head does not read, which is all but the first token of each text.

    No architecture is special-cased and none is changed; :func:`resolve_packing` finds out which can do with what.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._packed: dict[str, Any] = {}  # of the forward pass that runs, where its inputs are packed

    def accept_packed_inputs(self) -> list[RemovableHandle]:
        """Take the packed micro-batches of :class:`finetune.data.loader.Collator` beside padded ones.

        ``segment_ids`` become a block-diagonal attention mask, and the model's own head is handed the first tokens,
        ``[texts, 1, hidden]``, as if each text stood in a row of its own.
        """
        encoder: nn.Module = self._model.base_model
        return [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, always_call=True),
            encoder.register_forward_pre_hook(self._before_encoder, with_kwargs=True),
            encoder.register_forward_hook(self._after_encoder),
        ]

    def shorten_last_layer(self) -> list[Handle]:
        """Compute the last layer, attention and all, for the first tokens alone.

        Returns:
            No hook for architectures that are built in another way than BERT.
        """
        last: Any = self._last_layer()
        try:
            attention, after = last.attention.self, last.attention.output
            query, key, value = attention.query, attention.key, attention.value
            heads, dropout = attention.num_attention_heads, attention.dropout
        except AttributeError:
            return []
        if not all(isinstance(layer, nn.Linear) for layer in (query, key, value)):
            return []

        def forward(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
            hidden_states = hidden_states.to(_compute_dtype(self._model))
            first = self._first(hidden_states)
            texts, mask = self._texts(hidden_states, attention_mask)
            return attend_from_first(first, texts, mask, query, key, value, heads, dropout), None

        attention.forward = forward
        return [_OwnForward(attention), after.register_forward_pre_hook(self._first_of_others)]

    def shorten_rest_of_last_layer(self) -> list[RemovableHandle]:
        """Compute what follows the attention of the last layer, most of it, for the first tokens alone.

        Returns:
            No hook for architectures that are built in another way than those this knows.
        """
        for name in AFTER_ATTENTION:
            with suppress(AttributeError):
                return [self._last_layer().get_submodule(name).register_forward_pre_hook(self._first_of_all)]
        return []

    def _last_layer(self) -> nn.Module:
        count = getattr(self._model.config, "num_hidden_layers", 0)
        stacks = [each for each in self._model.base_model.modules() if isinstance(each, nn.ModuleList)]
        return next((stack[-1] for stack in stacks if len(stack) == count > 0), nn.Module())

    def use_attention(self) -> list[Handle]:
        """Compute attention by :mod:`finetune.attention`, where the architecture lets it be chosen."""
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(ATTENTION)
        return [_OwnAttention(self._model, before)] if self._model.config._attn_implementation == ATTENTION else []

    def mask_on_device(self) -> list[RemovableHandle]:
        """Make the attention mask of padded texts here: transformers looks whether it can do without, and waits."""
        return [self._model.base_model.register_forward_pre_hook(self._mask_padding, with_kwargs=True)]

    def _mask_padding(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return None
        is_padding = mask[:, None, None, :] == 0
        return args, {**kwargs, "attention_mask": _additive(is_padding, _compute_dtype(self._model))}

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "first_tokens" in kwargs:
            self._packed = {name: kwargs.pop(name) for name in PACKED_INPUTS & set(kwargs)}
        return args, kwargs

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._packed = {}

    def _before_encoder(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._packed:
            return None
        dtype = _compute_dtype(self._model)
        if "segments" in self._packed:
            mask = mask_of_segments(self._packed["segments"], dtype, self._model.device)
        else:
            mask = block_diagonal_mask(self._packed["segment_ids"], dtype)
        own = {name: tensor for name, tensor in self._packed.items() if name in ("position_ids", "token_type_ids")}
        return args, {**kwargs, "attention_mask": mask, **own}

    def _after_encoder(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        if not self._packed or output.last_hidden_state.shape[1] == 1:  # the last layer may have seen to it
            return None
        output.last_hidden_state = self._first(output.last_hidden_state)
        if output.get("pooler_output") is not None:
            output.pooler_output = module.pooler(output.last_hidden_state)
        return output

    def _texts(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[rows, tokens, hidden]`` -> ``[texts, tokens, hidden]``, and what each first token sees of them.

        Where texts share rows, each has its own copy of its row; where all share one, they are padded.
        """
        dtype = hidden.dtype
        if not self._packed:
            if mask is not None and mask.dtype == torch.bool:
                mask = _additive(~mask, dtype)
            return hidden, None if mask is None else mask[:, 0, :1]
        first = self._packed["first_tokens"]
        segments: Segments | None = self._packed.get("segments")
        if segments is None:
            assert mask is not None
            return hidden.index_select(0, first // hidden.shape[1]), mask.flatten(0, 2).index_select(0, first)[:, None]
        count = len(first)
        lengths = segments.boundaries.diff()[:count, None]
        longest = -(-int(segments.lengths[:count].max()) // LENGTHS_OF) * LENGTHS_OF
        within = torch.arange(longest, device=hidden.device)
        is_padding = within >= lengths
        places = torch.where(is_padding, first[:, None], first[:, None] + within)
        texts = hidden[0].index_select(0, places.flatten()).view(*places.shape, -1)
        return texts, _additive(is_padding[:, None], dtype)

    def _first_of_others(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return args[0], *map(self._first, args[1:])

    def _first_of_all(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(map(self._first, args))

    def _first(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, tokens, hidden]`` -> ``[texts, 1, hidden]``."""
        if not self._packed:
            return hidden[:, :1]
        return hidden.reshape(-1, hidden.shape[-1])[self._packed["first_tokens"]].unsqueeze(1)


def block_diagonal_mask(segment_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask ``[rows, 1, tokens, tokens]``: 0 between tokens of one text, else the lowest number of ``dtype``.

    Args:
        segment_ids: int ``[rows, tokens]``, one number for each text of a row; padding counts as a text of its own.
        dtype: in which attention is computed.
    """
    is_other = segment_ids[:, None, :, None] != segment_ids[:, None, None, :]
    return _additive(is_other, dtype)


def _additive(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 for what can be seen, the lowest number for what is hidden."""
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return zeros.masked_fill_(is_hidden, torch.finfo(dtype).min)


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
