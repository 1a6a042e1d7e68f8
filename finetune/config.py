"""The run config: one frozen dataclass per component, and how values reach it.

Defaults < YAML files (``--config``, later files win) < command line (``--section.field value``). Every value is
type-checked by jsonargparse; all problems are collected and raised as one :class:`ConfigError`.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import yaml

from finetune.errors import ConfigError

Settings = TypeVar("Settings")
TrackerName = Literal["wandb", "tensorboard", "none"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class _Loader(yaml.SafeLoader):
    """YAML in which a date is text and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands here twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {  # a copy, as all of PyYAML shares the original
    first: [resolver for resolver in resolvers if not resolver[0].endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True)
class DataConfig:
    """Which rows are read, and how text and labels are found in them."""

    train_file: str | list[str] | None = None
    """Training rows: a path, a glob, or a list of them (.tsv, .csv, .jsonl, .parquet; .gz and .zst too)."""
    validation_file: str | list[str] | None = None
    """Dev rows, in the same forms. Left out: a seeded, stratified part of the training rows is held back."""
    validation_split: float = 0.1
    """Share of the training rows held back when there is no validation_file."""
    text_column: str = "text"
    """Name of the column that holds the text."""
    text_pair_column: str | None = None
    """Name of the second text's column for sentence-pair tasks."""
    label_column: str = "label"
    """Name of the column that holds the label."""
    problem_type: ProblemType = "single_label_classification"
    """One label a row, several labels a row, or a number a row."""
    label_separator: str = ","
    """What stands between the labels of a row (multi_label_classification)."""
    max_length: int = 128
    """Longest input in tokens, special tokens included; longer texts are cut."""
    truncation: Literal["head", "tail", "head_tail"] = "head"
    """What a longer text keeps: its beginning, its end, or a quarter from its beginning and the rest from its end."""
    quoting: Literal["none", "minimal"] | None = None
    """none: a quote is a character like any other. minimal: CSV quoting. Default: none for .tsv, minimal for .csv."""
    encoding: str = "utf-8"
    """Encoding of the text files; a UTF-8 byte-order mark is understood."""
    header: bool = True
    """Whether the first line names the columns."""
    column_names: list[str] | None = None
    """Names of the columns of files without a header line."""
    empty_text: Literal["error", "keep", "drop"] = "error"
    """What to do with rows whose text is empty: stop and list them, keep them, or drop them and count."""
    class_weights: Literal["none", "balanced"] | dict[str, float] = "none"
    """What classes count in the training loss: all the same, balanced, or by name as in '{neg: 1, pos: 3}'."""
    cache_dir: str | None = None
    """Where read and tokenised data is cached. Default: the datasets cache of this user."""


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint is fine-tuned."""

    name_or_path: str | None = None
    """Hub name (roberta-large), local folder, or package:MODULE/FOLDER for a model that a Python package ships."""
    freeze_encoder: bool = False
    """Train the classification head alone; the encoder gets no gradients and no dropout."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop: batches, length, seeds, where results go."""

    output_dir: str | None = None
    """Run folder. Default: runs/MODEL-DATE-TIME."""
    overwrite: bool = False
    """Empty an existing run folder first, instead of refusing it."""
    per_device_train_batch_size: int | None = None
    """Examples in one forward pass of one process. Default: 16, or what global_batch_size leaves."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches each process adds up before an optimizer step. Default: the launch profile's, else 1."""
    global_batch_size: int | None = None
    """Examples of one optimizer step over all processes; per-device size or accumulation is derived from it."""
    num_train_epochs: float = 3.0
    """Passes over the training rows; fractions are allowed."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever num_train_epochs says."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    label_smoothing: float = 0.0
    """Share of each training label that is spread evenly over all classes (0.1 is usual)."""
    logging_steps: int = 10
    """Training metrics are logged every so many optimizer steps, and before each evaluation."""
    max_hours: float | None = None
    """Save a checkpoint and stop before this many hours have passed since the start, to be continued later."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not a number: stop and name the rows, or leave the step out (a few times only)."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Put texts in a row instead of padding them: where the model gives the same outputs, always, or never."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Several processes: exchange gradients in half the bytes, rounded. For slow networks."""
    auto_micro_batch: bool = False
    """Out of memory at the start: halve the per-device batch and double the accumulation instead of failing."""
    seed: int = 42
    """Seed of the example order, the new head's weights and dropout."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate, counted in optimizer steps."""

    learning_rate: float | None = None
    """Peak learning rate. Default: 2e-5, or 1e-3 with a frozen encoder."""
    weight_decay: float = 0.01
    """Decoupled weight decay; never applied to biases and normalisation layers."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "plateau"] = "linear"
    """After the warm-up: down to zero in a line or a half cosine, constant, or lowered when the dev metric stalls."""
    warmup_ratio: float = 0.06
    """Share of all optimizer steps in which the learning rate rises from zero."""
    warmup_steps: int | None = None
    """The same as a number of steps; takes the place of warmup_ratio."""
    plateau_factor: float = 0.5
    """plateau: the learning rate is multiplied by this."""
    plateau_patience: int = 1
    """plateau: evaluations without improvement that are let pass first."""
    min_learning_rate: float = 0.0
    """plateau: never lower than this."""
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by global batch / base_batch_size, or by its square root."""
    base_batch_size: int = 32
    """The global batch size for which learning_rate is meant (scale_learning_rate)."""


@dataclass(frozen=True)
class EvalConfig:
    """How often and by what the model is judged on the dev rows."""

    evals_per_epoch: float = 1.0
    """Evaluations in each epoch (5: five times; 0.5: every second epoch). The last step is always evaluated."""
    per_device_eval_batch_size: int = 64
    """Examples in one forward pass of one process during evaluation."""
    metrics: list[str] | None = None
    """Shipped metrics by name, a path to your own evaluate script, or a hub name. Default: by problem_type."""
    metric_for_best_model: str | None = None
    """The metric (or loss) that picks the best model. Default: accuracy, or what fits the problem_type."""
    greater_is_better: bool | None = None
    """Direction of that metric. Default: known for the shipped ones."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without a new best. Default: never."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept on disk so that a run that was killed goes on as if nothing had happened."""

    resume: str = "auto"
    """auto: go on from output_dir's newest whole checkpoint. never. Or a run folder or checkpoint to go on from."""
    save_every_steps: int | None = None
    """Optimizer steps between checkpoints. Default: one after each evaluation. A new best is always saved."""
    save_total_limit: int | None = 2
    """Checkpoints kept, the newest ones; that of the best model is kept besides. null: all."""
    save_optimizer: bool = True
    """Save the optimizer's state too. Without it checkpoints are a third of the size, and resuming is not exact."""


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go besides the run folder's metrics.jsonl."""

    trackers: list[TrackerName] = field(default_factory=lambda: ["wandb"])
    """Any of wandb, tensorboard, none. W&B works offline by itself when nobody is logged in."""
    project: str = "finetune"
    """W&B project."""
    run_name: str | None = None
    """Name of the run on the dashboard. Default: the name of the run folder."""
    group: str | None = None
    """W&B group, to compare runs side by side."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""


@dataclass(frozen=True)
class Config:
    """Everything a training run is made of."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dictionary, for YAML, JSON and trackers."""
        return asdict(self)

    def to_yaml(self) -> str:
        """YAML that :func:`parse` reads back to an equal config."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


@dataclass(frozen=True)
class CheckConfig:
    """What ``finetune check`` looks at; it takes a whole run config as well."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True)
class PredictDataConfig:
    """Which rows are predicted, and how they are found in the file."""

    file: str | list[str] | None = None
    """Rows to evaluate or predict: a path, a glob, or a list of them, in the same forms as training files."""
    text_column: str | None = None
    """Name of the column that holds the text. Default: as in training."""
    text_pair_column: str | None = None
    """Name of the second text's column for sentence-pair models. Default: as in training."""
    label_column: str | None = None
    """Name of the column that holds the label (evaluate). Default: as in training."""
    quoting: Literal["none", "minimal"] | None = None
    """none: a quote is a character like any other. minimal: CSV quoting. Default: none for .tsv, minimal for .csv."""
    encoding: str = "utf-8"
    """Encoding of the text files; a UTF-8 byte-order mark is understood."""
    header: bool = True
    """Whether the first line names the columns."""
    column_names: list[str] | None = None
    """Names of the columns of files without a header line."""
    cache_dir: str | None = None
    """Where read and tokenised data is cached. Default: the datasets cache of this user."""


@dataclass(frozen=True)
class PredictEvalConfig:
    """How the rows are computed and judged."""

    per_device_eval_batch_size: int = 64
    """Examples in one forward pass of one process."""
    metrics: list[str] | None = None
    """Shipped metrics by name, a path to your own evaluate script, or a hub name. Default: by problem_type."""
    threshold: float | None = None
    """Probability from which on any label is given (multi-label). Default: each label's own, tuned on the dev rows."""


@dataclass(frozen=True)
class PredictConfig:
    """What ``finetune evaluate`` and ``finetune predict`` take besides the model."""

    data: PredictDataConfig = field(default_factory=PredictDataConfig)
    eval: PredictEvalConfig = field(default_factory=PredictEvalConfig)


# Settings that may differ between the start of a run and its continuation: they change no weight. The sizes that make
# up the global batch are among them, since the global batch itself is compared, and so are the rows of the files.
FREE_TO_CHANGE = {
    "data.train_file",
    "data.validation_file",
    "data.cache_dir",
    "train.output_dir",
    "train.overwrite",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.global_batch_size",
    "train.logging_steps",
    "train.max_hours",
    "train.on_nonfinite",
    "train.auto_micro_batch",
    "eval.per_device_eval_batch_size",
    "eval.early_stopping_patience",
}


def deciding_settings(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that decide the result of training, by dotted name; of a config as :meth:`Config.to_dict` gives."""
    names = ((section, name, value) for section, values in config.items() for name, value in values.items())
    return {
        f"{section}.{name}": value
        for section, name, value in names
        if section not in ("checkpoint", "tracking") and f"{section}.{name}" not in FREE_TO_CHANGE
    }


POSITIVE = ("greater than 0", lambda value: 0 < value < float("inf"))
AT_LEAST_ZERO = ("at least 0", lambda value: 0 <= value < float("inf"))
AT_LEAST_ONE = ("at least 1", lambda value: value >= 1)
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "data.validation_split": ("greater than 0 and less than 1", lambda value: 0 < value < 1),
    "data.max_length": AT_LEAST_ONE,
    "train.per_device_train_batch_size": AT_LEAST_ONE,
    "train.gradient_accumulation_steps": AT_LEAST_ONE,
    "train.global_batch_size": AT_LEAST_ONE,
    "train.num_train_epochs": POSITIVE,
    "train.max_steps": AT_LEAST_ONE,
    "train.max_grad_norm": AT_LEAST_ZERO,
    "train.label_smoothing": ("at least 0 and less than 1", lambda value: 0 <= value < 1),
    "train.logging_steps": AT_LEAST_ONE,
    "train.max_hours": POSITIVE,
    "train.seed": ("between 0 and 4294967295", lambda value: 0 <= value < 2**32),
    "optim.learning_rate": AT_LEAST_ZERO,
    "optim.weight_decay": AT_LEAST_ZERO,
    "optim.warmup_ratio": ("between 0 and 1", lambda value: 0 <= value <= 1),
    "optim.warmup_steps": AT_LEAST_ZERO,
    "optim.plateau_factor": ("greater than 0 and less than 1", lambda value: 0 < value < 1),
    "optim.plateau_patience": AT_LEAST_ZERO,
    "optim.min_learning_rate": AT_LEAST_ZERO,
    "optim.base_batch_size": AT_LEAST_ONE,
    "eval.evals_per_epoch": POSITIVE,
    "eval.per_device_eval_batch_size": AT_LEAST_ONE,
    "eval.threshold": ("greater than 0 and less than 1", lambda value: 0 < value < 1),
    "eval.early_stopping_patience": AT_LEAST_ONE,
    "checkpoint.save_every_steps": AT_LEAST_ONE,
    "checkpoint.save_total_limit": AT_LEAST_ONE,
}


def problems(config: Config) -> list[str]:
    """What is wrong with the values of ``config``, one sentence each; empty when all is well."""
    found = data_problems(config)
    if not config.model.name_or_path:
        found.insert(0 if config.data.train_file else 1, _required("model.name_or_path", "bert-base-uncased"))
    return found + class_weight_problems(config)


def data_problems(config: Config) -> list[str]:
    """The same for what a look at the data needs."""
    found = [] if config.data.train_file else [_required("data.train_file", "train.tsv")]
    found += out_of_range(config)
    if config.data.column_names is not None and config.data.header:
        found.append("data.column_names names the columns of files without a header line: add --data.header false")
    if not config.data.header and config.data.column_names is None:
        found.append("data.header is false: name the columns, as in --data.column_names '[text, label]'")
    if not config.data.label_separator:
        found.append("data.label_separator is empty: give the character that stands between labels")
    return found


def _required(setting: str, example: str) -> str:
    return f"{setting} is required: pass --{setting} {example}"


def class_weight_problems(config: Config) -> list[str]:
    """What is wrong with ``data.class_weights`` and ``train.label_smoothing``, names aside."""
    found = []
    weights = config.data.class_weights
    if config.data.problem_type == "regression":
        if weights != "none":
            found.append("data.class_weights needs classes: leave it out for data.problem_type regression")
        if config.train.label_smoothing:
            found.append("train.label_smoothing needs classes: leave it out for data.problem_type regression")
    if isinstance(weights, dict):
        found += [
            f"data.class_weights: {name} stands for a label, which is text: write it in quotes"
            for name in weights
            if not isinstance(name, str)  # YAML reads 1 as a number and no as false
        ]
        found += [
            f"data.class_weights: {name} is {weight}: it must be greater than 0"
            for name, weight in weights.items()
            if not 0 < weight < float("inf")
        ]
    return found


def out_of_range(config: object) -> list[str]:
    """Numbers outside the range that makes sense for them."""
    return [
        f"{name} is {value}: it must be {RANGES[name][0]}"
        for name, value, _ in walk(config)
        if name in RANGES and value is not None and not RANGES[name][1](value)
    ]


def validate(config: Config) -> None:
    """Raise one :class:`ConfigError` that lists all problems of ``config``."""
    raise_all(problems(config))


def raise_all(found: Sequence[str]) -> None:
    """Raise ``found`` as one :class:`ConfigError`, if there is anything in it."""
    if found:
        raise ConfigError("\n".join(found) if len(found) == 1 else "\n".join(f"- {line}" for line in found))


def walk(config: object, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(dotted name, value, type)`` of every setting of a config dataclass."""
    types = typing.get_type_hints(type(config))
    for item in fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, item.name), prefix + item.name
        if hasattr(value, "__dataclass_fields__"):
            yield from walk(value, name + ".")
        else:
            yield name, value, types[item.name]


def field_docs(section: type) -> dict[str, str]:
    """The doc line under every field of a config dataclass."""
    from docstring_parser import parse_from_object

    return {meta.arg_name: meta.description or "" for meta in parse_from_object(section).params}


def type_name(annotation: Any) -> str:
    """A type as a person would say it: ``int or null``, ``one of none, minimal``."""
    if annotation is type(None):
        return "null"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is list:
        return "a list of texts such as '[a, b]'" if args == (str,) else f"a list with each {type_name(args[0])}"
    if origin is dict:
        return "numbers by name such as '{neg: 1, pos: 3}'"
    if args:
        return " or ".join(type_name(arg) for arg in args)
    words: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    return words[annotation]


def template(config: Config) -> str:
    """``config`` as YAML with the doc line above every field (``--print_config``)."""
    lines = []
    for section in fields(config):
        values = getattr(config, section.name)
        docs = field_docs(type(values))
        lines += [f"# {type(values).__doc__}", f"{section.name}:"]
        for item in fields(values):
            lines += [f"  # {line}" for line in textwrap.wrap(docs[item.name], 112)]
            lines.append(f"  {item.name}: {_inline_yaml(getattr(values, item.name))}")
        lines.append("")
    return "\n".join(lines)


def _inline_yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def build_parser(prog: str, config_class: type = Config) -> Any:
    """jsonargparse parser with ``--section.field`` options, typed and documented by the dataclasses."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=prog, exit_on_error=False)
    for section in fields(config_class):
        section_class: Any = section.default_factory
        parser.add_class_arguments(section_class, section.name, help=section_class.__doc__)
    return parser


@overload
def parse(argv: Sequence[str], prog: str = ...) -> tuple[Config, dict[str, str]]: ...


@overload
def parse(argv: Sequence[str], prog: str, config_class: type[Settings]) -> tuple[Settings, dict[str, str]]: ...


def parse(argv: Sequence[str], prog: str = "finetune train", config_class: Any = Config) -> Any:
    """Turn command-line arguments into a config.

    Returns the config and the origin of every value that is not a default: ``{"train.seed": "command line"}`` or the
    path of the YAML file. Values are type-checked but not yet validated against each other (:func:`validate`).

    Raises:
        ConfigError: listing every unknown key (with the nearest known one) and every value of a wrong type.
    """
    parser = build_parser(prog, config_class)
    types = {name: annotation for name, _, annotation in walk(config_class())}
    sections = {name.partition(".")[0] for name in types}
    found: list[str] = []
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def take(name: str, source: str, shown: object, parsed: Any) -> None:
        """Check one value by parsing it alone, so that one mistake does not hide the next."""
        if name in sections:
            if shown is not None:  # a section of a YAML file may be left empty
                found.append(f"{name} ({source}) is a section: expected settings below it, got {shown!r}")
            return
        if name not in types:
            found.append(f"unknown setting {name} ({source}){nearest(name, types)}")
            return
        try:
            section, key = name.split(".")
            if shown is None and type(None) not in typing.get_args(types[name]):  # jsonargparse lets it pass
                raise TypeError
            as_is = _stands_for_itself(types[name], shown, source)
            values[name] = shown if as_is else parsed()[section][key]
            origin[name] = source
        except Exception:  # jsonargparse raises ArgumentError, ValueError, YAML errors: all say "wrong type"
            quotes = " (write it in quotes)" if _takes_text(types[name]) and isinstance(shown, int | float) else ""
            found.append(f"{name} ({source}): expected {type_name(types[name])}, got {shown!r}{quotes}")

    config_files, options = _split_options(argv, found)
    for source, loaded in (entry for path in config_files for entry in _load_yaml(path, found)):
        for name, value in _flatten(loaded):
            section, _, key = name.partition(".")
            nested = {section: {key: value}}
            take(name, source, value, lambda nested=nested: parser.parse_object(nested, defaults=False))
    for name, text in options:
        take(name, "command line", text, lambda a=f"--{name}={text}": parser.parse_args([a], defaults=False))
    raise_all(found)

    given: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for name, value in values.items():
        section, key = name.split(".")
        given[section][key] = value
    make: dict[str, Any] = {section.name: section.default_factory for section in fields(config_class)}
    return config_class(**{name: make[name](**given[name]) for name in make}), origin


def _takes_text(annotation: Any) -> bool:
    return annotation is str or (typing.get_origin(annotation) is not list and str in typing.get_args(annotation))


def _stands_for_itself(annotation: Any, value: object, source: str) -> bool:
    """Whether ``value`` is a text that needs no parsing.

    jsonargparse reads the text of a setting that may be null as YAML, where ``#id`` and ``~`` mean null.
    """
    if not isinstance(value, str) or not _takes_text(annotation):
        return False
    return source != "command line" or (value != "null" and not value.startswith("["))


def _split_options(argv: Sequence[str], found: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """``--config`` paths and the ``(name, value)`` pairs of all other options."""
    config_files: list[str] = []
    options: list[tuple[str, str]] = []
    tokens = iter(argv)
    for token in tokens:
        if not token.startswith("--"):
            found.append(f"unexpected argument {token!r}: settings are given as --section.field VALUE")
            continue
        name, equals, value = token[2:].partition("=")
        if not equals:
            given = next(tokens, None)
            if given is None or given.startswith("--"):
                found.append(f"--{name} has no value: write --{name} VALUE")
                if given is not None:
                    tokens = iter([given, *tokens])
                continue
            value = given
        if name == "config":
            config_files.append(value)
        else:
            options.append((name, value))
    return config_files, options


def _load_yaml(path: str, found: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Read a run config or recipe; problems go to ``found``."""
    try:
        # PyYAML reads 2e-5 as text, from which jsonargparse makes a number where one is expected.
        loaded = yaml.load(find_config(path).read_text(encoding="utf-8"), Loader=_Loader)
    except ConfigError as error:
        found.append(str(error))
    except (OSError, UnicodeDecodeError) as error:
        found.append(f"--config {path} cannot be read: {error}")
    except yaml.YAMLError as error:
        found.append(f"{path} is not valid YAML: {' '.join(str(error).split())}")
    else:
        if isinstance(loaded, Mapping):
            yield path, loaded
        elif loaded is not None:
            found.append(f"{path} must hold sections such as 'train:' with settings below them")


def find_config(name: str) -> Path:
    """Path of a run config: an existing file, or the name of a recipe that ships with the package."""
    if os.path.isfile(name):
        return Path(name)
    folder = Path(str(importlib.resources.files("finetune") / "recipes"))
    recipes = sorted(path.stem for path in folder.glob("*.yaml"))
    if name in recipes:
        return folder / f"{name}.yaml"
    raise ConfigError(
        f"--config {name}: no such file, and no recipe of that name{nearest(name, recipes)} "
        f"(recipes: {', '.join(recipes)})"
    )


def _flatten(loaded: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, content in loaded.items():
        if isinstance(content, Mapping):
            yield from ((f"{section}.{key}", value) for key, value in content.items())
        else:
            yield str(section), content


def nearest(name: str, known: Iterator[str] | Sequence[str] | Mapping[str, object]) -> str:
    """``: did you mean X?`` for the closest known name, by the whole name or its last part; else an empty string."""
    names = list(known)
    last = {full.rpartition(".")[2]: full for full in names}
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    match = match or [last[part] for part in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.6)]
    return f": did you mean {match[0]}?" if match else ""
