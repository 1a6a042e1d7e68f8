"""Texts that share rows, and models that compute no more than their heads read: tried out before they are relied on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.attention import ATTENTION, mask_of_segments, trains_in_one_row
from finetune.data.batching import BatchSizes, epoch_order, micro_batches
from finetune.data.loader import Collator, Examples, PackedRows
from finetune.errors import ConfigError
from finetune.model import first_position

# What stands behind the attention of a layer, and is given all that the rest of it works on: in BERT and in DistilBERT.
AFTER_ATTENTION = ("attention.output", "sa_layer_norm")
PACKED_INPUTS = {"segment_ids", "segments", "first_tokens", "position_ids", "token_type_ids"}
TRIED = 3  # texts of each split on which a model is tried
SAVING_WORTH = 0.03  # share of the computed tokens that packing has to save: its masks take time as well
SAMPLED_STEPS = 20
# Largest difference of logits, as a share of the largest logit: what the order of a sum changes, and what a text that
# sees its neighbours, or has other positions, exceeds.
SAME_IN_FLOAT32 = 1e-4
SAME_IN_HALF = 0.1


@dataclass(frozen=True)
class Packing:
    """Whether texts share rows, and why; whether the last layer is shortened."""

    rows: PackedRows | None
    reason: str
    has_short_last_layer: bool

    def describe(self) -> list[str]:
        """For the plan."""
        shortened = "the last layer is computed for the first token of each text, which is all that the head reads"
        return [self.reason, *([shortened] if self.has_short_last_layer else [])]


def resolve_packing(
    setting: Literal["auto", "on", "off"],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: Sequence[Examples],
    sizes: BatchSizes,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    is_compiled: bool = False,
) -> Packing:
    """Decide on ``train.packing``, and spare the model what its head does not read: :class:`FirstTokens`.

    Each is tried on a few rows first and left out where the outputs are not those of the model as it is.

    Args:
        setting: off; on; or auto: on where the model can do with it and where it saves enough.
        model: on its device, not wrapped.
        tokenizer: of the model.
        splits: the rows that it will compute; the first ones decide whether packing saves enough.
        sizes: of a step.
        autocast: enters the precision of the run.
        is_compiled: whether torch.compile is to translate the model, which these hooks are not made for.

    Raises:
        ConfigError: ``on``, and the model cannot do with it.
    """
    if is_compiled and setting != "on":
        return Packing(None, "off: the launch profile has the model compiled", has_short_last_layer=False)
    if is_compiled:
        raise ConfigError("train.packing is on, but the launch profile has the model compiled: use auto or off")
    trial = _Trial(model, tokenizer, splits, sizes, autocast)
    hooks = FirstTokens(model)
    trial.obstacle(None, hooks.mask_on_device)
    is_short = trial.obstacle(None, hooks.shorten_last_layer) is None
    if model.device.type == "cpu":
        trial.obstacle(None, hooks.use_attention)
    if setting == "off":
        return Packing(None, "off (train.packing)", is_short)
    rows = PackedRows(first_position(model))
    obstacle = trial.obstacle(rows, hooks.accept_packed_inputs)
    if obstacle and setting == "on":
        raise ConfigError(f"train.packing is on, but {obstacle}: use auto or off")
    if obstacle:
        return Packing(None, f"off: {obstacle}; texts of similar length are padded together", is_short)
    reason = "texts share rows"
    in_one = replace(rows, in_one=True)
    if trains_in_one_row(model.device) and trial.obstacle(in_one, hooks.use_attention) is None:
        rows, reason = in_one, "texts stand in one row, and attention takes them apart"
    if setting == "auto":
        before, after = (_computed_tokens(Collator(splits[0], tokenizer, each), sizes) for each in (None, rows))
        if after > (1 - SAVING_WORTH) * before:
            return Packing(None, f"off: it would save {max(0.0, 1 - after / before):.1%} of all tokens", is_short)
    return Packing(rows, reason, is_short)


def _computed_tokens(collate: Collator, sizes: BatchSizes) -> int:
    """Of the first steps of the first epoch, all processes together."""
    lengths, size, is_packed = collate.examples.texts.lengths, sizes.global_batch, collate.packing is not None
    order = epoch_order(len(lengths), 0, 0)[: SAMPLED_STEPS * size]
    steps = [order[start : start + size] for start in range(0, len(order), size)]
    rounds = (each for step in steps for each in micro_batches(step, sizes, lengths, is_packed=is_packed))
    return sum(collate.computed_tokens(part) for ranks in rounds for part in ranks)


def trial_rows(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """The shortest, a middle and the longest text: what a model does to one of another length shows in them."""
    return np.argsort(lengths, kind="stable")[[0, len(lengths) // 2, -1]]  # TRIED of them


class _Trial:
    """Compares the outputs for a few texts of each split with those of the model as it is."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: Sequence[Examples],
        sizes: BatchSizes,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._splits = splits
        self._sizes = sizes
        self._precisions = ((nullcontext, SAME_IN_FLOAT32), (autocast, SAME_IN_HALF))
        self._expected = [self._logits(None, precision) for precision, _ in self._precisions]

    def obstacle(self, packing: PackedRows | None, register: Callable[[], Sequence[Handle]]) -> str | None:
        """What keeps the model from working with such inputs and these hooks, which stay when nothing does."""
        name = type(self._model).__name__
        if any(split.texts.lengths.min() < 1 for split in self._splits):
            return "some texts have no token at all"
        try:
            hooks = register()
        except ValueError:  # of transformers, where an architecture has an attention of its own
            hooks = []
        if not hooks:
            return f"{name} is built in another way"
        try:
            for (precision, same), expected in zip(self._precisions, self._expected, strict=True):
                difference = (self._logits(packing, precision) - expected).abs().max() / expected.abs().max()
                if not difference <= same:
                    break
            else:
                return None
            obstacle = f"{name} gives other outputs with it (by {float(difference):.1%})"
        except Exception as error:  # whatever a model makes of inputs that it was not written for
            obstacle = f"{name} cannot do with it ({type(error).__name__})"
        for hook in hooks:
            hook.remove()
        return obstacle

    def _logits(self, packing: PackedRows | None, precision: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
        """``[3 x splits, num_labels]``."""
        found = []
        with _evaluating(self._model), torch.no_grad(), precision():  # inference mode would spoil what models cache
            for split in self._splits:
                rows = trial_rows(split.texts.lengths)
                if packing is not None and packing.in_one:
                    rows = np.tile(rows, self._repeats(int(split.texts.lengths[rows].sum())))
                micro = Collator(split, self._tokenizer, packing)(rows)
                found.append(self._model(**micro.to(self._model.device).inputs).logits[-TRIED:].float())
        return torch.cat(found)

    def _repeats(self, tokens: int) -> int:
        """How often texts of so many tokens make a row that is longer than any text can be, as in training."""
        longest_text = int(getattr(self._model.config, "max_position_embeddings", None) or 512)
        return min(longest_text // tokens + 1, -(-self._sizes.per_device // TRIED))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(False)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


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

    def shorten_last_layer(self) -> list[RemovableHandle]:
        """Compute what follows the attention of the last layer, most of it, for the first tokens alone.

        Returns:
            No hook for architectures that are built in another way than those this knows.
        """
        count = getattr(self._model.config, "num_hidden_layers", 0)
        stacks = [each for each in self._model.base_model.modules() if isinstance(each, nn.ModuleList)]
        last = next((stack[-1] for stack in stacks if len(stack) == count > 0), nn.Module())
        for name in AFTER_ATTENTION:
            with suppress(AttributeError):
                return [last.get_submodule(name).register_forward_pre_hook(self._first_of_all)]
        return []

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
