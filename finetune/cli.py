"""The ``finetune`` command: parse, call one function, print."""

from __future__ import annotations

import codecs
import io
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from finetune.config import CheckConfig, PredictConfig, build_parser, out_of_range, parse, raise_all, template, validate
from finetune.errors import ConfigError, FinetuneError, Interrupted

TRAIN_HELP = """\
Fine-tune a classifier on TSV files.

  finetune train --data.train_file train.tsv --data.validation_file dev.tsv --model.name_or_path roberta-large
  finetune train --profile ddp2 --config my_run.yaml --optim.learning_rate 3e-5
  accelerate launch --config_file accelerate_configs/ddp2.yaml -m finetune train --config my_run.yaml

  --config FILE|RECIPE   a run config, or a recipe that ships with the package; may be given several times
  --profile NAME|FILE    start under `accelerate launch` with this launch profile
  --num_processes N      with --profile: another number of processes than the profile's
  --max_restarts N       with --profile: start again from the last checkpoint, up to N times, when a process dies
  --print_config         print all settings as a commented YAML template and exit
"""

CHECK_HELP = """\
Report on the data before training: copies, leaks between the files, contradicting labels, lengths, unknown tokens,
and what the simplest models reach. Exit code 1 when the data cannot be used as it is.

  finetune check --data.train_file train.tsv --data.validation_file dev.tsv
  finetune check --config my_run.yaml --model.name_or_path bert-base-chinese --output report.html

  --config FILE|RECIPE   a run config, or a recipe that ships with the package; may be given several times
  --output FILE          write the whole report as .html or .json too
"""

USAGE = """\
usage: finetune COMMAND [options]

Fine-tune a text classifier on TSV files with HuggingFace Accelerate.

commands:
  check       what there is to know about the data before training
  train       train.tsv and dev.tsv in, a fine-tuned classifier out
  evaluate    metrics of a trained model on a labelled file
  predict     labels and probabilities for every row of a file

`finetune COMMAND --help` lists the options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: a problem the user can mend, said in one message)."""
    make_output_printable()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        from finetune import __version__

        print(f"finetune {__version__}")
        return 0
    try:
        if command not in COMMANDS:
            raise FinetuneError(f"unknown command {command!r}: commands are {', '.join(COMMANDS)} (finetune --help)")
        return COMMANDS[command](arguments)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from finetune.launch import leave_with_error

        return leave_with_error(error)


def make_output_printable() -> None:
    """No character of a label may end a run: ASCII output becomes UTF-8, others show ? for what they lack."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_ascii = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if is_ascii else None, errors="replace")


def train_command(arguments: list[str]) -> int:
    """``finetune train``."""
    if "--help" in arguments or "-h" in arguments:
        print(TRAIN_HELP)
        print(build_parser("finetune train").format_help())
        return 0
    printing = "--print_config" in arguments
    own = [argument for argument in arguments if argument != "--print_config"]
    profile, own = take_option(own, "--profile")
    num_processes, own = take_option(own, "--num_processes")
    max_restarts, own = take_option(own, "--max_restarts")
    config, origin = parse(own)
    if printing:
        print(template(config))
        return 0
    validate(config)
    if profile is not None:
        from finetune.launch import relaunch

        return relaunch(
            profile,
            ["train", *own],
            number(num_processes, "--num_processes"),
            number(max_restarts, "--max_restarts"),
        )
    for name, value in (("--num_processes", num_processes), ("--max_restarts", max_restarts)):
        if value is not None:
            raise ConfigError(f"{name} goes with --profile: add one, as in --profile ddp2")
    from finetune.run import run

    run(config, origin)
    return 0


def check_command(arguments: list[str]) -> int:
    """``finetune check``."""
    if "--help" in arguments or "-h" in arguments:
        print(CHECK_HELP)
        print(build_parser("finetune check", CheckConfig).format_help())
        return 0
    output, rest = take_option(arguments, "--output")
    config, _ = parse(rest, "finetune check")
    from finetune.check import check

    return check(config, output)


def evaluate_command(arguments: list[str]) -> int:
    """``finetune evaluate``."""
    words, config = _prediction_arguments(arguments, "evaluate MODEL_DIR --data.file FILE", ["MODEL_DIR"])
    if config is None:
        return 0
    from finetune.predict import evaluate

    evaluate(words[0], config)
    return 0


def predict_command(arguments: list[str]) -> int:
    """``finetune predict``."""
    output, rest = take_option(arguments, "--output")
    words, config = _prediction_arguments(rest, "predict MODEL_DIR INPUT --output OUTPUT.tsv", ["MODEL_DIR", "INPUT"])
    if config is None:
        return 0
    if output is None:
        raise ConfigError("--output is required: the TSV file to write, as in --output predictions.tsv")
    from finetune.predict import predict

    predict(words[0], replace(config, data=replace(config.data, file=words[1])), output)
    return 0


def _prediction_arguments(arguments: list[str], usage: str, names: list[str]) -> tuple[list[str], PredictConfig | None]:
    """Positional arguments and settings; no settings when help was asked for and given."""
    if "--help" in arguments or "-h" in arguments:
        print(f"usage: finetune {usage} [options]\n\nMODEL_DIR is a run folder or its best/.\n")
        print(build_parser("finetune " + usage.split()[0], PredictConfig).format_help())
        return [], None
    words = list(itertools.takewhile(lambda word: not word.startswith("--"), arguments))
    if len(words) != len(names):
        raise ConfigError(f"finetune {usage}: expected {' and '.join(names)} first, got {words or 'nothing'}")
    config, _ = parse(arguments[len(words) :], "finetune " + usage.split()[0], PredictConfig)
    found = out_of_range(config)
    if "INPUT" not in names and not config.data.file:
        found.append("data.file is required: pass --data.file test.tsv")
    raise_all(found)
    return words, config


def take_option(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """Remove ``name VALUE`` or ``name=VALUE``; returns the value (the last one given) and the other arguments."""
    value, rest = None, []
    words = iter(arguments)
    for word in words:
        if word.startswith(name + "="):
            value = word.removeprefix(name + "=")
        elif word == name:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{name} has no value: write {name} VALUE")
        else:
            rest.append(word)
    return value, rest


def number(text: str | None, name: str) -> int | None:
    """An integer of at least 1, or None where nothing was given."""
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}: it must be an integer of at least 1")
    return int(text)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "check": check_command,
    "train": train_command,
    "evaluate": evaluate_command,
    "predict": predict_command,
}
