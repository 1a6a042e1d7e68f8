import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from finetune.errors import ConfigError
from finetune.metrics import (
    DEFAULT_METRICS,
    MULTI,
    REGRESSION,
    SHIPPED,
    SINGLE,
    Metrics,
    Sample,
    confusion_matrix,
    default_metric_for_best_model,
    greater_is_better,
    per_class_table,
    predictions,
    probabilities,
    shipped_module,
    tune_thresholds,
)

FITTING = {task: [n for n, shipped in SHIPPED.items() if task in shipped.problem_types] for task in DEFAULT_METRICS}


def logits_of(ids, num_labels):
    return np.eye(num_labels, dtype=np.float32)[ids]


def compute(names, logits, labels, problem_type, **kwargs):
    logits = np.asarray(logits, dtype=np.float32)
    metrics = Metrics(names, problem_type=problem_type, num_labels=logits.shape[1])
    return metrics.compute(logits, np.asarray(labels), **kwargs)


def intervals(names, logits, labels, problem_type, **kwargs):
    return Metrics(names, problem_type=problem_type, num_labels=logits.shape[1]).confidence_intervals(
        logits, labels, **kwargs
    )


def random_rows(problem_type, num_labels, rows, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, num_labels)).astype(np.float32)
    if problem_type == SINGLE:
        labels = rng.integers(num_labels, size=rows)
        logits[np.arange(rows), labels] += 1
    elif problem_type == MULTI:
        labels = (rng.random((rows, num_labels)) < 0.3).astype(np.float32)
        logits += 2 * labels.astype(np.float32) - 1
    else:
        labels = (logits[:, 0] + rng.normal(size=rows)).round(1)  # rounded: ties for the ranks
        logits = logits.round(1)
    return logits, labels


# Nine rows, three classes. Rows that have the class: 4, 3, 2; predicted: 3, 4, 2; both: 3, 2, 1.
TRUE = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
PREDICTED = np.array([0, 0, 0, 1, 1, 1, 2, 2, 1])

# Four rows, three labels. Rows that have the label: 2, 2, 0; predicted: 2, 1, 1; both: 2, 1, 0.
TRUE_MULTI = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=np.float32)
PREDICTED_MULTI = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 1], [0, 0, 0]])


def test_single_label_by_hand():
    scores = compute(FITTING[SINGLE], logits_of(PREDICTED, 3), TRUE, SINGLE)
    assert list(scores) == FITTING[SINGLE]
    assert scores == pytest.approx(
        {
            "accuracy": 6 / 9,
            "f1_macro": (6 / 7 + 4 / 7 + 2 / 4) / 3,  # 2 x both / (have + predicted)
            "f1_micro": 6 / 9,
            "f1_weighted": (4 * 6 / 7 + 3 * 4 / 7 + 2 * 2 / 4) / 9,
            "precision": (3 / 3 + 2 / 4 + 1 / 2) / 3,
            "recall": (3 / 4 + 2 / 3 + 1 / 2) / 3,
            # (right x rows - sum have x predicted) / root((rows^2 - sum have^2) x (rows^2 - sum predicted^2))
            # = (6 x 9 - (12 + 12 + 4)) / root((81 - 29) x (81 - 29)) = 26 / 52
            "matthews_correlation": 0.5,
            # One-hot logits: a pair is won, lost, or tied (a half) as its two rows were predicted as the class or not.
            # Class 0: 4 x 5 pairs, 3 x 5 won, 1 x 5 tied. Class 1: 3 x 6, 2 x 4 won, 2 x 2 + 1 x 4 tied.
            # Class 2: 2 x 7, 1 x 6 won, 1 x 1 + 1 x 6 tied.
            "roc_auc": (17.5 / 20 + 12 / 18 + 9.5 / 14) / 3,
        }
    )


def test_multi_label_by_hand():
    names = [name for name in FITTING[MULTI] if name != "roc_auc"]
    scores = compute(names, 2 * PREDICTED_MULTI - 1, TRUE_MULTI, MULTI)
    assert scores == pytest.approx(
        {
            "accuracy": 2 / 4,  # first and last row right in every label
            "f1_macro": (4 / 4 + 2 / 3 + 0) / 3,
            "f1_micro": 2 * 3 / (4 + 4),
            "f1_weighted": (2 * 1 + 2 * 2 / 3 + 0) / 4,
            "precision": (2 / 2 + 1 / 1 + 0 / 1) / 3,
            "recall": (2 / 2 + 1 / 2 + 0) / 3,
        }
    )


def test_regression_by_hand():
    # Mean 9/4, deviations -5/4 -1/4 -1/4 7/4; mean 15/4, deviations -11/4 1/4 -7/4 17/4.
    # Ranks 1 2.5 2.5 4 and 1 3 2 4: deviations -1.5 0 0 1.5 and -1.5 .5 -.5 1.5.
    scores = compute(FITTING[REGRESSION], [[1], [2], [2], [4]], [1.0, 4.0, 2.0, 8.0], REGRESSION)
    assert scores == pytest.approx(
        {
            "mse": (0 + 4 + 0 + 16) / 4,
            "mae": (0 + 2 + 0 + 4) / 4,
            "pearson": (55 - 1 + 7 + 119) / np.sqrt((25 + 1 + 1 + 49) * (121 + 1 + 49 + 289)),
            "spearman": 4.5 / np.sqrt(4.5 * 5),
        }
    )


def pairs_won(scores, positive):
    pairs = list(product(scores[positive], scores[~positive]))
    return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


@pytest.mark.parametrize(("problem_type", "num_labels"), [(SINGLE, 2), (SINGLE, 4), (MULTI, 3), (MULTI, 1)])
def test_roc_auc_counts_pairs(problem_type, num_labels):
    logits, labels = random_rows(problem_type, num_labels, rows=60)
    logits = logits.round()  # ties
    scores = probabilities(logits, problem_type)
    has = labels == 1 if problem_type == MULTI else labels[:, None] == np.arange(num_labels)
    columns = [1] if (problem_type, num_labels) == (SINGLE, 2) else range(num_labels)
    expected = np.mean([pairs_won(scores[:, column], has[:, column]) for column in columns])
    assert compute(["roc_auc"], logits, labels, problem_type)["roc_auc"] == pytest.approx(expected)


def test_binary_roc_auc_ranks_by_class_1():
    # The probability of class 0 is 1.0 in both rows as far as floats go, that of class 1 is e^-50 and e^-45.
    assert compute(["roc_auc"], [[50, 0], [45, 0]], [0, 1], SINGLE) == {"roc_auc": 1}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_labels", [2, 3, 12])
def test_single_label_equals_sklearn_on_weighted_rows(num_labels, seed):
    """The one formula behind scores and intervals, on many draws at once, with classes that no row has."""
    rng = np.random.default_rng(seed)
    true, predicted = rng.integers(num_labels, size=(2, 15))
    weights = rng.multinomial(15, np.full(15, 1 / 15), size=8).T
    sample = Sample(predicted, true, weights.astype(float))
    expected = {
        "accuracy": sk.accuracy_score,
        "f1_macro": lambda t, p: sk.f1_score(t, p, average="macro", zero_division=0),
        "f1_micro": lambda t, p: sk.f1_score(t, p, average="micro", zero_division=0),
        "f1_weighted": lambda t, p: sk.f1_score(t, p, average="weighted", zero_division=0),
        "precision": lambda t, p: sk.precision_score(t, p, average="macro", zero_division=0),
        "recall": lambda t, p: sk.recall_score(t, p, average="macro", zero_division=0),
        "matthews_correlation": sk.matthews_corrcoef,
    }
    for name, reference in expected.items():
        draws = [reference(np.repeat(true, column), np.repeat(predicted, column)) for column in weights.T]
        np.testing.assert_allclose(SHIPPED[name].score(sample), draws, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_multi_label_equals_sklearn_on_weighted_rows(seed):
    rng = np.random.default_rng(seed)
    true, predicted = (rng.random((2, 40, 4)) < 0.3).astype(int)
    true[:, 3] = 0
    scores = rng.random((40, 4)).round(1)
    weights = rng.multinomial(40, np.full(40, 1 / 40), size=8).T
    for name in ["f1_macro", "f1_micro", "f1_weighted"]:
        draws = [
            sk.f1_score(
                np.repeat(true, column, axis=0), np.repeat(predicted, column, axis=0), average=name[3:], zero_division=0
            )
            for column in weights.T
        ]
        np.testing.assert_allclose(SHIPPED[name].score(Sample(predicted, true, weights.astype(float))), draws)
    sample = Sample(scores[:, :3], true[:, :3], weights.astype(float))
    draws = [
        sk.roc_auc_score(np.repeat(true[:, :3], column, axis=0), np.repeat(scores[:, :3], column, axis=0))
        for column in weights.T
    ]
    np.testing.assert_allclose(SHIPPED["roc_auc"].score(sample), draws)


def test_regression_equals_scipy_on_weighted_rows():
    logits, labels = random_rows(REGRESSION, 1, rows=30)
    values = logits[:, 0].astype(float)
    weights = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=8).T
    sample = Sample(values, labels, weights.astype(float))
    for name, reference in {
        "mse": lambda x, y: np.mean((x - y) ** 2),
        "mae": lambda x, y: np.mean(abs(x - y)),
        "pearson": lambda x, y: stats.pearsonr(x, y).statistic,
        "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    }.items():
        draws = [reference(np.repeat(values, column), np.repeat(labels, column)) for column in weights.T]
        np.testing.assert_allclose(SHIPPED[name].score(sample), draws, err_msg=name)


# --- What the rows do not define --------------------------------------------------------------------------------------


def test_a_class_without_rows():
    # Class 2 neither occurs nor is predicted: it is not averaged. Class 1 is only predicted: it counts as 0.
    names = ["f1_macro", "precision", "recall", "matthews_correlation"]
    scores = compute(names, logits_of([0, 0, 1], 3), [0, 0, 0], SINGLE)
    assert scores == pytest.approx(
        {"f1_macro": (4 / 5 + 0) / 2, "precision": 1 / 2, "recall": (2 / 3) / 2, "matthews_correlation": 0}
    )


def test_a_label_without_rows():
    # A fourth label that no row has or is predicted to have: of a multi-label task every label counts.
    nobody = np.zeros((4, 1))
    scores = compute(
        ["f1_macro", "accuracy"],
        np.hstack([2 * PREDICTED_MULTI - 1, nobody - 1]),
        np.hstack([TRUE_MULTI, nobody]),
        MULTI,
    )
    assert scores == pytest.approx({"f1_macro": (1 + 2 / 3 + 0 + 0) / 4, "accuracy": 2 / 4})


def test_undefined_scores_are_nan_without_a_word(capfd):
    one_class = np.zeros(4, dtype=int)
    assert np.isnan(compute(["roc_auc"], np.random.rand(4, 2), one_class, SINGLE)["roc_auc"])
    assert np.isnan(compute(["roc_auc"], np.random.rand(4, 3), [0, 1, 1, 0], SINGLE)["roc_auc"])
    assert np.isnan(compute(["roc_auc"], np.random.rand(4, 3), TRUE_MULTI, MULTI)["roc_auc"])
    for logits, labels in [([[0.1]] * 3, [1.0, 2.0, 3.0]), ([[1], [2], [3]], [0.1] * 3), ([[1]], [1.0])]:
        scores = compute(["pearson", "spearman"], logits, labels, REGRESSION)
        assert np.isnan(list(scores.values())).all()
        bounds = intervals(["pearson", "spearman"], np.array(logits), np.array(labels), REGRESSION)
        assert np.isnan(list(bounds.values())).all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("problem_type", [SINGLE, MULTI, REGRESSION])
def test_bad_logits_do_not_crash(problem_type, bad, capfd):
    num_labels = 1 if problem_type == REGRESSION else 3
    logits, labels = random_rows(problem_type, num_labels, rows=20)
    logits[3, 0] = bad
    scores = compute(FITTING[problem_type], logits, labels, problem_type)
    intervals(FITTING[problem_type], logits, labels, problem_type)
    assert list(scores) == FITTING[problem_type]
    if np.isnan(bad):
        for name in {"roc_auc", *FITTING[REGRESSION]} & {*scores}:
            assert np.isnan(scores[name])
    assert capfd.readouterr() == ("", "")


def test_wrong_shape_is_a_bug():
    with pytest.raises(ValueError, match=r"\(2, 3\) for 2 rows and 4 labels"):
        Metrics(["accuracy"], problem_type=SINGLE, num_labels=4).compute(np.zeros((2, 3)), np.zeros(2, dtype=int))


# --- Choosing metrics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI, REGRESSION])
def test_defaults_fit(problem_type):
    assert {*DEFAULT_METRICS[problem_type]} <= {*FITTING[problem_type]}
    assert default_metric_for_best_model(problem_type) in DEFAULT_METRICS[problem_type]


def test_direction():
    lower = {name for name in [*SHIPPED, "loss", "mine"] if not greater_is_better(name, None)}
    assert lower == {"loss", "mse", "mae"}
    assert greater_is_better("mse", True) and not greater_is_better("mine", False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("acuracy", "unknown metric 'acuracy'; did you mean accuracy?"),
        ("F1", "did you mean f1_macro or f1_micro or f1_weighted?"),
        ("auc", "did you mean roc_auc?"),
        ("pearsonr", "did you mean pearson or spearman?"),
        ("mse", "'mse' does not fit single_label_classification; choose from: accuracy, f1_macro"),
        ("", "an empty name; choose from: accuracy"),
    ],
)
def test_wrong_names(name, expected):
    with pytest.raises(ConfigError) as caught:
        Metrics([name], problem_type=SINGLE, num_labels=2)
    assert str(caught.value).startswith("eval.metrics: ") and expected in str(caught.value)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        Metrics(["accuracy", "acuracy", "pearson", "accuracy"], problem_type=SINGLE, num_labels=2)
    assert len(str(caught.value).splitlines()) == 3
    assert "'accuracy' is listed 2 times; keep one" in str(caught.value)


def test_a_hub_name_without_network(monkeypatch):
    import evaluate

    def load(path, **_):
        raise FileNotFoundError("Couldn't reach\nthe hub.")

    monkeypatch.setattr(evaluate, "load", load)
    with pytest.raises(ConfigError) as caught:
        Metrics(["someone/brier_score"], problem_type=SINGLE, num_labels=2)
    message = str(caught.value)
    assert "'someone/brier_score' cannot be loaded: FileNotFoundError: Couldn't reach the hub. Without" in message
    assert "\n" not in message


# --- Metrics of the user ----------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path):
    """Writes a metric script whose ``_compute`` returns the expression, and gives its path."""

    def write(returns, name="my_metric", dtype="int64"):
        path = tmp_path / f"{name}.py"
        path.write_text(
            "import datasets\nimport evaluate\n"
            "class Mine(evaluate.Metric):\n"
            "    def _info(self):\n"
            f"        features = {{key: datasets.Value({dtype!r}) for key in ('predictions', 'references')}}\n"
            "        return evaluate.MetricInfo(\n"
            "            description='', citation='', features=datasets.Features(features))\n"
            "    def _compute(self, predictions, references):\n"
            f"        return {returns}\n"
        )
        return str(path)

    return write


def test_a_script_with_one_result(script):
    mine = script("{'wrong': sum(p != r for p, r in zip(predictions, references))}")
    assert compute([mine, "accuracy"], logits_of(PREDICTED, 3), TRUE, SINGLE) == {"accuracy": 6 / 9, "wrong": 3}
    assert intervals([mine], logits_of(PREDICTED, 3), TRUE, SINGLE) == {}


def test_a_folder_with_several_results(script, tmp_path, monkeypatch):
    returns = "{'first': predictions[0], 'last': references[-1], 'text': 'no number'}"
    path = Path(script(returns, name="f1", dtype="float64"))
    folder = path.with_suffix("")
    folder.mkdir()
    path.rename(folder / path.name)
    monkeypatch.chdir(tmp_path)
    for source in (str(folder), "f1"):  # a plain name that would be refused if the folder were not there
        assert compute([source], [[0.5], [1.5]], [2.0, 3.0], REGRESSION) == {"f1_first": 0.5, "f1_last": 3.0}


def test_a_result_named_like_a_shipped_metric(script):
    scores = compute([script("{'accuracy': -1}"), "accuracy"], logits_of(PREDICTED, 3), TRUE, SINGLE)
    assert scores == {"accuracy": 6 / 9, "my_metric_accuracy": -1}


@pytest.mark.parametrize(
    ("returns", "expected"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("{'x': 'y'}", "no number but {'x': 'y'}"), ("None", "None")],
)
def test_a_script_that_fails(script, returns, expected):
    mine = script(returns)
    with pytest.raises(ConfigError, match=expected) as caught:
        compute([mine], logits_of(PREDICTED, 3), TRUE, SINGLE)
    assert f"eval.metrics: {mine!r}" in str(caught.value)


def test_a_script_that_fails_on_bad_logits(script):
    mine = script("{'x': [int(p) for p in predictions][0]}", dtype="float64")
    assert np.isnan(compute([mine], [[np.nan], [1]], [0.0, 1.0], REGRESSION)["my_metric"])


@pytest.mark.parametrize("content", [None, "import nothing_like_this", "1 +"])
def test_a_script_that_does_not_load(tmp_path, content):
    path = tmp_path / "broken.py"
    if content:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*give the path of a local script"):
        Metrics([str(path)], problem_type=SINGLE, num_labels=2)


# --- As modules of evaluate -------------------------------------------------------------------------------------------


def test_modules_combine():
    import evaluate

    both = evaluate.combine([shipped_module(name, SINGLE) for name in ("accuracy", "f1_macro")])
    both.add_batch(predictions=PREDICTED[:5], references=TRUE[:5])
    both.add_batch(predictions=PREDICTED[5:], references=TRUE[5:])
    assert both.compute() == pytest.approx({"accuracy": 6 / 9, "f1_macro": 9 / 14})


def test_without_home_or_network_or_files_left(tmp_path):
    program = """
import sys, json, numpy as np
from finetune.metrics import Metrics
light = not {"evaluate", "datasets", "torch"} & {*sys.modules}
metrics = Metrics(["accuracy", "roc_auc"], problem_type="single_label_classification", num_labels=2)
print(json.dumps([light, metrics.compute(np.eye(2)[[0, 1, 1]], np.array([0, 1, 0]))]))
"""
    nowhere = {"HOME": os.devnull, "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]}
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=nowhere, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [True, {"accuracy": 2 / 3, "roc_auc": 0.75}]
    assert not [*tmp_path.glob("finetune*"), *tmp_path.rglob("*.arrow"), *tmp_path.rglob("*.lock")]


# --- Intervals --------------------------------------------------------------------------------------------------------


def test_accuracy_interval_is_the_binomial_one():
    # The bootstrap distribution of 160 right of 200 rows is exactly Binomial(200, 0.8) / 200.
    logits = logits_of((np.arange(200) % 5 == 0).astype(int), 2)
    low, high = intervals(["accuracy"], logits, np.zeros(200, dtype=int), SINGLE, level=0.9)["accuracy"]
    expected = stats.binom(200, 0.8).ppf([0.05, 0.95]) / 200
    # 1000 draws: the standard error of a 5 % quantile is root(.05 x .95 / 1000) / density there = 0.0019.
    assert [low, high] == pytest.approx(expected, abs=0.0075)


def test_mse_interval_is_the_normal_one():
    logits, labels = random_rows(REGRESSION, 1, rows=4000)
    squares = (logits[:, 0] - labels) ** 2
    error = squares.std() / np.sqrt(4000)
    bounds = intervals(["mse"], logits, labels, REGRESSION)["mse"]
    assert bounds == pytest.approx(squares.mean() + np.array([-1.96, 1.96]) * error, abs=0.5 * error)


@pytest.mark.parametrize(("problem_type", "num_labels"), [(SINGLE, 2), (SINGLE, 5), (MULTI, 4), (REGRESSION, 1)])
def test_intervals_hold_the_score_and_repeat(problem_type, num_labels):
    names = FITTING[problem_type]
    logits, labels = random_rows(problem_type, num_labels, rows=300)
    scores = compute(names, logits, labels, problem_type)
    bounds = intervals(names, logits, labels, problem_type)
    narrow = intervals(names, logits, labels, problem_type, level=0.5)
    assert list(bounds) == names
    for name in names:
        assert bounds[name][0] < narrow[name][0] < scores[name] < narrow[name][1] < bounds[name][1], name
    assert bounds == intervals(names, logits, labels, problem_type)
    assert bounds != intervals(names, logits, labels, problem_type, seed=1)
    assert bounds[names[-1]] == intervals(names[-1:], logits, labels, problem_type)[names[-1]]


def test_intervals_do_not_depend_on_the_chunk(monkeypatch):
    logits, labels = random_rows(MULTI, 3, rows=50)
    whole = intervals(FITTING[MULTI], logits, labels, MULTI)
    monkeypatch.setattr("finetune.metrics.CHUNK", 700)
    cut = intervals(FITTING[MULTI], logits, labels, MULTI)
    for name in whole:
        assert cut[name] == pytest.approx(whole[name]), name


def test_draws_without_the_class_are_left_out():
    # 1 positive of 12: (11/12)^12 = 35 % of the draws have none. In all others the AUC is 1.
    labels = np.arange(12) // 11
    assert intervals(["roc_auc"], logits_of(labels, 2), labels, SINGLE) == {"roc_auc": (1, 1)}


# --- From logits ------------------------------------------------------------------------------------------------------


def test_probabilities():
    np.testing.assert_allclose(probabilities(np.log([[1.0, 3.0], [4, 1]]), SINGLE), [[0.25, 0.75], [0.8, 0.2]])
    np.testing.assert_array_equal(probabilities(np.array([[1000.0, -1000.0]]), SINGLE), [[1, 0]])
    np.testing.assert_allclose(probabilities(np.array([[0, np.log(3), -1000]]), MULTI), [[0.5, 0.75, 0]])
    values = probabilities(np.array([[1.5], [-2]], dtype=np.float32), REGRESSION)
    assert values.tolist() == [1.5, -2] and values.dtype == np.float64


def test_predictions():
    logits = np.array([[0.0, 2, 1], [-1, -3, -2]], dtype=np.float32)
    assert predictions(logits, SINGLE).tolist() == [1, 0]
    assert predictions(logits, MULTI).tolist() == [[1, 1, 1], [0, 0, 0]]
    # Probabilities .5 .88 .73 and .27 .05 .12
    assert predictions(logits, MULTI, np.array([0.2, 0.9, 0.7])).tolist() == [[1, 0, 1], [1, 0, 0]]
    assert predictions(logits[:, :1], REGRESSION).tolist() == [0, -1]


def test_thresholds_reach_the_scores():
    thresholds = np.array([0.2, 0.9])
    logits, labels = np.array([[-1.0, 2], [-3, 3]]), np.array([[1, 0], [0, 1]])
    # Probabilities .27 .88 and .05 .95: right with the thresholds, the first row wrong at 0.5.
    assert compute(["accuracy"], logits, labels, MULTI) == {"accuracy": 0.5}
    assert compute(["accuracy"], logits, labels, MULTI, thresholds=thresholds) == {"accuracy": 1}
    assert intervals(["accuracy"], logits, labels, MULTI, thresholds=thresholds) == {"accuracy": (1, 1)}
    assert [row["f1"] for row in per_class_table(logits, labels, ["a", "b"], MULTI, thresholds)] == [1, 1]


def test_confusion_matrix():
    matrix = confusion_matrix(logits_of(PREDICTED, 4), TRUE, 4)
    assert matrix.tolist() == [[3, 1, 0, 0], [0, 2, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert matrix.dtype == np.int64


def test_per_class_table():
    rows = per_class_table(logits_of(PREDICTED, 4), TRUE, ["a", "b", "c", "d"], SINGLE)
    assert rows == [
        {"label": "a", "precision": 3 / 3, "recall": 3 / 4, "f1": 6 / 7, "support": 4},
        {"label": "b", "precision": 2 / 4, "recall": 2 / 3, "f1": 4 / 7, "support": 3},
        {"label": "c", "precision": 1 / 2, "recall": 1 / 2, "f1": 2 / 4, "support": 2},
        {"label": "d", "precision": 0, "recall": 0, "f1": 0, "support": 0},
    ]
    rows = per_class_table(2 * PREDICTED_MULTI - 1, TRUE_MULTI, ["a", "b", "c"], MULTI)
    assert [row["support"] for row in rows] == [2, 2, 0]
    assert [row["f1"] for row in rows] == [1, 2 / 3, 0]


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(1, 10, size=(12, 1)) / 10  # ties, also across truth
    labels = (rng.random((12, 1)) < 0.4).astype(float)
    labels[0] = 1
    grid = np.arange(0.05, 1, 0.05)  # every midpoint of tenths, and every tenth
    f1 = [sk.f1_score(labels, scores >= threshold, zero_division=0) for threshold in grid + 1e-9]
    (tuned,) = tune_thresholds(np.log(scores / (1 - scores)), labels)
    assert sk.f1_score(labels, scores >= tuned) == pytest.approx(max(f1))
    if sk.f1_score(labels, scores >= 0.5) == pytest.approx(max(f1)):
        assert abs(tuned - 0.5) < 1e-9


def test_thresholds_by_hand():
    scores = np.array([[0.1, 0.6, 0.3, 0.8], [0.2, 0.7, 0.4, 0.9], [0.4, 0.9, 0.6, 0.95]])
    labels = np.array([[0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1]])
    # Between .1 and .2; between .7 and .9; no row has it; any below .8 is perfect, so 0.5.
    assert tune_thresholds(np.log(scores / (1 - scores)), labels) == pytest.approx([0.15, 0.8, 0.5, 0.5])


def test_thresholds_survive_extremes():
    logits = np.array([[np.nan, np.nan], [-1000, np.inf]])
    tuned = tune_thresholds(logits, np.array([[1, 0], [0, 1]]))
    assert tuned.tolist() == [0.5, 0.5]
    assert predictions(logits, MULTI, tuned)[:, 1].tolist() == [0, 1]


def test_thresholds_take_nan_as_missed():
    # Three rows have the label, one of them at NaN. Found of predicted: 1 of 1 (F1 2/4), 1 of 2 (2/5), 2 of 3 (4/6).
    scores = np.array([[np.nan], [0.9], [0.6], [0.3]])
    assert tune_thresholds(np.log(scores / (1 - scores)), np.array([[1], [1], [0], [1]])) == pytest.approx([0.15])


def test_thresholds_part_neighbouring_floats():
    low = np.linspace(-1, -0.9, 500)
    logits = np.stack([low, np.nextafter(low, 0)])
    labels = np.tile([[0], [1]], 500)
    differ = probabilities(logits, MULTI)[0] < probabilities(logits, MULTI)[1]
    assert differ.any()
    tuned = tune_thresholds(logits, labels)
    assert (predictions(logits, MULTI, tuned) == labels)[:, differ].all()
