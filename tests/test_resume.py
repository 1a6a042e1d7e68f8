"""Runs that are killed, stopped, or damaged go on as if nothing had happened: real processes, equal bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import REPOSITORY, make_checkpoint, reviews, write_tsv
from jobs import Job, Nursery
from safetensors.torch import load_file

from finetune.data.batching import epoch_order

pytestmark = pytest.mark.jobs
SEED = 5


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("jobs")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train.tsv`` with 133 rows, ``dev.tsv`` with 41, and models with and without dropout."""
    folder = tmp_path_factory.mktemp("inputs")
    write_tsv(folder / "train.tsv", reviews(133))
    write_tsv(folder / "dev.tsv", reviews(41, seed=1))
    make_checkpoint(folder / "dropout", dropout=0.1)
    make_checkpoint(folder / "plain")
    return folder


def command(inputs: Path, output_dir: Path, model: str = "dropout", **changes: object) -> list[object]:
    """Two epochs of 12 steps, the last of which has one row; three micro-batches on each of two processes."""
    settings: dict[str, object] = {
        "data.train_file": inputs / "train.tsv",
        "data.validation_file": inputs / "dev.tsv",
        "data.cache_dir": inputs / "cache",
        "model.name_or_path": inputs / model,
        "train.output_dir": output_dir,
        "train.global_batch_size": 12,
        "train.per_device_train_batch_size": 2,
        "train.num_train_epochs": 2,
        "train.logging_steps": 3,
        "eval.evals_per_epoch": 3,
        "eval.per_device_eval_batch_size": 2,
        "optim.learning_rate": 3e-3,
        "optim.lr_scheduler_type": "plateau",
        "optim.plateau_patience": 0,
        "checkpoint.save_every_steps": 2,
        "tracking.trackers": "[]",
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["train", *(word for name, value in settings.items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def whole(nursery: Nursery, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    nursery.run(command(inputs, folder))
    return folder


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def logged(run: Path) -> list[dict[str, Any]]:
    """All entries of metrics.jsonl, without speeds."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in entry.items() if not name.startswith("perf/")} for entry in entries]


def assert_same_run(run: Path, whole: Path) -> None:
    """Weights, optimizer and random numbers bit for bit; each metric once and equal; the same results."""
    assert newest(run).name == newest(whole).name
    for name in ("model.safetensors", "training/optimizer.pt"):
        assert (newest(run) / name).read_bytes() == (newest(whole) / name).read_bytes(), name
    for name in ("training/rank-00000.pt", "training/rank-00001.pt"):
        one, other = (torch.load(folder / name, weights_only=True)["rng"] for folder in (newest(run), newest(whole)))
        assert torch.equal(one["torch"], other["torch"]), name
    assert (run / "best" / "model.safetensors").read_bytes() == (whole / "best" / "model.safetensors").read_bytes()
    assert logged(run) == logged(whole)
    assert (run / "predictions.tsv").read_text() == (whole / "predictions.tsv").read_text()
    mine, expected = (json.loads((folder / "results.json").read_text()) for folder in (run, whole))
    for name in ("metrics", "best_step", "best_metric", "global_step", "stop_reason"):
        assert mine[name] == expected[name], name


def test_the_uninterrupted_run(whole: Path) -> None:
    """What the others are compared with is what it is meant to be."""
    entries = logged(whole)
    assert [entry["step"] for entry in entries if "train/loss" in entry] == [3, 4, 6, 8, 9, 12, 15, 16, 18, 20, 21, 24]
    assert [entry["step"] for entry in entries if "eval/loss" in entry] == [4, 8, 12, 16, 20, 24]
    results = json.loads((whole / "results.json").read_text())
    assert len({entry["eval/loss"] for entry in entries if "eval/loss" in entry}) == 6
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert kept == sorted({f"step-{step:08d}" for step in (22, 24, results["best_step"])})
    assert (whole / "best" / "model.safetensors").stat().st_nlink == 2  # not stored twice


def kill_until_done(
    nursery: Nursery, arguments: list[object], moments: random.Random, kills: int, **env: str
) -> tuple[Job, int]:
    """Start the job again and again, killing it at random moments; returns the start that ended, and the kills."""
    killed = 0
    while True:
        job = nursery.start(arguments, **env)
        end = time.monotonic() + moments.uniform(0.2, 2.2)
        while job.is_running() and (killed == kills or time.monotonic() < end):
            time.sleep(0.002)
        if not job.is_running():
            assert job.wait() == [0, 0], job.output()
            return job, killed
        job.kill()
        killed += 1


def test_killed_at_random_moments(nursery: Nursery, inputs: Path, whole: Path, tmp_path: Path) -> None:
    """Over several runs when one of them gets through."""
    kills = int(os.environ.get("FINETUNE_KILLS", "20"))
    moments, killed, turn = random.Random(SEED), 0, 0
    while killed < kills:
        turn += 1
        run = tmp_path / f"run-{turn}"
        _, more = kill_until_done(nursery, command(inputs, run), moments, kills=kills - killed)
        killed += more
        assert_same_run(run, whole)
        shutil.rmtree(run)


# As on a GPU, where checkpoints are written while training goes on.
IN_BACKGROUND = """
import finetune.run
plain = finetune.run.Snapshots
finetune.run.Snapshots = lambda **fields: plain(**{**fields, "in_background": True})
"""


def test_written_in_the_background(nursery: Nursery, inputs: Path, whole: Path, tmp_path: Path) -> None:
    """The same run: uninterrupted, killed again and again, and stopped."""
    nursery.run(command(inputs, tmp_path / "calm"), FINETUNE_TEST_PATCH=IN_BACKGROUND)
    assert_same_run(tmp_path / "calm", whole)
    run, moments = tmp_path / "killed", random.Random(SEED)
    kill_until_done(nursery, command(inputs, run), moments, kills=6, FINETUNE_TEST_PATCH=IN_BACKGROUND)
    assert_same_run(run, whole)
    run = tmp_path / "stopped"
    job = nursery.start(command(inputs, run), FINETUNE_TEST_PATCH=IN_BACKGROUND)
    while not (run / "checkpoints" / "step-00000006").is_dir():
        assert job.is_running(), job.output()
        time.sleep(0.001)
    job.signal(signal.SIGTERM)
    assert job.wait() == [143, 143]
    step = int(" ".join(job.output().split()).partition("after step ")[2].split(" ")[0])
    assert newest(run).name == f"step-{step:08d}"
    nursery.run(command(inputs, run), FINETUNE_TEST_PATCH=IN_BACKGROUND)
    assert_same_run(run, whole)


def test_a_failure_in_the_background_is_said_once(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    patch = f"""{IN_BACKGROUND}
import finetune.snapshot
from finetune.errors import CheckpointError
def full(*_, **__):
    raise CheckpointError("the disk is full")
finetune.snapshot.save_checkpoint = full
"""
    job = nursery.start(command(inputs, tmp_path / "run"), FINETUNE_TEST_PATCH=patch)
    assert 2 in job.wait(30)
    assert job.output().count("error: the disk is full") == 1 and "Traceback" not in job.output()


def test_a_finished_run_is_left_alone(nursery: Nursery, inputs: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    job = nursery.run(command(inputs, whole))
    assert job.output().count("finished") == 1
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.fixture
def stopped(nursery: Nursery, inputs: Path, tmp_path: Path) -> Path:
    """A run that was killed after step 10, before step 12 was saved."""
    run = tmp_path / "run"
    job = nursery.start(command(inputs, run))
    while not (run / "checkpoints" / "step-00000010").is_dir():
        assert job.is_running(), job.output()
        time.sleep(0.001)
    job.kill()
    for step in (12, 14, 16):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    return run


DEFECTS = ["truncate", "delete", "flip", "append"]
FILES = ["model.safetensors", "training/optimizer.pt", "training/shared.pt", "training/rank-00001.pt", "manifest.json"]


@pytest.mark.parametrize(("defect", "name"), [*zip(DEFECTS, FILES, strict=False), ("delete", "manifest.json")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    nursery: Nursery, inputs: Path, whole: Path, stopped: Path, defect: str, name: str
) -> None:
    path = newest(stopped) / name
    content = path.read_bytes()
    if defect == "delete":
        path.unlink()
    else:
        changed = {
            "truncate": content[:-1],
            "flip": content[:50] + bytes([content[50] ^ 1]) + content[51:],
            "append": content + b"x",
        }
        path.write_bytes(changed[defect])
    job = nursery.run(command(inputs, stopped))
    said = " ".join(job.output().split())
    assert said.count("a checkpoint is passed over") == 1
    assert "step-00000010" in said and name.split("/")[-1] in said
    assert "from step 8 (" in said
    assert_same_run(stopped, whole)


def test_with_all_checkpoints_damaged_nothing_is_started(nursery: Nursery, inputs: Path, stopped: Path) -> None:
    for manifest in stopped.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    before = sorted(path for path in stopped.rglob("*") if "/." not in str(path))
    job = nursery.start(command(inputs, stopped))
    assert 2 in job.wait()
    assert job.output().count("all checkpoints are damaged") == 1
    assert sorted(path for path in stopped.rglob("*") if "/." not in str(path)) == before


def test_other_rows_or_settings_are_refused_and_listed(
    nursery: Nursery, inputs: Path, stopped: Path, tmp_path: Path
) -> None:
    rows = [*reviews(132), ("another row", "pos")]
    changes = {
        "data.train_file": write_tsv(tmp_path / "other.tsv", rows),
        "optim.learning_rate": 1e-3,
        "train.global_batch_size": 24,
        "train.per_device_train_batch_size": 4,
        "train.logging_steps": 5,  # which is allowed
    }
    job = nursery.start(command(inputs, stopped, **{name.replace(".", "__"): value for name, value in changes.items()}))
    assert 2 in job.wait()
    said = job.output()
    assert said.count("belongs to a run with other rows or settings") == 1
    lines = {line for line in said.splitlines() if line.startswith("- ")}
    assert lines == {
        "- the rows of the train split changed",
        "- the global batch size: 12 then, 24 now",
        "- optim.learning_rate: 0.003 then, 0.001 now",
    }


def test_on_another_number_of_processes(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    """Same rows in each step: without dropout one process goes on to the weights of two."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    nursery.run(command(inputs, whole, "plain"))
    arguments = command(inputs, run, "plain")
    job = nursery.start(arguments)
    while not (run / "checkpoints" / "step-00000010").is_dir():
        time.sleep(0.001)
    job.kill()
    job = nursery.run(command(inputs, run, "plain", train__per_device_train_batch_size=4), ranks=1)
    assert "1 process(es) instead of 2" in " ".join(job.output().split())
    one, other = load_file(newest(run) / "model.safetensors"), load_file(newest(whole) / "model.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=0)
    for mine, expected in zip(logged(run), logged(whole), strict=True):
        assert mine == {name: pytest.approx(value, abs=1e-4) for name, value in expected.items()}


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


def test_signals_stop_all_ranks_at_one_step(nursery: Nursery, inputs: Path, whole: Path, tmp_path: Path) -> None:
    """Ten times at random moments, in evaluations too, to one rank or to all: saved, told how to go on, exact."""
    moments, stops, turn = random.Random(SEED), 0, 0
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 143}
    while stops < 10:
        run = tmp_path / f"run-{turn}"
        slow_evaluation = SLOWED if turn % 2 == 0 else ""
        turn += 1
        while True:
            job = nursery.start(command(inputs, run), FINETUNE_TEST_PATCH=slow_evaluation)
            while job.is_running() and "run folder" not in job.output():
                time.sleep(0.002)
            wait = time.monotonic() + moments.uniform(0.05, 1.5)  # from when on signals are listened to
            while job.is_running() and time.monotonic() < wait:
                time.sleep(0.002)
            number = moments.choice(SIGNALS)
            ranks = moments.choice([(0,), (1,), (0, 1)])
            is_to_stop = stops < 10 and job.is_running()
            if is_to_stop:
                job.signal(number, *ranks)
            found = job.wait()
            if found == [0, 0] or (run / "report.html").exists():
                break
            assert found == [codes[number]] * 2, job.output()
            said = " ".join(job.output().split())
            assert said.count(f"by {number.name} after step") == 1
            step = int(said.partition("after step ")[2].split(" ")[0])
            assert newest(run).name == f"step-{step:08d}"
            assert "Traceback" not in said
            stops += 1
        assert_same_run(run, whole)


SLOWED = """
import time
import finetune.loop
evaluate = finetune.loop.evaluate
def slow(*arguments, each_round, **more):
    from contextlib import contextmanager
    @contextmanager
    def slower():
        with each_round():
            time.sleep(0.02)
            yield
    return evaluate(*arguments, each_round=slower, **more)
finetune.loop.evaluate = slow
"""


STOPPED_IN_THE_LAST_EVALUATION = """
import os, signal
import finetune.loop
evaluate = finetune.loop.evaluate
def stopped(*arguments, **more):
    stopped.times += 1
    if stopped.times == 6:
        os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*arguments, **more)
stopped.times = 0
finetune.loop.evaluate = stopped
"""


def test_a_stop_in_the_last_evaluation(nursery: Nursery, inputs: Path, whole: Path, tmp_path: Path) -> None:
    """The checkpoint that it leaves is written anew once the evaluation is done, or the run would never be finished."""
    run = tmp_path / "run"
    job = nursery.start(command(inputs, run), FINETUNE_TEST_PATCH=STOPPED_IN_THE_LAST_EVALUATION)
    assert job.wait() == [143, 143]
    assert newest(run).name == "step-00000024"
    nursery.run(command(inputs, run))
    assert_same_run(run, whole)
    assert "finished" in nursery.run(command(inputs, run)).output()


def test_a_limit_of_time_stops_cleanly(nursery: Nursery, inputs: Path, whole: Path, tmp_path: Path) -> None:
    """Every start ends by itself, with exit code 0, until one of them finishes the run."""
    run, starts = tmp_path / "run", 0
    while not (run / "results.json").exists():
        job = nursery.run(command(inputs, run, train__max_hours=1e-9))  # 4 microseconds: one step a start
        starts += 1
        if starts == 3:  # enough of that
            assert "by train.max_hours after step 3 of 24" in " ".join(job.output().split())
            nursery.run(command(inputs, run, train__max_hours=1))
    assert starts == 3
    assert_same_run(run, whole)


def test_a_second_interrupt_stops_at_once(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    patch = """
import time
from finetune.snapshot import Snapshots
Snapshots.save = lambda self, state: time.sleep(60)
"""
    job = nursery.start(command(inputs, tmp_path / "run"), ranks=1, FINETUNE_TEST_PATCH=patch)
    while "step 3/" not in job.output():  # saving takes a minute from step 2 on
        assert job.is_running()
        if "run folder" in job.output():
            time.sleep(0.5)
            break
    job.signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.is_running()
    job.signal(signal.SIGINT)
    assert job.wait(5) == [130]


def test_going_on_from_another_folder(
    nursery: Nursery, inputs: Path, whole: Path, stopped: Path, tmp_path: Path
) -> None:
    """A checkpoint that is named starts a run of its own, and leaves the other as it is."""
    before = sorted(stopped.rglob("*"))
    source = stopped / "checkpoints" / "step-00000008"
    job = nursery.run(command(inputs, tmp_path / "fork", checkpoint__resume=source))
    assert "from step 8 (" in " ".join(job.output().split())
    assert sorted(stopped.rglob("*")) == before
    one, other = (load_file(newest(run) / "model.safetensors") for run in (tmp_path / "fork", whole))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    job = nursery.start(command(inputs, tmp_path / "other", checkpoint__resume=tmp_path / "nowhere"))
    assert 2 in job.wait()
    assert job.output().count("no whole checkpoint there") == 1


def saved(run: Path) -> int:
    """The step of the newest checkpoint."""
    return int(newest(run).name.removeprefix("step-"))


@pytest.mark.parametrize("told", ["from another checkpoint", "to overwrite", "never to resume"])
def test_a_restarted_job_goes_on_from_its_own_checkpoints(
    nursery: Nursery, inputs: Path, whole: Path, stopped: Path, tmp_path: Path, told: str
) -> None:
    """Whatever it was told to do with the folder when it started for the first time."""
    run = tmp_path / "own"
    settings: dict[str, dict[str, object]] = {
        "from another checkpoint": {"checkpoint__resume": stopped / "checkpoints" / "step-00000008"},
        "to overwrite": {"train__overwrite": "true"},
        "never to resume": {"checkpoint__resume": "never"},
    }
    arguments = command(inputs, run, **settings[told])
    job = nursery.start(arguments)
    while not (run / "checkpoints" / "step-00000014").is_dir():
        assert job.is_running(), job.output()
        time.sleep(0.001)
    job.kill()
    step = saved(run)
    job = nursery.run(arguments, TORCHELASTIC_RESTART_COUNT="1")
    assert f"from step {step} (" in " ".join(job.output().split())
    one, other = (load_file(newest(each) / "model.safetensors") for each in (run, whole))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_without_the_optimizer_it_is_said(nursery: Nursery, inputs: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    nursery.run(command(inputs, run, checkpoint__save_optimizer="false", train__max_hours=1e-9))
    assert not (newest(run) / "training" / "optimizer.pt").exists()
    job = nursery.run(command(inputs, run, checkpoint__save_optimizer="false"))
    assert "the optimizer starts afresh" in " ".join(job.output().split())
    assert json.loads((run / "results.json").read_text())["global_step"] == 24


def test_resume_never_refuses_the_folder(nursery: Nursery, inputs: Path, stopped: Path) -> None:
    job = nursery.start(command(inputs, stopped, checkpoint__resume="never"))
    assert 2 in job.wait()
    assert job.output().count("already holds a run") == 1


def test_before_the_first_checkpoint_the_run_starts_over(
    nursery: Nursery, inputs: Path, whole: Path, stopped: Path
) -> None:
    shutil.rmtree(stopped / "checkpoints")
    nursery.run(command(inputs, stopped))
    assert_same_run(stopped, whole)


# ---------------------------------------------------------------- one W&B run


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of one offline file."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [entry["history"]["item"] for line in lines if (entry := json.loads(line))["type"] == "history"]


def test_restarts_are_one_wandb_run(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    """Killed, interrupted, killed: one run id, steps that only rise, and nothing is missing."""
    run = tmp_path / "run"
    arguments = command(inputs, run, tracking__trackers="[wandb]", train__logging_steps=1)
    for step, number in ((6, signal.SIGKILL), (12, signal.SIGTERM), (18, signal.SIGKILL)):
        job = nursery.start(arguments)
        while not (run / "checkpoints" / f"step-{step:08d}").is_dir():
            assert job.is_running(), job.output()
            time.sleep(0.001)
        job.signal(number)
        job.wait()
        time.sleep(0.5)  # W&B's own process ends after ours
    nursery.run(arguments)
    run_id = json.loads((run / "launch.json").read_text())["run_id"]
    folders = sorted(path for path in (run / "wandb").iterdir() if path.name.startswith("offline-run-"))
    assert len(folders) == 4
    assert {folder.name.rpartition("-")[2] for folder in folders} == {run_id}
    rows = [row for folder in folders for row in history(folder)]
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))
    for name in ("train/loss", "eval/loss"):
        in_wandb = {row["_step"]: row[name] for row in rows if name in row}
        assert in_wandb == {entry["step"]: pytest.approx(entry[name]) for entry in logged(run) if name in entry}


# ---------------------------------------------------------------- numbers that are none


PLANTED = """
import numpy as np
import finetune.data.loader as loader
collate = loader.Collator.__call__
def planted(self, rows, counted=True):
    micro = collate(self, rows, counted)
    micro.weights[np.isin(rows, BAD)] = float("nan")
    return micro
loader.Collator.__call__ = planted
"""


def step_of(row: int) -> int:
    """The optimizer step of the first epoch that takes a row."""
    return epoch_order(133, 42, 0).tolist().index(row) // 12 + 1


@pytest.mark.parametrize("logging_steps", [1, 50])
def test_a_loss_that_is_no_number_stops_all_ranks(
    nursery: Nursery, inputs: Path, tmp_path: Path, logging_steps: int
) -> None:
    """Whenever somebody looks, the step and the rows are those where it began."""
    row = 77
    job = nursery.start(
        command(inputs, tmp_path / "run", train__logging_steps=logging_steps),
        FINETUNE_TEST_PATCH=PLANTED.replace("BAD", f"[{row}]"),
    )
    codes = job.wait(30)
    assert 2 in codes and 0 not in codes
    said = job.output()
    assert said.count("is not finite") == 1 and "Traceback" not in said
    assert f"the training loss is not finite at step {step_of(row)} (learning rate 0.00" in said
    places = said.partition("in the micro-batch of ")[2].partition(": look at")[0].split(", ")
    assert len(places) == 2 and any(place.endswith(f"train.tsv:{row + 2}") for place in places)
    saved = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run").glob("checkpoints/step-*"))
    assert max(saved, default=0) < step_of(row)


def test_such_steps_can_be_left_out(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    job = nursery.run(
        command(inputs, tmp_path / "run", train__on_nonfinite="skip", train__logging_steps=1),
        FINETUNE_TEST_PATCH=PLANTED.replace("BAD", "[77]"),
    )
    said = " ".join(job.output().split())
    assert said.count("not finite") == said.count(": left out") == 2  # once an epoch
    assert "train.tsv:79" in said
    entries = [entry for entry in logged(tmp_path / "run") if "train/skipped_steps" in entry]
    assert entries[-1]["train/skipped_steps"] == 2
    assert "train/loss" not in entries[step_of(77) - 1]  # of the step that was left out there is none
    assert [entry["step"] for entry in entries] == list(range(1, 25))
    assert all(tensor.isfinite().all() for tensor in load_file(newest(tmp_path / "run") / "model.safetensors").values())


def test_not_too_many_of_them(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    job = nursery.start(
        command(inputs, tmp_path / "run", train__on_nonfinite="skip"),
        FINETUNE_TEST_PATCH=PLANTED.replace("BAD", "range(133)"),
    )
    assert 2 in job.wait(30)
    assert job.output().count("10 steps before it were left out") == 1


# ---------------------------------------------------------------- memory


TOO_SMALL = """
import torch
from transformers import BertForSequenceClassification as Bert
call = Bert.__call__
def limited(self, **inputs):
    texts = len(inputs.get("first_tokens", inputs["input_ids"]))  # which may share a row
    if self.training and texts > LIMIT:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return call(self, **inputs)
if rank == 1:
    Bert.__call__ = limited
"""


def test_micro_batches_are_halved_until_they_fit(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    """On one rank alone, in which the other follows; the result is that of the same sizes from the start."""
    sizes = {
        "train__global_batch_size": 32,
        "train__per_device_train_batch_size": 16,
        "train__auto_micro_batch": "true",
        "train__packing": "on",  # which auto decides by the sizes that were asked for
    }
    run, other = tmp_path / "run", tmp_path / "other"
    job = nursery.run(command(inputs, run, **sizes), FINETUNE_TEST_PATCH=TOO_SMALL.replace("LIMIT", "4"))
    said = " ".join(job.output().split())
    assert (
        "32 = 4 per device x 2 process(es) x 4 accumulation (train.auto_micro_batch: 16 per device do not fit" in said
    )
    sizes = {"train__global_batch_size": 32, "train__per_device_train_batch_size": 4, "train__packing": "on"}
    nursery.run(command(inputs, other, **sizes))
    for name in ("model.safetensors", "training/optimizer.pt"):
        assert (newest(run) / name).read_bytes() == (newest(other) / name).read_bytes()


def test_memory_that_one_example_does_not_fit_into(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    arguments = command(inputs, tmp_path / "run", train__auto_micro_batch="true")
    job = nursery.start(arguments, FINETUNE_TEST_PATCH=TOO_SMALL.replace("LIMIT", "0"))
    assert 2 in job.wait()
    assert job.output().count("out of memory with one example at a time") == 1


def test_later_the_message_says_what_to_set(nursery: Nursery, inputs: Path, tmp_path: Path) -> None:
    sizes = {"train__global_batch_size": 32, "train__per_device_train_batch_size": 16}
    arguments = command(inputs, tmp_path / "run", **sizes)
    job = nursery.start(arguments, FINETUNE_TEST_PATCH=TOO_SMALL.replace("LIMIT", "4"))
    assert 2 in job.wait(30)
    said = job.output()
    assert said.count("out of memory with micro-batches of 16") == 1 and "Traceback" not in said
    assert "--train.per_device_train_batch_size 8 and --train.gradient_accumulation_steps 2" in said


# ---------------------------------------------------------------- a rank that fails


FAILING = """
import finetune.loop
step = finetune.loop.optimizer_step
def failing(training, state, inputs):
    if rank == 1 and state.global_step == 5:
        FAIL
    return step(training, state, inputs)
finetune.loop.optimizer_step = failing
"""


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        ("raise KeyError('a fault of ours')", 1, "KeyError: 'a fault of ours'"),
        ("import finetune.errors as e; raise e.TrainingError('a mistake of theirs')", 2, "error: a mistake of theirs"),
        ("import os; os.kill(os.getpid(), 9)", 2, "error: lost the connection to another process"),
    ],
)
def test_a_rank_that_fails_takes_the_job_down(
    nursery: Nursery, inputs: Path, tmp_path: Path, fail: str, code: int, said: str
) -> None:
    """Within seconds, and the cause is printed once."""
    job = nursery.start(command(inputs, tmp_path / "run"), FINETUNE_TEST_PATCH=FAILING.replace("FAIL", fail))
    codes = job.wait(20)
    assert code in codes and 0 not in codes
    output = job.output()
    assert output.count(said) == 1
    assert output.count("Traceback") == (1 if code == 1 else 0)
    assert output.count("error: ") == (0 if code == 1 else 1)


# ---------------------------------------------------------------- launchers


def output_of(launcher: subprocess.Popen[str], seconds: float) -> str:
    """All that it prints until it ends; a job that hangs is ended with all its processes."""
    try:
        return launcher.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            each.kill()
        raise


def workers_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    return [each for each in psutil.Process(launcher.pid).children() if "finetune" in " ".join(each.cmdline())]


@pytest.mark.parametrize("how", ["accelerate launch", "--profile cpu"])
def test_a_launcher_restarts_a_killed_worker(inputs: Path, tmp_path: Path, how: str) -> None:
    """One worker is killed after a checkpoint; the job goes on by itself to the end of the uninterrupted run."""
    sizes: dict[str, object] = {"train__per_device_train_batch_size": 4} if how.endswith("cpu") else {}
    options = list(map(str, command(inputs, tmp_path / "run", "plain", train__num_train_epochs=1, **sizes)))
    if how == "accelerate launch":
        profile = str(REPOSITORY / "accelerate_configs" / "ddp2.yaml")
        start = ["-m", "accelerate.commands.launch", "--max_restarts", "2", "--config_file", profile, "-m", "finetune"]
        arguments = [sys.executable, *start, *options]
    else:
        arguments = [sys.executable, "-m", "finetune", *options, *how.split(), "--max_restarts", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path
    ) as launcher:
        while not (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir():
            assert launcher.poll() is None
            time.sleep(0.002)
        workers_of(launcher)[-1].kill()
        output = output_of(launcher, 120)
    assert launcher.returncode == 0, output
    assert "from step " in output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["global_step"], results["stop_reason"]) == (12, "all steps done")
    steps = [entry["step"] for entry in logged(tmp_path / "run") if "train/loss" in entry]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("profile", "number", "code"),
    [("ddp2", signal.SIGTERM, 143), ("cpu", signal.SIGINT, 130), ("ddp2", signal.SIGUSR1, 143)],
)
def test_a_signal_to_the_launcher_reaches_the_workers(
    inputs: Path, tmp_path: Path, profile: str, number: int, code: int
) -> None:
    sizes: dict[str, object] = {"train__per_device_train_batch_size": 4} if profile == "cpu" else {}
    options = map(str, command(inputs, tmp_path / "run", "plain", train__num_train_epochs=200, **sizes))
    with subprocess.Popen(
        [sys.executable, "-m", "finetune", *options, "--profile", profile],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as launcher:
        while not (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir():
            assert launcher.poll() is None
            time.sleep(0.002)
        launcher.send_signal(number)
        output = output_of(launcher, 60)
    assert launcher.returncode == code, output
    said = " ".join(output.split())
    assert said.count(f"by {signal.Signals(number).name} after step" if profile == "cpu" else " after step ") == 1
    assert "Traceback" not in said
    step = int(said.partition("after step ")[2].split(" ")[0])
    assert newest(tmp_path / "run").name == f"step-{step:08d}"
