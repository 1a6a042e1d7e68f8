"""The loss of each example, in float32; what is summed, weighted and divided is the caller's business."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def example_losses(logits: torch.Tensor, labels: torch.Tensor, problem_type: str) -> torch.Tensor:
    """Loss of each example.

    Args:
        logits: ``[examples, num_labels]``.
        labels: int64 ``[examples]`` class ids (cross-entropy), float ``[examples, num_labels]`` of 0 and 1 (binary
            cross-entropy, mean over labels), or float ``[examples]`` (squared error).
        problem_type: HF's name for which of the three.

    Returns:
        float32 ``[examples]``.
    """
    logits = logits.float()
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels, reduction="none")
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(dim=-1)
    return F.mse_loss(logits.squeeze(-1), labels.float(), reduction="none")
