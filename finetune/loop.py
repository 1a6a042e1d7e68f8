"""The whole of training, on one page."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel

from finetune.console import TrainingProgress
from finetune.data.loader import EvalLoader, StepInputs, TrainLoader
from finetune.errors import TrainingError
from finetune.evaluation import Evaluation, evaluate
from finetune.metrics import Metrics
from finetune.model import set_training_mode
from finetune.optim import LearningRateSchedule
from finetune.throughput import Throughput
from finetune.tracking import Trackers


@dataclass
class TrainState:
    """How far training has come: everything the loop decides by."""

    epoch: int = 0
    step_in_epoch: int = 0
    global_step: int = 0
    best_metric: float | None = None
    best_step: int = 0
    evaluations_without_best: int = 0
    stop_reason: str | None = None

    def advance(self) -> None:
        """One more optimizer step is done."""
        self.step_in_epoch += 1
        self.global_step += 1

    def start_next_epoch(self) -> None:
        """Every row of this epoch has been seen."""
        self.epoch += 1
        self.step_in_epoch = 0


@dataclass
class Training:
    """The parts that training is put together from; built by :mod:`finetune.run`."""

    accelerator: Accelerator
    model: nn.Module  # as prepared by Accelerate: perhaps wrapped by DistributedDataParallel
    bare_model: PreTrainedModel  # the same weights, for evaluation and saving
    optimizer: AcceleratedOptimizer
    schedule: LearningRateSchedule
    train_loader: TrainLoader
    eval_loader: EvalLoader
    metrics: Metrics
    trackers: Trackers
    progress: TrainingProgress
    save_best: Callable[[Evaluation], None]
    example_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> loss of each example
    problem_type: str
    total_steps: int
    evaluation_steps: frozenset[int]
    logging_steps: int
    max_grad_norm: float
    metric_for_best_model: str
    greater_is_better: bool
    early_stopping_patience: int | None
    throughput: Throughput

    def epoch(self, state: TrainState) -> float:
        """Passes over the training rows so far, as a fraction."""
        return state.epoch + state.step_in_epoch / self.train_loader.steps_per_epoch


def train(training: Training, state: TrainState) -> None:
    """Train until the last step or until early stopping says so; ``state`` tells how it ended."""
    throughput = training.throughput
    throughput.start()
    while state.stop_reason is None:
        for inputs in training.train_loader.epoch(state.epoch, state.step_in_epoch):
            loss_sum, grad_norm = optimizer_step(training, inputs)
            state.advance()
            throughput.count(inputs, loss_sum)
            training.progress.at(state.global_step)
            is_evaluation_due = state.global_step in training.evaluation_steps
            if is_evaluation_due or state.global_step % training.logging_steps == 0:
                log_training(training, state, grad_norm)
            if is_evaluation_due:
                with throughput.evaluating():
                    evaluate_and_keep_best(training, state)
            if state.global_step == training.total_steps:
                state.stop_reason = "all steps done"
            if state.stop_reason is not None:
                return
        state.start_next_epoch()


def optimizer_step(training: Training, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One update from the exact mean gradient over the global batch; gradients are all-reduced once.

    Each micro-batch's loss is a weighted sum over its examples, divided by the weight of the global batch (its size,
    unless classes have weights) and multiplied by the number of processes, since DistributedDataParallel averages
    over them.

    Returns:
        This rank's weighted sum of example losses, and the gradient's norm before clipping; both still on the device.
    """
    accelerator, model = training.accelerator, training.model
    set_training_mode(training.bare_model)
    loss_sum = torch.zeros((), device=accelerator.device)
    for position, micro in enumerate(inputs.micro_batches, start=1):
        is_last = position == len(inputs.micro_batches)
        with nullcontext() if is_last else accelerator.no_sync(model):
            losses = training.example_losses(model(**micro.inputs).logits, micro.labels)
            loss = (losses * micro.weights).sum()
            accelerator.backward(loss * accelerator.num_processes / inputs.weight)
        loss_sum += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm or float("inf"))
    training.optimizer.step()
    if not training.optimizer.step_was_skipped:  # float16: a gradient overflowed and the scale was lowered instead
        training.schedule.step()
    training.optimizer.zero_grad()
    return loss_sum, grad_norm


def log_training(training: Training, state: TrainState, grad_norm: torch.Tensor) -> None:
    """Log the mean loss over all examples of all ranks since the last time, and the speed."""
    metrics = {
        **training.throughput.summarise(training.accelerator),
        "train/learning_rate": training.schedule.learning_rate,
        "train/grad_norm": float(grad_norm),
    }
    refuse_non_finite("training loss", metrics["train/loss"], training, state)
    epoch = training.epoch(state)
    training.trackers.log(metrics, state.global_step, epoch)
    training.progress.training(state.global_step, epoch, metrics["train/loss"], metrics["perf/examples_per_second"])


def evaluate_and_keep_best(training: Training, state: TrainState) -> None:
    """Evaluate, log, save the best model, and decide (equally on every rank) whether to stop."""
    evaluation = evaluate(
        training.accelerator, training.bare_model, training.eval_loader, training.metrics, training.problem_type
    )
    refuse_non_finite("dev loss", evaluation.metrics["loss"], training, state)
    metric = evaluation.metrics[training.metric_for_best_model]
    is_best = is_better(metric, state.best_metric, training.greater_is_better)
    state.evaluations_without_best = 0 if is_best else state.evaluations_without_best + 1
    if is_best:
        state.best_metric, state.best_step = metric, state.global_step
        training.save_best(evaluation)
    training.schedule.evaluated(metric)
    epoch = training.epoch(state)
    values = {f"eval/{name}": value for name, value in evaluation.metrics.items()}
    training.trackers.log({**values, "perf/eval_seconds": evaluation.seconds}, state.global_step, epoch)
    training.progress.evaluation(state.global_step, epoch, evaluation.metrics, evaluation.seconds, is_best)
    patience = training.early_stopping_patience
    if patience is not None and state.evaluations_without_best >= patience:
        state.stop_reason = (
            f"early stopping: {state.evaluations_without_best} evaluations without a better "
            f"{training.metric_for_best_model} than at step {state.best_step}"
        )


def refuse_non_finite(what: str, loss: float, training: Training, state: TrainState) -> None:
    """Stop on every rank (the loss is the same on all) instead of training on with weights that are not numbers."""
    if not math.isfinite(loss):
        raise TrainingError(
            f"the {what} is {loss} at step {state.global_step} (learning rate {training.schedule.learning_rate:g}): "
            "lower optim.learning_rate, or use mixed_precision bf16 or no in the launch profile instead of fp16"
        )


def is_better(metric: float, best: float | None, greater_is_better: bool) -> bool:
    """Whether ``metric`` is a new best. The first one always is; a value that is not a number loses to any number."""
    if best is None:
        return True
    if math.isnan(metric):
        return False
    return math.isnan(best) or (metric > best if greater_is_better else metric < best)
