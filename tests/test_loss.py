"""Losses of single examples against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from finetune.loss import example_losses


def test_cross_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [math.log(1), math.log(2), math.log(5)], [10.0, 0.0, 0.0]])
    losses = example_losses(logits, torch.tensor([1, 2, 1]), "single_label_classification")
    # 1/3; 5/8; and e^0 / (e^10 + 2).
    expected = [math.log(3), math.log(8 / 5), math.log(math.exp(10) + 2)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_binary_cross_entropy_is_the_mean_over_labels() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [math.log(3), -math.log(3)]])
    labels = torch.tensor([[1, 1], [0, 0]])
    losses = example_losses(logits, labels, "multi_label_classification")
    # Probabilities 1/2 and 3/4 of labels that are given; 3/4 and 1/4 of labels that are not.
    expected = [(math.log(2) + math.log(4 / 3)) / 2, (math.log(4) + math.log(4 / 3)) / 2]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_squared_error() -> None:
    losses = example_losses(torch.tensor([[1.5], [-2.0], [0.0]]), torch.tensor([1.0, 1.0, 0.0]), "regression")
    assert losses.tolist() == [0.25, 9.0, 0.0]


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("single_label_classification", torch.tensor([0])),
        ("multi_label_classification", torch.tensor([[1.0]])),
        ("regression", torch.tensor([2.0])),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_float32(problem_type: str, labels: torch.Tensor, dtype: torch.dtype) -> None:
    """One output and one example: the shape is that of the examples, whatever the precision of the logits."""
    losses = example_losses(torch.tensor([[1.0]], dtype=dtype), labels, problem_type)
    assert (losses.dtype, losses.shape) == (torch.float32, (1,))
    expected = {"single_label_classification": 0.0, "multi_label_classification": math.log(1 + math.exp(-1))}
    assert losses.item() == pytest.approx(expected.get(problem_type, 1.0), rel=1e-6)
