"""Texts that share rows, and models that compute no more than their heads read: tried out before they are relied on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.attention import trains_in_one_row
from finetune.data.batching import BatchSizes, epoch_order, micro_batches
from finetune.data.loader import Collator, Examples, PackedRows
from finetune.errors import ConfigError
from finetune.first_tokens import FirstTokens, Handle
from finetune.model import first_position

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
    ways = (hooks.shorten_last_layer, hooks.shorten_rest_of_last_layer)
    is_short = any(trial.obstacle(None, each) is None for each in ways)
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
