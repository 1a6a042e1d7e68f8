"""Texts -> token ids, computed once and cached on disk by content, tokenizer and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
CACHE_VERSION = 3  # part of every cache key: raise it when what is stored changes


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

    def describe_cut(self) -> str:
        """What was cut, in words."""
        rows, tokens = self.truncated_rows / len(self), self.truncated_tokens / int(self.full_lengths.sum())
        return f"{self.truncated_rows:,} rows ({rows:.1%}) are cut and lose {tokens:.1%} of all tokens"


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
    # Padding and truncation are passed on every call: a tokenizer.json may have either baked in. What is not stored is
    # not asked for either: turning it into lists took a third of the time.
    whole = tokenizer(
        texts,
        pairs,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=None if pairs else False,
        verbose=False,
    )
    columns = {name: whole[name] for name in ("input_ids", "token_type_ids") if name in whole}
    full_lengths = list(map(len, columns["input_ids"]))
    for row in (row for row, length in enumerate(full_lengths) if length > max_length):
        if whole.is_fast:
            _cut(columns, whole, row, max_length, truncation)
        else:
            cut = _cut_in_python(tokenizer, texts[row], pairs[row] if pairs else None, max_length, truncation)
            for name, column in columns.items():
                column[row] = cut[name]
    return {**columns, "full_length": full_lengths, "length": list(map(len, columns["input_ids"]))}


def _cut(
    columns: Mapping[str, list[list[int]]], whole: BatchEncoding, row: int, max_length: int, truncation: Truncation
) -> None:
    """Shorten a row of all columns to ``max_length``; special tokens keep their places."""
    text_of_token = whole.sequence_ids(row)  # None for special tokens
    lengths = text_of_token.count(0), text_of_token.count(1)
    room = max_length - (len(text_of_token) - sum(lengths))
    shares = shared_room(*lengths, room, is_fast=True)
    for text, (length, share) in reversed(list(enumerate(zip(lengths, shares, strict=True)))):
        if share < length:
            start, lost = text_of_token.index(text), lost_tokens(length, share, truncation)
            for column in columns.values():
                del column[row][start + lost.start : start + lost.stop]


def _cut_in_python(
    tokenizer: PreTrainedTokenizerBase, text: str, pair: str | None, max_length: int, truncation: Truncation
) -> BatchEncoding:
    """The same for a tokenizer written in Python, which does not tell which text a token is of."""
    parts = [
        tokenizer(part, add_special_tokens=False, truncation=False, padding=False, verbose=False)["input_ids"]
        for part in (text, pair)
        if part is not None
    ]
    room = max_length - tokenizer.num_special_tokens_to_add(pair=pair is not None)
    shares = shared_room(len(parts[0]), len(parts[1]) if pair is not None else 0, room, is_fast=False)
    for ids, share in zip(parts, shares, strict=False):
        del ids[lost_tokens(len(ids), share, truncation)]
    cut: BatchEncoding = tokenizer.prepare_for_model(*parts, truncation=False, padding=False, verbose=False)
    return cut


def shared_room(first: int, second: int, room: int, *, is_fast: bool) -> tuple[int, int]:
    """How many of their tokens the texts of a pair keep, which have more than ``room`` together.

    The longer one loses first, as in HF's ``longest_first``. The odd token of two texts that are both cut goes to the
    longer one in fast tokenizers and to the first one in those written in Python, as when they cut by themselves.
    """
    kept = min(first, room // 2) if is_fast and first <= second else min(first, room - min(second, room // 2))
    return kept, room - kept


def lost_tokens(length: int, share: int, truncation: Truncation) -> slice:
    """The tokens that a text of ``length`` tokens loses when it keeps ``share`` of them."""
    head = {"head": share, "tail": 0, "head_tail": round(HEAD_SHARE * share)}[truncation]
    return slice(head, length - (share - head))


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
