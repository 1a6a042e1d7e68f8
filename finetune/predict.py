"""A trained model on new rows: ``finetune predict`` and ``finetune evaluate``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from finetune.config import PredictConfig, PredictDataConfig
from finetune.console import make_console, print_plan, print_results
from finetune.data.labels import Labels
from finetune.data.loader import EvalLoader, Examples
from finetune.data.tokenize import tokenize
from finetune.data.tsv import ReadOptions, Table, column_texts, read_table
from finetune.distributed import disconnect, first_on_each_node, on_every_process, on_main_process
from finetune.errors import ConfigError
from finetune.evaluation import evaluate as evaluate_rows
from finetune.evaluation import predict_logits
from finetune.launch import build_accelerator, check_before_start, check_connected, find_launch, use_all_cores
from finetune.metrics import DEFAULT_METRICS, Metrics, per_class_table, predictions, probabilities
from finetune.model import InputSettings, LoadedModel, load_trained_model
from finetune.run_folder import write_predictions


@dataclass(frozen=True)
class TrainedModel:
    """A model folder of a run, loaded for prediction."""

    loaded: LoadedModel
    inputs: InputSettings
    labels: Labels

    def thresholds(self, of_all: float | None) -> NDArray[np.float64] | None:
        """Probability from which on each label is given: ``of_all`` or those stored with the model; None: 0.5."""
        if self.inputs.problem_type != "multi_label_classification":
            return None
        if of_all is not None:
            return np.full(len(self.labels.names), of_all)
        return None if self.inputs.thresholds is None else np.array(self.inputs.thresholds)


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
    return TrainedModel(loaded, inputs, Labels(inputs.problem_type, names, inputs.label_separator))


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
    loader = EvalLoader(
        Examples(texts, labels),
        tokenizer,
        config.eval.per_device_eval_batch_size,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        device=accelerator.device,
    )
    model = accelerator.prepare_model(trained.loaded.model, evaluation_mode=True)
    trained = replace(trained, loaded=replace(trained.loaded, model=model))
    return Session(accelerator, trained, table, loader, trained.thresholds(config.eval.threshold))


def predict(model_dir: str, config: PredictConfig, output: str) -> None:
    """Write ``output``: every row of the input in its order, with its columns, prediction and probabilities.

    Raises:
        FinetuneError: the model or the rows cannot be read, or ``output`` cannot be written.
    """
    path = Path(output).expanduser().absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: the folder {path.parent} does not exist: make it first")
    session = start(model_dir, config, labelled=False)
    logits = predict_logits(session.accelerator, session.trained.loaded.model, session.loader)
    on_main_process(session.accelerator, lambda: _write(path, session, logits))
    console = make_console(visible=session.accelerator.is_main_process)
    print_plan(console, {"rows": f"{len(logits):,}", "predictions": str(path)})
    disconnect(session.accelerator)


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
            {"model": model_dir, "time": f"{evaluation.seconds:.1f} s"},
            title=f"{len(labels):,} rows of {', '.join(Path(name).name for name in session.table.files)}",
        )
    disconnect(accelerator)
    return evaluation.metrics
