r"""Strict reading of labelled text files: each row arrives exactly as it stands in the file, or a DataError says where.

Tab- and comma-separated files, JSON Lines and Parquet become one memory-mapped :class:`datasets.Dataset` of strings.
Nothing is guessed: no type conversion, no missing values, no Unicode normalisation, no replacement characters, and only
``\n`` and ``\r\n`` end a line. All problems are collected and raised once. Rows stream to an Arrow file in a cache
that is addressed by content, so memory stays flat and an unchanged file is not parsed twice.
"""

import codecs
import contextlib
import csv
import difflib
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.arrow_writer import ArrowWriter

from finetune.errors import ConfigError, DataError

_VERSION = 2  # of the cache: raise it when the same bytes would be read differently
_BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 10_000
_BATCH_CHARS = 1 << 22
_SHOWN = 5  # lines named for each kind of problem
_FEW_QUOTED, _MOST_QUOTED = 5, 0.9  # texts in quotes from which on a file looks like an export, not like quotations
_NUMBER_COLUMNS = ("line", "file")
_TYPES_REMEDY = "texts must be strings; labels strings, numbers or booleans"
_SETTINGS = {"text": "data.text_column", "text_pair": "data.text_pair_column", "label": "data.label_column"}
_OTHER_DELIMITERS = {
    ",": "commas stand between the names: name the file .csv",
    "\t": "tabs stand between the names: name the file .tsv",
    ";": "semicolons stand between the names: export the file with tabs, as .tsv, or with commas, as .csv",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json-lines", ".json")
_MAGIC = {
    b"\x1f\x8b": "gzip data: name the file .gz",
    b"\x28\xb5\x2f\xfd": "zstd data: name the file .zst",
    b"PK\x03\x04": "a zip archive or an Excel workbook: export it as tab-separated text",
    b"PAR1": "Parquet: name the file .parquet",
}
# Anything but white space and the zero-width characters that spreadsheets and web pages leave behind.
_is_visible = re.compile("[^\\s\u200b-\u200d\u2060\ufeff]").search

_is_surrogate = re.compile("[\ud800-\udfff]").search

_Row = tuple[int, list[str]]  # the 1-based line where the row starts, its fields


@dataclass(frozen=True)
class ReadOptions:
    """How files are to be read. Raises ConfigError when the settings contradict each other."""

    text_column: str = "text"
    """Column with the text."""
    text_pair_column: str | None = None
    """Column with the second text of a pair."""
    label_column: str | None = "label"
    """Column with the label; None for files to predict, which need none."""
    extra_columns: tuple[str, ...] = ()
    """Further columns to keep as strings under their own names, such as an id."""
    keep_all_columns: bool = False
    """Keep every named column of the file."""
    quoting: Literal["none", "minimal"] | None = None
    """"none": quotes are ordinary characters; "minimal": RFC 4180. None: "minimal" for .csv, "none" for the rest."""
    encoding: str = "utf-8"
    """Encoding of text files. A byte-order mark is skipped."""
    header: bool = True
    """The first line of a separated file names its columns."""
    column_names: tuple[str, ...] | None = None
    """Names of the columns of files without a header line."""
    empty_text: Literal["error", "keep", "drop"] = "error"
    """What to do with rows whose text (or second text) is empty or blank."""
    label_separator: str | None = None
    """Labels are sets of names with this between them: a label may be empty, or a list of strings (JSON, Parquet)."""

    def __post_init__(self) -> None:
        """Check the settings against each other."""
        problems = []
        if self.quoting not in (None, "none", "minimal"):
            problems.append(f"data.quoting: {self.quoting!r} is neither 'none' nor 'minimal'")
        if self.empty_text not in ("error", "keep", "drop"):
            problems.append(f"data.empty_text: {self.empty_text!r} is not 'error', 'keep' or 'drop'")
        try:
            "a".encode(self.encoding)
            codecs.getincrementaldecoder(self.encoding)
        except (LookupError, ValueError):
            problems.append(f"data.encoding: {self.encoding!r} is not a text encoding that Python knows")
        if self.header and self.column_names is not None:
            problems.append("data.column_names is for files without a header line: set data.header: false")
        if not self.header and not self.column_names:
            problems.append("data.header: false needs the names of the columns: set data.column_names: [text, label]")
        for name in self.columns.values():
            if self.column_names and self.column_names.count(name) != 1:
                found = self.column_names.count(name)
                problems.append(f"data.column_names has column {name!r} {found} times, once needed")
        if not all(self.columns.values()):
            problems.append("a column without a name cannot be used")
        used = [name for name in (self.text_column, self.text_pair_column, self.label_column) if name is not None]
        problems += [f"column {name!r} has two uses" for name, times in Counter(used).items() if times > 1]
        for name in self.extra_columns:
            if name in _NUMBER_COLUMNS or self.columns[name] != name:
                problems.append(f"extra column {name!r} has the name of a column that the reader makes: rename it")
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def roles(self) -> dict[str, str]:
        """``text``, ``text_pair`` and ``label``, where asked for -> column of the file; other columns are just kept."""
        roles = {"text": self.text_column, "text_pair": self.text_pair_column, "label": self.label_column}
        return {role: name for role, name in roles.items() if name is not None}

    @property
    def columns(self) -> dict[str, str]:
        """Column of the dataset -> column of the file, without those that ``keep_all_columns`` adds."""
        used = self.roles
        return used | {name: name for name in self.extra_columns if name not in used}


@dataclass(frozen=True)
class Table:
    """The rows of one or several files, in file order, and what was noticed on the way."""

    dataset: datasets.Dataset
    """Strings ``text``, ``text_pair`` and ``label`` (where asked for) and the kept columns; int64 ``line``, the 1-based
    line where the row starts (in Parquet: the row), and int32 ``file``, an index into ``files``."""
    files: tuple[str, ...]
    """Paths as given, globs expanded and sorted."""
    blank_lines: int
    """Empty lines skipped."""
    dropped_rows: int
    """Rows left out for their empty text (``empty_text="drop"`` only)."""
    stripped_labels: int
    """Labels that had blanks around them, which were removed."""
    notes: tuple[str, ...]
    """The same for people, file by file: ``train.tsv: 3 blank lines skipped``."""
    warnings: tuple[str, ...] = ()
    """What was read as it stands but looks wrong, file by file."""

    def where(self, row: int) -> str:
        """Return file and line of a row, such as ``train.tsv:17``."""
        place = self.dataset[row]
        return f"{self.files[place['file']]}:{place['line']}"


def read_table(source: str | Sequence[str], options: ReadOptions, *, cache_dir: str | None = None) -> Table:
    """Read a file, a glob, or several of them, into one memory-mapped table.

    The suffix tells the format: ``.csv``, ``.jsonl`` (``.ndjson``, ``.json-lines``, ``.json``: one object a line),
    ``.parquet``; anything else is tab-separated. Text formats may be compressed: ``.gz``, ``.zst``. JSON numbers and
    booleans become labels as their JSON text; Parquet numbers likewise. Columns that are just kept take any value: null
    as an empty cell, lists and objects as JSON text. Rows are cached under ``cache_dir`` (None: ``finetune`` in the
    cache folder of `datasets`), by the contents of the files and the options.

    Raises:
        DataError: A file is missing, has no rows, or has lines that cannot be taken exactly as they are. The message
            names the first lines of each kind of problem, their number, and the setting or edit that mends them.
    """
    problems = _Problems()
    files = [_File.of(path, options) for path in _expand([source] if isinstance(source, str) else source, problems)]
    problems.raise_if_any()
    before = [_state(file.path) for file in files]
    key = _cache_key(files, options, problems)
    problems.raise_if_any()
    folder = os.path.join(cache_dir or os.path.join(datasets.config.HF_DATASETS_CACHE, "finetune"), key)
    cached = _load(folder)
    if cached is None:
        try:
            _build(folder, files, options, key)
        except OSError as error:  # those of the data files are collected as problems
            raise DataError(f"cannot write the data cache {folder}: {error}; HF_DATASETS_CACHE moves it") from error
        for file, state in zip(files, before, strict=True):
            if _state(file.path) != state:
                shutil.rmtree(folder, ignore_errors=True)
                raise DataError(f"{file.path} changed while it was being read: try again when it is complete")
        cached = _load(folder)
        if cached is None:
            raise DataError(f"the data cache {folder} cannot be read back: remove it and try again")
    dataset, counts = cached
    notes = [note for file, count in zip(files, counts, strict=True) for note in count.notes(file.path, options)]
    warnings = [text for file, count in zip(files, counts, strict=True) for text in count.warnings(file.path, options)]
    return Table(
        dataset=dataset,
        files=tuple(file.path for file in files),
        blank_lines=sum(count.blank_lines for count in counts),
        dropped_rows=sum(count.empty_texts for count in counts) if options.empty_text == "drop" else 0,
        stripped_labels=sum(count.stripped_labels for count in counts),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def column_texts(dataset: datasets.Dataset, name: str) -> Iterator[str]:
    """The texts of a column one by one, a batch in memory at a time."""
    for batch in dataset.select_columns([name]).with_format("arrow").iter(_BATCH_ROWS):
        yield from batch.column(name).to_pylist()


class _Problems:
    """What is wrong with the files, grouped by what mends it; raised as one DataError."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._shown: dict[str, list[str]] = {}

    def add(self, place: str, what: str, remedy: str) -> None:
        self._counts[remedy] += 1
        shown = self._shown.setdefault(remedy, [])
        if len(shown) < _SHOWN:
            shown.append(f"{place}: {what}")

    def __bool__(self) -> bool:
        return bool(self._counts)

    def raise_if_any(self) -> None:
        lines: list[str] = []
        for remedy, shown in self._shown.items():
            lines += shown
            if self._counts[remedy] > len(shown):
                lines.append(f"... {self._counts[remedy]} such places in all")
            lines.append(f"  -> {remedy}")
        if lines:
            raise DataError("\n".join(lines))


class _Stop(Exception):
    """Nothing more can be read from this file; the reason is among the problems."""


@dataclass
class _Counts:
    """What one file held."""

    rows: int = 0
    blank_lines: int = 0
    empty_texts: int = 0
    stripped_labels: int = 0
    empty_labels: int = 0
    headers: int = 0  # rows that repeat the header
    first_header: int = 0  # the line of the first of them
    has_quoted_name: bool = False  # in the header; this and the next three are for files whose quotes are characters
    texts_with_quotes: int = 0
    quoted_texts: int = 0  # begin and end with a quote; those between, if any, are doubled
    escaped_texts: int = 0  # of these, the ones with doubled quotes: hardly by chance

    def warnings(self, path: str, options: ReadOptions) -> Iterator[str]:
        texts = self.rows - (self.empty_texts if options.empty_text == "keep" else 0)
        enough = self.quoted_texts >= (1 if self.has_quoted_name else _FEW_QUOTED)
        every_text = enough and self.quoted_texts >= _MOST_QUOTED * texts
        where_needed = self.texts_with_quotes == self.escaped_texts >= _FEW_QUOTED
        if every_text or where_needed:
            yield (
                f"{path}: {self.quoted_texts:,} of {texts:,} texts stand in double quotes, which are kept: if a "
                "program exported them so, set data.quoting: minimal"
            )
        if self.headers:
            more = f" and {self.headers - 1:,} more" if self.headers > 1 else ""
            yield f"{path}:{self.first_header}{more}: the row repeats the header: were several files put together here?"

    def notes(self, path: str, options: ReadOptions) -> Iterator[str]:
        if self.blank_lines:
            yield f"{path}: {_number(self.blank_lines, 'blank line')} skipped"
        if self.empty_texts:
            fate = "dropped" if options.empty_text == "drop" else "kept"
            yield f"{path}: {_number(self.empty_texts, 'row')} with an empty text {fate}"
        if self.stripped_labels:
            yield f"{path}: blanks around {_number(self.stripped_labels, 'label')} removed"
        if self.empty_labels:
            yield f"{path}: {_number(self.empty_labels, 'row')} without a label"


@dataclass(frozen=True)
class _File:
    path: str
    kind: Literal["plain", "quoted", "json", "parquet"]
    delimiter: str
    compression: str | None

    @classmethod
    def of(cls, path: str, options: ReadOptions) -> "_File":
        stem, suffix = os.path.splitext(path.lower())
        compression = _COMPRESSIONS.get(suffix)
        if compression:
            suffix = os.path.splitext(stem)[1]
        delimiter = "," if suffix == ".csv" else "\t"
        if suffix in _JSON_SUFFIXES:
            return cls(path, "json", delimiter, compression)
        if suffix == ".parquet":
            return cls(path, "parquet", delimiter, compression)
        quoting = options.quoting or ("minimal" if suffix == ".csv" else "none")
        return cls(path, "quoted" if quoting == "minimal" else "plain", delimiter, compression)

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        with open(self.path, "rb") as raw, pa.input_stream(raw, compression=self.compression) as stream:
            yield stream


class _Reader:
    """Reads one file; what is wrong goes to ``problems``, what was noticed to ``counts``."""

    def __init__(self, file: _File, options: ReadOptions, problems: _Problems, columns: Mapping[str, str] | None):
        self.file = file
        self.options = options
        self.problems = problems
        self.counts = _Counts()
        self.sound = True
        self.columns = columns  # dataset column -> file column; None until the first file of several has told

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in batches, without the column ``file``."""
        try:
            rows = self._checked(self._rows())
            while True:
                lines, values = _take(rows)
                if not lines:
                    break
                self.counts.rows += len(lines)
                yield self._table(lines, values)
        except _Stop:
            return
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            self._problem(None, f"cannot be read: {error}", "the file must be whole and readable")
            return
        if not self.counts.rows and self.sound:
            what = "no rows, all with an empty text" if self.counts.empty_texts else "no rows"
            what = what if os.path.getsize(self.file.path) else "no rows, the file is empty"
            self._problem(None, what, "give a file with at least one row")

    def _table(self, lines: list[int], values: list[str]) -> pa.Table:
        assert self.columns is not None  # rows have come, so the columns are settled
        width = len(self.columns)
        try:
            arrays = [pa.array(values[i::width], pa.string()) for i in range(width)]
        except UnicodeEncodeError:
            for i, value in enumerate(values):
                if _is_surrogate(value):
                    what = "half of a surrogate pair (\\ud800 to \\udfff) is not a character"
                    self._problem(lines[i // width], what, "mend the broken characters")
            raise _Stop from None
        return pa.table([*arrays, pa.array(lines, pa.int64())], names=[*self.columns, "line"])

    def _checked(self, rows: Iterator[_Row]) -> Iterator[_Row]:
        """Strip and check labels, deal with empty texts."""
        label = list(self.options.roles).index("label") if self.options.label_column is not None else None
        pair = self.options.text_pair_column is not None
        names = list(self.options.roles.values())
        header = names if len(names) > 1 and self.options.header and self.file.kind in ("plain", "quoted") else None
        counts, empty_text = self.counts, self.options.empty_text
        is_plain, may_be_empty = self.file.kind == "plain", self.options.label_separator is not None
        for line, values in rows:
            if not _is_visible(values[0]) or (pair and not _is_visible(values[1])):
                counts.empty_texts += 1
                if empty_text == "drop":
                    continue
                if empty_text == "error":
                    self._problem(line, "empty text", "fill or remove them, or set data.empty_text: keep or drop")
            if label is not None:
                stripped = values[label].strip()
                if not _is_visible(stripped):
                    if not may_be_empty:
                        self._problem(line, "empty label", "give every row a label, or remove the row")
                        continue
                    counts.empty_labels += 1
                    values[label] = ""
                elif stripped != values[label]:
                    counts.stripped_labels += 1
                    values[label] = stripped
            if is_plain and '"' in values[0]:
                self._count_quotes(values[0])
            if header and values[0].endswith(header[0]) and _is_header(values, header):
                counts.headers += 1
                counts.first_header = counts.first_header or line
            yield line, values

    def _count_quotes(self, text: str) -> None:
        """Tell a text that a program has put in quotes from one that has quotes of its own."""
        inner = text[1:-1]
        is_quoted = len(text) > 1 and text[0] == text[-1] == '"' and '"' not in inner.replace('""', "")
        self.counts.texts_with_quotes += 1
        self.counts.quoted_texts += is_quoted
        self.counts.escaped_texts += is_quoted and '"' in inner

    def _rows(self) -> Iterator[_Row]:
        """Yield the fields that ``columns`` asks for, in that order."""
        if self.file.kind == "json":
            return self._json_rows()
        if self.file.kind == "parquet":
            return self._parquet_rows()
        return self._separated_rows(self._plain_fields() if self.file.kind == "plain" else self._quoted_fields())

    def _separated_rows(self, rows: Iterator[_Row]) -> Iterator[_Row]:
        if self.options.column_names is not None:
            names, line = list(self.options.column_names), 1
        else:
            line, names = next(rows, (0, []))
            if not line:
                return
        picks = [names.index(name) for name in self._find_columns(names, line).values()]
        self.counts.has_quoted_name = any(len(name) > 1 and name[0] == name[-1] == '"' for name in names)
        width = len(names)
        named = max(i for i, name in enumerate(names, 1) if name)  # a trailing tab adds columns without a name
        for line, fields in rows:
            if len(fields) == named or (named < len(fields) <= width and not any(fields[named:])):
                yield line, [fields[i] for i in picks]
            else:
                self._ragged(line, fields, named)

    def _ragged(self, line: int, fields: list[str], expected: int) -> None:
        what = f"{_number(len(fields), 'field')}, {expected} expected"
        remedy = "every row needs as many fields as there are columns: mend the lost or extra separators"
        if self.file.kind == "plain" and any(field[:1] == '"' or field[-1:] == '"' for field in fields):
            remedy = "these lines look quoted, as spreadsheets export them: set data.quoting: minimal"
        self._problem(line, what, remedy)

    def _plain_fields(self) -> Iterator[_Row]:
        delimiter = self.file.delimiter
        return ((number, line.split(delimiter)) for number, line in self._lines())

    def _quoted_fields(self) -> Iterator[_Row]:
        csv.field_size_limit(2**31 - 1)  # its default of 131,072 characters is no promise of ours
        delimiter = self.file.delimiter
        lines = enumerate(itertools.chain.from_iterable(io.StringIO(b, newline="\n") for b in self._blocks()), 1)
        for number, line in lines:
            if '"' in line:  # only then can a row go on over several lines
                row = csv.reader(itertools.chain([line], (more for _, more in lines)), delimiter=delimiter, strict=True)
                try:
                    fields = next(row)
                except csv.Error as error:
                    what = "a quote opens in this row and never closes" if "end of data" in str(error) else str(error)
                    remedy = "double the quotes inside a quoted field, or set data.quoting: none if quotes are text"
                    others = [other for other in _OTHER_DELIMITERS if other != delimiter and f'"{other}"' in line]
                    remedy = _OTHER_DELIMITERS[others[0]] if number == 1 and others else remedy
                    self._problem(number, what, remedy)
                else:
                    yield number, fields
            elif bare := line.removesuffix("\n").removesuffix("\r"):
                yield number, bare.split(delimiter)
            else:
                self.counts.blank_lines += 1

    def _json_rows(self) -> Iterator[_Row]:
        decode = json.JSONDecoder(
            object_pairs_hook=_unique_keys, parse_int=_JsonNumber, parse_float=_JsonNumber, parse_constant=_refuse
        ).decode
        columns: Mapping[str, str] | None = None
        roles: Mapping[str, str | None] = {}
        for line, text in self._lines():
            try:
                record = decode(text)
            except (ValueError, RecursionError) as error:
                self._problem(line, f"not JSON: {error}", "write one JSON object a line")
                continue
            if not isinstance(record, dict):
                self._problem(line, "not a JSON object", "write one JSON object a line")
                continue
            if columns is None:
                columns = self._settle_columns(list(record), line)
                roles = self._roles(columns)
            missing = [name for name in columns.values() if name not in record]
            if missing or (self.options.keep_all_columns and len(record) != len(set(columns.values()))):
                what = f"no key {_names(missing)}" if missing else "more keys than the first row"
                self._problem(line, f"{what}; keys found: {_names(list(record))}", self._columns_remedy(missing))
                continue
            if isinstance(record.get(self.options.label_column or ""), list):
                joined = self._joined(line, [_json_string(name, "label") for name in record[self.options.label_column]])
                if joined is None:
                    continue
                record[self.options.label_column] = joined
            try:
                values = [_json_string(record[name], roles[column]) for column, name in columns.items()]
            except RecursionError:
                self._problem(line, "lists or objects inside each other, too deep to keep", "leave this column out")
                continue
            if None in values:
                what = f"the value of {list(columns.values())[values.index(None)]!r} has the wrong type"
                self._problem(line, what, _TYPES_REMEDY)
            else:
                yield line, values  # type: ignore[misc]  # no None among them

    def _joined(self, line: int, names: Sequence[str | None]) -> str | None:
        """A list of labels as one text; None when it cannot be told apart again."""
        separator = self.options.label_separator
        if separator is None:
            remedy = "set data.problem_type: multi_label_classification where rows have several labels"
            self._problem(line, "the label is a list", remedy)
        elif None in names:
            self._problem(line, "a list of labels holds something else than strings", _TYPES_REMEDY)
        elif bad := [name for name in names if name and separator in name]:
            remedy = "set data.label_separator to a text that no label contains"
            self._problem(line, f"the label {bad[0]!r} contains the separator {separator!r}", remedy)
        else:
            return separator.join(name for name in names if name)
        return None

    def _parquet_rows(self) -> Iterator[_Row]:
        with open(self.file.path, "rb") as raw:
            parquet = pq.ParquetFile(raw)
            schema = parquet.schema_arrow
            columns = self._find_columns(schema.names, None)
            roles = self._roles(columns)
            for column, name in columns.items():
                kind = schema.field(name).type
                is_list_of_labels = roles[column] == "label" and _is_list(kind)
                if not _has_strings(kind.value_type if is_list_of_labels else kind, roles[column]):
                    self._problem(None, f"column {name!r} is of type {kind}", _TYPES_REMEDY)
                    raise _Stop
            number = 0
            for batch in parquet.iter_batches(batch_size=1000, columns=list(dict.fromkeys(columns.values()))):
                for values in zip(*(_cells(batch.column(name), roles[c]) for c, name in columns.items()), strict=True):
                    number += 1
                    if None in values:
                        name = list(columns.values())[values.index(None)]
                        self._problem(number, f"column {name!r} is null", "fill or remove these rows")
                        continue
                    cells = [self._joined(number, cell) if isinstance(cell, list) else cell for cell in values]
                    if None not in cells:
                        yield number, cells  # type: ignore[misc]  # no None among them

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield (number, line without its end), skipping and counting blank ones."""
        number = 0
        for block in self._blocks():
            lines = block.replace("\r\n", "\n").split("\n")
            if not lines[-1]:
                lines.pop()
            for line in lines:
                number += 1
                if line:
                    yield number, line
                else:
                    self.counts.blank_lines += 1

    def _blocks(self) -> Iterator[str]:
        """Yield the decoded text in blocks of whole lines, their ends included."""
        decoder = codecs.getincrementaldecoder(self.options.encoding)()
        line = 0  # whole lines so far
        begun: list[str] = []  # pieces of the line that goes on in the next block
        at_start = True
        with self.file.open() as stream:
            data = b" "
            while data:
                data = stream.read(_BLOCK_BYTES)
                text = self._decode(decoder, data, line)
                if at_start and text:
                    text, at_start = text.removeprefix("\ufeff"), False
                end = text.rfind("\n") + 1
                if end:
                    block = "".join(begun) + text[:end]
                    self._find_nul(block, line)
                    line += block.count("\n")
                    yield block
                    begun = []
                begun.append(text[end:])
        if block := "".join(begun):
            self._find_nul(block, line)
            if not line and block.count("\r") > 1:
                self._problem(1, "lines end in \\r alone, as on old Macs", "convert the line ends to \\n")
                raise _Stop
            yield block

    def _decode(self, decoder: codecs.IncrementalDecoder, data: bytes, line: int) -> str:
        state = decoder.getstate()
        try:
            return decoder.decode(data, final=not data)
        except UnicodeError as error:
            reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
        decoder.setstate(state)
        try:  # again byte by byte: the only way to the line that holds for every codec
            for i in range(len(data)):
                line += decoder.decode(data[i : i + 1]).count("\n")
        except UnicodeError:
            pass
        self._problem(line + 1, f"cannot be decoded as {self.options.encoding} ({reason})", self._encoding_remedy)
        raise _Stop

    def _find_nul(self, block: str, line: int) -> None:
        if "\0" in block:
            for number, text in enumerate(block.split("\n"), line + 1):
                if "\0" in text:
                    self._problem(number, "NUL character", self._encoding_remedy)

    @functools.cached_property
    def _encoding_remedy(self) -> str:
        with self.file.open() as stream:
            head = stream.read(1 << 16)
        for magic, what in _MAGIC.items():
            if head.startswith(magic):
                return f"the file is {what}"
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            candidates = ["utf-16"]
        elif b"\0" in head:
            candidates = ["utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"]
        else:
            candidates = ["utf-8", "gb18030", "cp1252"]
        for encoding in candidates:
            if _decodes(self.file, encoding):
                return f"the bytes would decode as {encoding}: if that is right, set data.encoding: {encoding}"
        return "set data.encoding to the encoding of the file, or mend the broken bytes"

    def _find_columns(self, names: list[str], line: int | None) -> Mapping[str, str]:
        """Settle the columns of a file whose ``names`` are known, and make sure that each is there once."""
        if not self.sound and any("\0" in name for name in names):  # reported already
            raise _Stop
        columns = self._settle_columns(names, line)
        wanted = set(columns.values())
        padded = [name for name in names if name != name.strip() and {name, name.strip()} & wanted]
        repeated = [name for name, times in Counter(names).items() if times > 1 and name in wanted]
        missing = [name for name in columns.values() if name not in names]
        if padded and self.options.header:
            self._problem(line, f"blanks around the column name {_names(padded)}", "remove the blanks from the header")
            raise _Stop
        if repeated:
            self._problem(line, f"more than one column is called {_names(repeated)}", "give columns different names")
            raise _Stop
        if missing:
            self._problem(
                line,
                f"no column {_names(missing)}; columns found: {_names(names)}{_nearest(missing, names)}",
                self._columns_remedy(missing, names),
            )
            raise _Stop
        return columns

    def _settle_columns(self, names: list[str], line: int | None) -> Mapping[str, str]:
        columns = self.options.columns
        if self.options.keep_all_columns:
            others = [name for name in names if name and name not in columns.values()]
            if clashing := [name for name in others if name in columns or name in _NUMBER_COLUMNS]:
                what = f"column {_names(clashing)} has the name of a column that the reader makes"
                self._problem(line, what, "rename it, or do not keep all columns")
                raise _Stop
            if broken := [name for name in others if _is_surrogate(name)]:
                self._problem(line, f"half of a surrogate pair in {_names(broken)}", "mend the broken characters")
                raise _Stop
            columns |= {name: name for name in others}
            if self.columns is not None and columns.keys() != self.columns.keys():
                what = f"columns {_names(list(columns))}, but the first file has {_names(list(self.columns))}"
                self._problem(line, what, "give all files the same columns, or do not keep all columns")
                raise _Stop
        if self.columns is None:
            self.columns = columns
        return self.columns

    def _roles(self, columns: Mapping[str, str]) -> dict[str, str | None]:
        """Column of the dataset -> itself, or None where it is just kept."""
        return {column: column if column in self.options.roles else None for column in columns}

    def _columns_remedy(self, missing: list[str], names: Sequence[str] = ()) -> str:
        settings = [
            _SETTINGS[column]
            for column, name in self.options.columns.items()
            if name in missing and column in _SETTINGS
        ]
        remedy = f"set {' and '.join(settings)} to a name found" if settings else "give every row the same columns"
        if self.file.kind == "plain" and any(name[:1] == '"' for name in names):
            return f"the names look quoted: set data.quoting: minimal; otherwise {remedy}"
        for delimiter, advice in _OTHER_DELIMITERS.items():
            if self.file.kind in ("plain", "quoted") and missing and set(missing) <= _split_names(names, delimiter):
                return advice
        if self.file.kind in ("plain", "quoted"):
            return f"{remedy}; if line 1 is no header, set data.header: false and data.column_names: [text, label]"
        return remedy

    def _problem(self, line: int | None, what: str, remedy: str) -> None:
        self.sound = False
        self.problems.add(self.file.path if line is None else f"{self.file.path}:{line}", what, remedy)


class _JsonNumber(str):
    """A number as it is written in the JSON text."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key appears twice")
    return record


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _json_string(value: object, role: str | None) -> str | None:
    """Return a string as it is, a number or boolean label as written, anything to keep as text; None for all else."""
    if type(value) is str:
        return value
    if role in ("text", "text_pair"):
        return None
    if isinstance(value, _JsonNumber | bool):
        return _json_text(value)
    if role is not None:
        return None
    return "" if value is None else _json_text(value)


def _json_text(value: object) -> str:
    if isinstance(value, _JsonNumber):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_json_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json_text(key)}: {_json_text(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _has_strings(kind: pa.DataType, role: str | None) -> bool:
    """Whether a Parquet type gives strings, or numbers and booleans where those will do, or anything to keep."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return True
    if role is None:
        return not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(number) and role not in ("text", "text_pair")


def _cells(array: pa.Array, role: str | None) -> list[Any]:
    """Return the strings of a Parquet column, lists of them for lists of labels; None for null but where just kept."""
    if role == "label" and _is_list(array.type):
        names = iter(_strings(array.flatten()))
        lengths = array.value_lengths().to_pylist()
        return [None if length is None else list(itertools.islice(names, length)) for length in lengths]
    if role is None and pa.types.is_nested(array.type):
        values = array.to_pylist()
        return ["" if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]
    strings = _strings(array)
    return strings if role is not None else ["" if string is None else string for string in strings]


def _strings(array: pa.Array) -> list[str | None]:
    if pa.types.is_floating(array.type):  # as Python writes them: Arrow would write 1.0 as 1
        return [None if value != value else str(value) for value in array.to_numpy(zero_copy_only=False)]
    strings: list[str | None] = array.cast(pa.string()).to_pylist()
    return strings


def _is_header(values: Sequence[str], header: Sequence[str]) -> bool:
    """Whether a row repeats the names of its columns; put together by bytes, a file begins with a byte-order mark."""
    return [value.removeprefix("\ufeff") for value in values[: len(header)]] == header


def _split_names(names: Sequence[str], delimiter: str) -> set[str]:
    return {part.strip(' "') for name in names if delimiter in name for part in name.split(delimiter)}


def _take(rows: Iterator[_Row]) -> tuple[list[int], list[str]]:
    """Return the line numbers of the next rows and all their fields end to end, a batch of bounded size.

    End to end, because a list for each row would keep the garbage collector busy: it took half of the time.
    """
    lines: list[int] = []
    values: list[str] = []
    chars = 0
    for line, fields in rows:
        lines.append(line)
        values += fields
        chars += sum(map(len, fields))
        if len(lines) >= _BATCH_ROWS or chars >= _BATCH_CHARS:
            break
    return lines, values


def _decodes(file: _File, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        with file.open() as stream:
            while data := stream.read(_BLOCK_BYTES):
                decoder.decode(data)
        decoder.decode(b"", final=True)
    except UnicodeError:
        return False
    return True


def _nearest(missing: Iterable[str], names: Iterable[str]) -> str:
    plain = {name.strip(' "').lower(): name for name in names}
    near = [plain[match] for name in missing for match in difflib.get_close_matches(name.lower(), plain, n=1)]
    return f"; nearest: {_names(near)}" if near else ""


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name if len(name) <= 60 else name[:60] + "...") for name in names[:10])
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _expand(paths: Iterable[str], problems: _Problems) -> list[str]:
    """Return the files that paths and globs stand for, those of a glob sorted."""
    files: list[str] = []
    for path in paths:
        if os.path.isfile(path):
            files.append(path)
        elif os.path.isdir(path):
            problems.add(path, "is a folder", "name the files in it: folder/*.tsv")
        elif os.path.exists(path):
            problems.add(path, "is not a regular file", "files are read twice, so copy it to a file first")
        elif matches := sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match)):
            files += matches
        else:
            what = "matches no file" if glob.has_magic(path) else "no such file"
            problems.add(path, what, f"paths start from {os.getcwd()}")
    if not files and not problems:
        problems.add("data", "no file given", "name at least one file")
    return files


def _state(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _cache_key(files: list[_File], options: ReadOptions, problems: _Problems) -> str:
    """Hash what the rows depend on: contents and formats of the files, and the options; not names or times."""
    parts: list[object] = [_VERSION, options]
    for file in files:
        try:
            with open(file.path, "rb") as raw:
                digest = hashlib.blake2b(digest_size=32)
                while data := raw.read(_BLOCK_BYTES):
                    digest.update(data)
        except OSError as error:
            problems.add(file.path, f"cannot be read: {error.strerror}", "the file must be whole and readable")
        else:
            parts.append((file.kind, file.delimiter, file.compression, digest.hexdigest()))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _build(folder: str, files: list[_File], options: ReadOptions, key: str) -> None:
    """Parse the files into ``folder``, which appears whole or not at all."""
    scratch = f"{folder}.{uuid.uuid4().hex}"
    os.makedirs(scratch)
    try:
        problems = _Problems()
        counts = _write_rows(os.path.join(scratch, "rows.arrow"), files, options, key, problems)
        problems.raise_if_any()
        with open(os.path.join(scratch, "counts.json"), "w", encoding="utf-8") as stream:
            json.dump([asdict(count) for count in counts], stream)
        with contextlib.suppress(OSError):  # another process was first
            os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_rows(path: str, files: list[_File], options: ReadOptions, key: str, problems: _Problems) -> list[_Counts]:
    """Stream the rows of all files to one Arrow file; from the first problem on, only look for more problems."""
    counts = []
    columns: Mapping[str, str] | None = None
    writer: ArrowWriter | None = None
    try:
        for index, file in enumerate(files):
            reader = _Reader(file, options, problems, columns)
            for table in reader.tables():
                if problems:
                    continue
                if writer is None:
                    features = datasets.Features({name: datasets.Value("string") for name in table.column_names})
                    features |= {"line": datasets.Value("int64"), "file": datasets.Value("int32")}
                    writer = ArrowWriter(path=path, features=features, fingerprint=key)
                writer.write_table(table.append_column("file", pa.repeat(pa.scalar(index, pa.int32()), len(table))))
            counts.append(reader.counts)
            columns = reader.columns
        if writer is not None:
            writer.finalize()
    finally:
        if writer is not None:
            writer.close()
    return counts


def _load(folder: str) -> tuple[datasets.Dataset, list[_Counts]] | None:
    """Return what ``_build`` left, or None; remove what is damaged."""
    try:
        with open(os.path.join(folder, "counts.json"), encoding="utf-8") as stream:
            counts = [_Counts(**count) for count in json.load(stream)]
        dataset = datasets.Dataset.from_file(os.path.join(folder, "rows.arrow"))
        if len(dataset) == sum(count.rows for count in counts):
            return dataset, counts
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None
