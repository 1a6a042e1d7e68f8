"""Training against a plain PyTorch loop that takes the mean over each global batch at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import reviews
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

import finetune.loop
from finetune.config import OptimConfig
from finetune.console import TrainingProgress
from finetune.data.batching import BatchSizes, epoch_order
from finetune.data.loader import EvalLoader, Examples, TrainLoader
from finetune.data.tokenize import TokenizedTexts, tokenize
from finetune.errors import Interrupted, TrainingError
from finetune.evaluation import Evaluation
from finetune.finite import FiniteWatch
from finetune.first_tokens import FirstTokens
from finetune.interrupt import StopRequests
from finetune.launch import build_accelerator
from finetune.loop import Training, TrainState, is_better, optimizer_step, train
from finetune.loss import example_losses, example_weights
from finetune.metrics import Metrics
from finetune.model import LoadedModel, load_model
from finetune.optim import LearningRateSchedule
from finetune.throughput import Throughput
from finetune.tracking import Tracker, Trackers

CPU = torch.device("cpu")
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
ROWS = reviews(23, seed=2)  # 10 + 10 + 3
SEED = 7


class Recorder(Tracker):
    """Keeps what is logged: ``{step: metrics}``."""

    name = "recorder"

    def __init__(self) -> None:
        self.training: dict[int, Mapping[str, float]] = {}
        self.evaluations: dict[int, Mapping[str, float]] = {}
        self.epochs: dict[int, float] = {}

    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        kept = self.training if "train/loss" in metrics else self.evaluations
        assert step not in kept
        kept[step] = dict(metrics)
        self.epochs[step] = epoch

    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        pass

    def describe(self) -> str:
        return "memory"


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    torch.set_num_threads(1)
    return build_accelerator()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def labels_of(problem_type: str) -> np.ndarray:
    ids = np.array([int(label == "pos") for _, label in ROWS])
    if problem_type == MULTI:
        return np.stack([ids, np.arange(len(ids)) % 3 == 0, np.ones(len(ids))], axis=1).astype(np.float32)
    return ids if problem_type == SINGLE else (ids * 1.5 - np.arange(len(ids)) / 10).astype(np.float32)


def load(bert: Path, problem_type: str) -> LoadedModel:
    torch.manual_seed(1)  # the same new head every time
    names = {SINGLE: ("neg", "pos"), MULTI: ("a", "b", "c"), REGRESSION: ()}[problem_type]
    loaded = load_model(str(bert), label_names=names, problem_type=problem_type, max_length=32)
    with torch.no_grad():  # a fresh model says nearly the same of every text
        for module in loaded.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(10)
    return loaded


class Setup:
    """Everything that :class:`Training` is built of, over the 23 rows."""

    def __init__(
        self,
        accelerator: Accelerator,
        bert: Path,
        cache: str,
        sizes: BatchSizes,
        *,
        problem_type: str = SINGLE,
        rate: float = 0.5,
        total_steps: int = 6,
        optim: OptimConfig | None = None,
        class_weights: np.ndarray | None = None,
        label_smoothing: float = 0.0,
        **changes: Any,
    ) -> None:
        self.loaded = load(bert, problem_type)
        self.texts = tokenize(
            datasets.Dataset.from_dict({"text": [text for text, _ in ROWS]}),
            self.loaded.tokenizer,
            max_length=32,
            cache_dir=cache,
        )
        labels = labels_of(problem_type)
        split = Examples(self.texts, labels, example_weights(labels, class_weights))
        optimizer = torch.optim.SGD(self.loaded.model.parameters(), lr=rate)
        optim = optim or OptimConfig(lr_scheduler_type="constant", warmup_steps=0)
        schedule = LearningRateSchedule(optimizer, optim, total_steps, greater_is_better=True)
        model, prepared = accelerator.prepare(self.loaded.model, optimizer)
        self.recorder = Recorder()
        self.best_steps: list[Evaluation] = []
        self.saved_steps: list[int] = []
        self.state = TrainState()
        tokenizer = self.loaded.tokenizer
        settings: dict[str, Any] = {
            "accelerator": accelerator,
            "model": model,
            "bare_model": accelerator.unwrap_model(model),
            "optimizer": prepared,
            "schedule": schedule,
            "train_loader": TrainLoader(split, tokenizer, sizes, rank=0, seed=SEED, device=accelerator.device),
            "eval_loader": EvalLoader(split, tokenizer, 4, rank=0, num_processes=1, device=accelerator.device),
            "metrics": Metrics([], problem_type=problem_type, num_labels=self.loaded.model.config.num_labels),
            "trackers": Trackers([self.recorder]),
            "progress": TrainingProgress(Console(quiet=True, file=StringIO()), total_steps),
            "stop_requests": StopRequests(),
            "finite_watch": FiniteWatch(lambda rows: [f"row {row}" for row in rows]),
            "keep_best": self.best_steps.append,
            "save_checkpoint": self.save,
            "example_losses": partial(
                example_losses,
                problem_type=problem_type,
                class_weights=None if class_weights is None else torch.from_numpy(class_weights),
                label_smoothing=label_smoothing,
            ),
            "problem_type": problem_type,
            "total_steps": total_steps,
            "evaluation_steps": frozenset({total_steps}),
            "logging_steps": 1,
            "save_every_steps": None,
            "skip_nonfinite": False,
            "max_grad_norm": 0.0,
            "metric_for_best_model": "loss",
            "greater_is_better": False,
            "early_stopping_patience": None,
            "throughput": Throughput(),
        }
        self.training = Training(**{**settings, **changes})

    def save(self, state: TrainState) -> None:
        state.saved_step = state.global_step
        self.saved_steps.append(state.global_step)

    def train(self) -> None:
        train(self.training, self.state)


class Reference:
    """The same training in plain PyTorch: all rows of a step in one batch, the mean of their losses, one update."""

    def __init__(self, bert: Path, texts: TokenizedTexts, problem_type: str = SINGLE) -> None:
        self.model = load(bert, problem_type).model
        self.model.train()
        self._ids, self._labels, self._kind = texts.dataset["input_ids"], labels_of(problem_type), problem_type
        self.losses: list[torch.Tensor] = []
        self.norms: list[float] = []

    def step(
        self,
        rows: Sequence[int],
        rate: float,
        max_norm: float | None = None,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(self._ids[int(row)]) for row in rows], batch_first=True)
        logits = self.model(input_ids=ids, attention_mask=(ids != 0).long()).logits
        labels = torch.tensor(self._labels[np.array(rows)])
        if self._kind == SINGLE:
            losses = logits.exp().sum(dim=1).log() - logits[torch.arange(len(rows)), labels]
        elif self._kind == MULTI:
            losses = ((1 + logits.exp()).log() - labels * logits).mean(dim=1)
        else:
            losses = (logits[:, 0] - labels) ** 2
        loss = losses.mean()
        if class_weights is not None:  # each class probability, or each entry of the label vector, has its weight
            weight, share = torch.tensor(class_weights), label_smoothing
            if self._kind == SINGLE:
                logs = logits.log_softmax(dim=1)
                smoothed = -(1 - share) * logs[torch.arange(len(rows)), labels] - share * logs.mean(dim=1)
                loss = (weight[labels] * smoothed).sum() / weight[labels].sum()
            else:
                counts = torch.where(labels == 1, weight, torch.ones_like(weight))
                targets = torch.where(labels == 1, 1 - share / 2, share / 2)
                entries = -targets * logits.sigmoid().log() - (1 - targets) * (1 - logits.sigmoid()).log()
                loss = (counts * entries).sum() / counts.sum()
            losses = loss[None]
        self.model.zero_grad()
        loss.backward()
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in parameters))
        scale = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
        with torch.no_grad():
            for parameter in parameters:
                parameter -= rate * scale * parameter.grad
        self.losses.append(losses.detach())
        self.norms.append(norm)


def batches(epoch: int, size: int = 10) -> list[list[int]]:
    order = epoch_order(len(ROWS), SEED, epoch).tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def assert_same_weights(model: Any, expected: Any, start: Any) -> None:
    moved = 0.0
    for (name, a), (_, b), (_, c) in zip(
        model.named_parameters(), expected.named_parameters(), start.named_parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        moved = max(moved, float((b - c).detach().abs().max()))
    assert moved > 1e-2  # thousands of times the tolerance


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI, REGRESSION])
@pytest.mark.parametrize(("per_device", "accumulation"), [(10, 1), (5, 2), (2, 5)])
def test_updates_equal_those_of_the_whole_global_batch(
    accelerator: Accelerator, bert: Path, cache: str, per_device: int, accumulation: int, problem_type: str
) -> None:
    """Two epochs of 10, 10 and 3 rows: the short batch counts as the mean over its three."""
    setup = Setup(
        accelerator, bert, cache, BatchSizes(per_device, 1, accumulation), problem_type=problem_type, rate=0.1
    )
    reference = Reference(bert, setup.texts, problem_type)
    for rows in batches(0) + batches(1):
        reference.step(rows, 0.1)
    setup.train()
    assert_same_weights(setup.training.bare_model, reference.model, load(bert, problem_type).model)
    logged = setup.recorder.training
    assert [logged[step]["train/loss"] for step in range(1, 7)] == pytest.approx(
        [float(losses.mean()) for losses in reference.losses], abs=1e-5
    )
    assert [logged[step]["train/grad_norm"] for step in range(1, 7)] == pytest.approx(reference.norms, abs=1e-4)


@pytest.mark.parametrize(
    ("problem_type", "weights"),
    [(SINGLE, np.array([0.4, 3.0], np.float32)), (MULTI, np.array([0.4, 3.0, 2.0], np.float32))],
)
@pytest.mark.parametrize(("per_device", "accumulation"), [(10, 1), (2, 5)])
def test_weights_stand_above_and_below_the_line(
    accelerator: Accelerator,
    bert: Path,
    cache: str,
    problem_type: str,
    weights: np.ndarray,
    per_device: int,
    accumulation: int,
) -> None:
    """The weighted mean over the whole global batch, not a mean of the micro-batches' weighted means."""
    setup = Setup(
        accelerator,
        bert,
        cache,
        BatchSizes(per_device, 1, accumulation),
        problem_type=problem_type,
        rate=0.1,
        class_weights=weights,
        label_smoothing=0.2,
    )
    reference = Reference(bert, setup.texts, problem_type)
    for rows in batches(0) + batches(1):
        reference.step(rows, 0.1, class_weights=weights.tolist(), label_smoothing=0.2)
    setup.train()
    assert_same_weights(setup.training.bare_model, reference.model, load(bert, problem_type).model)
    logged = [setup.recorder.training[step]["train/loss"] for step in range(1, 7)]
    assert logged == pytest.approx([float(loss) for loss in reference.losses], abs=1e-5)


@pytest.mark.parametrize(("per_device", "accumulation"), [(10, 1), (2, 5)])
def test_clipping_is_of_the_whole_gradient(
    accelerator: Accelerator, bert: Path, cache: str, per_device: int, accumulation: int
) -> None:
    setup = Setup(accelerator, bert, cache, BatchSizes(per_device, 1, accumulation), max_grad_norm=0.2, total_steps=3)
    reference = Reference(bert, setup.texts)
    for rows in batches(0):
        reference.step(rows, 0.5, max_norm=0.2)
    assert min(reference.norms) > 0.4  # every gradient is clipped
    setup.train()
    assert_same_weights(setup.training.bare_model, reference.model, load(bert, SINGLE).model)
    logged = [setup.recorder.training[step]["train/grad_norm"] for step in (1, 2, 3)]
    assert logged == pytest.approx(reference.norms, abs=1e-4)  # as it was before clipping


@pytest.mark.parametrize("variable", [None, "7"])
def test_the_environment_does_not_scale_the_loss_again(
    bert: Path, cache: str, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """ACCELERATE_GRADIENT_ACCUMULATION_STEPS makes ``accelerator.backward`` divide, were it let."""
    if variable:
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", variable)
    setup = Setup(build_accelerator(), bert, cache, BatchSizes(2, 1, 5), total_steps=1)
    reference = Reference(bert, setup.texts)
    reference.step(batches(0)[0], 0.5)
    setup.train()
    assert_same_weights(setup.training.bare_model, reference.model, load(bert, SINGLE).model)


class ReadsOfTensors(TorchDispatchMode):
    """Counts what makes the host wait for the device: a tensor's value asked for as a number, or copied to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_reads_of_tensors_are_counted() -> None:
    """Or the test below would hold for want of counting."""
    with ReadsOfTensors() as reads:
        values = torch.ones(3)
        assert (values.sum().item(), float(values[0]), bool(values[1] > 0)) == (3, 1, True)
    assert reads.count == 3


def test_no_step_waits_for_the_device_between_log_lines(
    accelerator: Accelerator, bert: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch refuses to wait; on a CPU reads are counted: one a step, of a number that is on the host."""
    setup = Setup(accelerator, bert, cache, BatchSizes(2, 1, 2), logging_steps=100, total_steps=6, max_grad_norm=1.0)
    FirstTokens(setup.loaded.model).mask_on_device()  # as every run does; transformers' own masks wait
    reads_before: list[int] = []

    def noted(*arguments: Any) -> Any:
        reads_before.append(reads.count)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if 1 < len(reads_before) < 6 else "default")
        return optimizer_step(*arguments)

    monkeypatch.setattr(finetune.loop, "optimizer_step", noted)
    try:
        with ReadsOfTensors() as reads:
            setup.train()
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    assert np.diff(reads_before).tolist() == [1, 1, 1, 1, 1]
    assert reads.count > reads_before[-1] + 1  # the last step is logged and evaluated


def test_a_stand_in_row_counts_nothing(accelerator: Accelerator, bert: Path, cache: str) -> None:
    """One of two ranks that has no row left, seen alone: its gradient is exactly zero."""
    setup = Setup(accelerator, bert, cache, BatchSizes(2, 1, 5))
    inputs = next(iter(setup.training.train_loader.epoch(0, 2)))
    for micro in inputs.micro_batches:
        micro.weights.zero_()
    outcome, _ = optimizer_step(setup.training, setup.state, inputs)
    assert (float(outcome.losses.sum()), float(outcome.grad_norm)) == (0.0, 0.0)  # type: ignore[arg-type]
    for (name, a), (_, b) in zip(
        setup.training.bare_model.named_parameters(), load(bert, SINGLE).model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_the_logged_loss_is_the_mean_over_examples(accelerator: Accelerator, bert: Path, cache: str) -> None:
    """Every two steps: (10 + 10), (3 + 10), (10 + 3) examples; not a mean of the steps' means."""
    setup = Setup(accelerator, bert, cache, BatchSizes(5, 1, 2), logging_steps=2)
    reference = Reference(bert, setup.texts)
    for rows in batches(0) + batches(1):
        reference.step(rows, 0.5)
    setup.train()
    assert sorted(setup.recorder.training) == [2, 4, 6]
    for step, metrics in setup.recorder.training.items():
        losses = torch.cat(reference.losses[step - 2 : step])
        assert metrics["train/loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    means = [float(losses.mean()) for losses in reference.losses]
    assert abs(sum(means[2:4]) / 2 - setup.recorder.training[4]["train/loss"]) > 1e-3


def test_the_last_step_is_logged(accelerator: Accelerator, bert: Path, cache: str) -> None:
    setup = Setup(accelerator, bert, cache, BatchSizes(10, 1, 1), logging_steps=4, total_steps=5)
    setup.train()
    assert sorted(setup.recorder.training) == [4, 5]


def test_one_step_of_the_schedule_for_each_update(accelerator: Accelerator, bert: Path, cache: str) -> None:
    """Linear over six steps with two of warm-up; the rate of the update itself, read where it is made."""
    used: list[float] = []
    setup = Setup(
        accelerator, bert, cache, BatchSizes(2, 1, 5), optim=OptimConfig(warmup_steps=2, lr_scheduler_type="linear")
    )
    handle = setup.training.optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    setup.train()
    handle.remove()
    assert used == pytest.approx([0.0, 0.25, 0.5, 0.375, 0.25, 0.125])


def test_a_skipped_update_does_not_advance_the_schedule(accelerator: Accelerator, bert: Path, cache: str) -> None:
    optim = OptimConfig(warmup_steps=4)
    setup = Setup(accelerator, bert, cache, BatchSizes(10, 1, 1), optim=optim)
    real = setup.training.optimizer
    setup.training.optimizer = SimpleNamespace(  # type: ignore[assignment]
        step=lambda: None, zero_grad=real.zero_grad, step_was_skipped=True, optimizer=real.optimizer
    )
    for inputs in setup.training.train_loader.epoch(0):
        optimizer_step(setup.training, setup.state, inputs)
    assert setup.training.schedule.learning_rate == 0.0
    setup.training.optimizer = real
    optimizer_step(setup.training, setup.state, next(iter(setup.training.train_loader.epoch(0))))
    assert setup.training.schedule.learning_rate == pytest.approx(0.5 / 4)


def test_gradients_do_not_leak_into_the_next_update(accelerator: Accelerator, bert: Path, cache: str) -> None:
    setup = Setup(accelerator, bert, cache, BatchSizes(10, 1, 1))
    optimizer_step(setup.training, setup.state, next(iter(setup.training.train_loader.epoch(0))))
    assert all(parameter.grad is None for parameter in setup.training.bare_model.parameters())


def scripted(monkeypatch: pytest.MonkeyPatch, values: Sequence[float], name: str = "accuracy") -> list[float]:
    """Make evaluations return these values, one after the other; the list left shows how many were not asked for."""
    left = list(values)

    def evaluate(*_: object, **__: object) -> Evaluation:
        return Evaluation(np.zeros((1, 2), np.float32), {"loss": 0.0, name: left.pop(0)}, 0.0)

    monkeypatch.setattr(finetune.loop, "evaluate", evaluate)
    return left


EVERY_STEP = frozenset(range(1, 10))


@pytest.mark.parametrize(
    ("values", "greater", "patience", "steps", "best_step", "best"),
    [
        # Patience 2: stops after the second evaluation in a row that is no better.
        ([0.5, 0.6, 0.6, 0.5, 0.9], True, 2, 4, 2, 0.6),
        ([0.5, 0.4, 0.6, 0.5, 0.7, 0.7, 0.7, 0.9], True, 2, 7, 5, 0.7),
        ([0.5, 0.4, 0.6, 0.5], True, 1, 2, 1, 0.5),
        ([0.5, 0.6, 0.55, 0.4, 0.4, 0.5], False, 2, 3, 1, 0.5),
        # Values that are no numbers are not better than any number, and any number is better than them.
        ([math.nan, 0.1, math.nan, math.nan, 0.5], True, 2, 4, 2, 0.1),
        ([math.nan, math.nan, math.nan], True, 2, 3, 1, math.nan),
        # Without patience, and with more than is needed, all nine steps are done.
        ([0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], True, None, 9, 1, 0.9),
        ([0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], True, 9, 9, 1, 0.9),
    ],
)
def test_early_stopping_by_hand(
    accelerator: Accelerator,
    bert: Path,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    values: list[float],
    greater: bool,
    patience: int | None,
    steps: int,
    best_step: int,
    best: float,
) -> None:
    left = scripted(monkeypatch, values)
    setup = Setup(
        accelerator,
        bert,
        cache,
        BatchSizes(10, 1, 1),
        total_steps=9,
        evaluation_steps=EVERY_STEP,
        metric_for_best_model="accuracy",
        greater_is_better=greater,
        early_stopping_patience=patience,
    )
    setup.train()
    assert setup.state.global_step == steps
    assert len(left) == len(values) - steps
    assert setup.state.best_step == best_step
    assert setup.state.best_metric == pytest.approx(best, nan_ok=True)
    stopped_early = steps < 9
    assert str(setup.state.stop_reason).startswith("early stopping" if stopped_early else "all steps done")
    if stopped_early:
        assert f"{patience} evaluations without a better accuracy than at step {best_step}" in str(
            setup.state.stop_reason
        )
    # Saved whenever it was a new best: counted by the rule itself.
    bests, highest = 0, math.nan
    for value in values[:steps]:
        better = not math.isnan(value) and (math.isnan(highest) or ((value > highest) == greater and value != highest))
        if better or bests == 0:
            bests, highest = bests + 1, value
    assert len(setup.best_steps) == bests


EIGHT_STEPS: dict[str, Any] = {
    "total_steps": 8,
    "evaluation_steps": frozenset({3, 6, 8}),
    "metric_for_best_model": "accuracy",
    "greater_is_better": True,
}


def test_steps_epochs_and_evaluations(
    accelerator: Accelerator, bert: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 rows in tens: three steps an epoch; eight steps with evaluations at 3, 6 and 8."""
    left = scripted(monkeypatch, [0.1, 0.3, 0.2])
    setup = Setup(
        accelerator,
        bert,
        cache,
        BatchSizes(2, 1, 5),
        **EIGHT_STEPS,
    )
    setup.train()
    assert left == []
    assert (setup.state.global_step, setup.state.epoch, setup.state.step_in_epoch) == (8, 2, 2)
    assert (setup.state.best_step, setup.state.best_metric, setup.state.evaluations_without_best) == (6, 0.3, 1)
    evaluations = setup.recorder.evaluations
    assert {step: metrics["eval/accuracy"] for step, metrics in evaluations.items()} == {3: 0.1, 6: 0.3, 8: 0.2}
    assert setup.recorder.epochs == pytest.approx({step: step / 3 for step in range(1, 9)})
    assert setup.training.throughput.total.examples == 23 * 2 + 20
    assert setup.training.throughput.total.tokens == 2 * int(setup.texts.lengths.sum()) + sum(
        int(setup.texts.lengths[row]) for rows in batches(2)[:2] for row in rows
    )


def test_training_goes_on_from_a_state(accelerator: Accelerator, bert: Path, cache: str) -> None:
    """From the second step of the second epoch: its two remaining batches and no others."""
    setup = Setup(accelerator, bert, cache, BatchSizes(10, 1, 1), total_steps=6)
    setup.state.epoch, setup.state.step_in_epoch, setup.state.global_step = 1, 1, 4
    reference = Reference(bert, setup.texts)
    for rows in batches(1)[1:]:
        reference.step(rows, 0.5)
    setup.train()
    assert_same_weights(setup.training.bare_model, reference.model, load(bert, SINGLE).model)


def test_plateau_hears_of_every_evaluation(
    accelerator: Accelerator, bert: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [0.5, 0.5, 0.4, 0.6, 0.1, 0.1])
    optim = OptimConfig(lr_scheduler_type="plateau", warmup_steps=0, plateau_factor=0.5, plateau_patience=0)
    used: list[float] = []
    setup = Setup(
        accelerator,
        bert,
        cache,
        BatchSizes(10, 1, 1),
        optim=optim,
        evaluation_steps=EVERY_STEP,
        metric_for_best_model="accuracy",
        greater_is_better=True,
    )
    setup.training.optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    setup.train()
    assert used == [0.5, 0.5, 0.25, 0.125, 0.125, 0.0625]


NAN = math.nan


@pytest.mark.parametrize(
    ("metric", "best", "greater", "expected"),
    [
        (0.5, None, True, True),
        (0.5, None, False, True),
        (NAN, None, True, True),
        (0.6, 0.5, True, True),
        (0.5, 0.5, True, False),
        (0.4, 0.5, True, False),
        (0.6, 0.5, False, False),
        (0.5, 0.5, False, False),
        (0.4, 0.5, False, True),
        (NAN, 0.5, True, False),
        (NAN, 0.5, False, False),
        (0.5, NAN, True, True),
        (0.5, NAN, False, True),
        (NAN, NAN, True, False),
        (-0.1, -0.2, True, True),
        (0.0, -0.2, False, False),
        (math.inf, 0.5, True, True),
        (math.inf, 0.5, False, False),
    ],
)
def test_is_better(metric: float, best: float | None, greater: bool, expected: bool) -> None:
    assert is_better(metric, best, greater) is expected


@pytest.mark.parametrize(
    ("every", "values", "saved"),
    [
        (None, [0.5, 0.4, 0.6], [3, 6, 8]),  # after each evaluation
        (2, [0.5, 0.4, 0.6], [2, 3, 4, 6, 8]),  # every second step, and the new best of step 3
        (5, [0.5, 0.4, 0.3], [3, 5, 8]),
        (100, [0.5, 0.5, 0.5], [3, 8]),  # the first evaluation is a best; the last step is always saved
    ],
)
def test_when_checkpoints_are_saved(
    accelerator: Accelerator,
    bert: Path,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
    values: list[float],
    saved: list[int],
) -> None:
    scripted(monkeypatch, values)
    setup = Setup(
        accelerator,
        bert,
        cache,
        BatchSizes(10, 1, 1),
        save_every_steps=every,
        **EIGHT_STEPS,
    )
    setup.train()
    assert setup.saved_steps == saved


def test_weights_that_are_no_numbers_are_never_saved(accelerator: Accelerator, bert: Path, cache: str) -> None:
    """The second step diverges; nobody looks before the third is to be saved."""
    setup = Setup(accelerator, bert, cache, BatchSizes(10, 1, 1), logging_steps=50, save_every_steps=1)
    saved = setup.training.save_checkpoint

    def save(state: TrainState) -> None:
        saved(state)
        if state.global_step == 1:
            with torch.no_grad():
                next(setup.training.bare_model.parameters()).fill_(math.inf)

    setup.training.save_checkpoint = save
    with pytest.raises(TrainingError, match=r"training loss is not finite at step 2 .*in the micro-batch of row \d+"):
        setup.train()
    assert setup.saved_steps == [1]


def test_an_interrupted_evaluation_is_made_up_for(
    accelerator: Accelerator, bert: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped inside the evaluation of step 3: saved as not evaluated, evaluated first when it goes on."""
    setup = Setup(accelerator, bert, cache, BatchSizes(10, 1, 1), evaluation_steps=frozenset({3, 6}))

    def interrupted(*_: object, **__: object) -> Evaluation:
        raise Interrupted("SIGTERM", 143)

    with monkeypatch.context() as patch:
        patch.setattr(finetune.loop, "evaluate", interrupted)
        with pytest.raises(Interrupted):
            setup.train()
    assert (setup.saved_steps, setup.state.global_step, setup.state.evaluated_step) == ([3], 3, 0)
    assert sorted(setup.recorder.evaluations) == []
    setup.train()
    assert sorted(setup.recorder.evaluations) == [3, 6]
    assert sorted(setup.recorder.training) == [1, 2, 3, 4, 5, 6]
    assert setup.saved_steps == [3, 3, 6]  # the first one of step 3 knew nothing of its evaluation
