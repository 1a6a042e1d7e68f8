"""Packed and shortened against HF's own model on padded texts, for many architectures; which of them are left alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from conftest import make_tokenizer

from finetune.attention import attend_nested, has_nested_attention
from finetune.data.batching import BatchSizes
from finetune.data.loader import Collator, Examples
from finetune.data.tokenize import tokenize
from finetune.errors import ConfigError
from finetune.first_tokens import FirstTokens, block_diagonal_mask
from finetune.packing import resolve_packing

TEXTS = [
    "good film",
    "the book was very bad and the film is not good",
    "a",
    "very very awful book and poor film the the",
    "the",
    "film is a good book",
    "not good",
    "a lovely book",
]
SHAPE = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 66, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 30, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 66,
    "num_labels": 3,
}  # fmt: skip
ROBERTA = {**SHAPE, "pad_token_id": 1}
SIZES = BatchSizes(8, 1, 1)


def make(kind: str, **more: Any) -> Any:
    """A random model whose outputs depend on every token."""
    shape = {"DistilBert": DISTILBERT}.get(kind, ROBERTA if "Roberta" in kind else SHAPE)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**shape, **more})
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Any, Examples]:
    tokenizer = make_tokenizer("bert")
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    tokens = tokenize(rows, tokenizer, max_length=32, cache_dir=str(tmp_path))
    return tokenizer, Examples(tokens, np.arange(len(TEXTS)))


def plain(model: Any, tokenizer: Any) -> torch.Tensor:
    """What HF makes of the texts, padded."""
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False, truncation=False)
    if model.config.pad_token_id == 1:  # this tokenizer's padding is 0, which a RoBERTa takes for a word
        inputs["input_ids"][inputs["attention_mask"] == 0] = 1
    return model(**inputs).logits


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.sin().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


PACKABLE = ["Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "Ernie", "Camembert", "RemBert"]


@pytest.mark.parametrize("how", ["rows, eager", "rows, sdpa", "rows", "one row", "one row, nested"])
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_texts_give_the_same_logits_and_gradients(
    texts: tuple[Any, Examples], kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows with a mask, under HF's own attention and ours; in one row, as CPUs and GPUs (nested) take it apart."""
    if kind == "RemBert" and how != "rows":
        pytest.skip("RemBERT has one attention only")
    tokenizer, split = texts
    if "Roberta" in kind or kind == "Camembert":
        tokenizer.pad_token = "[UNK]"  # number 1, as these models expect
    model = make(kind, **({"pad_token_id": 1} if kind == "Camembert" else {})).eval()
    expected = plain(model, tokenizer)
    wanted = gradients(model, expected)
    if how.startswith("rows, "):
        model.set_attn_implementation(how.removeprefix("rows, "))
        monkeypatch.setattr(FirstTokens, "use_attention", lambda self: [])
    if how == "rows":
        monkeypatch.setattr("finetune.packing.trains_in_one_row", lambda device: False)
    if how == "one row, nested":
        assert has_nested_attention(torch.device("cpu"))
        monkeypatch.setattr("finetune.attention.attend_by_groups", attend_nested)
    packing = resolve_packing("on", model, tokenizer, [split], SIZES)
    assert packing.rows is not None and packing.has_short_last_layer
    if kind != "DistilBert":  # of its last layer, the attention is computed whole
        assert "forward" in vars(model.base_model.encoder.layer[-1].attention.self)
    assert packing.rows.in_one == how.startswith("one row")
    rows = np.array([3, 0, 7, 2, 5, 1, 6, 4])
    batch = Collator(split, tokenizer, packing.rows)(rows)
    assert len(batch.inputs["input_ids"]) < len(rows)  # some do share a row
    for inputs in (batch.inputs, Collator(split, tokenizer)(rows).inputs):
        found = model(**inputs).logits
        torch.testing.assert_close(found, expected[rows], atol=1e-5, rtol=0)
        for name, gradient in gradients(model, found).items():
            torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


def test_one_text_a_row_is_packed_too(texts: tuple[Any, Examples]) -> None:
    """As many rows as texts, in another order than theirs."""
    tokenizer, _ = texts
    model = make("Bert").eval()
    hooks = FirstTokens(model)
    words = [[2, *[7] * 5, 3], [2, *[8] * 6, 3]]
    lengths = np.array([7, 8], np.int32)
    from finetune.data.loader import PackedRows
    from finetune.data.tokenize import TokenizedTexts

    split = Examples(TokenizedTexts(datasets.Dataset.from_dict({"input_ids": words}), lengths, lengths), np.arange(2))
    expected = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in words])
    hooks.accept_packed_inputs()
    inputs = Collator(split, tokenizer, PackedRows(0))(np.arange(2)).inputs
    assert inputs["input_ids"].shape == (2, 8)
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=0)


def test_in_bfloat16(texts: tuple[Any, Examples]) -> None:
    tokenizer, split = texts
    model = make("Bert").eval()
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    expected = plain(model, tokenizer)
    packing = resolve_packing("auto", model, tokenizer, [split], SIZES, autocast)
    assert packing.rows is not None
    with autocast():
        found = model(**Collator(split, tokenizer, packing.rows)(np.arange(len(TEXTS))).inputs).logits
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("MobileBert", {}, "other outputs"),  # sees its neighbours
        ("ConvBert", {}, "other outputs"),
        ("DebertaV2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, ""),
        ("GPT2", {}, ""),  # reads the last token
        ("Bart", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}, ""),
    ],
)
def test_models_that_cannot_do_with_it_are_left_as_they_are(
    texts: tuple[Any, Examples], kind: str, more: dict[str, Any], said: str
) -> None:
    tokenizer, split = texts
    model = make(kind, **more).eval()
    collate = Collator(split, tokenizer)
    expected = model(**collate(np.arange(4)).inputs).logits
    packing = resolve_packing("auto", model, tokenizer, [split], SIZES)
    assert packing.rows is None and packing.reason.startswith("off: ") and said in packing.reason
    assert "padded together" in packing.reason
    torch.testing.assert_close(model(**collate(np.arange(4)).inputs).logits, expected)
    with pytest.raises(ConfigError, match=r"train\.packing is on, but .*: use auto or off"):
        resolve_packing("on", model, tokenizer, [split], SIZES)


def test_a_head_that_reads_more_than_the_first_token_keeps_its_last_layer(texts: tuple[Any, Examples]) -> None:
    tokenizer, split = texts
    model = make("Bert").eval()

    class Mean(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.mean(1)

    model.bert.pooler = Mean()
    packing = resolve_packing("auto", model, tokenizer, [split], SIZES)
    assert packing.rows is None and not packing.has_short_last_layer


def test_a_model_with_a_window_is_tried_on_the_longest_text_of_any_split(tmp_path: Path) -> None:
    """ModernBERT's local layers see half a window to each side: texts that fit into it show nothing of that."""
    tokenizer = make_tokenizer("bert")
    short, long = (
        Examples(tokenize(rows, tokenizer, max_length=64, cache_dir=str(tmp_path)), np.arange(len(rows)))
        for rows in (
            datasets.Dataset.from_dict({"text": ["good"] * 8 + ["a very good film"]}),
            datasets.Dataset.from_dict({"text": ["good", "bad film", "film book the a was is very not and good " * 4]}),
        )
    )
    more = {"local_attention": 16, "global_attn_every_n_layers": 3}
    assert resolve_packing("auto", make("ModernBert", **more), tokenizer, [short], SIZES).rows is not None
    model = make("ModernBert", **more).eval()
    rows = np.arange(3)
    expected = model(**Collator(long, tokenizer)(rows).inputs).logits
    packing = resolve_packing("auto", model, tokenizer, [short, long], SIZES)
    assert packing.rows is None and "other outputs" in packing.reason
    torch.testing.assert_close(model(**Collator(long, tokenizer)(rows).inputs).logits, expected)


def test_where_nothing_is_saved_it_stays_off(texts: tuple[Any, Examples], tmp_path: Path) -> None:
    tokenizer, _ = texts
    rows = datasets.Dataset.from_dict({"text": ["good film was a book the"] * 9})
    split = Examples(tokenize(rows, tokenizer, max_length=32, cache_dir=str(tmp_path)), np.arange(9))
    packing = resolve_packing("auto", make("Bert"), tokenizer, [split], SIZES)
    assert packing.rows is None and packing.reason == "off: it would save 0.0% of all tokens"
    assert packing.has_short_last_layer
    assert resolve_packing("on", make("Bert"), tokenizer, [split], SIZES).rows is not None


def test_the_setting_switches_it_off(texts: tuple[Any, Examples]) -> None:
    tokenizer, split = texts
    assert resolve_packing("off", make("Bert"), tokenizer, [split], SIZES).rows is None


def test_a_compiled_model_is_left_alone(texts: tuple[Any, Examples]) -> None:
    tokenizer, split = texts
    packing = resolve_packing("auto", make("Bert"), tokenizer, [split], SIZES, is_compiled=True)
    assert (packing.rows, packing.has_short_last_layer) == (None, False)
    assert packing.describe() == ["off: the launch profile has the model compiled"]
    with pytest.raises(ConfigError, match=r"train\.packing is on, but the launch profile has the model compiled"):
        resolve_packing("on", make("Bert"), tokenizer, [split], SIZES, is_compiled=True)


def test_the_trial_changes_no_mode_and_draws_no_random_number(texts: tuple[Any, Examples]) -> None:
    tokenizer, split = texts
    model = make("Bert").train()
    model.bert.eval()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    resolve_packing("auto", model, tokenizer, [split], SIZES, nullcontext)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.bert.training and model.dropout.training


def test_masks() -> None:
    lowest = torch.finfo(torch.float32).min
    mask = block_diagonal_mask(torch.tensor([[1, 1, 2, 0]], dtype=torch.int32), torch.float32)
    no, yes = lowest, 0.0
    assert mask.tolist() == [[[[yes, yes, no, no], [yes, yes, no, no], [no, no, yes, no], [no, no, no, yes]]]]
