"""A trained model on new rows: ``finetune predict`` and ``finetune evaluate``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from finetune.config import PredictConfig, PredictDataConfig
from finetune.console import make_console, print_plan, print_results
from finetune.data.batching import BatchSizes
from finetune.data.labels import Labels
from finetune.data.loader import EvalLoader, Examples
from finetune.data.tokenize import tokenize
from finetune.data.tsv import ReadOptions, Table, column_texts, read_table
from finetune.distributed import disconnect, first_on_each_node, on_every_process, on_main_process
from finetune.errors import CheckpointError, ConfigError
from finetune.evaluation import evaluate as evaluate_rows
from finetune.evaluation import predict_logits
from finetune.launch import (
    build_accelerator,
    check_before_start,
    check_connected,
    find_launch,
    is_compiled,
    use_all_cores,
)
from finetune.metrics import DEFAULT_METRICS, Metrics, per_class_table, predictions, probabilities
from finetune.model import INPUTS_FILE, InputSettings, LoadedModel, load_trained_model
from finetune.packing import resolve_packing
from finetune.run_folder import prediction_columns, write_predictions


@dataclass(frozen=True)
class TrainedModel:
    """A model folder of a run, loaded for prediction."""

    loaded: LoadedModel
    inputs: InputSettings
    labels: Labels

    def thresholds(self, of_all: float | None) -> NDArray[np.float64] | None:
        """Probability from which on each label is given: ``of_all`` or those stored with the model; None: 0.5.

        Raises:
            ConfigError: ``of_all`` for a model that does not give several labels a row.
        """
        if of_all is None:
            return None if self.inputs.thresholds is None else np.array(self.inputs.thresholds, np.float64)
        if self.inputs.problem_type != "multi_label_classification":
            raise ConfigError(
                "eval.threshold is for models that give several labels a row; this one was trained with "
                f"data.problem_type {self.inputs.problem_type}: leave it out"
            )
        return np.full(len(self.labels.names), of_all)


def load_trained(folder: str) -> TrainedModel:
    """Load ``best/`` of a run; the run folder itself is understood too.

    Raises:
        CheckpointError: it is not a model folder that finetune wrote.
    """
    path = Path(folder).expanduser()
    path = path / "best" if (path / "best").is_dir() else path
    inputs = InputSettings.load(path)
    loaded = load_trained_model(path, inputs)
    id2label = {int(index): name for index, name in (loaded.model.config.id2label or {}).items()}
    names = () if inputs.problem_type == "regression" else tuple(id2label[index] for index in sorted(id2label))
    if inputs.thresholds is not None and not _are_thresholds(inputs.thresholds, len(names)):
        raise CheckpointError(
            f"{path / INPUTS_FILE}: thresholds must be {len(names)} numbers from 0 to 1, one for each label of the "
            f"model, or null, which means 0.5; found {inputs.thresholds!r:.100}"
        )
    return TrainedModel(loaded, inputs, Labels(inputs.problem_type, names, inputs.label_separator))


def _are_thresholds(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(value) in (int, float) and 0 <= value <= 1 for value in values)
    )


def read_rows(config: PredictDataConfig, inputs: InputSettings, *, labelled: bool) -> Table:
    """Rows with the columns of training; nothing is dropped. Without labels, all columns are kept for the output."""
    options = ReadOptions(
        text_column=config.text_column or inputs.text_column,
        text_pair_column=config.text_pair_column or inputs.text_pair_column,
        label_column=(config.label_column or inputs.label_column) if labelled else None,
        keep_all_columns=not labelled,
        quoting=config.quoting,
        encoding=config.encoding,
        header=config.header,
        column_names=None if config.column_names is None else tuple(config.column_names),
        empty_text="keep",
        label_separator=inputs.label_separator if inputs.problem_type == "multi_label_classification" else None,
    )
    return read_table(config.file or "", options, cache_dir=config.cache_dir)


@dataclass(frozen=True)
class Session:
    """What both commands start with: connected processes, a model, rows as tokens."""

    accelerator: Accelerator
    trained: TrainedModel
    table: Table
    loader: EvalLoader
    thresholds: NDArray[np.float64] | None


def start(model_dir: str, config: PredictConfig, *, labelled: bool) -> Session:
    """Connect the processes, load the model, read and tokenise the rows."""
    datasets.disable_progress_bars()
    launch = find_launch()
    check_before_start(launch)
    accelerator = build_accelerator()
    check_connected(launch, accelerator)
    use_all_cores(launch)
    trained = on_every_process(accelerator, lambda: load_trained(model_dir))
    thresholds = on_every_process(accelerator, lambda: trained.thresholds(config.eval.threshold))
    table = first_on_each_node(accelerator, lambda: read_rows(config.data, trained.inputs, labelled=labelled))
    tokenizer, inputs = trained.loaded.tokenizer, trained.inputs
    texts = first_on_each_node(
        accelerator,
        lambda: tokenize(
            table.dataset,
            tokenizer,
            max_length=inputs.max_length,
            truncation=inputs.truncation,
            cache_dir=config.data.cache_dir,
        ),
    )
    labels = on_every_process(
        accelerator, lambda: trained.labels.encode(table) if labelled else np.zeros(len(texts), np.int64)
    )
    examples, model = Examples(texts, labels), trained.loaded.model
    model.to(accelerator.device)
    sizes = BatchSizes(config.eval.per_device_eval_batch_size, 1, 1)
    packing = on_every_process(
        accelerator,
        lambda: resolve_packing(
            "auto", model, tokenizer, [examples], sizes, accelerator.autocast, is_compiled=is_compiled(accelerator)
        ),
    )
    loader = EvalLoader(
        examples,
        tokenizer,
        config.eval.per_device_eval_batch_size,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        device=accelerator.device,
        packing=packing.rows,
    )
    model = accelerator.prepare_model(model, evaluation_mode=True)
    trained = replace(trained, loaded=replace(trained.loaded, model=model))
    return Session(accelerator, trained, table, loader, thresholds)


def predict(model_dir: str, config: PredictConfig, output: str) -> None:
    """Write ``output``: every row of the input in its order, with its columns, prediction and probabilities.

    Raises:
        FinetuneError: the model or the rows cannot be read, or ``output`` cannot be written.
    """
    path = Path(output).expanduser().absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: the folder {path.parent} does not exist: make it first")
    session = start(model_dir, config, labelled=False)
    on_every_process(session.accelerator, lambda: _refuse_own_columns(session))
    logits = predict_logits(session.accelerator, session.trained.loaded.model, session.loader)
    on_main_process(session.accelerator, lambda: _write(path, session, logits))
    console = make_console(visible=session.accelerator.is_main_process)
    print_plan(console, {**_about_rows(session), **_about_thresholds(session, config), "predictions": str(path)})
    disconnect(session.accelerator)


def _refuse_own_columns(session: Session) -> None:
    """The output would have two columns of one name."""
    own = prediction_columns(session.trained.labels.names)
    twice = [name for name in input_columns(session.table, session.trained.inputs) if name in own]
    if twice:
        raise ConfigError(
            f"{session.table.files[0]} has a column {twice[0]!r}, and the output adds one of that name: rename it in "
            "the input, or leave it out there"
        )


def _about_rows(session: Session) -> dict[str, list[str]]:
    """How many, and what the reader did to them or noticed."""
    table = session.table
    said = [*table.notes, *(f"warning: {warning}" for warning in table.warnings)]
    return {"rows": [f"{len(table.dataset):,}", *said]}


def _about_thresholds(session: Session, config: PredictConfig) -> dict[str, str]:
    """From which probability on a label is given, where rows have several."""
    labels = session.trained.labels
    if labels.problem_type != "multi_label_classification":
        return {}
    if config.eval.threshold is not None:
        return {"thresholds": f"{config.eval.threshold:g} for every label (eval.threshold)"}
    if session.thresholds is None:
        return {"thresholds": "0.5 for every label: none are saved with the model"}
    return {"thresholds": "each label's own, tuned on the dev rows of training"}


def _write(path: Path, session: Session, logits: NDArray[np.float32]) -> None:
    labels, rows = session.trained.labels, session.table.dataset
    write_predictions(
        path,
        predicted=predictions(logits, labels.problem_type, session.thresholds),
        probability=probabilities(logits, labels.problem_type),
        label_names=labels.names,
        columns={
            name: column_texts(rows, source)
            for name, source in input_columns(session.table, session.trained.inputs).items()
        },
        separator=labels.separator,
    )


def input_columns(table: Table, inputs: InputSettings) -> dict[str, str]:
    """Column of the input file -> column of the table, for the columns that the output repeats."""
    own = {"text": inputs.text_column, "text_pair": inputs.text_pair_column}
    return {own.get(name) or name: name for name in table.dataset.column_names if name not in ("line", "file")}


def evaluate(model_dir: str, config: PredictConfig) -> dict[str, float]:
    """Print the metrics of a model on labelled rows, with 95 % intervals; returns the metrics."""
    session = start(model_dir, config, labelled=True)
    trained, accelerator = session.trained, session.accelerator
    problem_type = trained.labels.problem_type
    names = trained.labels.names
    wanted = config.eval.metrics if config.eval.metrics is not None else DEFAULT_METRICS[problem_type]
    metrics = on_every_process(
        accelerator, lambda: Metrics(wanted, problem_type=problem_type, num_labels=trained.labels.num_labels)
    )
    thresholds = session.thresholds
    evaluation = evaluate_rows(accelerator, trained.loaded.model, session.loader, metrics, problem_type, thresholds)
    if accelerator.is_main_process:
        labels = session.loader.examples.labels
        print_results(
            make_console(visible=True),
            evaluation.metrics,
            metrics.confidence_intervals(evaluation.logits, labels, thresholds=thresholds),
            per_class_table(evaluation.logits, labels, names, problem_type, thresholds) if names else [],
            {
                "model": model_dir,
                **_about_thresholds(session, config),
                **_about_rows(session),
                "time": f"{evaluation.seconds:.1f} s",
            },
            title=f"{len(labels):,} rows of {', '.join(Path(name).name for name in session.table.files)}",
        )
    disconnect(accelerator)
    return evaluation.metrics
