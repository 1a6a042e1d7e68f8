"""Losses of single examples against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from finetune.errors import ConfigError
from finetune.loss import example_losses, example_weights, resolve_class_weights


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


def test_smoothed_cross_entropy() -> None:
    """Probabilities 1/8, 2/8, 5/8 of the label 5/8: 0.7 of the loss is its own, a tenth is each class's."""
    logits = torch.tensor([[math.log(1), math.log(2), math.log(5)]])
    losses = example_losses(logits, torch.tensor([2]), "single_label_classification", label_smoothing=0.3)
    expected = 0.7 * math.log(8 / 5) + 0.1 * (math.log(8) + math.log(4) + math.log(8 / 5))
    assert losses.tolist() == pytest.approx([expected], rel=1e-6)


def test_smoothed_binary_cross_entropy() -> None:
    """Probabilities 3/4 and 1/4; a label that is given becomes 0.9, one that is not 0.1."""
    logits = torch.tensor([[math.log(3), -math.log(3)]])
    losses = example_losses(logits, torch.tensor([[1, 0]]), "multi_label_classification", label_smoothing=0.2)
    assert losses.tolist() == pytest.approx([0.9 * math.log(4 / 3) + 0.1 * math.log(4)], rel=1e-6)


def test_a_given_label_counts_its_weight_in_the_mean_over_labels() -> None:
    logits = torch.tensor([[math.log(3), math.log(3), math.log(3)]])
    weights = torch.tensor([4.0, 7.0, 0.5])
    labels = torch.tensor([[1, 0, 1]])
    losses = example_losses(logits, labels, "multi_label_classification", class_weights=weights)
    given, absent = math.log(4 / 3), math.log(4)
    assert losses.tolist() == pytest.approx([(4 * given + absent + 0.5 * given) / 5.5], rel=1e-6)
    assert example_weights(labels.numpy(), weights.numpy()).tolist() == pytest.approx([5.5 / 3])


def test_an_example_of_one_class_counts_the_weight_of_that_class() -> None:
    """The sum of weighted losses over the sum of weights is torch's own weighted mean."""
    logits, labels, weights = torch.randn(9, 3), torch.arange(9) % 3, torch.tensor([0.5, 2.0, 7.0])
    counted = torch.from_numpy(example_weights(labels.numpy(), weights.numpy()))
    losses = example_losses(logits, labels, "single_label_classification", class_weights=weights)
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=weights)
    torch.testing.assert_close((losses * counted).sum() / counted.sum(), expected)


def test_without_weights_all_count_the_same() -> None:
    assert resolve_class_weights("none", ["a", "b"], np.array([0, 1, 1])) is None
    assert example_weights(np.array([0, 1, 1]), None).tolist() == [1.0, 1.0, 1.0]


def test_balanced_weights() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [2] * 1)
    weights = resolve_class_weights("balanced", ["a", "b", "c"], labels)
    assert weights is not None
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    sums = [float(example_weights(labels[labels == each], weights).sum()) for each in range(3)]
    assert sums == pytest.approx([10 / 3] * 3)  # each class counts the same in sum


def test_balanced_weights_of_several_labels() -> None:
    """Given in 1, 3 and 4 of 4 rows, and in none: a weight can neither be infinite nor zero."""
    labels = np.array([[1, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0]], np.float32)
    weights = resolve_class_weights("balanced", ["a", "b", "c", "d"], labels)
    assert weights is not None
    assert weights.tolist() == pytest.approx([3.0, 1 / 3, 1 / 4, 3.0])


def test_weights_by_name() -> None:
    weights = resolve_class_weights({"pos": 3.0}, ["neg", "pos"], np.array([0, 1]))
    assert weights is not None
    assert weights.tolist() == [1.0, 3.0]


def test_a_weight_for_no_class_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.class_weights: no training row has the label 'poss': did you mean pos"
    ):
        resolve_class_weights({"poss": 3.0}, ["neg", "pos"], np.array([0, 1]))
