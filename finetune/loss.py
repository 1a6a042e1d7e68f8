"""The loss of each example, in float32, and what each counts; sums and divisions are the caller's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from finetune.config import nearest
from finetune.errors import ConfigError


def example_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str,
    *,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of each example.

    Args:
        logits: ``[examples, num_labels]``.
        labels: int64 ``[examples]`` class ids (cross-entropy), float ``[examples, num_labels]`` of 0 and 1 (binary
            cross-entropy, mean over labels), or float ``[examples]`` (squared error).
        problem_type: HF's name for which of the three.
        class_weights: float ``[num_labels]``. A given label of a multi-label example counts its weight in the mean
            over labels, one that is not given counts 1. Examples of one class have their weight from
            :func:`example_weights` alone.
        label_smoothing: Szegedy et al. 2016 (arXiv:1512.00567): this share of the label is spread evenly over all
            classes; over given and not given in the multi-label case.

    Returns:
        float32 ``[examples]``.
    """
    logits = logits.float()
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    if problem_type == "multi_label_classification":
        given = labels.float()
        targets = given * (1 - label_smoothing) + label_smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        if class_weights is None:
            return losses.mean(dim=-1)
        counts = 1 + given * (class_weights - 1)
        return (losses * counts).sum(dim=-1) / counts.sum(dim=-1)
    return F.mse_loss(logits.squeeze(-1), labels.float(), reduction="none")


def resolve_class_weights(
    setting: str | Mapping[str, float], label_names: Sequence[str], labels: NDArray[Any]
) -> NDArray[np.float32] | None:
    """``data.class_weights`` as numbers in label order; None where all count the same.

    Balanced means that every class counts the same in sum: a class with n of N rows weighs N / (classes x n). In the
    multi-label case a given label weighs as much as all the rows without it: (N - n) / n.

    Args:
        setting: ``none``, ``balanced``, or weights by label name; classes that are not named weigh 1.
        label_names: names in id order.
        labels: the training labels, class ids ``[rows]`` or 0 and 1 ``[rows, num_labels]``.

    Raises:
        ConfigError: a name that no class has.
    """
    if setting == "none":
        return None
    if isinstance(setting, str):
        if labels.ndim == 2:
            rows = np.maximum(labels.sum(axis=0), 1)
            return np.asarray(np.maximum(len(labels) - rows, 1) / rows, np.float32)
        rows = np.maximum(np.bincount(labels, minlength=len(label_names)), 1)
        return np.asarray(len(labels) / (len(label_names) * rows), np.float32)
    unknown = [name for name in setting if name not in label_names]
    if unknown:
        raise ConfigError(
            f"data.class_weights: no training row has the label {unknown[0]!r}{nearest(unknown[0], label_names)} "
            f"(labels: {', '.join(label_names[:20])}{', …' if len(label_names) > 20 else ''})"
        )
    return np.array([setting.get(name, 1.0) for name in label_names], np.float32)


def example_weights(labels: NDArray[Any], class_weights: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """What each row counts in the mean loss, float32 ``[rows]``: in the sum of losses, and in what it is divided by.

    One class: the weight of that class, as in torch's weighted mean. Several labels: the mean weight of its entries.
    """
    if class_weights is None:
        return np.ones(len(labels), np.float32)
    if labels.ndim == 1:
        return np.asarray(class_weights[labels])
    return np.asarray(1 + labels @ (class_weights - 1) / len(class_weights), np.float32)
