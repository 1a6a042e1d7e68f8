"""The whole program, launched for real: same weights on every launch profile, every profile, files, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import REPOSITORY, Finetune, make_checkpoint, reviews, write_tsv
from jobs import Nursery
from safetensors.torch import load_file

QUIET = ("--tracking.trackers", "[]")


def options(files: tuple[Path, Path], checkpoint: Path, output: str, **more: object) -> list[str]:
    """Arguments of ``finetune train`` for a short run; ``optim__seed=1``: ``--optim.seed 1``."""
    train_file, validation_file = files
    settings: dict[str, object] = {
        "data.train_file": train_file,
        "data.validation_file": validation_file,
        "data.max_length": 16,
        "model.name_or_path": checkpoint,
        "train.output_dir": output,
        "optim.learning_rate": 1e-3,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return ["train", *QUIET, *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def launch_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "launch.json").read_text())


def logged(folder: Path, name: str) -> dict[int, float]:
    """``{step: value}`` of one metric."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors")


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.jobs
def test_same_weights_whatever_the_processes_and_the_accumulation(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    # 37 rows in global batches of 20: the second step of each epoch has 17 rows, which no share divides evenly.
    # Weights of classes and smoothing are in it: what they divide by is of the global batch too.
    common = {"train__global_batch_size": 20, "train__num_train_epochs": 2, "train__logging_steps": 1}
    common |= {"data__class_weights": "{neg: 1.0, pos: 3.0}", "train__label_smoothing": 0.1}
    launches = {"whole": (None, 1), "1x2": (None, 2), "2x1": ("ddp2", 1), "2x5": ("ddp2", 5)}
    for name, (profile, accumulation) in launches.items():
        more = {"train__gradient_accumulation_steps": accumulation}
        succeeded(finetune(*options(review_files, bert, name, **common, **more), profile=profile))
        record = launch_record(tmp_path / name)
        assert record["num_processes"] == (2 if profile == "ddp2" else 1)
        assert record["gradient_accumulation_steps"] == accumulation
        assert record["global_batch_size"] == 20

    whole = last_weights(tmp_path / "whole")
    start = load_file(bert / "model.safetensors")
    assert max((whole[f"bert.{name}"] - tensor).abs().max() for name, tensor in start.items()) > 1e-3  # it did train
    for name in ("1x2", "2x1", "2x5"):
        weights = last_weights(tmp_path / name)
        assert weights.keys() == whole.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(
                tensor, whole[key], rtol=0, atol=1e-5, msg=lambda m, k=key, n=name: f"{n} {k} {m}"
            )
        for metric in ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy"):
            series, expected = logged(tmp_path / name, metric), logged(tmp_path / "whole", metric)
            assert list(series) == list(expected) == ([2, 4] if metric.startswith("eval") else [1, 2, 3, 4])
            assert list(series.values()) == pytest.approx(list(expected.values()), abs=1e-4)


COMPUTE_ANEW = "import finetune.run; finetune.run.compute_features = lambda *_, **__: None"


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_a_frozen_encoder_is_computed_once_with_the_same_result(
    tmp_path: Path, forked_jobs: Nursery, review_files: tuple[Path, Path], kind: str
) -> None:
    """For one process and for two; a second start finds what the first has computed."""
    checkpoint = make_checkpoint(tmp_path / kind, kind, dropout=0.0)
    common = {"model__freeze_encoder": "true", "train__global_batch_size": 20, "train__num_train_epochs": 3}
    common |= {"data__cache_dir": tmp_path / "cache", "optim__learning_rate": 1e-2}
    for name, ranks, patch in (("anew", 1, COMPUTE_ANEW), ("once", 1, ""), ("again", 1, ""), ("shared", 2, "")):
        arguments = options(review_files, checkpoint, str(tmp_path / name), **common)
        job = forked_jobs.run(arguments, ranks, FINETUNE_TEST_PATCH=patch)
        assert ("the head alone is computed" in job.output()) == (name != "anew")
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "finetune").glob("features-*")}
        if name == "once":
            first = files
            assert [path.suffix for path in files] == [".npy", ".npy"]  # train and dev
        elif name != "anew":
            assert files == first
    start = load_file(checkpoint / "model.safetensors")
    expected = last_weights(tmp_path / "anew")
    for name in ("once", "again", "shared"):
        weights = last_weights(tmp_path / name)
        assert weights.keys() == expected.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=0)
        for metric in ("train/loss", "eval/loss"):
            series = list(logged(tmp_path / name, metric).values())
            assert series == pytest.approx(list(logged(tmp_path / "anew", metric).values()), abs=1e-5)
        assert json.loads((tmp_path / name / "results.json").read_text())["padding_fraction"] == 0
    unchanged = [key for key in expected if key.split(".", 1)[-1] in start and "pooler" not in key]
    assert unchanged and all(torch.equal(expected[key], start[key.split(".", 1)[-1]]) for key in unchanged)


COUNT_GRAPHS = """
import pathlib, finetune.run
disconnect = finetune.run.disconnect
def counted(accelerator):
    from torch._dynamo.utils import counters
    pathlib.Path("FILE").write_text(str(counters["stats"]["unique_graphs"]))
    disconnect(accelerator)
finetune.run.disconnect = counted
"""


def test_a_compiled_model_trains_to_the_same_weights(
    tmp_path: Path, forked_jobs: Nursery, review_files: tuple[Path, Path], bert: Path
) -> None:
    """As a profile's dynamo_config asks for; texts of many lengths make few graphs."""
    for name, env in (("plain", {}), ("compiled", {"ACCELERATE_DYNAMO_BACKEND": "aot_eager"})):
        arguments = options(review_files, bert, str(tmp_path / name), train__num_train_epochs=2)
        patch = COUNT_GRAPHS.replace("FILE", str(tmp_path / f"{name}.graphs"))
        job = forked_jobs.run(arguments, 1, FINETUNE_TEST_PATCH=patch, **env)
        assert ("off: the launch profile has the model compiled" in job.output()) == (name == "compiled")
    for key, tensor in last_weights(tmp_path / "compiled").items():
        torch.testing.assert_close(tensor, last_weights(tmp_path / "plain")[key], atol=1e-5, rtol=0)
    graphs = [int((tmp_path / f"{name}.graphs").read_text()) for name in ("plain", "compiled")]
    assert graphs[0] == 0 and 1 <= graphs[1] <= 6


def test_an_encoder_whose_outputs_do_not_fit_on_the_disk(
    tmp_path: Path, forked_jobs: Nursery, review_files: tuple[Path, Path], bert: Path
) -> None:
    patch = "import os\ndef full(*_):\n    raise OSError(28, 'No space left on device')\nos.posix_fallocate = full"
    arguments = options(review_files, bert, str(tmp_path / "run"), model__freeze_encoder="true")
    arguments += ["--data.cache_dir", str(tmp_path / "cache")]
    job = forked_jobs.start(arguments, 2, FINETUNE_TEST_PATCH=patch)
    assert 2 in job.wait()
    assert job.output().count("the outputs of the frozen encoder, 0 MB, cannot be written to") == 1
    assert "Traceback" not in job.output()
    assert not [path for path in (tmp_path / "cache").rglob("*") if ".part" in path.name or path.suffix == ".npy"]


@pytest.mark.parametrize(("compression", "digits"), [("bf16", 6), ("fp16", 9)])
@pytest.mark.jobs
def test_compressed_gradients_are_rounded_and_no_more(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path, compression: str, digits: int
) -> None:
    """To about so many binary digits, seen in the norm of the first gradient: the weights are still the same."""
    common = {"train__max_steps": 2, "train__logging_steps": 1, "train__max_grad_norm": 0}
    for name, setting in (("plain", "none"), ("rounded", compression)):
        arguments = options(review_files, bert, name, **common, train__gradient_compression=setting)
        succeeded(finetune(*arguments, processes=2))
    plain, rounded = (logged(tmp_path / name, "train/grad_norm")[1] for name in ("plain", "rounded"))
    assert 0 < abs(plain - rounded) < plain * 2.0**-digits
    losses = [logged(tmp_path / name, "train/loss") for name in ("plain", "rounded")]
    assert losses[0][1] == losses[1][1]
    assert losses[0][2] == pytest.approx(losses[1][2], abs=1e-3)


@pytest.mark.jobs
def test_same_weights_whether_texts_share_rows_or_not(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    common = {"train__global_batch_size": 20, "train__num_train_epochs": 2, "train__logging_steps": 1}
    for packing, processes in (("off", 1), ("on", 1), ("on", 2)):
        arguments = options(review_files, bert, f"{packing}-{processes}", **common, train__packing=packing)
        done = succeeded(finetune(*arguments, processes=processes))
        assert ("texts stand in one row" in done.stdout) == (packing == "on")
    apart = tmp_path / "off-1"
    for together in (tmp_path / "on-1", tmp_path / "on-2"):
        for key, tensor in last_weights(together).items():
            torch.testing.assert_close(tensor, last_weights(apart)[key], rtol=0, atol=1e-5)
        for metric in ("train/loss", "train/grad_norm", "eval/loss"):
            expected = list(logged(apart, metric).values())
            assert list(logged(together, metric).values()) == pytest.approx(expected, abs=1e-4)
        padding = [json.loads((each / "results.json").read_text())["padding_fraction"] for each in (together, apart)]
        assert padding[0] < padding[1]


@pytest.mark.parametrize(
    ("profile", "processes", "accumulation"),
    [
        ("cpu", 1, 1),
        ("single_gpu", 1, 1),
        ("single_gpu_accum", 1, 4),
        ("ddp2", 2, 1),
        ("ddp2_accum10", 2, 10),
        ("ddp8", 8, 1),
    ],
)
@pytest.mark.jobs
def test_shipped_profile(
    tmp_path: Path,
    finetune: Finetune,
    review_files: tuple[Path, Path],
    bert: Path,
    profile: str,
    processes: int,
    accumulation: int,
) -> None:
    path = REPOSITORY / "accelerate_configs" / f"{profile}.yaml"
    assert yaml.safe_load(path.read_text())["num_processes"] == processes
    started = min(processes, 2)  # eight processes on two cores take half a minute to start
    arguments = options(review_files, bert, "run", train__max_steps=1, train__per_device_train_batch_size=2)
    done = succeeded(finetune(*arguments, profile=profile, launcher=["--num_processes", str(started)]))
    record = launch_record(tmp_path / "run")
    assert record["profile"] == str(path)
    assert (record["num_processes"], record["gradient_accumulation_steps"]) == (started, accumulation)
    assert record["global_batch_size"] == 2 * started * accumulation
    assert done.stdout.count("Best model on 11 dev rows") == 1  # one process prints


@pytest.mark.jobs
def test_multinode_profile(tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path) -> None:
    """Both machines of the profile, here as two launchers on one, which starts one process for each instead of 8."""
    assert yaml.safe_load((REPOSITORY / "accelerate_configs" / "multinode.yaml").read_text())["num_processes"] == 16
    arguments = options(review_files, bert, "run", train__max_steps=1, train__per_device_train_batch_size=1)
    port = str(30000 + os.getpid() % 20000)

    def machine(rank: int) -> subprocess.CompletedProcess[str]:
        place = ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        place += ["--num_processes", "2"]
        return finetune(*arguments, profile="multinode", launcher=place, timeout=500)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(machine, (0, 1)):
            succeeded(done)
    record = launch_record(tmp_path / "run")
    assert (record["num_processes"], record["num_machines"]) == (2, 2)
    assert record["gradient_accumulation_steps"] == 1


@pytest.mark.jobs
def test_profile_option_is_the_same_as_accelerate_launch(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    arguments = options(review_files, bert, "run", train__max_steps=1, train__per_device_train_batch_size=1)
    succeeded(finetune(*arguments, "--profile", "ddp2_accum10"))
    record = launch_record(tmp_path / "run")
    assert Path(record["profile"]).stem == "ddp2_accum10"
    assert (record["num_processes"], record["gradient_accumulation_steps"]) == (2, 10)


def test_train_save_reload(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], any_checkpoint: Path
) -> None:
    from transformers import pipeline

    more = {"train__num_train_epochs": 4, "eval__evals_per_epoch": 2, "optim__learning_rate": 5e-3}
    succeeded(finetune(*options(review_files, any_checkpoint, "run", **more)))
    best = tmp_path / "run" / "best"
    succeeded(finetune("predict", best, review_files[1], "--output", "out.tsv", "--eval.per_device_eval_batch_size", 3))
    before = [line.split("\t") for line in (tmp_path / "run" / "predictions.tsv").read_text().splitlines()]
    after = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert before[0] == ["label", "prediction", "probability_neg", "probability_pos"]
    assert after[0] == ["text", "label", "prediction", "probability_neg", "probability_pos"]
    rows = [line.split("\t") for line in review_files[1].read_text().splitlines()[1:]]
    assert [cells[:2] for cells in after[1:]] == rows
    assert [cells[0] for cells in before[1:]] == [label for _, label in rows]
    for old, new in zip(before[1:], after[1:], strict=True):
        assert old[1] == new[2]
        assert [float(x) for x in old[2:]] == pytest.approx([float(x) for x in new[3:]], abs=2e-6)
    classify = pipeline("text-classification", model=str(best))
    answers = classify([text for text, _ in rows], top_k=None)
    for cells, answer in zip(after[1:], answers, strict=True):
        scores = {each["label"]: each["score"] for each in answer}
        assert scores == pytest.approx({"neg": float(cells[3]), "pos": float(cells[4])}, abs=1e-5)


def test_run_folder(tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path) -> None:
    more = {"train__num_train_epochs": 3, "train__per_device_train_batch_size": 8, "train__logging_steps": 2}
    done = succeeded(finetune(*options(review_files, bert, "run", **more)))
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.yaml", "launch.json", "metrics.jsonl", "checkpoints", "best", "predictions.tsv", "results.json",
        "report.html", "data_check.json",
    }  # fmt: skip
    steps = 5 * 3  # 37 rows in batches of 8, three epochs
    assert sorted(logged(run, "train/loss")) == [2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert sorted(logged(run, "eval/accuracy")) == [5, 10, 15]
    results = json.loads((run / "results.json").read_text())
    assert results["global_step"] == steps
    assert results["dev_rows"] == 11
    assert results["train_rows"] == 37
    lines = [line.split("\t") for line in (run / "predictions.tsv").read_text().splitlines()[1:]]
    right = sum(label == prediction for label, prediction, *_ in lines)
    assert results["metrics"]["accuracy"]["value"] == pytest.approx(right / 11)
    assert results["best_metric"] == max(logged(run, "eval/accuracy").values())
    low, high = (results["metrics"]["accuracy"][side] for side in ("low", "high"))
    assert low <= right / 11 <= high
    # The plan comes before the first step and says what is about to be done.
    plan, _, rest = done.stdout.partition("eval step 5")
    assert (
        "37 rows" in plan
        and "8 = 8 per device x 1 process(es) x 1 accumulation" in plan
        and "15 optimizer steps" in plan
    )
    assert "Best model on 11 dev rows" in rest
    # The dumped config starts the same run again.
    again = finetune("train", "--config", run / "config.yaml", "--train.output_dir", "again")
    succeeded(again)
    assert logged(tmp_path / "again", "train/loss") == logged(run, "train/loss")


def test_existing_run_is_kept_unless_overwritten(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    arguments = options(review_files, bert, "run", train__max_steps=1)
    succeeded(finetune(*arguments))
    before = (tmp_path / "run" / "launch.json").stat().st_mtime_ns
    again = " ".join(succeeded(finetune(*arguments)).stdout.split())
    assert "all steps done; --train.overwrite true starts anew" in again
    refused = finetune(*arguments, "--train.seed", 7)
    assert refused.returncode == 2
    assert "train.seed: 42 then, 7 now" in refused.stderr and "--train.overwrite true" in refused.stderr
    refused = finetune(*arguments, "--checkpoint.resume", "never")
    assert refused.returncode == 2
    assert "--train.overwrite true" in refused.stderr and "Traceback" not in refused.stderr
    assert (tmp_path / "run" / "launch.json").stat().st_mtime_ns == before
    succeeded(finetune(*arguments, "--train.overwrite", "true"))
    assert (tmp_path / "run" / "launch.json").stat().st_mtime_ns > before


@pytest.mark.parametrize("kind", ["frozen", "plateau", "pairs", "held_back", "regression", "multi_label"])
def test_variants_train(tmp_path: Path, finetune: Finetune, bert: Path, kind: str) -> None:
    rows = reviews(40)
    header, more = ("text", "label"), {"train__num_train_epochs": 2, "eval__evals_per_epoch": 2}
    if kind == "frozen":
        more["model__freeze_encoder"] = "true"
    elif kind == "plateau":
        more |= {"optim__lr_scheduler_type": "plateau", "optim__plateau_patience": 0, "optim__learning_rate": 0}
    elif kind == "pairs":
        rows = [(f"{text}", text[::-1], label) for text, label in rows]
        header, more["data__text_pair_column"] = ("text", "second", "label"), "second"
    elif kind == "regression":  # of pairs
        rows = [(text, text[::-1], str(len(text.split()))) for text, _ in rows]
        header, more["data__text_pair_column"] = ("text", "second", "label"), "second"
        more["data__problem_type"] = "regression"
    elif kind == "multi_label":  # one row in ten has none
        rows = [(text, f"{label},{'long' if len(text) > 30 else 'short'}") for text, label in rows]
        rows = [(text, label if row % 10 else "") for row, (text, label) in enumerate(rows)]
        more["data__problem_type"] = "multi_label_classification"
    train_file, dev_file = (
        write_tsv(tmp_path / "a.tsv", rows[:30], header),
        write_tsv(tmp_path / "b.tsv", rows[30:], header),
    )
    arguments = options((train_file, dev_file), bert, "run", **more)
    if kind == "held_back":
        position = arguments.index("--data.validation_file")
        del arguments[position : position + 2]
    if kind == "frozen":
        position = arguments.index("--optim.learning_rate")
        del arguments[position : position + 2]
    succeeded(finetune(*arguments))
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text())
    predictions = (run / "predictions.tsv").read_text().splitlines()
    if kind == "held_back":
        # A tenth of the 15 rows of each class, rounded to 2.
        assert (results["train_rows"], results["dev_rows"]) == (26, 4)
        assert sorted(line.split("\t")[0] for line in predictions[1:]) == ["neg", "neg", "pos", "pos"]
    else:
        assert (results["train_rows"], results["dev_rows"]) == (30, 10)
        assert [line.split("\t")[0] for line in predictions[1:]] == [row[-1] for row in rows[30:]]
    if kind == "frozen":
        weights, start = last_weights(run), load_file(bert / "model.safetensors")
        assert all(torch.equal(weights[f"bert.{name}"], tensor) for name, tensor in start.items())
        assert max(logged(run, "train/learning_rate").values()) <= 1e-3  # the default for a head alone
        assert weights["classifier.weight"].std() > 0
    if kind == "multi_label":
        check_thresholds(finetune, run, dev_file, results, [line.split("\t") for line in predictions])
    if kind == "regression":
        assert predictions[0] == "label\tprediction"
        assert {"mse", "pearson"} <= results["metrics"].keys()


@pytest.mark.parametrize("truncation", ["tail", "head_tail"])
def test_prediction_cuts_as_training_did(tmp_path: Path, finetune: Finetune, roberta: Path, truncation: str) -> None:
    """max_length is more than the model takes, and texts are longer still: both ends of them count in what is kept."""
    rows = [(" ".join([text] * 12 + [("bad", "good")[label == "pos"]]), label) for text, label in reviews(24)]
    files = (write_tsv(tmp_path / "a.tsv", rows[:18]), write_tsv(tmp_path / "b.tsv", rows[18:]))
    done = succeeded(
        finetune(*options(files, roberta, "run", data__max_length=500, data__truncation=truncation, train__max_steps=2))
    )
    assert "data.max_length lowered from 500 to 64" in done.stdout
    assert re.search(r"train: .*; 1[0-9] rows \([0-9.]+%\) are cut and lose [0-9.]+% of all tokens", done.stdout)
    assert (
        f"longer texts keep their {'end' if truncation == 'tail' else 'beginning (a quarter) and end'}" in done.stdout
    )
    run = tmp_path / "run"
    assert json.loads((run / "best" / "finetune.json").read_text())["truncation"] == truncation
    side = json.loads((run / "best" / "tokenizer_config.json").read_text()).get("truncation_side", "right")
    assert side == ("left" if truncation == "tail" else "right")

    succeeded(finetune("predict", run, files[1], "--output", tmp_path / "out.tsv"))
    of_training = [line.split("\t")[1:] for line in (run / "predictions.tsv").read_text().splitlines()]
    assert [line.split("\t")[2:] for line in (tmp_path / "out.tsv").read_text().splitlines()] == of_training


def check_thresholds(finetune: Finetune, run: Path, dev_file: Path, results: Any, table: list[list[str]]) -> None:
    """Each label's threshold has the best F1 on the dev rows that any has; it is saved with the model and used."""
    names = ["long", "neg", "pos", "short"]
    assert table[0][2:] == [f"probability_{name}" for name in names]
    assert list(results["thresholds"]) == names
    assert json.loads((run / "best" / "finetune.json").read_text())["thresholds"] == list(
        results["thresholds"].values()
    )

    def f1(given: list[bool], predicted: list[bool]) -> float:
        hits = sum(a and b for a, b in zip(given, predicted, strict=True))
        return 2 * hits / max(sum(given) + sum(predicted), 1)

    best = []
    for column, name in enumerate(names, start=2):
        given = [name in row[0].split(",") for row in table[1:]]
        shares = [float(row[column]) for row in table[1:]]
        predicted = [name in row[1].split(",") for row in table[1:]]
        margins = [share - results["thresholds"][name] for share in shares]  # of shares that are written with 6 digits
        assert all(
            is_given == (margin > 0) for is_given, margin in zip(predicted, margins, strict=True) if abs(margin) > 1e-6
        )
        possible = [f1(given, [share >= level for share in shares]) for level in [*shares, 0.5]]
        assert f1(given, predicted) >= max(possible) - 1e-9
        best.append(f1(given, predicted))
    assert results["metrics_at_thresholds"]["f1_macro"] == pytest.approx(sum(best) / 4)

    def evaluated(*more: str) -> dict[str, str]:
        done = succeeded(finetune("evaluate", run, "--data.file", dev_file, *more))
        assert "10 rows of b.tsv" in done.stdout
        rows = [line.strip("│┃ ").split("│") for line in done.stdout.splitlines() if "│" in line]
        return {row[0].strip(): row[1].strip() for row in rows if len(row) == 3}

    tuned = evaluated()
    for name, value in results["metrics_at_thresholds"].items():
        assert tuned[name] == f"{value:.4f}"
    at_half = evaluated("--eval.threshold", "0.5")
    for name in results["metrics_at_thresholds"]:
        assert at_half[name] == f"{results['metrics'][name]['value']:.4f}"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("missing file", ["nowhere.tsv"]),
        ("empty file", ["train.tsv", "empty"]),
        ("missing column", ["data.label_column", "sentiment"]),
        ("duplicate column", ["train.tsv:1", "more than one column is called 'label'"]),
        ("one class", ["same label", "two classes"]),
        ("unknown dev label", ["dev.tsv:4", "mixed"]),
        ("missing model", ["no-such-model", "hub"]),
        ("unwritable output", ["train.output_dir"]),
        ("tracker", ["tracking.trackers", "wandb"]),
        ("metric", ["eval.metrics", "accuracy"]),
    ],
)
def test_bad_input_stops_with_one_message_and_leaves_nothing(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path, spoil: str, said: list[str]
) -> None:
    train_file, dev_file = review_files
    more: dict[str, object] = {}
    model, output = bert, "run"
    if spoil == "missing file":
        train_file = tmp_path / "nowhere.tsv"
    elif spoil == "empty file":
        train_file.write_bytes(b"")
    elif spoil == "missing column":
        write_tsv(train_file, reviews(6), ("text", "sentiment"))
    elif spoil == "duplicate column":
        write_tsv(train_file, [(text, label, label) for text, label in reviews(6)], ("text", "label", "label"))
    elif spoil == "one class":
        write_tsv(train_file, [(text, "only") for text, _ in reviews(6)])
    elif spoil == "unknown dev label":
        write_tsv(dev_file, [*reviews(2), ("so so", "mixed")])
    elif spoil == "missing model":
        model = Path("no-such-model")
    elif spoil == "unwritable output":
        (tmp_path / "file").write_text("")
        output = "file/run"
    elif spoil == "tracker":
        more["tracking__trackers"] = "[wandbb]"
    elif spoil == "metric":
        more["eval__metrics"] = "[acuracy]"
    done = finetune(*options((train_file, dev_file), model, output, **more))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
    for fragment in said:
        assert fragment in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.jobs
def test_error_in_a_two_process_run_is_said_once(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    write_tsv(review_files[1], [*reviews(2), ("so so", "mixed")])
    done = finetune(*options(review_files, bert, "run"), "--profile", "ddp2", timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1 and "dev.tsv:4" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    done = finetune(*options(review_files, bert, "run"), profile="ddp2", timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("dev.tsv:4") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.jobs
def test_unconnected_copies_are_refused(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    profile = tmp_path / "multi_cpu.yaml"
    profile.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"
    )
    done = finetune(*options(review_files, bert, "run"), profile=profile)
    assert done.returncode != 0
    assert "asks for 2 processes, but 1 are connected" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.jobs
def test_wandb_offline_run_holds_config_summary_and_series(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path], bert: Path
) -> None:
    arguments = options(review_files, bert, "run", train__num_train_epochs=2, train__per_device_train_batch_size=8)
    arguments[arguments.index("[]")] = "[wandb]"
    succeeded(finetune(*arguments, "--tracking.run_name", "my run", "--tracking.tags", "[x]", profile="ddp2"))
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 1  # one run a job, not one a process
    wandb = Path(sys.executable).with_name("wandb")
    command = [str(wandb), "leet", "inspect", "--summary", "--json", str(runs[0])]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    text = json.dumps(shown)
    for series in (
        "train/loss", "train/learning_rate", "train/grad_norm", "train/global_step", "eval/loss", "eval/accuracy",
        "eval/f1_macro", "perf/examples_per_second", "perf/tokens_per_second", "best/accuracy", "best/step",
        "eval/confusion_matrix", "eval/per_class",
    ):  # fmt: skip
        assert series in text, series
    for setting in ("name_or_path", "learning_rate", "global_batch_size", "my run"):
        assert setting in text, setting
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert f'"best/accuracy": {results["best_metric"]}' in text


@pytest.mark.jobs
def test_dropout_differs_between_ranks_and_early_stopping_stops_both(
    tmp_path: Path, finetune: Finetune, review_files: tuple[Path, Path]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", dropout=0.3)
    more = {
        "optim__learning_rate": 0,  # nothing improves after the first evaluation
        "eval__early_stopping_patience": 2,
        "eval__evals_per_epoch": 1,
        "train__num_train_epochs": 9,
    }
    done = succeeded(finetune(*options(review_files, checkpoint, "run", **more), profile="ddp2"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["stop_reason"].startswith("early stopping: 2 evaluations")
    assert results["best_step"] * 3 == results["global_step"]
    assert "early stopping" in done.stdout
    exchange, waited = (results[f"communication_{kind}seconds_per_step"] for kind in ("", "waited_"))
    assert 0 < waited <= exchange < results["training_seconds"] / results["global_step"]


# Runs the program with every all-reduce of gradients counted, and writes the count of each rank.
COUNTING = """
import os, sys
from pathlib import Path
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from finetune.cli import main

calls = 0
build = DistributedDataParallel.__init__


def count(group, bucket):
    global calls
    calls += 1
    return allreduce_hook(group, bucket)


def build_counted(self, *arguments, **options):
    build(self, *arguments, **options)
    self.register_comm_hook(None, count)


DistributedDataParallel.__init__ = build_counted
code = main(sys.argv[1:])
Path("calls-" + os.environ["RANK"]).write_text(str(calls))
sys.exit(code)
"""


@pytest.mark.jobs
def test_gradients_are_reduced_once_a_step(tmp_path: Path, review_files: tuple[Path, Path], bert: Path) -> None:
    # 37 rows, 2 processes x 2 rows x 5 micro-batches: two steps of five rounds each (20 and 17 rows). The tiny model
    # fits into one bucket, so a step is one call; without no_sync it would be five.
    (tmp_path / "count.py").write_text(COUNTING, encoding="utf-8")
    more = {"train__num_train_epochs": 1, "train__per_device_train_batch_size": 2}
    arguments = options(review_files, bert, "run", train__gradient_accumulation_steps=5, **more)
    profile = REPOSITORY / "accelerate_configs" / "ddp2.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(profile), "count.py"]
    done = subprocess.run(
        [*launcher, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    succeeded(done)
    assert logged(tmp_path / "run", "eval/loss").keys() == {2}
    assert [(tmp_path / f"calls-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
