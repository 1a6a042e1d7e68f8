"""The training and dev rows with their encoded labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.config import DataConfig
from finetune.data.batching import stratified_split
from finetune.data.labels import Labels, learn_labels
from finetune.data.scan import scan
from finetune.data.tsv import ReadOptions, Table, read_table
from finetune.errors import DataError


@dataclass(frozen=True)
class Splits:
    """Rows as text, labels as :meth:`Labels.encode` gives them, one entry a row in file order."""

    train: Table
    dev: Table
    labels: Labels
    train_labels: NDArray[Any]
    dev_labels: NDArray[Any]


def read_options(config: DataConfig) -> ReadOptions:
    """How the files of this config are read."""
    return ReadOptions(
        text_column=config.text_column,
        text_pair_column=config.text_pair_column,
        label_column=config.label_column,
        quoting=config.quoting,
        encoding=config.encoding,
        header=config.header,
        column_names=None if config.column_names is None else tuple(config.column_names),
        empty_text=config.empty_text,
        label_separator=config.label_separator if config.problem_type == "multi_label_classification" else None,
    )


def read_splits(config: DataConfig, seed: int) -> Splits:
    """Read both splits, or hold back a seeded, stratified part of the training rows as dev.

    Copies of a text, also those that differ in case, width, punctuation and blanks alone, stay on one side: the dev
    score would tell how well the model remembers them.

    Raises:
        DataError: a file cannot be read as it stands, or the dev rows have a label that the training rows lack.
    """
    options = read_options(config)
    train = read_table(config.train_file or "", options, cache_dir=config.cache_dir)
    labels = learn_labels(train, config.problem_type, config.label_separator)
    train_labels = labels.encode(train)
    if config.validation_file:
        dev = read_table(config.validation_file, options, cache_dir=config.cache_dir)
        return Splits(train, dev, labels, train_labels, labels.encode(dev))
    groups = np.unique(scan(train, config.cache_dir).near, return_inverse=True)[1]
    firsts = np.unique(groups, return_index=True)[1]
    classes: Any = train_labels[firsts] if config.problem_type == "single_label_classification" else None
    _, dev_groups = stratified_split(classes, len(firsts), config.validation_split, seed)
    is_dev = np.isin(groups, dev_groups)
    rows, dev_rows = np.flatnonzero(~is_dev), np.flatnonzero(is_dev)
    if not len(dev_rows):
        raise DataError(
            f"{train.files[0]}: {len(train_labels)} rows are too few to hold back dev rows: give data.validation_file"
        )
    return Splits(_select(train, rows), _select(train, dev_rows), labels, train_labels[rows], train_labels[dev_rows])


def _select(table: Table, rows: NDArray[np.int64]) -> Table:
    return replace(table, dataset=table.dataset.select(rows))
