"""The run folder: everything that one run writes, besides what the trackers log."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from finetune.config import Config, deciding_settings
from finetune.data.batching import BatchSizes
from finetune.errors import CheckpointError, ConfigError

PACKAGES = (
    "finetune", "torch", "accelerate", "transformers", "tokenizers", "datasets", "evaluate", "wandb", "numpy",
)  # fmt: skip
LAUNCH_FILE = "launch.json"


@dataclass(frozen=True)
class LaunchRecord:
    """``launch.json``: where and how a run ran, at its latest start."""

    run_id: str
    profile: str | None
    num_processes: int
    num_machines: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_accumulation_source: str
    global_batch_size: int
    mixed_precision: str
    device: str
    device_name: str
    threads_per_process: int
    seed: int
    rank_seeds: list[int]
    command: list[str]
    started: str
    python: str
    platform: str
    packages: dict[str, str]
    git_commit: str | None


def launch_record(
    *,
    run_id: str,
    profile: Path | None,
    sizes: BatchSizes,
    accumulation_source: str,
    num_machines: int,
    mixed_precision: str,
    device: str,
    device_name: str,
    threads: int,
    seed: int,
) -> LaunchRecord:
    """Collect what a person needs to run this again."""
    return LaunchRecord(
        run_id=run_id,
        profile=None if profile is None else str(profile),
        num_processes=sizes.num_processes,
        num_machines=num_machines,
        per_device_train_batch_size=sizes.per_device,
        gradient_accumulation_steps=sizes.accumulation,
        gradient_accumulation_source=accumulation_source,
        global_batch_size=sizes.global_batch,
        mixed_precision=mixed_precision,
        device=device,
        device_name=device_name,
        threads_per_process=threads,
        seed=seed,
        rank_seeds=[seed + rank for rank in range(sizes.num_processes)],
        command=sys.argv,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=dict(_versions()),
        git_commit=_git_commit(),
    )


def _versions() -> Iterable[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue


def _git_commit() -> str | None:
    """Commit of the repository that the run was started in, which is the user's own."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def choose_output_dir(config: Config, started: float | None = None, is_restarted: bool = False) -> Path:
    """``train.output_dir``, the run folder of ``checkpoint.resume``, or a new name made from the model and the time.

    Nothing is written yet.

    Args:
        config: the run config.
        started: time of the job's start, the same for each of its restarts; default: now.
        is_restarted: whether this is one of those restarts: what is in the folder is this job's own.

    Raises:
        ConfigError: the folder has something in it that is neither to be continued nor to be overwritten, or cannot
            be written.
    """
    resume = config.checkpoint.resume
    if config.train.output_dir:
        folder = Path(config.train.output_dir).expanduser().absolute()
    elif resume not in ("auto", "never"):
        source = Path(resume).expanduser().absolute()
        folder = source.parent.parent if source.parent.name == "checkpoints" else source
    else:
        model = Path(str(config.model.name_or_path)).name
        time = datetime.fromtimestamp(started) if started is not None else datetime.now()
        folder = Path("runs", f"{model}-{time:%Y%m%d-%H%M%S}").absolute()
    try:
        if not (is_restarted and (folder / LAUNCH_FILE).is_file()):
            _check_output_dir(folder, config)
    except OSError as error:
        raise ConfigError(f"train.output_dir {folder} cannot be used: {error.strerror or error}") from error
    return folder


def _is_to_be_continued(folder: Path, config: Config) -> bool:
    """Whether a run of the same settings was stopped here; before its first checkpoint it starts over."""
    if config.checkpoint.resume == "never":
        return False
    if {path.name for path in folder.iterdir()} <= {LAUNCH_FILE, f".{LAUNCH_FILE}.staged", "config.yaml"}:
        return True  # killed while it began: nothing in it can be lost
    if not (folder / LAUNCH_FILE).is_file():
        return False
    if (folder / "checkpoints").is_dir():
        return True  # what it has in common with this run is compared once the rows are read
    try:
        earlier = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return deciding_settings(earlier) == deciding_settings(config.to_dict())
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return False


def run_id_of(folder: Path, is_overwritten: bool) -> str:
    """The id of the run in a folder that is to be continued, else a new one."""
    try:
        earlier = None if is_overwritten else json.loads((folder / LAUNCH_FILE).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError):
        earlier = None
    return earlier or uuid.uuid4().hex[:8]


def _check_output_dir(folder: Path, config: Config) -> None:
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"train.output_dir {folder}: {existing} is a file: give a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not config.train.overwrite:
            if _is_to_be_continued(folder, config):
                return
            raise ConfigError(
                f"train.output_dir {folder} already holds a run: give another folder, or empty it first with "
                "--train.overwrite true"
            )
        if not (folder / LAUNCH_FILE).is_file():
            raise ConfigError(
                f"train.output_dir {folder} holds files that no run wrote ({LAUNCH_FILE} is missing): "
                "train.overwrite empties run folders only, so give another folder"
            )
        for setting, name in _sources(config):
            if Path(name).expanduser().resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"train.output_dir {folder} would be emptied (train.overwrite), but {setting} {name} is in it: "
                    "give another folder"
                )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"train.output_dir {folder} cannot be written: no permission for {existing}")


def _sources(config: Config) -> Iterable[tuple[str, str]]:
    """Files and folders that the run reads, by setting."""
    data = config.data
    model = config.model.name_or_path
    for setting, value in (
        ("model.name_or_path", model if model and os.path.exists(os.path.expanduser(model)) else None),
        ("data.train_file", data.train_file),
        ("data.validation_file", data.validation_file),
    ):
        for name in [value] if isinstance(value, str) else value or []:
            yield setting, name


def start_run_folder(folder: Path, config: Config, record: LaunchRecord) -> None:
    """Empty, create or continue the run folder and write ``launch.json`` and ``config.yaml``.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if folder.is_dir() and config.train.overwrite:
            # launch.json goes last: without it a half-emptied folder would not count as a run folder any more.
            for entry in sorted(folder.iterdir(), key=lambda path: path.name == LAUNCH_FILE):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / LAUNCH_FILE, asdict(record))
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"train.output_dir {folder} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON; numbers that are not finite become null, as JSON has no word for them."""
    write_text(path, json.dumps(_finite(content), ensure_ascii=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def write_predictions(
    path: Path,
    *,
    predicted: NDArray[Any],
    probability: NDArray[np.float64],
    label_names: Sequence[str],
    columns: Mapping[str, Iterable[str]],
    separator: str,
) -> None:
    """One row an example, in file order: the given ``columns``, ``prediction``, and each class's probability.

    Args:
        path: the TSV to write.
        predicted: class ids ``[rows]``, 0/1 ``[rows, num_labels]``, or numbers ``[rows]`` (no ``label_names``).
        probability: ``[rows, num_labels]``; not written for regression.
        label_names: names in id order; empty for regression.
        columns: further columns by name, such as ``label``.
        separator: between several labels of a row.
    """
    header = [*columns, *prediction_columns(label_names)]

    def lines() -> Iterator[str]:
        yield "\t".join(map(_cell, header))
        for row, (*given, prediction) in enumerate(zip(*columns.values(), predicted, strict=True)):
            if not label_names:
                text, shares = f"{float(prediction):.6g}", []
            elif predicted.ndim == 2:
                text = separator.join(name for name, is_given in zip(label_names, prediction, strict=True) if is_given)
                shares = probability[row]
            else:
                text, shares = label_names[int(prediction)], probability[row]
            yield "\t".join([*map(_cell, given), _cell(text), *(f"{share:.6f}" for share in shares)])

    with _staged(path) as staged, staged.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(f"{line}\n" for line in lines())  # as they come: all together may not fit into memory


def prediction_columns(label_names: Sequence[str]) -> list[str]:
    """The columns that :func:`write_predictions` adds to those given."""
    return ["prediction", *(f"probability_{name}" for name in label_names)]


def _cell(text: str) -> str:
    """A text that keeps to its cell: labels from CSV or JSON may hold tabs and line ends."""
    return text.replace("\t", " ").replace("\r", " ").replace("\n", " ")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with _staged(path) as staged:
        staged.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A file to write in the place of ``path``, which it takes when all went well."""
    staged = path.with_name(f".{path.name}.staged")
    try:
        yield staged
        staged.replace(path)
    except BaseException as error:
        staged.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
