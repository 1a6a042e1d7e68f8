"""What a finished run has to show: results.json, predictions.tsv, the trackers' summary, the tables at the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from finetune.console import print_results
from finetune.data.splits import Splits
from finetune.data.tsv import column_texts
from finetune.distributed import communication_seconds
from finetune.evaluation import Evaluation
from finetune.loop import Training, TrainState
from finetune.loss import example_losses
from finetune.metrics import confusion_matrix, per_class_table, predictions, probabilities, tune_thresholds
from finetune.model import INPUTS_FILE, InputSettings
from finetune.report import write_report
from finetune.run_folder import LaunchRecord, write_json, write_predictions


@dataclass(frozen=True)
class Results:
    """The best model of a run on the dev rows, and what the run took. Built and used by the main process."""

    splits: Splits
    training: Training
    state: TrainState
    evaluation: Evaluation
    record: LaunchRecord
    peak_memory_bytes: int
    wall_seconds: float
    checkpoint_bytes: int
    startup_seconds: dict[str, float]

    def publish(self, console: Console, output_dir: Path) -> None:
        """Write the files, hand the summary to the trackers, print the tables."""
        labels, logits = self.splits.labels, self.evaluation.logits
        intervals = self.intervals()
        per_class = self.per_class()
        results = self.as_dict(intervals, per_class)
        write_json(output_dir / "results.json", results)
        write_dev_predictions(output_dir / "predictions.tsv", self.splits, logits, self.thresholds)
        if self.thresholds is not None:
            save_thresholds(output_dir / "best", self.thresholds)
        trackers = self.training.trackers
        trackers.log_evaluation_tables(
            self.state.global_step, label_names=labels.names, confusion=self.confusion(), per_class=per_class
        )
        best = {f"best/{name}": value for name, value in self.evaluation.metrics.items()}
        summary = {**best, "best/step": self.state.best_step, "stop_reason": self.state.stop_reason}
        trackers.finish(summary, failed=False)
        write_report(output_dir)
        throughput = self.training.throughput
        counts = throughput.total
        facts = {
            "best": f"{self.training.metric_for_best_model} at step {self.state.best_step} of {self.state.global_step}",
            "stopped": str(self.state.stop_reason),
            "time": (
                f"{self.wall_seconds:.0f} s in all: {counts.seconds:.0f} s training, "
                f"{throughput.evaluation_seconds:.0f} s evaluation, {throughput.checkpoint_seconds:.0f} s checkpoints "
                f"({self.checkpoint_bytes / 1e6:,.0f} MB each)"
            ),
            "speed": (
                f"{results['examples_per_second']:.1f} examples/s, {results['tokens_per_second']:,.0f} tokens/s, "
                f"{results['padding_fraction']:.1%} padding, {self.peak_memory_bytes / 2**30:.2f} GiB at the peak"
            ),
            "model": str(output_dir / "best"),
            "report": str(output_dir / "report.html"),
            "tracking": trackers.describe(),
        }
        if self.thresholds is not None:
            tuned = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics_at_thresholds.items())
            facts["thresholds"] = f"each label's own, tuned on these dev rows and saved with the model: {tuned}"
        title = f"Best model on {len(logits):,} dev rows"
        print_results(console, self.evaluation.metrics, intervals, per_class, facts, title=title)

    def as_dict(self, intervals: dict[str, tuple[float, float]], per_class: list[dict[str, Any]]) -> dict[str, Any]:
        """The content of ``results.json``."""
        training, state, counts = self.training, self.state, self.training.throughput.total
        metrics = {
            name: {"value": value, "low": low, "high": high}
            for name, value in self.evaluation.metrics.items()
            for low, high in [intervals.get(name, (None, None))]
        }
        return {
            "metric_for_best_model": training.metric_for_best_model,
            "best_metric": state.best_metric,
            "best_step": state.best_step,
            "metrics": metrics,
            "interval_level": 0.95,
            "labels": list(self.splits.labels.names),
            "per_class": per_class,
            **self._thresholds_as_dict(),
            "stop_reason": state.stop_reason,
            "global_step": state.global_step,
            "epoch": training.epoch(state),
            "train_rows": len(self.splits.train_labels),
            "dev_rows": len(self.splits.dev_labels),
            "wall_seconds": self.wall_seconds,
            "startup_seconds": self.startup_seconds,
            "training_seconds": counts.seconds,
            "data_seconds": training.train_loader.waited_seconds,
            **communication_seconds(training.model),
            "evaluation_seconds": training.throughput.evaluation_seconds,
            "checkpoint_seconds": training.throughput.checkpoint_seconds,
            "checkpoint_bytes": self.checkpoint_bytes,
            "skipped_steps": state.skipped_steps,
            **{name.removeprefix("perf/"): value for name, value in counts.rates().items()},
            "peak_memory_bytes": self.peak_memory_bytes,
            "num_processes": self.record.num_processes,
            "global_batch_size": self.record.global_batch_size,
            "gradient_accumulation_steps": self.record.gradient_accumulation_steps,
        }

    @cached_property
    def thresholds(self) -> NDArray[np.float64] | None:
        """The probability from which on each label is given, with the best F1 on the dev rows; multi-label only."""
        if self.training.problem_type != "multi_label_classification":
            return None
        return tune_thresholds(self.evaluation.logits, self.splits.dev_labels)

    @cached_property
    def metrics_at_thresholds(self) -> dict[str, float]:
        """The metrics at the tuned thresholds: on the rows that they were tuned on, so they flatter."""
        return self.training.metrics.compute(self.evaluation.logits, self.splits.dev_labels, self.thresholds)

    def _thresholds_as_dict(self) -> dict[str, Any]:
        if self.thresholds is None:
            return {}
        named = dict(zip(self.splits.labels.names, self.thresholds.tolist(), strict=True))
        return {"thresholds": named, "metrics_at_thresholds": self.metrics_at_thresholds}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % interval of each metric over samples of dev rows; the loss's by the normal approximation of a mean."""
        logits, labels = self.evaluation.logits, self.splits.dev_labels
        losses = example_losses(torch.from_numpy(logits), torch.from_numpy(labels), self.training.problem_type).numpy()
        half = 1.96 * float(losses.std()) / len(losses) ** 0.5
        mean = self.evaluation.metrics["loss"]
        return {"loss": (mean - half, mean + half), **self.training.metrics.confidence_intervals(logits, labels)}

    def confusion(self) -> NDArray[np.int64] | None:
        """``[true, predicted]`` counts where each row has one class."""
        if self.training.problem_type != "single_label_classification":
            return None
        return confusion_matrix(self.evaluation.logits, self.splits.dev_labels, self.splits.labels.num_labels)

    def per_class(self) -> list[dict[str, Any]]:
        """Precision, recall, F1 and rows of each class; empty for regression."""
        labels = self.splits.labels
        if not labels.names:
            return []
        return per_class_table(
            self.evaluation.logits, self.splits.dev_labels, labels.names, self.training.problem_type, self.thresholds
        )


def save_thresholds(model_folder: Path, thresholds: NDArray[np.float64]) -> None:
    """Store thresholds with a model, for prediction."""
    inputs = InputSettings.load(model_folder)
    write_json(model_folder / INPUTS_FILE, asdict(replace(inputs, thresholds=thresholds.tolist())))


def write_dev_predictions(
    path: Path, splits: Splits, logits: NDArray[np.float32], thresholds: NDArray[np.float64] | None
) -> None:
    """``predictions.tsv``: label, prediction and probabilities of every dev row, in file order."""
    labels = splits.labels
    write_predictions(
        path,
        predicted=predictions(logits, labels.problem_type, thresholds),
        probability=probabilities(logits, labels.problem_type),
        label_names=labels.names,
        columns={"label": column_texts(splits.dev.dataset, "label")},
        separator=labels.separator,
    )
