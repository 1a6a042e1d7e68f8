"""Texts -> token ids, computed once and cached on disk by content, tokenizer and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.errors import ConfigError

CACHE_VERSION = 1  # part of every cache key: raise it when what is stored changes


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of a split, one row a text, in file order.

    ``dataset`` has ``input_ids`` and, for pairs, ``token_type_ids`` where the tokenizer gives them; ``lengths`` int32
    ``[rows]`` counts the tokens kept, ``full_lengths`` those before cutting, special tokens included in both.
    """

    dataset: datasets.Dataset
    lengths: NDArray[np.int32]
    full_lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def truncated_rows(self) -> int:
        """Rows that were cut."""
        return int((self.full_lengths > self.lengths).sum())

    @property
    def truncated_tokens(self) -> int:
        """Tokens that were cut off."""
        return int((self.full_lengths - self.lengths).sum())


def tokenize(
    texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, *, max_length: int, cache_dir: str | None = None
) -> TokenizedTexts:
    """Tokenise the columns ``text`` and, where present, ``text_pair`` (as true pairs).

    Args:
        texts: strings; its fingerprint is taken as its content's.
        tokenizer: any HF tokenizer.
        max_length: tokens kept, special tokens included; pairs lose from their longer text first.
        cache_dir: where the result is kept; default: the datasets cache.

    Raises:
        ConfigError: ``max_length`` leaves no room for text; tokenizers leave texts uncut then, or cut them away.
    """
    columns = [name for name in ("text", "text_pair") if name in texts.column_names]
    special = tokenizer.num_special_tokens_to_add(pair="text_pair" in columns)
    if max_length <= special:
        raise ConfigError(
            f"data.max_length is {max_length}, but each input has {special} special tokens: it must be at least "
            f"{special + 1}"
        )
    texts = texts.select_columns(columns)
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "finetune"
    folder.mkdir(parents=True, exist_ok=True)
    key = _cache_key(texts, tokenizer, max_length)
    dataset = texts.map(
        _encode,
        batched=True,
        batch_size=1000,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns=columns,
        cache_file_name=str(folder / f"tokens-{key}.arrow"),
        new_fingerprint=key,
        features=_features(tokenizer, pairs="text_pair" in columns),
    )
    lengths, full_lengths = (_column(dataset, name) for name in ("length", "full_length"))
    return TokenizedTexts(dataset.remove_columns(["length", "full_length"]), lengths, full_lengths)


def _encode(
    batch: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list[Any]]:
    texts, pairs = batch["text"], batch.get("text_pair")
    # Padding and truncation are passed on every call: a tokenizer.json may have either baked in.
    whole = tokenizer(texts, pairs, truncation=False, padding=False, verbose=False)
    columns = [name for name in ("input_ids", "token_type_ids") if name in whole and (pairs or name == "input_ids")]
    encoded: dict[str, list[Any]] = {name: list(whole[name]) for name in columns}
    encoded["full_length"] = [len(ids) for ids in encoded["input_ids"]]
    too_long = [row for row, length in enumerate(encoded["full_length"]) if length > max_length]
    if too_long:
        parts = ([column[row] for row in too_long] if column else None for column in (texts, pairs))
        cut = tokenizer(*parts, truncation=True, max_length=max_length, padding=False)
        for name in columns:
            for row, ids in zip(too_long, cut[name], strict=True):
                encoded[name][row] = ids
    encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
    return encoded


def _features(tokenizer: PreTrainedTokenizerBase, pairs: bool) -> datasets.Features:
    columns = {"input_ids": datasets.List(datasets.Value("int32"))}
    if pairs and "token_type_ids" in tokenizer("a", "b", truncation=False, padding=False):
        columns["token_type_ids"] = datasets.List(datasets.Value("int8"))
    return datasets.Features({**columns, "full_length": datasets.Value("int32"), "length": datasets.Value("int32")})


def _column(dataset: datasets.Dataset, name: str) -> NDArray[np.int32]:
    return np.asarray(dataset.data.column(name).to_numpy(), dtype=np.int32)


def _cache_key(texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """Hash of all that the token ids depend on."""
    if getattr(tokenizer, "is_fast", False):
        # The settings for padding and truncation change with every call, and are passed on every call.
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content["padding"] = content["truncation"] = None
        state = json.dumps(content, sort_keys=True)
    else:
        state = json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)], default=str)
    special = json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True)
    kind = [type(tokenizer).__name__, tokenizer.truncation_side, getattr(tokenizer, "split_special_tokens", False)]
    parts = [CACHE_VERSION, texts._fingerprint, texts.column_names, kind, state, special, max_length]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
