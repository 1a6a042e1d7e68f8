"""The plan: what a run is going to do, in words, before it does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune.config import Config
from finetune.data.batching import TrainingLength
from finetune.data.check import DataCheck, count_classes
from finetune.data.splits import Splits
from finetune.data.tokenize import TokenizedTexts
from finetune.data.tsv import Table
from finetune.model import LoadedModel
from finetune.run_folder import LaunchRecord

KEPT = {"head": "beginning", "tail": "end", "head_tail": "beginning (a quarter) and end"}
MAX_CLASSES = 12  # classes that the plan counts one by one


def describe_plan(
    config: Config,
    splits: Splits,
    train_texts: TokenizedTexts,
    dev_texts: TokenizedTexts,
    loaded: LoadedModel,
    length: TrainingLength,
    learning_rate: str,
    record: LaunchRecord,
    check: DataCheck,
) -> dict[str, str | list[str]]:
    """``{name: line or lines}`` for :func:`finetune.console.print_plan`."""
    dev_files = (
        "" if config.data.validation_file else f" ({100 * config.data.validation_split:g}% of the training rows)"
    )
    return {
        "train": [f"{_files(splits.train)}: {len(train_texts):,} rows", *splits.train.notes],
        "dev": [
            f"{_files(splits.dev)}: {len(dev_texts):,} rows{dev_files}",
            *(splits.dev.notes if config.data.validation_file else ()),
        ],
        "labels": _labels(splits),
        **_loss(config),
        "tokens": [
            f"max_length {loaded.max_length}: longer texts keep their {KEPT[config.data.truncation]}",
            *map(_lengths, ("train", "dev"), (train_texts, dev_texts)),
        ],
        **_warnings(check),
        "model": [f"{config.model.name_or_path}: {_model(loaded)}", *loaded.notes],
        "batch": (
            f"{record.global_batch_size} = {record.per_device_train_batch_size} per device x {record.num_processes} "
            f"process(es) x {record.gradient_accumulation_steps} accumulation ({record.gradient_accumulation_source})"
        ),
        "steps": (
            f"{length.total_steps:,} optimizer steps, {length.steps_per_epoch:,} an epoch; "
            f"evaluated {len(length.evaluation_steps)} time(s)"
        ),
        "learning rate": learning_rate,
        "machine": (
            f"{record.num_processes} x {record.device_name}, {record.threads_per_process} CPU thread(s) each, "
            f"precision {'float32' if record.mixed_precision == 'no' else record.mixed_precision}"
        ),
    }


def _warnings(check: DataCheck) -> dict[str, list[str]]:
    """What should be looked at in the data; nothing where all is well."""
    found = [f"warning: {finding.message}" for finding in check.of("warning")]
    return {"data check": [*found, "places and remedies: `finetune check`, or data_check.json"]} if found else {}


def _files(table: Table) -> str:
    first = Path(table.files[0]).name
    return first if len(table.files) == 1 else f"{first} and {len(table.files) - 1} more"


def _labels(splits: Splits) -> str:
    names, encoded = splits.labels.names, splits.train_labels
    if not names:
        return f"numbers from {encoded.min():g} to {encoded.max():g} (regression)"
    counts = count_classes(encoded, splits.labels)
    if len(names) > MAX_CLASSES:
        return f"{len(names)} classes with {min(counts.values()):,} to {max(counts.values()):,} training rows"
    return f"{len(names)} classes: " + ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _loss(config: Config) -> dict[str, str]:
    """How the training loss departs from the plain mean; nothing where it does not."""
    weights, smoothing = config.data.class_weights, config.train.label_smoothing
    said = str(weights)
    if isinstance(weights, dict):
        said = ", ".join(f"{name} {weight:g}" for name, weight in weights.items()) + ", others 1"
    parts = [] if weights == "none" else [f"class weights {said}"]
    parts += [f"label smoothing {smoothing:g}"] if smoothing else []
    return {"training loss": "; ".join(parts)} if parts else {}


def _lengths(split: str, texts: TokenizedTexts) -> str:
    median, most = np.percentile(texts.full_lengths, [50, 100])
    line = f"{split}: median {median:.0f}, longest {most:.0f}"
    if not texts.truncated_rows:
        return line + "; nothing is cut"
    return f"{line}; {texts.describe_cut()}"


def _model(loaded: LoadedModel) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in loaded.model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, needed in sizes if needed)
    share = "" if trained == total else f", {trained:,} of them trained"
    return f"{type(loaded.model).__name__}, {total / 1e6:.1f} million parameters{share}"
