"""Token ids against the tokenizer called on each text alone; what is cut; when the cache is used."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS, make_tokenizer, write_tsv
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer, CanineTokenizer

import finetune.data.tokenize as module
from finetune.data.tokenize import TokenizedTexts, tokenize
from finetune.data.tsv import ReadOptions, read_table
from finetune.errors import ConfigError

TEXTS = ["good film", "the book was a bad book", "好书 and not 坏", "unseen words", "very " * 30 + "good", "good"]
PAIRS = ["a", "very poor film", "坏", "the " * 20, "not good", "and"]


@pytest.fixture(scope="module", params=["bert", "roberta"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return make_tokenizer(request.param)


@pytest.fixture
def bert_tokenizer() -> Any:
    return make_tokenizer("bert")


def rows(folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None, name: str = "rows.tsv") -> Any:
    """A data set read from a file with these texts."""
    columns = [texts, *([pairs] if pairs else []), ["x"] * len(texts)]
    header = ["text", *(["text_pair"] if pairs else []), "label"]
    path = write_tsv(folder / name, list(zip(*columns, strict=True)), header)
    options = ReadOptions(text_pair_column="text_pair" if pairs else None)
    return read_table(str(path), options, cache_dir=str(folder / "cache")).dataset


def ids_of(tokenized: TokenizedTexts) -> list[list[int]]:
    return list(tokenized.dataset["input_ids"])


@pytest.mark.parametrize("max_length", [3, 8, 64])
def test_ids_equal_those_of_each_text_alone(tmp_path: Path, tokenizer: Any, max_length: int) -> None:
    tokenized = tokenize(rows(tmp_path, TEXTS), tokenizer, max_length=max_length, cache_dir=str(tmp_path))
    alone = [tokenizer(text, truncation=True, max_length=max_length, padding=False)["input_ids"] for text in TEXTS]
    whole = [tokenizer(text, truncation=False, padding=False)["input_ids"] for text in TEXTS]
    assert ids_of(tokenized) == alone
    assert tokenized.dataset.column_names == ["input_ids"]
    assert tokenized.lengths.tolist() == list(map(len, alone))
    assert tokenized.full_lengths.tolist() == list(map(len, whole))
    assert len(tokenized) == len(TEXTS)


def test_what_is_cut_by_hand(tmp_path: Path, bert_tokenizer: Any) -> None:
    """[CLS] and [SEP] come to each of 1, 3, 4, and 9 words; five tokens are kept."""
    texts = ["good", "good film and", "not a good film", "the book was not good and the film was"]
    tokenized = tokenize(rows(tmp_path, texts), bert_tokenizer, max_length=5, cache_dir=str(tmp_path))
    assert tokenized.lengths.tolist() == [3, 5, 5, 5]
    assert tokenized.full_lengths.tolist() == [3, 5, 6, 11]
    assert (tokenized.truncated_rows, tokenized.truncated_tokens) == (2, 1 + 6)
    words = [bert_tokenizer.convert_ids_to_tokens(ids) for ids in ids_of(tokenized)]
    assert words[2] == ["[CLS]", "not", "a", "good", "[SEP]"]
    assert words[3] == ["[CLS]", "the", "book", "was", "[SEP]"]


@pytest.mark.parametrize("max_length", [7, 12, 64])
def test_pairs_are_true_pairs(tmp_path: Path, tokenizer: Any, max_length: int) -> None:
    tokenized = tokenize(rows(tmp_path, TEXTS, PAIRS), tokenizer, max_length=max_length, cache_dir=str(tmp_path))
    alone = [
        tokenizer(text, pair, truncation="longest_first", max_length=max_length, padding=False)
        for text, pair in zip(TEXTS, PAIRS, strict=True)
    ]
    assert ids_of(tokenized) == [each["input_ids"] for each in alone]
    if "token_type_ids" in alone[0]:
        assert list(tokenized.dataset["token_type_ids"]) == [each["token_type_ids"] for each in alone]
    else:
        assert tokenized.dataset.column_names == ["input_ids"]


def test_a_pair_by_hand(tmp_path: Path, bert_tokenizer: Any) -> None:
    data = rows(tmp_path, ["good film", "good"], ["bad", "the the the the the"])
    tokenized = tokenize(data, bert_tokenizer, max_length=7, cache_dir=str(tmp_path))
    words = [bert_tokenizer.convert_ids_to_tokens(ids) for ids in ids_of(tokenized)]
    assert words == [
        ["[CLS]", "good", "film", "[SEP]", "bad", "[SEP]"],
        ["[CLS]", "good", "[SEP]", "the", "the", "the", "[SEP]"],  # the longer one is cut
    ]
    assert list(tokenized.dataset["token_type_ids"]) == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
    assert tokenized.full_lengths.tolist() == [6, 9]


def test_truncation_and_padding_inside_tokenizer_json_do_nothing(tmp_path: Path, bert_tokenizer: Any) -> None:
    """As all-MiniLM has them: cut to 6 and filled up to 6."""
    bert_tokenizer.save_pretrained(tmp_path / "baked")
    path = tmp_path / "baked" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    baked = AutoTokenizer.from_pretrained(tmp_path / "baked")
    assert len(baked.backend_tokenizer.encode("good").ids) == 6  # it does have them
    data = rows(tmp_path, TEXTS)
    tokenized = tokenize(data, baked, max_length=20, cache_dir=str(tmp_path))
    expected = [bert_tokenizer(text, truncation=True, max_length=20)["input_ids"] for text in TEXTS]
    assert ids_of(tokenized) == expected
    assert [len(ids) for ids in expected] == [4, 8, 7, 4, 20, 3]
    assert tokenized.full_lengths.max() == 33


@pytest.mark.parametrize(("max_length", "pairs", "least"), [(1, False, 3), (2, False, 3), (1, True, 4), (3, True, 4)])
def test_no_room_for_text(tmp_path: Path, bert_tokenizer: Any, max_length: int, pairs: bool, least: int) -> None:
    data = rows(tmp_path, TEXTS, PAIRS if pairs else None)
    with pytest.raises(ConfigError, match=rf"data\.max_length is {max_length},.*at least {least}$"):
        tokenize(data, bert_tokenizer, max_length=max_length, cache_dir=str(tmp_path))
    tokenized = tokenize(data, bert_tokenizer, max_length=least, cache_dir=str(tmp_path))
    assert tokenized.lengths.tolist() == [min(least, length) for length in tokenized.full_lengths]


def test_rows_keep_their_order_over_many_batches(tmp_path: Path, bert_tokenizer: Any) -> None:
    texts = [" ".join(["good"] * (index % 7 + 1)) for index in range(2500)]
    tokenized = tokenize(rows(tmp_path, texts), bert_tokenizer, max_length=6, cache_dir=str(tmp_path))
    assert tokenized.full_lengths.tolist() == [index % 7 + 3 for index in range(2500)]
    assert tokenized.lengths.tolist() == [min(index % 7 + 3, 6) for index in range(2500)]


def test_a_selection_of_rows(tmp_path: Path, bert_tokenizer: Any) -> None:
    data = rows(tmp_path, TEXTS)
    selected = tokenize(data.select([5, 0]), bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    everything = tokenize(data, bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    assert ids_of(selected) == [ids_of(everything)[5], ids_of(everything)[0]]
    assert selected.lengths.tolist() == [3, 4]


class Called(Exception):
    pass


@pytest.fixture
def no_tokenising(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to make every later tokenisation raise :class:`Called`."""

    def refuse(*_: object, **__: object) -> Mapping[str, Any]:
        raise Called

    return lambda: monkeypatch.setattr(module, "_encode", refuse)


def test_the_second_call_comes_from_the_cache(tmp_path: Path, bert_tokenizer: Any, no_tokenising: Any) -> None:
    first = tokenize(rows(tmp_path, TEXTS), bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    no_tokenising()
    # Read anew, with a tokenizer loaded anew that has been used with other settings in between.
    again = make_tokenizer("bert")
    again("good film", truncation=True, max_length=3, padding="max_length")
    second = tokenize(rows(tmp_path, TEXTS), again, max_length=8, cache_dir=str(tmp_path))
    assert ids_of(second) == ids_of(first)
    assert second.lengths.tolist() == first.lengths.tolist()
    assert second.full_lengths.tolist() == first.full_lengths.tolist()


def test_what_changes_the_ids_is_tokenised_again(tmp_path: Path, bert_tokenizer: Any, no_tokenising: Any) -> None:
    data = rows(tmp_path, TEXTS)
    tokenize(data, bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    no_tokenising()
    tokenize(data, bert_tokenizer, max_length=8, cache_dir=str(tmp_path))  # the cache works

    with pytest.raises(Called):
        tokenize(data, bert_tokenizer, max_length=9, cache_dir=str(tmp_path))
    with pytest.raises(Called):
        tokenize(data, make_tokenizer("roberta"), max_length=8, cache_dir=str(tmp_path))
    with pytest.raises(Called):
        tokenize(rows(tmp_path / "other", [*TEXTS[:-1], "bad"]), bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    with pytest.raises(Called):
        tokenize(data.select([0, 1]), bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    with pytest.raises(Called):
        tokenize(rows(tmp_path / "pairs", TEXTS, PAIRS), bert_tokenizer, max_length=8, cache_dir=str(tmp_path))

    changed = make_tokenizer("bert")
    changed.split_special_tokens = True
    with pytest.raises(Called):
        tokenize(data, changed, max_length=8, cache_dir=str(tmp_path))
    grown = make_tokenizer("bert")
    grown.add_tokens(["unseen"])
    with pytest.raises(Called):
        tokenize(data, grown, max_length=8, cache_dir=str(tmp_path))


def test_the_side_that_a_tokenizer_cuts_by_itself_does_not_count(tmp_path: Path, bert_tokenizer: Any) -> None:
    data = rows(tmp_path, ["good film bad book"])
    bert_tokenizer.truncation_side = "left"
    cut = {
        how: tokenize(data, bert_tokenizer, max_length=4, truncation=how, cache_dir=str(tmp_path))  # type: ignore[arg-type]
        for how in ("head", "tail", "head_tail")
    }
    words = {how: bert_tokenizer.convert_ids_to_tokens(ids_of(each)[0]) for how, each in cut.items()}
    assert words == {
        "head": ["[CLS]", "good", "film", "[SEP]"],
        "tail": ["[CLS]", "bad", "book", "[SEP]"],
        "head_tail": ["[CLS]", "good", "book", "[SEP]"],  # a quarter of two, rounded
    }


@cache
def shared_tokenizer(kind: str) -> Any:
    """One for all examples of a test; byt5 and canine are written in Python."""
    python: dict[str, Any] = {"byt5": ByT5Tokenizer, "canine": CanineTokenizer}
    return python[kind]() if kind in python else make_tokenizer(kind)


def word_lists(min_size: int = 0) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(["good", "film", "好", "unseen"]), min_size=min_size, max_size=12)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "byt5", "canine"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_head_and_tail_are_those_of_the_tokenizer(kind: str, data: st.DataObject) -> None:
    """As its own truncation cuts, on either side, single texts and pairs."""
    tokenizer = shared_tokenizer(kind)
    # Those in Python that cut from the left forget the special token of an empty second text.
    words = word_lists(min_size=0 if tokenizer.is_fast else 1).map(" ".join)
    texts = data.draw(st.lists(words, min_size=1, max_size=3))
    pairs = data.draw(st.none() | st.lists(words, min_size=len(texts), max_size=len(texts)))
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    max_length = data.draw(st.integers(special + 1, 30))
    for how, side in (("head", "right"), ("tail", "left")):
        encoded = module._encode({"text": texts, **({"text_pair": pairs} if pairs else {})}, tokenizer, max_length, how)
        tokenizer.truncation_side = side
        expected = tokenizer(texts, pairs, truncation=True, max_length=max_length, padding=False)
        assert encoded["input_ids"] == expected["input_ids"]
        assert ("token_type_ids" in encoded) == ("token_type_ids" in expected and pairs is not None)
        if "token_type_ids" in encoded:
            assert encoded["token_type_ids"] == expected["token_type_ids"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_head_tail_is_the_input_without_the_middles_of_its_texts(data: st.DataObject) -> None:
    """A word is a token here, so words can be left out in place of tokens; HF's own truncation tells how many."""
    tokenizer = shared_tokenizer("bert")
    texts = [data.draw(word_lists()) for _ in range(data.draw(st.integers(1, 2)))]
    max_length = data.draw(st.integers(4 if len(texts) == 2 else 3, 30))
    columns = {name: [" ".join(words)] for name, words in zip(("text", "text_pair"), texts, strict=False)}
    encoded = module._encode(columns, tokenizer, max_length, "head_tail")
    tokenizer.truncation_side = "right"
    counts = tokenizer(*columns.values(), truncation=True, max_length=max_length).sequence_ids(0)
    shortened = []
    for which, words in enumerate(texts):
        kept = counts.count(which)
        head = round(kept * 128 / 510) if kept < len(words) else kept
        shortened.append([" ".join([*words[:head], *words[len(words) - (kept - head) :]])])
    expected = tokenizer(*shortened)
    assert encoded["input_ids"] == expected["input_ids"]
    if len(texts) == 2:
        assert encoded["token_type_ids"] == expected["token_type_ids"]


def test_head_tail_of_512_tokens_is_that_of_the_paper() -> None:
    """[CLS], the first 128 and the last 382 of 1,000 tokens, [SEP]."""
    tokenizer = shared_tokenizer("bert")
    words = random.Random(0).choices(WORDS, k=1000)
    encoded = module._encode({"text": [" ".join(words)]}, tokenizer, 512, "head_tail")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"][0]) == ["[CLS]", *words[:128], *words[-382:], "[SEP]"]
    assert (encoded["full_length"], encoded["length"]) == ([1002], [512])


def test_head_tail_of_a_pair() -> None:
    """[CLS] 2 of 2 [SEP] 8 of 20 [SEP]: the longer text alone is cut, to a quarter and three quarters."""
    tokenizer = shared_tokenizer("bert")
    second = random.Random(0).choices(WORDS, k=20)
    encoded = module._encode({"text": ["good film"], "text_pair": [" ".join(second)]}, tokenizer, 13, "head_tail")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"][0]) == [
        "[CLS]", "good", "film", "[SEP]", *second[:2], *second[-6:], "[SEP]",
    ]  # fmt: skip
    assert encoded["token_type_ids"] == [[0] * 4 + [1] * 9]


def test_head_tail_of_a_tokenizer_in_python() -> None:
    """A byte is a token and </s> ends each text. Four of eight are one and three; two and four of ten likewise."""
    tokenizer = shared_tokenizer("byt5")
    encoded = module._encode({"text": ["abcdefgh", "ab"]}, tokenizer, 5, "head_tail")
    assert tokenizer.batch_decode(encoded["input_ids"]) == ["afgh</s>", "ab</s>"]
    encoded = module._encode({"text": ["ab"], "text_pair": ["klmnopqrst"]}, tokenizer, 8, "head_tail")
    assert tokenizer.batch_decode(encoded["input_ids"]) == ["ab</s>krst</s>"]


def test_special_tokens_inside_a_text_are_text(bert_tokenizer: Any) -> None:
    encoded = module._encode({"text": ["[SEP] good [SEP] film [SEP] bad"]}, bert_tokenizer, 5, "tail")
    assert bert_tokenizer.convert_ids_to_tokens(encoded["input_ids"][0]) == ["[CLS]", "film", "[SEP]", "bad", "[SEP]"]


def test_truncation_is_part_of_the_cache_key(tmp_path: Path, bert_tokenizer: Any, no_tokenising: Any) -> None:
    data = rows(tmp_path, TEXTS)
    tokenize(data, bert_tokenizer, max_length=8, cache_dir=str(tmp_path))
    no_tokenising()
    with pytest.raises(Called):
        tokenize(data, bert_tokenizer, max_length=8, truncation="tail", cache_dir=str(tmp_path))


@pytest.mark.parametrize("kind", ["bert", "roberta", "byt5"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_are_never_lost(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Number and order of the rows stay, and each has all its tokens or ``max_length`` of them; empty texts too."""
    tokenizer = shared_tokenizer(kind)
    texts = data.draw(st.lists(st.text(max_size=40), min_size=1, max_size=6))
    pairs = data.draw(st.none() | st.lists(st.text(max_size=40), min_size=len(texts), max_size=len(texts)))
    how: Any = data.draw(st.sampled_from(["head", "tail", "head_tail"]))
    columns = {"text": texts, **({"text_pair": pairs} if pairs else {})}
    cache_dir = str(tmp_path_factory.mktemp("cache"))
    tokenized = tokenize(Dataset.from_dict(columns), tokenizer, max_length=9, truncation=how, cache_dir=cache_dir)
    alone = [  # as lists of one text: in a call with bare strings an empty second text is none
        tokenizer([text], [pairs[row]] if pairs else None, truncation=False, padding=False, verbose=False)["input_ids"][
            0
        ]
        for row, text in enumerate(texts)
    ]
    assert tokenized.full_lengths.tolist() == [len(ids) for ids in alone]
    assert tokenized.lengths.tolist() == [min(len(ids), 9) for ids in alone]
    for ids, whole in zip(ids_of(tokenized), alone, strict=True):
        assert ids == whole if len(whole) <= 9 else len(ids) == 9
        left = iter(whole)
        assert all(token in left for token in ids)  # in their order, nothing new
        assert ids[-1] == whole[-1]  # a special token


def test_files_of_equal_name_and_other_content(tmp_path: Path, bert_tokenizer: Any) -> None:
    one, two = (rows(tmp_path / name, [text]) for name, text in (("a", "good film"), ("b", "the bad book")))
    lengths = [
        tokenize(data, bert_tokenizer, max_length=8, cache_dir=str(tmp_path)).lengths.tolist() for data in (one, two)
    ]
    assert lengths == [[4], [5]]
    # A file that changes under its name.
    changed = rows(tmp_path / "a", ["not a very good film"])
    assert tokenize(changed, bert_tokenizer, max_length=8, cache_dir=str(tmp_path)).lengths.tolist() == [7]
