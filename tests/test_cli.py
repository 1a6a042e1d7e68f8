"""The commands as a person types them: help, mistakes, exit codes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Finetune

from finetune import __version__
from finetune.cli import main, make_output_printable, number, take_option
from finetune.config import Config, PredictConfig, field_docs, parse, walk
from finetune.errors import ConfigError, DataError, Interrupted

FILES = ["--data.train_file", "train.tsv", "--model.name_or_path", "bert"]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that must end with code 2; gives its message."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert "Traceback" not in err
        return err.removeprefix("error: ").removesuffix("\n")

    return run


class Call:
    """Stands in the place of a function and keeps what it was called with."""

    def __init__(self, result: Any = None) -> None:
        self.arguments: list[tuple[Any, ...]] = []
        self.result = result

    def __call__(self, *arguments: Any) -> Any:
        self.arguments.append(arguments)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def replace_function(monkeypatch: pytest.MonkeyPatch, name: str, result: Any = None) -> Call:
    call = Call(result)
    monkeypatch.setattr(name, call)
    return call


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: finetune COMMAND [options]\n")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == [
        "check",
        "train",
        "evaluate",
        "predict",
    ]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"finetune {__version__}\n", "")


def options_in(text: str) -> set[str]:
    return {word.rstrip(",:") for word in text.split() if word.startswith("--") and "." in word}


def squeeze(text: str) -> str:
    """Without line breaks, as the help wraps its lines."""
    return "".join(text.split())


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_train_help_is_the_manual(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", flag]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert options_in(out) >= {f"--{name}" for name, _, _ in walk(Config())}
    for option in ("--config FILE|RECIPE", "--profile NAME|FILE", "--num_processes N", "--print_config"):
        assert f"\n  {option}" in out
    for section in (Config().data, Config().train, Config().tracking):
        for doc in field_docs(type(section)).values():
            assert squeeze(doc).rstrip(".") in squeeze(out)


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("evaluate", "usage: finetune evaluate MODEL_DIR --data.file FILE [options]"),
        ("predict", "usage: finetune predict MODEL_DIR INPUT --output OUTPUT.tsv [options]"),
    ],
)
def test_help_of_trained_models_commands(command: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == first
    assert options_in(out) >= {f"--{name}" for name, _, _ in walk(PredictConfig())}
    assert "--train.seed" not in out


def test_help_goes_before_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--no_such_option", "--help"]) == 0
    assert capsys.readouterr().err == ""


def test_the_printed_template_is_a_run_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "demo", "--train.seed", "7", "--tracking.run_name", "2e-5"]
    assert main(["train", *arguments, "--print_config"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert parse(["--config", str(path)])[0] == parse(arguments)[0]
    assert "  # Seed of the example order, the new head's weights and dropout.\n  seed: 7\n" in path.read_text("utf-8")


# ---------------------------------------------------------------- mistakes


def test_an_unknown_command(refused: Any) -> None:
    assert refused("trian") == "unknown command 'trian': commands are check, train, evaluate, predict (finetune --help)"


def test_nothing_given(refused: Any) -> None:
    assert refused("train").splitlines() == [
        "- data.train_file is required: pass --data.train_file train.tsv",
        "- model.name_or_path is required: pass --model.name_or_path bert-base-uncased",
    ]


def test_a_misspelt_setting(refused: Any) -> None:
    said = refused("train", "--train.sed", "1")
    assert said == "unknown setting train.sed (command line): did you mean train.seed?"


def test_a_value_out_of_range(refused: Any) -> None:
    said = refused("train", *FILES, "--optim.warmup_ratio", "6")
    assert said == "optim.warmup_ratio is 6.0: it must be between 0 and 1"


@pytest.mark.parametrize("option", ["--profile", "--num_processes"])
@pytest.mark.parametrize("rest", [[], ["--train.seed", "1"]])
def test_launch_options_without_a_value(option: str, rest: list[str], refused: Any) -> None:
    assert refused("train", *FILES, option, *rest) == f"{option} has no value: write {option} VALUE"


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", ""])
def test_an_impossible_number_of_processes(count: str, refused: Any) -> None:
    said = refused("train", *FILES, "--profile", "ddp2", f"--num_processes={count}")
    assert said == f"--num_processes is '{count}': it must be an integer of at least 1"


def test_a_number_of_processes_needs_a_profile(refused: Any) -> None:
    """Or it would be dropped silently, and one process would train."""
    said = refused("train", *FILES, "--num_processes", "2")
    assert said == "--num_processes goes with --profile: add one, as in --profile ddp2"


def test_an_unknown_profile(refused: Any) -> None:
    said = refused("train", *FILES, "--profile", "dpp2")
    assert said.startswith("--profile dpp2: no such file, and no shipped profile of that name: did you mean ddp2?")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate"], "finetune evaluate MODEL_DIR --data.file FILE: expected MODEL_DIR first, got nothing"),
        (["evaluate", "--data.file", "a"], "expected MODEL_DIR first, got nothing"),
        (["evaluate", "a", "b"], "expected MODEL_DIR first, got ['a', 'b']"),
        (["evaluate", "a"], "data.file is required: pass --data.file test.tsv"),
        (["evaluate", "a", "--eval.per_device_eval_batch_size", "0"], "eval.per_device_eval_batch_size is 0"),
        (["evaluate", "a", "--data.flie", "b"], "unknown setting data.flie (command line): did you mean data.file?"),
        (["predict", "a"], "expected MODEL_DIR and INPUT first, got ['a']"),
        (["predict", "a", "b"], "--output is required: the TSV file to write, as in --output predictions.tsv"),
        (["predict", "a", "b", "--output"], "--output has no value: write --output VALUE"),
        (["predict", "a", "b", "--output", "--data.header", "false"], "--output has no value"),
    ],
)
def test_mistakes_with_trained_models(arguments: list[str], said: str, refused: Any) -> None:
    assert said in refused(*arguments)


# ---------------------------------------------------------------- what is called


def test_train_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    call = replace_function(monkeypatch, "finetune.run.run")
    assert main(["train", *FILES, "--train.seed", "3"]) == 0
    ((config, origin),) = call.arguments
    assert (config.data.train_file, config.model.name_or_path, config.train.seed) == ("train.tsv", "bert", 3)
    assert origin == dict.fromkeys(("data.train_file", "model.name_or_path", "train.seed"), "command line")


@pytest.mark.parametrize("code", [0, 2])
def test_train_under_a_profile(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers get the same arguments, less those that are about launching; their exit code is ours."""
    call = replace_function(monkeypatch, "finetune.launch.relaunch", code)
    here = replace_function(monkeypatch, "finetune.run.run")
    first = [*FILES, "--profile=ddp2", "--train.seed", "3"]
    second = ["--num_processes", "4", "--max_restarts", "2", *FILES, "--profile", "a", "--profile", "my profile.yaml"]
    assert main(["train", *first]) == code
    assert main(["train", *second]) == code
    assert call.arguments == [
        ("ddp2", ["train", *FILES, "--train.seed", "3"], None, None),
        ("my profile.yaml", ["train", *FILES], 4, 2),
    ]
    assert here.arguments == []


def test_mistakes_are_found_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    call = replace_function(monkeypatch, "finetune.launch.relaunch", 0)
    assert "train.sed" in refused("train", *FILES, "--profile", "ddp2", "--train.sed", "1")
    assert "data.train_file is required" in refused("train", "--profile", "ddp2")
    assert call.arguments == []


def test_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    call = replace_function(monkeypatch, "finetune.predict.evaluate")
    assert main(["evaluate", "runs/a", "--data.file", "test.tsv", "--eval.metrics", "[f1_macro]"]) == 0
    ((folder, config),) = call.arguments
    assert (folder, config.data.file, config.eval.metrics) == ("runs/a", "test.tsv", ["f1_macro"])


def test_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    call = replace_function(monkeypatch, "finetune.predict.predict")
    assert main(["predict", "runs/a", "in.tsv", "--output", "out.tsv", "--data.text_column", "#text"]) == 0
    ((folder, config, output),) = call.arguments
    assert (folder, config.data.file, config.data.text_column, output) == ("runs/a", "in.tsv", "#text", "out.tsv")


def test_errors_of_a_run_are_one_message(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    replace_function(monkeypatch, "finetune.run.run", DataError("train.tsv, line 3: two cells where three belong"))
    assert refused("train", *FILES) == "train.tsv, line 3: two cells where three belong"


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_function(monkeypatch, "finetune.run.run", KeyError("oops"))
    assert main(["train", *FILES]) == 1
    assert "KeyError: 'oops'" in capsys.readouterr().err


def test_an_interrupted_run_has_the_exit_code_of_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_function(monkeypatch, "finetune.run.run", Interrupted("SIGTERM", 143))
    assert main(["train", *FILES]) == 143
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("arguments", "value", "rest"),
    [
        ([], None, []),
        (["--a", "1"], None, ["--a", "1"]),
        (["--output", "x"], "x", []),
        (["--output=x=y"], "x=y", []),
        (["--output="], "", []),
        (["--a", "1", "--output", "x", "--b", "2"], "x", ["--a", "1", "--b", "2"]),
        (["--output", "x", "--output", "y"], "y", []),
        (["--outputs", "x"], None, ["--outputs", "x"]),
    ],
)
def test_take_option(arguments: list[str], value: str | None, rest: list[str]) -> None:
    before = list(arguments)
    assert take_option(arguments, "--output") == (value, rest)
    assert arguments == before


def test_number() -> None:
    assert number(None, "--n") is None
    assert number("12", "--n") == 12
    with pytest.raises(ConfigError):
        number("0", "--n")


# ---------------------------------------------------------------- the real program


def test_the_installed_command_and_the_module(finetune: Finetune) -> None:
    script = Path(sys.executable).with_name("finetune")
    installed = subprocess.run([script, "--version"], capture_output=True, text=True, cwd=REPOSITORY)
    as_module = finetune("--version")
    for done in (installed, as_module):
        assert (done.returncode, done.stdout, done.stderr) == (0, f"finetune {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such_command"], "error: unknown command 'no_such_command'"),
        (["train"], "error: - data.train_file is required"),
        (["train", "--config", "no_such_file.yaml"], "error: --config no_such_file.yaml: no such file"),
        (["predict", "a", "b"], "error: --output is required"),
    ],
)
def test_mistakes_end_with_code_2_and_no_traceback(arguments: list[str], said: str, finetune: Finetune) -> None:
    done = finetune(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_a_missing_training_file(finetune: Finetune, tmp_path: Path) -> None:
    done = finetune("train", *FILES, "--tracking.trackers", "[]", "--train.output_dir", "run")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("train.tsv") >= 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "科技 ·".encode()), ("gbk", "科技 ·".encode("gbk")), ("cp1252", b"?? \xb7")]
)
def test_any_terminal_can_show_any_label(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bytes) -> None:
    written = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding=encoding, write_through=True))
    make_output_printable()
    sys.stdout.write("科技 ·")
    assert written.getvalue() == shown
