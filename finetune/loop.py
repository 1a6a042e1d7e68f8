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
from finetune.errors import Interrupted, TrainingError
from finetune.evaluation import Evaluation, evaluate
from finetune.finite import REMEDY, FiniteWatch, StepOutcome, is_nonfinite
from finetune.interrupt import StopRequests
from finetune.metrics import Metrics
from finetune.model import set_training_mode
from finetune.optim import LearningRateSchedule, clip_grad_norm
from finetune.throughput import Throughput
from finetune.tracking import Trackers

MOST_SKIPS = 10  # steps left out under train.on_nonfinite: skip, or one in a hundred when that is more


@dataclass
class TrainState:
    """How far training has come: everything the loop decides by."""

    epoch: int = 0
    step_in_epoch: int = 0
    global_step: int = 0
    evaluated_step: int = 0
    saved_step: int = 0
    skipped_steps: int = 0
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
    stop_requests: StopRequests
    finite_watch: FiniteWatch
    keep_best: Callable[[Evaluation], None]
    save_checkpoint: Callable[[TrainState], None]
    example_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> loss of each example
    problem_type: str
    total_steps: int
    evaluation_steps: frozenset[int]
    logging_steps: int
    save_every_steps: int | None
    skip_nonfinite: bool
    max_grad_norm: float
    metric_for_best_model: str
    greater_is_better: bool
    early_stopping_patience: int | None
    throughput: Throughput

    def epoch(self, state: TrainState) -> float:
        """Passes over the training rows so far, as a fraction."""
        return state.epoch + state.step_in_epoch / self.train_loader.steps_per_epoch


def train(training: Training, state: TrainState) -> None:
    """Train until the last step or until early stopping says so; ``state`` tells how it ended.

    Raises:
        Interrupted: on all ranks, after a checkpoint, when one was asked to stop.
        TrainingError: the loss or the gradients are not numbers.
    """
    training.throughput.start()
    try:
        if state.global_step in training.evaluation_steps:  # a run that goes on may have been stopped in an evaluation
            evaluate_and_save(training, state)
        while state.stop_reason is None:
            for inputs in training.train_loader.epoch(state.epoch, state.step_in_epoch):
                with training.stop_requests.round():
                    one_step(training, state, inputs)
                evaluate_and_save(training, state)
                if state.stop_reason is not None:
                    return
            state.start_next_epoch()
    except Interrupted:
        save(training, state)
        raise


def one_step(training: Training, state: TrainState, inputs: StepInputs) -> None:
    """One optimizer step and what is logged of it."""
    outcome, is_left_out = optimizer_step(training, state, inputs)
    state.advance()
    if is_left_out:
        training.throughput.count_skipped(inputs)
        count_left_out(training, state, outcome)
    else:
        training.throughput.count(inputs, outcome.losses.sum())
        training.finite_watch.note(outcome)
    training.progress.at(state.global_step)
    if state.global_step in training.evaluation_steps or state.global_step % training.logging_steps == 0:
        log_training(training, state, outcome.grad_norm)


def evaluate_and_save(training: Training, state: TrainState) -> None:
    """What is due after an optimizer step, besides logging."""
    step, every = state.global_step, training.save_every_steps
    is_evaluated = step in training.evaluation_steps and state.evaluated_step != step
    if is_evaluated:
        with training.throughput.evaluating():
            evaluate_and_keep_best(training, state)
    if step == training.total_steps:
        state.stop_reason = "all steps done"
    is_due = is_evaluated if every is None else step % every == 0
    if is_due or (is_evaluated and state.best_step == step) or state.stop_reason is not None:
        save(training, state)


def save(training: Training, state: TrainState) -> None:
    """Save a checkpoint, unless this step has one; never one of weights that are not numbers."""
    throughput = training.throughput
    if state.saved_step != state.global_step:
        training.finite_watch.check(training.accelerator, throughput.mean_loss(training.accelerator))
        with throughput.saving():
            training.save_checkpoint(state)
        training.stop_requests.needed = throughput.longest_step + 2 * throughput.longest_checkpoint


def optimizer_step(training: Training, state: TrainState, inputs: StepInputs) -> tuple[StepOutcome, bool]:
    """One update from the exact mean gradient over the global batch; gradients are all-reduced once.

    Each micro-batch's loss is a weighted sum over its examples, divided by the weight of the global batch (its size,
    unless classes have weights) and multiplied by the number of processes, since DistributedDataParallel averages
    over them.

    Returns:
        This rank's losses and the gradient's norm before clipping, still on the device; whether the update was left
        out because they are not numbers.
    """
    accelerator, model = training.accelerator, training.model
    set_training_mode(training.bare_model)
    sums: list[torch.Tensor] = []
    for position, micro in enumerate(inputs.micro_batches, start=1):
        is_last = position == len(inputs.micro_batches)
        with nullcontext() if is_last else accelerator.no_sync(model):
            losses = training.example_losses(model(**micro.inputs).logits, micro.labels)
            loss = (losses * micro.weights).sum()
            accelerator.backward(loss * accelerator.num_processes / inputs.weight)
        sums.append(loss.detach())
    grad_norm = clip_grad_norm(accelerator, model.parameters(), training.optimizer.optimizer, training.max_grad_norm)
    rows = [micro.rows for micro in inputs.micro_batches]
    outcome = StepOutcome(state.global_step + 1, training.schedule.learning_rate, rows, torch.stack(sums), grad_norm)
    is_left_out = training.skip_nonfinite and is_nonfinite(accelerator, outcome)
    if not is_left_out or accelerator.scaler is not None:  # float16: the scaler leaves it out, and has to see it
        training.optimizer.step()
    if training.optimizer.step_was_skipped:  # float16: a gradient overflowed, so the scale was lowered instead
        outcome.grad_norm = None
    elif not is_left_out:
        training.schedule.step()
    training.optimizer.zero_grad()
    return outcome, is_left_out


def log_training(training: Training, state: TrainState, grad_norm: torch.Tensor | None) -> None:
    """Log the mean loss over all examples of all ranks since the last time, and the speed."""
    metrics = training.throughput.summarise(training.accelerator)
    training.finite_watch.check(training.accelerator, metrics.get("train/loss", 0.0))
    metrics["train/learning_rate"] = training.schedule.learning_rate
    if grad_norm is not None:
        metrics["train/grad_norm"] = float(grad_norm)
    if training.skip_nonfinite:
        metrics["train/skipped_steps"] = state.skipped_steps
    epoch = training.epoch(state)
    training.trackers.log(metrics, state.global_step, epoch)
    loss = metrics.get("train/loss", math.nan)
    training.progress.training(state.global_step, epoch, loss, metrics["perf/examples_per_second"])


def evaluate_and_keep_best(training: Training, state: TrainState) -> None:
    """Evaluate, log, remember the best, and decide (equally on every rank) whether to stop."""
    evaluation = evaluate(
        training.accelerator,
        training.bare_model,
        training.eval_loader,
        training.metrics,
        training.problem_type,
        each_round=training.stop_requests.round,
    )
    refuse_nonfinite_evaluation(training, state, evaluation)
    state.evaluated_step = state.global_step
    state.saved_step = 0  # a checkpoint of an interrupted evaluation does not know its result
    metric = evaluation.metrics[training.metric_for_best_model]
    is_best = is_better(metric, state.best_metric, training.greater_is_better)
    state.evaluations_without_best = 0 if is_best else state.evaluations_without_best + 1
    if is_best:
        state.best_metric, state.best_step = metric, state.global_step
        training.keep_best(evaluation)
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


def refuse_nonfinite_evaluation(training: Training, state: TrainState, evaluation: Evaluation) -> None:
    """Stop on every rank (the loss is the same on all) instead of training on with weights that are not numbers."""
    loss = evaluation.metrics["loss"]
    if not math.isfinite(loss):
        raise TrainingError(
            f"the dev loss is {loss} at step {state.global_step} (learning rate {training.schedule.learning_rate:g}): "
            "lower optim.learning_rate, or use mixed_precision bf16 or no in the launch profile instead of fp16"
        )


def count_left_out(training: Training, state: TrainState, outcome: StepOutcome) -> None:
    """A few steps that are left out are an accident of the data; many are a fault of the run."""
    state.skipped_steps += 1
    said = training.finite_watch.describe(training.accelerator, [outcome])
    limit = max(MOST_SKIPS, training.total_steps // 100)
    if state.skipped_steps > limit:
        raise TrainingError(f"{said}; {limit} steps before it were left out (train.on_nonfinite: skip): {REMEDY}")
    training.progress.warn(f"{said}: left out")


def is_better(metric: float, best: float | None, greater_is_better: bool) -> bool:
    """Whether ``metric`` is a new best. The first one always is; a value that is not a number loses to any number."""
    if best is None:
        return True
    if math.isnan(metric):
        return False
    return math.isnan(best) or (metric > best if greater_is_better else metric < best)
