"""Dropout by its distribution, and models that stay what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_checkpoint
from torch import nn
from transformers import AutoModelForSequenceClassification

from finetune.dropout import Dropout, dropped_out, keep_mask, use_fast_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.25])
def test_a_mask_keeps_the_share_that_it_should(dtype: torch.dtype, keep: float) -> None:
    torch.manual_seed(1)
    count = 1_000_003
    mask = keep_mask(count, keep, dtype)
    assert mask.shape == (count,) and mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / keep, dtype=dtype).item()}
    deviation = (keep * (1 - keep) / count) ** 0.5
    is_kept = (mask > 0).double()
    assert abs(is_kept.mean().item() - keep) < 5 * deviation + 1 / 131072
    # Neighbours know nothing of each other, at any of the places that share one random number.
    for distance in (1, 2, 3, 4, 8):
        both = (is_kept[distance:] * is_kept[:-distance]).mean().item()
        assert abs(both - keep**2) < 6 * deviation


def test_the_seed_decides() -> None:
    values = torch.ones(1000)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, two = dropped_out(values, 0.5), dropped_out(values, 0.5)
    assert not torch.equal(one, two)
    torch.set_rng_state(state)
    assert torch.equal(dropped_out(values, 0.5), one) and torch.equal(dropped_out(values, 0.5), two)


def test_gradients_pass_where_values_did() -> None:
    values = torch.randn(7, 11, requires_grad=True)
    result = dropped_out(values, 0.25)
    result.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, (result != 0) / 0.75)
    assert torch.allclose(result, values * values.grad)
    assert dropped_out(values, 0.0) is values
    layer = Dropout(0.5).eval()
    assert layer(values) is values
    assert (layer.train()(values) == 0).any()


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_a_model_gives_the_same_outputs_and_saves_the_same_files(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(tmp_path / kind, kind, dropout=0.1)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = {
        "input_ids": torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]]),
        "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
    }
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path / "before")
    use_fast_dropout(model)
    torch.testing.assert_close(model(**inputs).logits, expected)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert dropouts and all(type(module) is Dropout for module in dropouts)
    model.save_pretrained(tmp_path / "after")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert before == after
    torch.manual_seed(0)
    one, two = (model.train()(**inputs).logits for _ in range(2))
    assert not torch.equal(one, two)
