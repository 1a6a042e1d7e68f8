"""What there is to know about rows before anybody trains on them: copies, leaks, contradictions, lengths, baselines.

Texts are streamed and hashed; no more than a few numbers a row are held, so a million rows need no more memory than a
thousand do per row.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.labels import Labels, label_warnings
from finetune.data.scan import BATCH, Scan, scan, texts
from finetune.data.splits import Splits
from finetune.data.tokenize import TokenizedTexts
from finetune.data.tsv import Table

SHOWN = 5  # places that a finding names
FEW_ROWS = 10  # training rows below which a class can hardly be learned
UNKNOWN_SHARE = 0.05  # of all tokens: above it the tokenizer is of another language than the texts
LONG_TEXT = 20_000  # characters: rather a document that lost its line ends than a text
LEVELS = (64, 128, 256, 512)  # max_length that people choose
PERCENTILES = (5, 25, 50, 75, 95, 99, 100)

Severity = Literal["error", "warning", "info"]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Finding:
    """Something that a person should know, where it is, and what to do about it."""

    severity: Severity
    code: str
    message: str
    places: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Lengths:
    """Of a split, in ``unit``: percentiles, a histogram ``counts`` between ``edges``, and what is cut at a length.

    ``cut`` is ``{max_length: (share of rows, share of tokens)}``; empty where the unit is characters.
    """

    unit: str
    percentiles: Mapping[int, float]
    edges: Sequence[float]
    counts: Sequence[int]
    cut: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitFacts:
    """What a split holds. ``classes`` counts rows by label name; regression has ``numbers`` (percentiles) instead."""

    files: tuple[str, ...]
    rows: int
    classes: Mapping[str, int]
    numbers: Mapping[int, float]
    lengths: Lengths
    repeated_rows: int
    near_copies: int
    conflicting_texts: int
    empty_texts: int
    unknown_share: float | None


@dataclass(frozen=True)
class Baseline:
    """What a model must beat: a metric by name, with the 95 % interval of ``accuracy`` where there is one."""

    name: str
    metrics: Mapping[str, float]
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class DataCheck:
    """The whole report; ``leaks`` counts dev rows whose text is in train, ``exact`` and ``normalised``."""

    splits: Mapping[str, SplitFacts]
    leaks: Mapping[str, int]
    findings: Sequence[Finding]
    baselines: Sequence[Baseline] = ()
    max_length: int | None = None

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


# --- Copies and contradictions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Rows of a split that say the same: positions of rows that repeat an earlier row (text and label), of texts that
    repeat another but for case, width, punctuation and blanks, and of texts with several labels (the first row of
    each label)."""

    repeated: Ids
    near: Ids
    conflicting: list[Ids]
    near_conflicting: int


def find_copies(found: Scan, labels: NDArray[Any]) -> Copies:
    """Copies among the rows of one split.

    Args:
        found: hashes of the texts.
        labels: as encoded; rows of equal values have the same label.
    """
    label_ids = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    text_ids, near_ids = (np.unique(hashes, return_inverse=True)[1] for hashes in (found.exact, found.near))
    width = int(label_ids.max(initial=0)) + 1
    of_both = text_ids * width + label_ids
    first_of_both, first_of_text = _firsts(of_both), _firsts(text_ids)
    is_repeated = np.ones(len(labels), bool)
    is_repeated[first_of_both] = False
    # A near copy is a text of its own that becomes another one when it is normalised.
    is_near = np.ones(len(first_of_text), bool)
    is_near[_firsts(near_ids[first_of_text])] = False
    conflicts = _with_several_labels(text_ids, of_both)
    is_conflict = np.zeros(len(labels), bool)
    is_conflict[conflicts] = True
    rows = first_of_both[is_conflict[text_ids[first_of_both]]]
    rows = rows[np.argsort(text_ids[rows], kind="stable")]
    groups = np.split(rows, np.flatnonzero(np.diff(text_ids[rows])) + 1) if len(rows) else []
    near_conflicts = _with_several_labels(near_ids, near_ids * width + label_ids)
    return Copies(
        repeated=np.flatnonzero(is_repeated),
        near=first_of_text[is_near],
        conflicting=sorted(groups, key=lambda group: int(group[0])),
        near_conflicting=len(near_conflicts) - len(conflicts),
    )


def _firsts(ids: Ids) -> Ids:
    """The position of the first of each value, in order."""
    return np.sort(np.unique(ids, return_index=True)[1])


def _with_several_labels(ids: Ids, ids_with_label: Ids) -> Ids:
    """The texts that occur with more than one label."""
    texts_of_pairs = ids[np.unique(ids_with_label, return_index=True)[1]]
    values, counts = np.unique(texts_of_pairs, return_counts=True)
    return np.asarray(values[counts > 1])


# --- The report -------------------------------------------------------------------------------------------------------


def check_data(
    tables: Mapping[str, Table],
    encoded: Mapping[str, NDArray[Any]],
    labels: Labels,
    *,
    tokens: Mapping[str, TokenizedTexts] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    baselines: Sequence[Baseline] = (),
    cache_dir: str | None = None,
) -> DataCheck:
    """Look at the rows of each split.

    Args:
        tables: rows of ``train`` and, where it has a file of its own, ``dev``.
        encoded: their labels as :meth:`Labels.encode` gives them.
        labels: the labels of the training rows.
        tokens: token ids of the same splits, where a tokenizer is known.
        tokenizer: that made them.
        max_length: at which they were cut.
        baselines: of :func:`fit_baselines`, to go into the report.
        cache_dir: where hashes of the texts are kept.
    """
    scans = {name: scan(table, cache_dir) for name, table in tables.items()}
    findings: list[Finding] = []
    facts = {}
    for name, table in tables.items():
        copies = find_copies(scans[name], encoded[name])
        unknown = None
        if name == "train" or table.files != tables["train"].files:  # else the same was said of train
            findings += [Finding("info", "reader", note) for note in table.notes]
            findings += [Finding("warning", "reader", text) for text in table.warnings]
        findings += _findings_of_texts(name, table, scans[name])
        findings += _findings_of_copies(name, table, copies, labels)
        if tokens is not None and tokenizer is not None:
            unknown = unknown_share(tokens[name], tokenizer, pairs="text_pair" in table.dataset.column_names)
            findings += _findings_of_tokens(name, table, tokens[name], tokenizer, unknown)
        facts[name] = SplitFacts(
            files=table.files,
            rows=len(encoded[name]),
            classes=count_classes(encoded[name], labels),
            numbers=percentiles(encoded[name]) if labels.problem_type == "regression" else {},
            lengths=_lengths_in_tokens(tokens[name], max_length) if tokens else _lengths_in_characters(scans[name]),
            repeated_rows=len(copies.repeated),
            near_copies=len(copies.near),
            conflicting_texts=len(copies.conflicting),
            empty_texts=int((scans[name].visible == 0).sum()),
            unknown_share=unknown,
        )
    leaks: dict[str, int] = {}
    if "dev" in tables:
        leaks, leak_findings = _leaks(tables, scans)
        findings += leak_findings
    findings += [Finding("warning", "similar_labels", text) for text in label_warnings(tables["train"], labels)]
    if labels.names:
        findings += _findings_of_classes({name: each.classes for name, each in facts.items()}, encoded)
    order = ("error", "warning", "info")
    findings.sort(key=lambda finding: order.index(finding.severity))
    return DataCheck(facts, leaks, findings, tuple(baselines), max_length)


def count_classes(labels: NDArray[Any], known: Labels) -> dict[str, int]:
    """Rows with each label, by name; empty for regression."""
    if not known.names:
        return {}
    counts = labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=len(known.names))
    return {name: int(count) for name, count in zip(known.names, counts, strict=True)}


def percentiles(values: NDArray[Any]) -> dict[int, float]:
    """``{percent: value}``."""
    return dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).round(3).tolist(), strict=True))


def _lengths_in_characters(found: Scan) -> Lengths:
    return Lengths("characters", percentiles(found.characters), *_histogram(found.characters))


def _lengths_in_tokens(tokens: TokenizedTexts, max_length: int | None) -> Lengths:
    full = tokens.full_lengths.astype(np.int64)
    total = max(int(full.sum()), 1)
    cut = {
        level: (float((full > level).mean()), float(np.maximum(full - level, 0).sum() / total))
        for level in sorted({*LEVELS, *([max_length] if max_length else [])})
    }
    return Lengths("tokens", percentiles(full), *_histogram(full), cut)


def _histogram(values: NDArray[Any]) -> tuple[list[float], list[int]]:
    """Up to thirty bars; the last one takes all that is longer than the 99th percentile."""
    top = max(float(np.percentile(values, 99)), 1.0)
    counts, edges = np.histogram(np.minimum(values, top), bins=min(30, max(1, int(top))), range=(0, top))
    return edges.round(2).tolist(), counts.tolist()


def unknown_share(tokens: TokenizedTexts, tokenizer: PreTrainedTokenizerBase, *, pairs: bool) -> float:
    """Share of the tokens of text that are the unknown token; 0 for tokenizers that know every byte."""
    if tokenizer.unk_token_id is None:
        return 0.0
    batches = tokens.dataset.select_columns(["input_ids"]).with_format("arrow").iter(BATCH)
    unknown = 0
    for batch in batches:
        ids = pc.list_flatten(batch.column("input_ids"))
        unknown += pc.sum(pc.equal(ids, tokenizer.unk_token_id)).as_py() or 0
    special = tokenizer.num_special_tokens_to_add(pair=pairs)
    return float(unknown / max(int(tokens.lengths.sum()) - special * len(tokens), 1))


# --- Findings ---------------------------------------------------------------------------------------------------------


def _findings_of_texts(split: str, table: Table, found: Scan) -> Iterator[Finding]:
    empty, short, long = (
        np.flatnonzero(found.visible == 0),
        np.flatnonzero(found.visible == 1),
        np.flatnonzero(found.characters > LONG_TEXT),
    )
    if len(empty):
        yield Finding("warning", "empty_texts", f"{split}: {_rows(empty)} without any text", _places(table, empty))
    if len(short):
        message = f"{split}: {_rows(short)} with a single character of text"
        yield Finding("info", "short_texts", message, _places(table, short))
    if len(long):
        message = f"{split}: {_rows(long)} with more than {LONG_TEXT:,} characters"
        yield Finding("warning", "long_texts", message, _places(table, long), "was a line end lost there?")


def _findings_of_copies(split: str, table: Table, copies: Copies, labels: Labels) -> Iterator[Finding]:
    share = len(copies.repeated) / len(table.dataset)
    if len(copies.repeated):
        yield Finding(
            "warning" if share > 0.01 else "info",
            "repeated_rows",
            f"{split}: {_rows(copies.repeated)} ({share:.1%}) repeat an earlier row, text and label",
            _places(table, copies.repeated),
            "they count several times in training and evaluation: keep one of each, unless that is meant",
        )
    if len(copies.near):
        yield Finding(
            "info",
            "near_copies",
            f"{split}: {len(copies.near):,} more text{_s(copies.near)} with the words of another: case, width, "
            "punctuation and blanks aside",
            _places(table, copies.near),
        )
    if copies.conflicting:
        shown = [" and ".join(_places(table, group[:SHOWN])) for group in copies.conflicting[:SHOWN]]
        also = f" ({copies.near_conflicting:,} more when normalised)" if copies.near_conflicting > 0 else ""
        is_harmless = labels.problem_type == "regression"
        yield Finding(
            "info" if is_harmless else "warning",
            "conflicting_labels",
            f"{split}: {len(copies.conflicting):,} text{_s(copies.conflicting)} with different labels{also}",
            tuple(shown),
            "" if is_harmless else "no model can be right on all of them: decide on one label each",
        )


def _leaks(tables: Mapping[str, Table], scans: Mapping[str, Scan]) -> tuple[dict[str, int], list[Finding]]:
    """Dev rows whose text is among the training rows: their score says how well the model remembers."""
    dev, train = scans["dev"], scans["train"]
    exact, near = _is_in(dev.exact, train.exact), _is_in(dev.near, train.near)
    counts = {"exact": int(exact.sum()), "normalised": int(near.sum())}
    if not counts["normalised"]:
        return counts, []
    share = counts["normalised"] / len(dev.near)
    places = []
    for row in np.flatnonzero(near)[:SHOWN]:
        twin = int(np.flatnonzero(train.near == dev.near[row])[0])
        places.append(f"{tables['dev'].where(int(row))} is {tables['train'].where(twin)}")
    message = (
        f"dev rows that are in train too: {counts['exact']:,} as they stand, {counts['normalised']:,} ({share:.1%}) "
        "without case, width, punctuation and blanks"
    )
    remedy = "leave them out of one of the two, or the dev score says how well the model remembers"
    return counts, [Finding("warning", "leakage", message, tuple(places), remedy)]


def _is_in(values: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """``np.isin`` by sorting, which is several times as fast for many hashes."""
    ordered = np.sort(others)
    return np.asarray(ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values)


def _findings_of_tokens(
    split: str, table: Table, tokens: TokenizedTexts, tokenizer: PreTrainedTokenizerBase, unknown: float
) -> Iterator[Finding]:
    if tokens.truncated_rows:
        share = tokens.truncated_rows / len(tokens)
        yield Finding(
            "warning" if share > 0.2 else "info",
            "truncation",
            f"{split}: {tokens.describe_cut()}",
            remedy="raise data.max_length, or choose which part is kept with data.truncation" if share > 0.2 else "",
        )
    if unknown > UNKNOWN_SHARE:
        examples = "".join(unknown_characters(table, tokenizer))
        yield Finding(
            "warning",
            "unknown_tokens",
            f"{split}: {unknown:.1%} of the tokens are {tokenizer.unk_token}"
            + (f" (it does not know {examples!r}, among others)" if examples else ""),
            remedy="is model.name_or_path a model of the language of these texts?",
        )


def unknown_characters(table: Table, tokenizer: PreTrainedTokenizerBase, rows: int = 500, count: int = 12) -> list[str]:
    """The most frequent characters of the first rows that the tokenizer does not know."""
    seen: Counter[str] = Counter()
    for text, _ in zip(texts(table.dataset), range(rows), strict=False):
        seen.update(each for each in text if not each.isspace())
    unknown = [
        each
        for each, _ in seen.most_common()
        if tokenizer.unk_token_id
        in tokenizer(each, add_special_tokens=False, truncation=False, padding=False).input_ids
    ]
    return unknown[:count]


def _findings_of_classes(
    classes: Mapping[str, Mapping[str, int]], encoded: Mapping[str, NDArray[Any]]
) -> Iterator[Finding]:
    train = classes["train"]
    few = {name: count for name, count in train.items() if count < FEW_ROWS}
    if few:
        yield Finding(
            "warning",
            "rare_classes",
            f"{len(few):,} of {len(train):,} classes have fewer than {FEW_ROWS} training rows: {_counted(few)}",
            remedy="collect more of them, or merge classes",
        )
    most, least = max(train.values()), max(min(train.values()), 1)
    if most > 10 * least:
        message = f"the largest class has {most / least:,.0f} times the training rows of the smallest"
        remedy = "look at f1_macro beside accuracy; data.class_weights: balanced may help"
        yield Finding("info", "imbalance", message, remedy=remedy)
    if "dev" not in classes:
        return
    dev = classes["dev"]
    missing = [name for name, count in dev.items() if not count]
    if missing:
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        message = f"{len(missing):,} of {len(dev):,} classes have no dev row: {', '.join(missing[:20])}{more}"
        yield Finding("warning", "missing_in_dev", message, remedy="nothing is measured of them: add such rows to dev")
    shares = [
        np.array(list(counts.values())) / len(encoded[split]) for split, counts in (("train", train), ("dev", dev))
    ]
    gaps = np.abs(shares[0] - shares[1])
    # Three standard deviations of the difference of two shares, or it may be chance.
    pooled = np.clip((shares[0] + shares[1]) / 2, 1e-9, 1)
    chance = 3 * np.sqrt(pooled * (1 - pooled) * (1 / len(encoded["train"]) + 1 / len(encoded["dev"])))
    worst = int(np.argmax(gaps))
    if gaps[worst] > max(0.05, chance[worst]):
        name = list(train)[worst]
        message = f"{name} is {shares[0][worst]:.1%} of the training rows but {shares[1][worst]:.1%} of the dev rows"
        yield Finding("warning", "shifted_classes", message, remedy="were both drawn from the same source?")


def _rows(rows: Ids) -> str:
    return f"{len(rows):,} row{_s(rows)}"


def _s(items: Sequence[object] | Ids) -> str:
    return "" if len(items) == 1 else "s"


def _places(table: Table, rows: Ids) -> tuple[str, ...]:
    return tuple(table.where(int(row)) for row in rows[:SHOWN])


def _counted(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:20])
    return shown + (f" and {len(counts) - 20} more" if len(counts) > 20 else "")


# --- Baselines --------------------------------------------------------------------------------------------------------

BASELINE_ROWS = {"train": 20_000, "dev": 5_000}
# Scripts that put no blanks between words: Thai to Khmer, kana and Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def fit_baselines(splits: Splits, seed: int) -> Iterator[Baseline]:
    """What the most frequent answer and what word counts reach on the dev rows: a model has to beat both.

    Fitted on at most 20,000 training rows and judged on at most 5,000 dev rows, drawn by ``seed``.
    """
    rows = {
        name: np.sort(np.random.default_rng([seed, limit]).permutation(len(labels))[:limit])
        for (name, limit), labels in zip(BASELINE_ROWS.items(), (splits.train_labels, splits.dev_labels), strict=True)
    }
    train, dev = splits.train_labels[rows["train"]], splits.dev_labels[rows["dev"]]
    yield _judge("most frequent answer", np.broadcast_to(_most_frequent(train), dev.shape), dev)
    drawn = {
        name: splits_table.dataset.select(rows[name])
        for name, splits_table in (("train", splits.train), ("dev", splits.dev))
    }
    fitted = _word_counts(drawn["train"], train, drawn["dev"])
    if fitted is not None:
        name, predicted = fitted
        yield _judge(name, predicted, dev)


def _most_frequent(labels: NDArray[Any]) -> Any:
    if labels.dtype == np.int64:
        return np.bincount(labels).argmax()
    if labels.ndim == 2:
        return (labels.mean(axis=0) >= 0.5).astype(labels.dtype)
    return labels.mean()


def _word_counts(
    train_rows: datasets.Dataset, labels: NDArray[Any], dev_rows: datasets.Dataset
) -> tuple[str, NDArray[Any]] | None:
    """TF-IDF features and a linear model; None where there is nothing to count or to tell apart."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    head = "".join(text for text, _ in zip(texts(train_rows), range(1000), strict=False))
    is_unspaced = len(_UNSPACED.findall(head)) > 0.2 * len(head)
    units = {"analyzer": "char", "ngram_range": (1, 3)} if is_unspaced else {"ngram_range": (1, 2)}
    vectorizer = TfidfVectorizer(
        **units, token_pattern=None if is_unspaced else r"(?u)\b\w+\b", sublinear_tf=True, max_features=200_000
    )
    try:
        features = vectorizer.fit_transform(texts(train_rows))
    except ValueError:  # no word in any text
        return None
    kind = "characters" if is_unspaced else "words"
    if labels.dtype != np.int64 and labels.ndim == 1:
        model, name = Ridge(), f"TF-IDF of {kind} + ridge regression"
    else:
        if labels.ndim == 1 and len(np.unique(labels)) < 2:
            return None
        model, name = LogisticRegression(C=10, solver="liblinear"), f"TF-IDF of {kind} + logistic regression"
        if labels.ndim == 2 or len(np.unique(labels)) > 2:
            model = OneVsRestClassifier(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of solvers that stop early: good enough for a baseline
        model.fit(features, labels)
    return name, np.asarray(model.predict(vectorizer.transform(texts(dev_rows))))


def _judge(name: str, predicted: NDArray[Any], labels: NDArray[Any]) -> Baseline:
    from scipy.stats import binomtest
    from sklearn.metrics import f1_score

    if labels.dtype != np.int64 and labels.ndim == 1:
        return Baseline(name, {"mse": float(np.mean((predicted - labels) ** 2))})
    right = predicted == labels
    right = right.all(axis=1) if right.ndim == 2 else right
    averages = ("micro", "macro") if labels.ndim == 2 else ("macro",)
    scores = {f"f1_{how}": float(f1_score(labels, predicted, average=how, zero_division=0)) for how in averages}
    interval = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
    return Baseline(name, {"accuracy": float(right.mean()), **scores}, (float(interval.low), float(interval.high)))
