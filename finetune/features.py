"""A frozen encoder's outputs, computed once and kept on disk: what is trained afterwards is the head alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPooling

from finetune.data.loader import Collator, EvalLoader, Examples, PackedRows
from finetune.distributed import on_every_process
from finetune.errors import DataError
from finetune.packing import trial_rows

CACHE_VERSION = 1  # part of every cache key: raise it when what is stored changes
SAME = 1e-2  # largest difference of logits, as a share of the largest logit: the order of sums, in bfloat16 too


class FrozenEncoder:
    """An encoder that is not trained, and takes its own outputs of an earlier pass in place of tokens.

    Args:
        model: on its device, not wrapped.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._encoder: Any = model.base_model
        self._features: torch.Tensor | None = None
        self._computed: torch.Tensor | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether its outputs never change: at most a pooler is trained, which comes after them."""
        trained = [name for name, parameter in self._encoder.named_parameters() if parameter.requires_grad]
        return all(name.startswith("pooler.") for name in trained)

    def accept_features(self) -> None:
        """Let the model take ``features`` float32 ``[examples, hidden]`` for its inputs, beside tokens."""
        forward = self._encoder.forward

        def recalled(*args: Any, **kwargs: Any) -> Any:
            if self._features is None:
                return forward(*args, **kwargs)
            hidden = self._features.unsqueeze(1)
            pooler: nn.Module | None = getattr(self._encoder, "pooler", None)
            return BaseModelOutputWithPooling(hidden, None if pooler is None else pooler(hidden))

        self._encoder.forward = recalled
        self._model.register_forward_pre_hook(self._take_features, with_kwargs=True)
        self._model.register_forward_hook(self._forget, always_call=True)

    def features(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the encoder makes of the first token of each text, ``[examples, hidden]``."""
        handle = self._encoder.register_forward_hook(self._keep)
        try:
            self._model(**inputs)
        finally:
            handle.remove()
        assert self._computed is not None
        return self._computed

    def _take_features(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._features = kwargs.pop("features", None)
        return args, kwargs

    def _forget(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._features = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._computed = output.last_hidden_state[:, 0].float()


def compute_features(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: list[Examples],
    *,
    packing: PackedRows | None,
    batch_size: int,
    cache_dir: str | None,
    local_rank: int,
    local_processes: int,
) -> list[Examples] | None:
    """The splits with their ``features``, which the model takes from now on; a collective.

    The processes of a machine share the work; what they find is kept in the datasets cache, by the contents of the
    texts and of the encoder, the precision and the version of this program.

    Returns:
        None for a model that does not take them, or would give other outputs with them.

    Raises:
        DataError: they cannot be written.
    """
    encoder = FrozenEncoder(model)
    if not encoder.is_fixed:
        return None
    model.train(False)
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "finetune"
    weights = on_every_process(accelerator, lambda: _digest(model))
    found = []
    for split in splits:
        parts = [CACHE_VERSION, weights, accelerator.mixed_precision, split.texts.dataset._fingerprint]
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        path = folder / f"features-{key}.npy"
        loader = EvalLoader(
            split,
            tokenizer,
            batch_size,
            rank=local_rank,
            num_processes=local_processes,
            device=accelerator.device,
            packing=packing,
        )
        is_there = [path.is_file()]
        if not all(gather_object(is_there) if accelerator.num_processes > 1 else is_there):
            _write(accelerator, encoder, loader, path, int(model.config.hidden_size))
        found.append(replace(split, features=np.load(path, mmap_mode="r")))
    encoder.accept_features()
    plain, recalled = Collator(splits[0], tokenizer), Collator(found[0], tokenizer)
    rows = trial_rows(splits[0].texts.lengths)
    same = on_every_process(accelerator, lambda: _same_logits(model, plain, recalled, rows, accelerator.autocast))
    return found if same else None


def _same_logits(
    model: Any,
    plain: Collator,
    recalled: Collator,
    rows: NDArray[np.int64],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> bool:
    try:
        with torch.no_grad(), autocast():
            expected, found = (
                model(**collate(rows).to(model.device).inputs).logits.float() for collate in (plain, recalled)
            )
    except Exception:  # whatever a head makes of inputs that it was not written for
        return False
    return bool((found - expected).abs().max() <= SAME * expected.abs().max())


def _write(accelerator: Accelerator, encoder: FrozenEncoder, loader: EvalLoader, path: Path, hidden: int) -> None:
    rows = len(loader.examples)
    part = path.with_suffix(f".{os.environ.get('MASTER_PORT', os.getpid())}.part")

    def reserve() -> None:
        if not accelerator.is_local_main_process:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(rows, hidden))
            del whole
            with part.open("r+b") as file:  # or a full disk would end the process at some page instead of with an error
                os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DataError(
                f"the outputs of the frozen encoder, {rows * hidden * 4 / 1e6:,.0f} MB, cannot be written to "
                f"{path.parent}: {error.strerror}: give data.cache_dir a place on another disk"
            ) from error

    def fill() -> None:
        features = np.lib.format.open_memmap(part, mode="r+")
        with torch.no_grad(), accelerator.autocast():
            for batch_rows, batch in loader:
                features[batch_rows] = encoder.features(batch.inputs).cpu().numpy()
        features.flush()

    def publish() -> None:
        if accelerator.is_local_main_process:
            part.replace(path)

    for work in (reserve, fill, publish):
        on_every_process(accelerator, work)


def _digest(model: PreTrainedModel) -> str:
    """Of all weights of the encoder but its pooler."""
    digest = hashlib.sha256(repr(model.config.to_dict()).encode())
    for name, tensor in sorted(model.base_model.state_dict().items()):
        if not name.startswith("pooler."):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
