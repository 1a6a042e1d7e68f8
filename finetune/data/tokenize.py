"""Texts -> token ids, computed once and cached on disk by content, tokenizer and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from finetune.errors import ConfigError

Truncation = Literal["head", "tail", "head_tail"]
HEAD_SHARE = 128 / 510  # of what head_tail keeps of a text: Sun et al. 2019 (arXiv:1905.05583), section 5.3.1
CACHE_VERSION = 2  # part of every cache key: raise it when what is stored changes


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
    texts: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    truncation: Truncation = "head",
    cache_dir: str | None = None,
) -> TokenizedTexts:
    """Tokenise the columns ``text`` and, where present, ``text_pair`` (as true pairs).

    Args:
        texts: strings; its fingerprint is taken as its content's.
        tokenizer: any HF tokenizer.
        max_length: tokens kept, special tokens included; pairs lose from their longer text first.
        truncation: what is kept of a longer text: its beginning, its end, or a quarter from its beginning and the
            rest from its end (Sun et al. 2019, arXiv:1905.05583).
        cache_dir: where the result is kept; default: the datasets cache.

    Raises:
        ConfigError: ``max_length`` leaves no room for text; or the tokenizer cannot tell the texts of a pair apart.
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
    if "text_pair" in columns and not tokenizer.is_fast and truncation == "head_tail":
        raise ConfigError(
            f"data.truncation head_tail: {type(tokenizer).__name__} does not tell which text of a pair a token is of: "
            "use head or tail"
        )
    key = _cache_key(texts, tokenizer, max_length, truncation)
    dataset = texts.map(
        _encode,
        batched=True,
        batch_size=1000,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length, "truncation": truncation},
        remove_columns=columns,
        cache_file_name=str(folder / f"tokens-{key}.arrow"),
        new_fingerprint=key,
        features=_features(tokenizer, pairs="text_pair" in columns),
    )
    lengths, full_lengths = (_column(dataset, name) for name in ("length", "full_length"))
    return TokenizedTexts(dataset.remove_columns(["length", "full_length"]), lengths, full_lengths)


def _encode(
    batch: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerBase, max_length: int, truncation: Truncation
) -> dict[str, list[Any]]:
    texts, pairs = batch["text"], batch.get("text_pair")
    # Padding and truncation are passed on every call: a tokenizer.json may have either baked in.
    whole = tokenizer(
        texts, pairs, truncation=False, padding=False, return_special_tokens_mask=not tokenizer.is_fast, verbose=False
    )
    columns = [name for name in ("input_ids", "token_type_ids") if name in whole and (pairs or name == "input_ids")]
    encoded: dict[str, list[Any]] = {name: list(whole[name]) for name in columns}
    encoded["full_length"] = [len(ids) for ids in encoded["input_ids"]]
    for row, length in enumerate(encoded["full_length"]):
        if length > max_length:
            kept = kept_positions(_texts_of_tokens(whole, row), max_length, truncation)
            for name in columns:
                encoded[name][row] = [encoded[name][row][position] for position in kept]
    encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
    return encoded


def _texts_of_tokens(whole: BatchEncoding, row: int) -> Sequence[int | None]:
    """For each token the text that it is of, 0 or 1; None for special tokens."""
    if whole.is_fast:
        return whole.sequence_ids(row)
    return [None if is_special else 0 for is_special in whole["special_tokens_mask"][row]]


def kept_positions(texts_of_tokens: Sequence[int | None], max_length: int, truncation: Truncation) -> list[int]:
    """Positions of the tokens that stay when an input is cut to ``max_length``; special tokens always do.

    Args:
        texts_of_tokens: for each token the text that it is of, 0 or 1; None for special tokens.
        max_length: tokens to keep, of an input that has more.
        truncation: which tokens of each text stay.
    """
    positions = [[at for at, text in enumerate(texts_of_tokens) if text == which] for which in (0, 1)]
    kept = {at for at, text in enumerate(texts_of_tokens) if text is None}
    shares = _shared(len(positions[0]), len(positions[1]), max_length - len(kept))
    for own, count in zip(positions, shares, strict=True):
        head = {"head": count, "tail": 0, "head_tail": round(HEAD_SHARE * count)}[truncation]
        kept.update(own if count == len(own) else [*own[:head], *own[len(own) - (count - head) :]])
    return sorted(kept)


def _shared(first: int, second: int, budget: int) -> tuple[int, int]:
    """How many tokens each text of a pair keeps of ``budget``: the longer one loses first, as in HF's longest_first."""
    if second < first:
        return _shared(second, first, budget)[::-1]
    kept = first if 2 * first <= budget else budget // 2
    return kept, min(second, budget - kept)


def _features(tokenizer: PreTrainedTokenizerBase, pairs: bool) -> datasets.Features:
    columns = {"input_ids": datasets.List(datasets.Value("int32"))}
    if pairs and "token_type_ids" in tokenizer("a", "b", truncation=False, padding=False):
        columns["token_type_ids"] = datasets.List(datasets.Value("int8"))
    return datasets.Features({**columns, "full_length": datasets.Value("int32"), "length": datasets.Value("int32")})


def _column(dataset: datasets.Dataset, name: str) -> NDArray[np.int32]:
    return np.asarray(dataset.data.column(name).to_numpy(), dtype=np.int32)


def _cache_key(
    texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, truncation: Truncation
) -> str:
    """Hash of all that the token ids depend on."""
    if getattr(tokenizer, "is_fast", False):
        # The settings for padding and truncation change with every call, and are passed on every call.
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content["padding"] = content["truncation"] = None
        state = json.dumps(content, sort_keys=True)
    else:
        state = json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)], default=str)
    special = json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True)
    kind = [type(tokenizer).__name__, getattr(tokenizer, "split_special_tokens", False)]
    parts = [CACHE_VERSION, texts._fingerprint, texts.column_names, kind, state, special, max_length, truncation]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
