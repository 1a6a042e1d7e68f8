"""``finetune check``: the data report before anybody spends hours on a GPU."""

from __future__ import annotations

from pathlib import Path

import datasets

from finetune.check_console import print_check
from finetune.check_page import write_check_page
from finetune.config import Config, DataConfig, data_problems, raise_all
from finetune.console import make_console
from finetune.data.check import DataCheck, Finding, check_data, fit_baselines
from finetune.data.splits import read_options, read_splits
from finetune.data.tokenize import tokenize
from finetune.data.tsv import read_table
from finetune.errors import ConfigError, DataError
from finetune.model import load_tokenizer
from finetune.run_folder import write_json

OUTPUTS = (".html", ".json")


def check(config: Config, output: str | None = None) -> int:
    """Report on the data of a run config; returns the exit code: 1 when there are errors, 0 with warnings or none.

    Args:
        config: the run config; without a model there is nothing to say of tokens.
        output: ``.html`` or ``.json`` file to write the whole report to.

    Raises:
        FinetuneError: a setting is wrong, the model cannot be loaded, or ``output`` cannot be written.
    """
    raise_all(data_problems(config))
    path = None if output is None else _output_path(output)
    datasets.disable_progress_bars()
    console = make_console(visible=True)
    report = _report(config, with_model=config.model.name_or_path is not None)
    print_check(console, report)
    if path is not None:
        if path.suffix == ".json":
            write_json(path, report.as_dict())
        else:
            write_check_page(path, report)
        console.print(f"report: {path}")
    return 1 if report.of("error") else 0


def _output_path(output: str) -> Path:
    path = Path(output).expanduser().absolute()
    if path.suffix not in OUTPUTS:
        raise ConfigError(f"--output {output}: the name must end in .html or .json")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {path.parent} does not exist: make it first")
    return path


def _report(config: Config, with_model: bool) -> DataCheck:
    data = config.data
    tokenizer, limit = load_tokenizer(config.model.name_or_path or "") if with_model else (None, None)
    errors = _reading_errors(data)
    if errors:
        return DataCheck({}, {}, errors)
    try:
        splits = read_splits(data, config.train.seed)
    except DataError as error:
        return DataCheck({}, {}, [_error(error)])
    tables, encoded = {"train": splits.train}, {"train": splits.train_labels}
    if data.validation_file:
        tables["dev"], encoded["dev"] = splits.dev, splits.dev_labels
    else:  # the file as it stands, not what is left of it once dev rows are held back
        tables["train"] = read_table(data.train_file or "", read_options(data), cache_dir=data.cache_dir)
        encoded["train"] = splits.labels.encode(tables["train"])
    tokens, max_length = None, None
    if tokenizer is not None:
        max_length = min(data.max_length, limit or data.max_length)
        tokens = {
            name: tokenize(
                table.dataset,
                tokenizer,
                max_length=max_length,
                truncation=data.truncation,
                cache_dir=data.cache_dir,
            )
            for name, table in tables.items()
        }
    return check_data(
        tables,
        encoded,
        splits.labels,
        tokens=tokens,
        tokenizer=tokenizer,
        max_length=max_length,
        baselines=list(fit_baselines(splits, config.train.seed)),
        cache_dir=data.cache_dir,
    )


def _reading_errors(data: DataConfig) -> list[Finding]:
    """What is wrong with the files: of all of them, so that one correction does not uncover the next mistake."""
    found = []
    for source in (data.train_file, data.validation_file):
        if source:
            try:
                read_table(source, read_options(data), cache_dir=data.cache_dir)
            except DataError as error:
                found.append(_error(error))
    return found


def _error(error: DataError) -> Finding:
    return Finding("error", "unreadable", str(error))
