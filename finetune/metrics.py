"""Scores of an evaluation: the metrics that ship with the package, the user's own, and what else logits can tell.

Shipped metrics are ``evaluate.Metric`` modules that need no hub and no network (:func:`shipped_module`). Each is one
function of a :class:`Sample`, so a score and its bootstrap interval come from the same formula, and no formula warns:
a ratio with nothing below the line is 0 (``zero_division=0``), a score that the rows cannot define is NaN.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

from finetune.errors import ConfigError

Array = NDArray[Any]
Floats = NDArray[np.float64]

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"

COUNT_RESAMPLES = 1000  # metrics of (true, predicted) pairs: cheap, so as many as Efron & Tibshirani ask of percentiles
ROW_RESAMPLES = 200  # metrics that rank or sum every row
CHUNK = 2_000_000  # weights held at a time: 16 MB


# --- One sample of rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Rows of an evaluation, row ``i`` taken ``weights[i, d]`` times in draw ``d``.

    The evaluated rows themselves are one draw of ones; a bootstrap is many draws of resampled counts.
    """

    predictions: Array  # ids [rows], 0/1 [rows, labels], probabilities [rows, labels] or values [rows]
    references: Array  # ids [rows], 0/1 [rows, labels] or values [rows]
    weights: Floats  # [rows, draws]
    min_classes: int = 0  # count at least this many classes, also those that no row has

    @cached_property
    def size(self) -> Floats:
        """Rows in each draw."""
        return np.asarray(self.weights.sum(axis=0))

    @cached_property
    def exact(self) -> Floats:
        """Rows in each draw whose prediction is right: for multi-label in every label."""
        right = self.predictions == self.references
        return np.asarray((right.all(axis=1) if right.ndim == 2 else right) @ self.weights)

    @cached_property
    def _indicators(self) -> tuple[Any, Any]:
        if self.references.ndim == 2:
            return sparse.csr_array(self.references), sparse.csr_array(self.predictions)
        classes = max(self.min_classes, self.references.max(initial=-1) + 1, self.predictions.max(initial=-1) + 1)
        return _one_hot(self.references, classes), _one_hot(self.predictions, classes)

    @cached_property
    def true(self) -> Floats:
        """[classes, draws] rows that have the class."""
        return np.asarray(self._indicators[0].T @ self.weights)

    @cached_property
    def predicted(self) -> Floats:
        """[classes, draws] rows predicted to have the class."""
        return np.asarray(self._indicators[1].T @ self.weights)

    @cached_property
    def hits(self) -> Floats:
        """[classes, draws] rows that have the class and were predicted to have it."""
        true, predicted = self._indicators
        return np.asarray(true.multiply(predicted).T @ self.weights)

    def macro(self, per_class: Floats) -> Floats:
        """Mean over the classes, as scikit-learn takes it: every label of a multi-label task, but of a single-label
        task only the classes that occur, as truth or as prediction."""
        counted = (self.true + self.predicted > 0) | (self.references.ndim == 2)
        return _ratio((per_class * counted).sum(axis=0), counted.sum(axis=0))


def _one_hot(ids: Array, classes: int) -> Any:
    rows = len(ids)
    return sparse.csr_array((np.ones(rows), ids, np.arange(rows + 1)), shape=(rows, classes))


def _ratio(above: Array, below: Array) -> Floats:
    return np.divide(above, below, out=np.zeros(np.shape(above)), where=below > 0)


# --- The shipped metrics ----------------------------------------------------------------------------------------------


def _accuracy(sample: Sample) -> Floats:
    return _ratio(sample.exact, sample.size)


def _precision_per_class(sample: Sample) -> Floats:
    return _ratio(sample.hits, sample.predicted)


def _recall_per_class(sample: Sample) -> Floats:
    return _ratio(sample.hits, sample.true)


def _f1_per_class(sample: Sample) -> Floats:
    return _ratio(2 * sample.hits, sample.true + sample.predicted)


def _f1_micro(sample: Sample) -> Floats:
    return _ratio(2 * sample.hits.sum(axis=0), (sample.true + sample.predicted).sum(axis=0))


def _f1_weighted(sample: Sample) -> Floats:
    return _ratio((sample.true * _f1_per_class(sample)).sum(axis=0), sample.true.sum(axis=0))


def _matthews_correlation(sample: Sample) -> Floats:
    """Gorodkin 2004, R_K: the covariance of truth and prediction over the root of the product of their variances."""
    agreement = sample.exact * sample.size - (sample.true * sample.predicted).sum(axis=0)
    spread_true = sample.size**2 - (sample.true**2).sum(axis=0)
    spread_predicted = sample.size**2 - (sample.predicted**2).sum(axis=0)
    return _ratio(agreement, np.sqrt(spread_true * spread_predicted))


def _roc_auc(sample: Sample) -> Floats:
    """Of all (positive, negative) pairs the part that the probability orders rightly, a tie being half of one."""
    if not np.isfinite(sample.predictions).all():
        return np.full_like(sample.size, np.nan)
    if sample.references.ndim == 2:
        columns, positive = sample.predictions.T, sample.references.T == 1
    else:
        columns = sample.predictions.T
        positive = sample.references == np.arange(len(columns))[:, None]
        if len(columns) == 2:
            columns, positive = columns[1:], positive[1:]
    return np.asarray(np.mean([_auc(*column, sample) for column in zip(columns, positive, strict=True)], axis=0))


def _auc(scores: Floats, positive: Array, sample: Sample) -> Floats:
    """Mann & Whitney 1947: pairs won = the rank sum of the positives less the least that it can be."""
    ranks, tie_group = _mid_ranks(scores, sample.weights)
    weights = sample.weights[positive]
    positives = weights.sum(axis=0)
    won = (weights * ranks[tie_group[positive]]).sum(axis=0) - positives * (positives + 1) / 2
    pairs = positives * (sample.size - positives)
    return np.where(pairs > 0, _ratio(won, pairs), np.nan)


def _mid_ranks(values: Array, weights: Floats) -> tuple[Floats, Array]:
    """Ranks from 1, equal values sharing their mean rank: [distinct values, draws], and the index of each row in it."""
    distinct, tie_group = np.unique(values, return_inverse=True)
    group_size = np.asarray(_one_hot(tie_group, len(distinct)).T @ weights)
    return group_size.cumsum(axis=0) - (group_size - 1) / 2, tie_group


def _mse(sample: Sample) -> Floats:
    return np.asarray((sample.predictions - sample.references) ** 2 @ sample.weights / sample.size)


def _mae(sample: Sample) -> Floats:
    return np.asarray(np.abs(sample.predictions - sample.references) @ sample.weights / sample.size)


def _pearson(sample: Sample) -> Floats:
    return _correlation(sample.predictions[:, None], sample.references[:, None], sample)


def _spearman(sample: Sample) -> Floats:
    if np.isnan(sample.predictions).any():
        return np.full_like(sample.size, np.nan)
    (x, x_group), (y, y_group) = (_mid_ranks(v, sample.weights) for v in (sample.predictions, sample.references))
    return _correlation(x[x_group], y[y_group], sample)


def _correlation(x: Floats, y: Floats, sample: Sample) -> Floats:
    def centred(values: Floats) -> tuple[Floats, Floats]:
        mean = (sample.weights * values).sum(axis=0) / sample.size
        deviation = values - mean
        norm = np.sqrt((sample.weights * deviation**2).sum(axis=0))
        # Rounding leaves a constant with a norm a little above 0; the bound is that of scipy.stats.pearsonr.
        return deviation, np.where(norm > 1e-13 * np.abs(mean), norm, np.nan)

    (x, x_norm), (y, y_norm) = centred(x), centred(y)
    return np.asarray(np.clip((sample.weights * x * y).sum(axis=0) / x_norm / y_norm, -1, 1))


@dataclass(frozen=True)
class Shipped:
    """A metric of the package: what it reads, for which tasks, and its formula."""

    description: str
    score: Callable[[Sample], Floats]
    problem_types: tuple[str, ...] = (SINGLE, MULTI)
    reads: Literal["predictions", "probabilities"] = "predictions"
    greater_is_better: bool = True

    @property
    def of_pairs(self) -> bool:
        """Whether it needs no more than how often each (true, predicted) pair occurs."""
        return self.reads == "predictions" and REGRESSION not in self.problem_types


SHIPPED: Mapping[str, Shipped] = {
    "accuracy": Shipped("Part of the rows that are right (multi-label: in every label).", _accuracy),
    "f1_macro": Shipped("Mean over the classes of their F1.", lambda s: s.macro(_f1_per_class(s))),
    "f1_micro": Shipped("F1 of all decisions together (single-label: equals accuracy).", _f1_micro),
    "f1_weighted": Shipped("Mean over the classes of their F1, weighted by their rows.", _f1_weighted),
    "precision": Shipped("Mean over the classes of their precision.", lambda s: s.macro(_precision_per_class(s))),
    "recall": Shipped("Mean over the classes of their recall.", lambda s: s.macro(_recall_per_class(s))),
    "matthews_correlation": Shipped("Matthews correlation, 0 for a constant.", _matthews_correlation, (SINGLE,)),
    "roc_auc": Shipped(
        "Area under the ROC curve: binary of class id 1, multi-class mean of one class against the rest, multi-label "
        "mean over labels. NaN when a class has no row, or has them all.",
        _roc_auc,
        reads="probabilities",
    ),
    "mse": Shipped("Mean squared error.", _mse, (REGRESSION,), greater_is_better=False),
    "mae": Shipped("Mean absolute error.", _mae, (REGRESSION,), greater_is_better=False),
    "pearson": Shipped("Linear correlation, NaN for a constant.", _pearson, (REGRESSION,)),
    "spearman": Shipped("Rank correlation, NaN for a constant.", _spearman, (REGRESSION,)),
}

DEFAULT_METRICS: Mapping[str, tuple[str, ...]] = {
    SINGLE: ("accuracy", "f1_macro"),
    MULTI: ("f1_micro", "f1_macro", "accuracy"),
    REGRESSION: ("mse", "pearson", "spearman"),
}


def default_metric_for_best_model(problem_type: str) -> str:
    """The first of the defaults: accuracy, f1_micro, mse.

    For regression mse and not a correlation: it is defined for constant predictions too, and a correlation would
    call a model best whose values are off by any scale and offset.
    """
    return DEFAULT_METRICS[problem_type][0]


def greater_is_better(name: str, override: bool | None = None) -> bool:
    """Whether a larger value of the metric is a better model; of a user's metric it is, unless told otherwise."""
    if override is not None:
        return override
    return SHIPPED[name].greater_is_better if name in SHIPPED else name != "loss"


# --- Modules of evaluate ----------------------------------------------------------------------------------------------


def shipped_module(name: str, problem_type: str) -> Any:
    """The shipped metric as an ``evaluate.Metric``: ``.compute(predictions=..., references=...) -> {name: value}``.

    Predictions are class ids, 0/1 rows or values, as :func:`predictions` gives them; roc_auc takes a row of
    probabilities. Imports evaluate here because that takes seconds (it brings in datasets).
    """
    import evaluate
    from datasets import Features, List, Value

    shipped = SHIPPED[name]
    answer = Value("float64" if problem_type == REGRESSION else "int64")
    references_feature = List(answer) if problem_type == MULTI else answer
    predictions_feature = List(Value("float64")) if shipped.reads == "probabilities" else references_feature

    class ShippedMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
        def _info(self) -> Any:
            features = Features({"predictions": predictions_feature, "references": references_feature})
            return evaluate.MetricInfo(description=shipped.description, citation="", features=features)

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            weights = np.ones((len(references), 1))
            with np.errstate(all="ignore"):
                return {name: shipped.score(Sample(np.array(predictions), np.array(references), weights)).item()}

    ShippedMetric.__name__ = name  # evaluate names a module after its class
    return _in_memory(ShippedMetric)


def _in_memory(build: Callable[..., Any]) -> Any:
    """A module that leaves no file: evaluate makes its folder when it builds one, and in memory never looks back."""
    with tempfile.TemporaryDirectory(prefix="finetune-metrics-") as folder:
        return build(keep_in_memory=True, num_process=1, experiment_id=uuid4().hex, cache_dir=folder)


class UserMetric:
    """A metric that does not ship with the package: a script of the user or a module of the hub."""

    def __init__(self, source: str) -> None:
        import evaluate

        self.source = source
        self.name = Path(source).name.removesuffix(".py")
        try:
            self.module = _in_memory(lambda **options: evaluate.load(source, module_type="metric", **options))
        except Exception as error:  # the user's code runs here
            raise ConfigError(
                f"eval.metrics: {source!r} cannot be loaded: {_one_line(error)}. Without network give the path of a "
                f"local script (NAME.py, or a folder NAME that holds it), or one of: {', '.join(SHIPPED)}"
            ) from error

    def compute(self, predictions: Array, references: Array) -> dict[str, float]:
        """The numbers among the results: under their own key when it is the only one, else as ``name_key``."""
        try:
            results = self.module.compute(predictions=predictions, references=references)
        except Exception as error:  # the user's code runs here
            if not np.isfinite(predictions).all():
                return {self.name: np.nan}
            raise ConfigError(
                f"eval.metrics: {self.source!r} failed on predictions of shape {predictions.shape} and references of "
                f"shape {references.shape}: {_one_line(error)}. Mend the script or take it out of the list"
            ) from error
        numbers = {key: float(value) for key, value in (results or {}).items() if isinstance(value, Real)}
        if not numbers:
            raise ConfigError(
                f"eval.metrics: {self.source!r} returned no number but {results!r:.200}. Let its _compute return "
                "a dict of numbers, or take it out of the list"
            )
        return numbers if len(numbers) == 1 else {f"{self.name}_{key}": value for key, value in numbers.items()}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": .")


def _problem_with(name: str, problem_type: str) -> str | None:
    """What is wrong with a name of ``eval.metrics``, as far as can be told without loading it."""
    fitting = [known for known, shipped in SHIPPED.items() if problem_type in shipped.problem_types]
    if name in SHIPPED:
        if name in fitting:
            return None
        return f"eval.metrics: {name!r} does not fit {problem_type}; choose from: {', '.join(fitting)}"
    if "/" in name or name.endswith(".py") or os.path.exists(name):
        return None
    wanted = name.lower().strip()
    if not wanted:
        return f"eval.metrics: an empty name; choose from: {', '.join(fitting)}"
    if near := [known for known in SHIPPED if known.startswith(wanted)] or get_close_matches(wanted, SHIPPED):
        return (
            f"eval.metrics: unknown metric {name!r}; did you mean {' or '.join(near)}? "
            f"(A metric of the hub with that name is evaluate-metric/{name}, a script of yours ./{name}.py)"
        )
    return None


class Metrics:
    """The metrics of one run: ``eval.metrics``, checked against the task and loaded."""

    def __init__(self, names: Sequence[str], *, problem_type: str, num_labels: int) -> None:
        self.problem_type = problem_type
        self.num_labels = num_labels
        problems = [problem for name in dict.fromkeys(names) if (problem := _problem_with(name, problem_type))]
        problems += [
            f"eval.metrics: {name!r} is listed {names.count(name)} times; keep one"
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        self._shipped = {name: shipped_module(name, problem_type) for name in names if name in SHIPPED}
        self._user = [UserMetric(name) for name in names if name not in SHIPPED]

    def compute(self, logits: Array, labels: Array, thresholds: Array | None = None) -> dict[str, float]:
        """The value of each metric, in the order of the names; NaN where the rows do not define it.

        ``logits`` is [rows, num_labels]; ``labels`` is ids [rows], 0/1 [rows, num_labels] or values [rows].
        """
        inputs, references = self._inputs(logits, labels, thresholds)
        scores: dict[str, float] = {}
        for name, module in self._shipped.items():
            scores |= module.compute(predictions=inputs[SHIPPED[name].reads], references=references)
        for metric in self._user:
            for key, value in metric.compute(inputs["predictions"], references).items():
                scores[f"{metric.name}_{key}" if key in scores else key] = value
        return scores

    def confidence_intervals(
        self,
        logits: Array,
        labels: Array,
        *,
        level: float = 0.95,
        seed: int = 0,
        thresholds: Array | None = None,
    ) -> dict[str, tuple[float, float]]:
        """Percentile bootstrap over rows (Efron & Tibshirani 1993, chapter 13) of each shipped metric.

        Resampling rows draws how often each is taken from a multinomial. For metrics of (true, predicted) it may as
        well draw how often each distinct pair is taken, which is the same distribution at a fraction of the work.
        Draws that do not define the metric are left out; (NaN, NaN) when none does. User metrics get no interval.
        """
        inputs, references = self._inputs(logits, labels, thresholds)
        tail = (1 - level) / 2
        intervals = {}
        for of_pairs in (True, False):
            shipped = {name: SHIPPED[name] for name in self._shipped if SHIPPED[name].of_pairs == of_pairs}
            for name, draws in _bootstrap(shipped, inputs, references, of_pairs, seed).items():
                defined = draws[np.isfinite(draws)]
                low, high = np.quantile(defined, [tail, 1 - tail]) if len(defined) else (np.nan, np.nan)
                intervals[name] = (float(low), float(high))
        return {name: intervals[name] for name in self._shipped}

    def _inputs(self, logits: Array, labels: Array, thresholds: Array | None) -> tuple[dict[str, Array], Array]:
        """What metrics read of the logits, by the name of ``Shipped.reads``, and the labels in the same terms."""
        if logits.shape != (len(labels), self.num_labels):
            raise ValueError(f"logits of shape {logits.shape} for {len(labels)} rows and {self.num_labels} labels")
        inputs = {
            "predictions": predictions(logits, self.problem_type, thresholds),
            "probabilities": probabilities(logits, self.problem_type),
        }
        return inputs, _references(labels, self.problem_type)


def _references(labels: Array, problem_type: str) -> Array:
    return labels.astype(np.float64 if problem_type == REGRESSION else np.int64)


def _bootstrap(
    shipped: Mapping[str, Shipped], inputs: Mapping[str, Array], references: Array, of_pairs: bool, seed: int
) -> dict[str, Floats]:
    """Each metric's value in every resample. The same seed gives all metrics of a kind the same resamples."""
    if not shipped:
        return {}
    rows = len(references)
    rng = np.random.default_rng(seed)
    counts, draws = np.ones(rows, dtype=np.int64), ROW_RESAMPLES
    if of_pairs:
        pairs = np.column_stack([references, inputs["predictions"]])
        distinct, counts = np.unique(pairs, axis=0, return_counts=True)
        true, predicted = (half.reshape(-1, *references.shape[1:]) for half in np.hsplit(distinct, 2))
        references, inputs, draws = true, {"predictions": predicted}, COUNT_RESAMPLES
    chunk = max(1, CHUNK // len(counts))
    values: dict[str, list[Floats]] = {name: [] for name in shipped}
    for start in range(0, draws, chunk):
        weights = rng.multinomial(rows, counts / rows, size=min(chunk, draws - start)).T.astype(np.float64, order="C")
        samples = {kind: Sample(array, references, weights) for kind, array in inputs.items()}
        with np.errstate(all="ignore"):
            for name, metric in shipped.items():
                values[name].append(metric.score(samples[metric.reads]))
    return {name: np.concatenate(parts) for name, parts in values.items()}


# --- From logits ------------------------------------------------------------------------------------------------------


def probabilities(logits: Array, problem_type: str) -> Floats:
    """Softmax over the classes, a sigmoid of each label, or the values of a regression as they are; in float64."""
    logits = logits.astype(np.float64)
    if problem_type == REGRESSION:
        return logits.reshape(len(logits))
    with np.errstate(all="ignore"):
        return np.asarray(special.expit(logits) if problem_type == MULTI else special.softmax(logits, axis=1))


def predictions(logits: Array, problem_type: str, thresholds: Array | None = None) -> Array:
    """Ids of the likeliest class, 0/1 of each label (probability at or above its threshold, 0.5), or the values."""
    if problem_type == SINGLE:
        return np.asarray(logits.argmax(axis=1))
    values = probabilities(logits, problem_type)
    if problem_type == REGRESSION:
        return values
    return (values >= (0.5 if thresholds is None else thresholds)).astype(np.int64)


def confusion_matrix(logits: Array, labels: Array, num_labels: int) -> NDArray[np.int64]:
    """[true, predicted] rows of a single-label task."""
    cells = labels.astype(np.int64) * num_labels + logits.argmax(axis=1)
    return np.bincount(cells, minlength=num_labels**2).reshape(num_labels, num_labels)


def per_class_table(
    logits: Array, labels: Array, label_names: Sequence[str], problem_type: str, thresholds: Array | None = None
) -> list[dict[str, Any]]:
    """One dict for each label name, in order: label, precision, recall, f1, support (rows that have it)."""
    sample = Sample(
        predictions(logits, problem_type, thresholds),
        _references(labels, problem_type),
        weights=np.ones((len(labels), 1)),
        min_classes=len(label_names),
    )
    columns = (_precision_per_class(sample), _recall_per_class(sample), _f1_per_class(sample), sample.true)
    return [
        {"label": name, "precision": precision, "recall": recall, "f1": f1, "support": int(support)}
        for name, precision, recall, f1, support in zip(label_names, *(c[:, 0].tolist() for c in columns), strict=True)
    ]


def tune_thresholds(logits: Array, labels: Array) -> Floats:
    """For each label of a multi-label task the probability threshold with the best F1 on these rows.

    F1 changes only at the probabilities of the rows, so 0.5 and the midpoints between neighbours are all there is to
    try; of equally good ones the closest to 0.5 wins. A label that no row has keeps 0.5.
    """
    scores = probabilities(logits, MULTI)
    return np.array([_best_threshold(*column) for column in zip(scores.T, labels.T == 1, strict=True)])


def _best_threshold(scores: Floats, positive: Array) -> float:
    def at_or_above(thresholds: Floats, values: Floats) -> Array:
        return len(values) - np.searchsorted(np.sort(values), thresholds)

    if not positive.any():
        return 0.5
    comparable = ~np.isnan(scores)
    distinct = np.unique(scores[comparable])
    below = np.concatenate([[0.0], distinct[:-1]])[: len(distinct)]
    midpoints = (below + distinct) / 2
    # Two neighbouring floats have no float between them, and their mean may round to the lower one.
    thresholds = np.append(np.where(midpoints > below, midpoints, distinct), 0.5)
    hits = at_or_above(thresholds, scores[comparable & positive])
    f1 = 2 * hits / (positive.sum() + at_or_above(thresholds, scores[comparable]))
    best = thresholds[f1 == f1.max()]
    return float(best[np.abs(best - 0.5).argmin()])
