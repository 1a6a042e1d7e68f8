"""Logits of all rows in file order, whatever the batches and processes; metrics of exactly those rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import reviews

from finetune.data.loader import EvalLoader, Examples
from finetune.data.tokenize import TokenizedTexts, tokenize
from finetune.evaluation import evaluate, predict_logits
from finetune.launch import build_accelerator
from finetune.metrics import Metrics
from finetune.model import LoadedModel, load_model

CPU = torch.device("cpu")
ROWS = reviews(11, seed=4)
TEXTS = [text for text, _ in ROWS]
LABELS = np.array([int(label == "pos") for _, label in ROWS])
LabelledLoader = Callable[..., EvalLoader]


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    torch.set_num_threads(1)
    return build_accelerator()


@pytest.fixture(scope="module")
def loaded(any_checkpoint: Path) -> LoadedModel:
    loaded = load_model(
        str(any_checkpoint), label_names=("neg", "pos"), problem_type="single_label_classification", max_length=32
    )
    with torch.no_grad():  # a fresh model says nearly the same of every text
        for module in loaded.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(10)
    return loaded


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> TokenizedTexts:
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    return tokenize(dataset, loaded.tokenizer, max_length=32, cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> np.ndarray:
    """Logits of each row without any other and without padding."""
    loaded.model.eval()
    with torch.no_grad():
        batches = [loaded.tokenizer(text, return_tensors="pt") for text in TEXTS]
        return np.concatenate([loaded.model(**batch).logits.numpy() for batch in batches])


def loader_of(
    loaded: LoadedModel, texts: TokenizedTexts, batch_size: int, rank: int = 0, num_processes: int = 1
) -> EvalLoader:
    split = Examples(texts, LABELS)
    return EvalLoader(split, loaded.tokenizer, batch_size, rank=rank, num_processes=num_processes, device=CPU)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 16])
def test_logits_are_those_of_each_row_alone(
    accelerator: Accelerator, loaded: LoadedModel, texts: TokenizedTexts, alone: np.ndarray, batch_size: int
) -> None:
    got = predict_logits(accelerator, loaded.model, loader_of(loaded, texts, batch_size))
    assert (got.dtype, got.shape) == (np.float32, (11, 2))
    np.testing.assert_allclose(got, alone, atol=1e-6, rtol=0)
    assert np.abs(alone - alone[0]).max() > 0.05  # the rows differ, so their order was tested


class OneOf:
    """A rank among several: gathers what all of them sent, which a first pass has written down."""

    device = CPU

    def __init__(self, sent: list[list[torch.Tensor]], rank: int, replay: bool) -> None:
        self._sent, self._rank, self._replay = sent, rank, replay
        self._calls = 0

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._replay:
            self._sent[self._rank].append(tensor)
            return tensor
        self._calls += 1
        parts = [calls[self._calls - 1] for calls in self._sent]
        assert len({part.shape for part in parts}) == 1  # gloo and NCCL gather equal shapes only
        assert torch.equal(parts[self._rank], tensor)
        return torch.cat(parts)


@pytest.mark.parametrize("processes", [2, 3, 4, 12])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 16])
def test_several_ranks_place_every_row(
    loaded: LoadedModel, texts: TokenizedTexts, alone: np.ndarray, batch_size: int, processes: int
) -> None:
    """11 rows never divide; with 16 in a batch, or 12 ranks, some rank has none."""
    sent: list[list[torch.Tensor]] = [[] for _ in range(processes)]
    for replay in (False, True):
        for rank in range(processes):
            loader = loader_of(loaded, texts, batch_size, rank, processes)
            stand_in: Any = OneOf(sent, rank, replay)
            got = predict_logits(stand_in, loaded.model, loader)
            if replay:
                np.testing.assert_allclose(got, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("batch_size", [2, 4, 5])
def test_metrics_of_uneven_rows(
    accelerator: Accelerator, loaded: LoadedModel, texts: TokenizedTexts, alone: np.ndarray, batch_size: int
) -> None:
    metrics = Metrics(["accuracy"], problem_type="single_label_classification", num_labels=2)
    got = evaluate(
        accelerator,
        loaded.model,
        loader_of(loaded, texts, batch_size),
        metrics,
        "single_label_classification",
    )
    right, loss = 0, 0.0
    for (first, second), label in zip(alone.tolist(), LABELS.tolist(), strict=True):
        right += int((second > first) == bool(label))
        loss += math.log(math.exp(first) + math.exp(second)) - (first, second)[label]
    assert got.metrics == {"loss": pytest.approx(loss / 11, abs=1e-6), "accuracy": pytest.approx(right / 11)}
    np.testing.assert_allclose(got.logits, alone, atol=1e-6, rtol=0)
    assert got.seconds > 0


def test_dropout_is_off_and_no_graph_is_kept(
    accelerator: Accelerator, loaded: LoadedModel, texts: TokenizedTexts, alone: np.ndarray
) -> None:
    dropouts = [module for module in loaded.model.modules() if isinstance(module, torch.nn.Dropout)]
    before = [module.p for module in dropouts]
    try:
        for module in dropouts:
            module.p = 0.5
        loaded.model.train()
        got = predict_logits(accelerator, loaded.model, loader_of(loaded, texts, 4))
    finally:
        for module, probability in zip(dropouts, before, strict=True):
            module.p = probability
    np.testing.assert_allclose(got, alone, atol=1e-6, rtol=0)
    assert dropouts
