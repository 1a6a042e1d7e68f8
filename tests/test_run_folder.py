"""What a run refuses to write into, and what it writes, byte for byte."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.config import Config, DataConfig, ModelConfig, TrackingConfig, TrainConfig, parse
from finetune.data.batching import BatchSizes
from finetune.errors import CheckpointError, ConfigError
from finetune.run_folder import (
    LaunchRecord,
    choose_output_dir,
    launch_record,
    start_run_folder,
    write_json,
    write_predictions,
)


def config(output_dir: Path | str | None, overwrite: bool = False, **data: Any) -> Config:
    return Config(
        data=DataConfig(train_file="train.tsv", **data) if "train_file" not in data else DataConfig(**data),
        model=ModelConfig(name_or_path="org/some-bert"),
        train=TrainConfig(output_dir=None if output_dir is None else str(output_dir), overwrite=overwrite),
    )


def refusal(chosen: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_output_dir(chosen)
    return str(caught.value)


def record() -> LaunchRecord:
    return launch_record(
        run_id="abc12345",
        profile=Path("/profiles/ddp2.yaml"),
        sizes=BatchSizes(per_device=4, num_processes=2, accumulation=3),
        accumulation_source="profile ddp2",
        num_machines=1,
        mixed_precision="bf16",
        device="cpu",
        device_name="CPU",
        threads=1,
        seed=7,
    )


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run folder as a finished run leaves it."""
    folder = tmp_path / "runs/old"
    (folder / "best").mkdir(parents=True)
    (folder / "best/model.safetensors").write_bytes(b"weights")
    (folder / "launch.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---------------------------------------------------------------- which folder


def test_a_new_or_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_output_dir(config(tmp_path / "a/b")) == tmp_path / "a/b"
    assert not (tmp_path / "a").exists()  # nothing is written yet
    (tmp_path / "empty").mkdir()
    assert choose_output_dir(config(tmp_path / "empty")) == tmp_path / "empty"
    assert choose_output_dir(config(tmp_path / "empty", overwrite=True)) == tmp_path / "empty"
    monkeypatch.chdir(tmp_path)
    assert choose_output_dir(config("relative")) == tmp_path / "relative"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_output_dir(config("~/mine")) == tmp_path / "mine"


def test_the_default_is_named_after_the_model_and_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime

    monkeypatch.chdir(tmp_path)
    before = datetime.now().replace(microsecond=0)
    folder = choose_output_dir(config(None))
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("some-bert-")
    assert before <= datetime.strptime(folder.name, "some-bert-%Y%m%d-%H%M%S") <= datetime.now()


def test_a_finished_run_is_not_touched_unasked(old_run: Path) -> None:
    before = tree(old_run)
    said = refusal(config(old_run))
    assert said == (
        f"train.output_dir {old_run} already holds a run: give another folder, or empty it first with "
        "--train.overwrite true"
    )
    assert tree(old_run) == before


def test_overwrite_never_empties_what_no_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert refusal(config(tmp_path, overwrite=True)) == (
        f"train.output_dir {tmp_path} holds files that no run wrote (launch.json is missing): "
        "train.overwrite empties run folders only, so give another folder"
    )
    (tmp_path / "launch.json").mkdir()  # a folder of that name proves nothing
    assert "launch.json is missing" in refusal(config(tmp_path, overwrite=True))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_folder(overwrite: bool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    os.chmod(file, 0o777)  # an executable one passes a mere check of permissions
    assert refusal(config(file, overwrite)) == f"train.output_dir {file}: {file} is a file: give a folder"
    below = file / "runs/new"
    assert refusal(config(below, overwrite)) == f"train.output_dir {below}: {file} is a file: give a folder"


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return not mode & os.W_OK

    monkeypatch.setattr(os, "access", access)
    folder = tmp_path / "a/b"
    assert refusal(config(folder)) == f"train.output_dir {folder} cannot be written: no permission for {tmp_path}"
    assert asked == [tmp_path]


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    folder = tmp_path / "other"
    assert refusal(config(folder)) == f"train.output_dir {folder} cannot be used: Permission denied"


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    """Found by looking, or from Python 3.14 on by writing."""
    chosen = config(tmp_path / ("n" * 300))
    with pytest.raises(ConfigError, match=r"^train\.output_dir /.*/n+ cannot be (used|written): File name too long$"):
        start_run_folder(choose_output_dir(chosen), chosen, record())


@pytest.mark.parametrize("output", ["{run}", "{link}"])
@pytest.mark.parametrize("spelling", ["{run}/best", "{run}/../old/best", "link/best"])
def test_overwrite_keeps_the_model_it_starts_from(
    spelling: str, output: str, old_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on from ``best/`` into the same folder would delete the weights before there are new ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(old_run)
    model, folder = spelling.format(run=old_run), output.format(run=old_run, link=tmp_path / "link")
    chosen = replace(config(folder, overwrite=True), model=ModelConfig(name_or_path=model))
    assert refusal(chosen) == (
        f"train.output_dir {folder} would be emptied (train.overwrite), but model.name_or_path {model} is in it: "
        "give another folder"
    )


def test_overwrite_keeps_the_data_it_reads(old_run: Path, tmp_path: Path) -> None:
    inside, outside = str(old_run / "rows/*.tsv"), str(tmp_path / "train.tsv")
    for name, files in (("data.train_file", {"train_file": [outside, inside]}),
                        ("data.validation_file", {"train_file": outside, "validation_file": inside})):  # fmt: skip
        assert f"{name} {inside} is in it" in refusal(config(old_run, overwrite=True, **files))
    assert choose_output_dir(config(old_run, overwrite=True, train_file=outside)) == old_run


def test_a_hub_name_is_not_taken_for_a_folder(old_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(old_run)  # where the hub name org/some-bert would be a path inside the run folder
    chosen = config(old_run, overwrite=True, train_file=str(tmp_path / "train.tsv"))
    assert choose_output_dir(chosen) == old_run


# ---------------------------------------------------------------- what a run writes first


def test_overwrite_empties_the_folder_and_nothing_else(old_run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "dataset"
    outside.mkdir()
    (outside / "rows.tsv").write_text("text\tlabel\n")
    (old_run / "data").symlink_to(outside)
    (old_run / ".best.staged").mkdir()
    chosen = config(old_run, overwrite=True)
    start_run_folder(choose_output_dir(chosen), chosen, record())
    assert tree(old_run) == {"launch.json", "config.yaml"}
    assert (outside / "rows.tsv").read_text() == "text\tlabel\n"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "dataset"}


def test_without_overwrite_nothing_is_removed(old_run: Path) -> None:
    before = tree(old_run)
    start_run_folder(old_run, config(old_run), record())
    assert tree(old_run) == before | {"config.yaml"}


def test_a_folder_that_was_half_emptied_can_be_emptied_again(old_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr("shutil.rmtree", lambda path: removed.append(path.name))
    monkeypatch.setattr(Path, "unlink", lambda path: removed.append(path.name))
    start_run_folder(old_run, config(old_run, overwrite=True), record())
    assert sorted(removed) == ["best", "launch.json", "metrics.jsonl"]
    assert removed[-1] == "launch.json"


def test_the_config_is_written_as_it_was(tmp_path: Path) -> None:
    chosen = replace(config(tmp_path / "new/run"), tracking=TrackingConfig(run_name="2e-5 新闻", tags=["null"]))
    start_run_folder(tmp_path / "new/run", chosen, record())
    assert parse(["--config", str(tmp_path / "new/run/config.yaml")])[0] == chosen


def test_the_launch_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no repository of the user's
    monkeypatch.setattr(sys, "argv", ["finetune", "train", "--config", "demo"])
    start_run_folder(tmp_path / "run", config(tmp_path / "run"), record())
    written = json.loads((tmp_path / "run/launch.json").read_text(encoding="utf-8"))
    assert written["packages"].keys() >= {"torch", "accelerate", "transformers", "datasets"}
    assert written["started"].endswith("+00:00")
    known = {
        "profile": "/profiles/ddp2.yaml",
        "num_processes": 2,
        "num_machines": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "gradient_accumulation_source": "profile ddp2",
        "global_batch_size": 24,
        "mixed_precision": "bf16",
        "device": "cpu",
        "device_name": "CPU",
        "threads_per_process": 1,
        "seed": 7,
        "rank_seeds": [7, 8],
        "command": ["finetune", "train", "--config", "demo"],
        "git_commit": None,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    assert {name: written[name] for name in known} == known


def test_the_commit_is_that_of_the_users_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    commit = (tmp_path / ".git" / (tmp_path / ".git/HEAD").read_text().split()[1]).read_text().strip()
    assert len(commit) == 40
    assert record().git_commit == commit


def test_no_profile_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    without = launch_record(
        run_id="abc12345",
        profile=None,
        sizes=BatchSizes(1, 1, 1),
        accumulation_source="default",
        num_machines=1,
        mixed_precision="no",
        device="cpu",
        device_name="CPU",
        threads=2,
        seed=0,
    )
    assert (without.profile, without.git_commit, without.rank_seeds) == (None, None, [0])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where even root cannot write")
def test_a_place_where_nobody_can_write() -> None:
    folder = Path("/proc/finetune/run")
    with pytest.raises(ConfigError, match=r"^train\.output_dir /proc/finetune/run cannot be written: "):
        start_run_folder(folder, config(folder), record())


# ---------------------------------------------------------------- JSON


def test_json_is_readable_and_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {
        "loss": float("nan"), "best": float("inf"), "worst": -float("inf"), "numpy": np.float64("nan"), "f1": 0.5,
        "rows": 3, "label": "好", "none": None, "yes": True,
        "list": [1.5, float("nan"), ("a", float("inf"))], "inner": {"x": float("nan"), 1: "one"},
    })  # fmt: skip
    text = path.read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == {
        "loss": None, "best": None, "worst": None, "numpy": None, "f1": 0.5,
        "rows": 3, "label": "好", "none": None, "yes": True,
        "list": [1.5, None, ["a", None]], "inner": {"x": None, "1": "one"},
    }  # fmt: skip
    assert '\n  "label": "好"' in text
    assert text.endswith("}\n")


# ---------------------------------------------------------------- predictions, byte for byte


def written(path: Path, **arguments: Any) -> str:
    write_predictions(path, **{"separator": ",", "columns": {}, **arguments})
    return path.read_bytes().decode("utf-8")


def test_one_label_a_row(tmp_path: Path) -> None:
    text = written(
        tmp_path / "predictions.tsv",
        predicted=np.array([1, 0, 1]),
        probability=np.array([[0.25, 0.75], [0.9999999, 0.0000001], [1 / 3, 2 / 3]]),
        label_names=["neg", "好"],
        columns={"label": ["neg", "neg", "好"]},
    )
    assert text == (
        "label\tprediction\tprobability_neg\tprobability_好\n"
        "neg\t好\t0.250000\t0.750000\n"
        "neg\tneg\t1.000000\t0.000000\n"
        "好\t好\t0.333333\t0.666667\n"
    )


def test_several_labels_a_row(tmp_path: Path) -> None:
    text = written(
        tmp_path / "predictions.tsv",
        predicted=np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        probability=np.array([[0.5, 0.25, 0.75], [0, 0, 0.125], [0, 1, 0]]),
        label_names=["a", "b", "c"],
        columns={"text": ["x", "y", "z"], "label": ["a|c", "", "b"]},
        separator="|",
    )
    assert text == (
        "text\tlabel\tprediction\tprobability_a\tprobability_b\tprobability_c\n"
        "x\ta|c\ta|c\t0.500000\t0.250000\t0.750000\n"
        "y\t\t\t0.000000\t0.000000\t0.125000\n"
        "z\tb\tb\t0.000000\t1.000000\t0.000000\n"
    )


def test_a_number_a_row(tmp_path: Path) -> None:
    text = written(
        tmp_path / "predictions.tsv",
        predicted=np.array([0.1, -1234.5, 1e-7, 12345678.0], dtype=np.float32),
        probability=np.zeros((4, 1)),
        label_names=[],
        columns={"label": ["0", "-1000", "0.0", "12345679"]},
    )
    assert text == "label\tprediction\n0\t0.1\n-1000\t-1234.5\n0.0\t1e-07\n12345679\t1.23457e+07\n"


def test_no_further_columns(tmp_path: Path) -> None:
    text = written(
        tmp_path / "predictions.tsv", predicted=np.array([0]), probability=np.array([[1.0]]), label_names=["a"]
    )
    assert text == "prediction\tprobability_a\na\t1.000000\n"


def test_cells_keep_to_themselves(tmp_path: Path) -> None:
    """Labels and texts from CSV and JSON may hold tabs and line ends; a quote is a character like any other."""
    text = written(
        tmp_path / "predictions.tsv",
        predicted=np.array([0, 1]),
        probability=np.array([[1.0, 0.0], [0.0, 1.0]]),
        label_names=["a\tb", "c\r\nd"],
        columns={"a\ttext": ['"one\ntwo', "three\rfour"]},
    )
    assert text == (
        "a text\tprediction\tprobability_a b\tprobability_c  d\n"
        '"one two\ta b\t1.000000\t0.000000\n'
        "three four\tc  d\t0.000000\t1.000000\n"
    )


def test_columns_of_another_length_are_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        written(
            tmp_path / "predictions.tsv",
            predicted=np.array([0, 0]),
            probability=np.ones((2, 1)),
            label_names=["a"],
            columns={"label": ["a", "a", "a"]},
        )
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- whole or not at all


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["write_text", "replace"])
def test_a_full_disk_leaves_the_old_file(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"f1": 0.5})
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(Path, broken, no_space)
        write_json(path, {"f1": 0.75})
    assert str(caught.value) == f"{path} cannot be written: No space left on device"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    write_json(path, {"f1": 0.75})
    assert json.loads(path.read_text()) == {"f1": 0.75}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"results\.json cannot be written: Is a directory"):
        write_json(path, {})
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (["launch.json"], False),  # killed between its first two files
        ([".launch.json.staged"], False),
        (["launch.json", "config.yaml"], False),
        (["launch.json", "notes.txt"], True),
        (["config.yaml", "thesis.tex"], True),
    ],
)
def test_a_run_that_was_killed_while_it_began(tmp_path: Path, names: list[str], is_refused: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("half")
    if is_refused:
        with pytest.raises(ConfigError, match="already holds a run"):
            choose_output_dir(config(folder))
    else:
        assert choose_output_dir(config(folder)) == folder
