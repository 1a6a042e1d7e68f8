"""What of a running training goes into a checkpoint, and how a run goes on from one."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from finetune.checkpoint import (
    MANIFEST,
    load_state,
    newest_whole,
    remove_after,
    rng_state,
    save_checkpoint,
    save_state,
    saved_steps,
    set_rng_state,
    step_folder,
    verify,
)
from finetune.config import CheckpointConfig, Config, deciding_settings
from finetune.distributed import on_main_process
from finetune.errors import CheckpointError, ConfigError
from finetune.evaluation import Evaluation
from finetune.folders import write_folder
from finetune.loop import TrainState
from finetune.model import InputSettings, LoadedModel, load_trained_model, save_model
from finetune.optim import LearningRateSchedule
from finetune.run_folder import write_json
from finetune.throughput import Throughput

TRAINING = "training"  # folder of a checkpoint with all that is not the model
STATE_FILE = "state.json"


@dataclass(frozen=True)
class Identity:
    """What makes a run this run: everything that decides its weights, by the name that a message gives it."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config, rows: Mapping[str, str], labels: tuple[str, ...], global_batch: int) -> Identity:
        """Of a resolved config and the contents of its data.

        Args:
            config: the run config.
            rows: fingerprint of the rows of each split.
            labels: names in id order.
            global_batch: examples of one optimizer step.
        """
        own = {f"the rows of the {split} split": fingerprint for split, fingerprint in rows.items()}
        return cls(
            {
                **deciding_settings(config.to_dict()),
                **own,
                "the labels": list(labels),
                "the global batch size": global_batch,
            }
        )

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One line for each value that is not the one of ``other``, a checkpoint's."""
        mine = json.loads(json.dumps(self.values))
        return [
            f"{name} changed"
            if name.startswith("the rows")
            else f"{name}: {other.get(name)} then, {mine.get(name)} now"
            for name in {**other, **mine}
            if mine.get(name) != other.get(name)
        ]


@dataclass(frozen=True)
class Resumable:
    """A whole checkpoint that a run can go on from."""

    folder: Path
    content: Mapping[str, Any]  # of its state.json

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.content["train_state"]["global_step"])

    @property
    def stop_reason(self) -> str | None:
        """Why training had ended; None when it had not."""
        reason: str | None = self.content["train_state"]["stop_reason"]
        return reason

    def describe(self, num_processes: int) -> str:
        """For the plan."""
        saved_by = self.content["num_processes"]
        line = f"from step {self.step} ({self.folder})"
        if not self.is_exact:
            line += "; the optimizer starts afresh (checkpoint.save_optimizer was false), so this is not exact"
        if saved_by != num_processes:
            line += (
                f"; {num_processes} process(es) instead of {saved_by}: the same steps, other random numbers in dropout"
            )
        return line

    @property
    def is_exact(self) -> bool:
        """Whether it has the optimizer's state."""
        return (self.folder / TRAINING / "optimizer.pt").is_file()


def find_checkpoint(resume: str, output_dir: Path, warn: Callable[[str], None]) -> Resumable | None:
    """The checkpoint that ``checkpoint.resume`` asks for, verified; None where there is none and none is needed.

    Args:
        resume: ``auto``, ``never``, a run folder or a checkpoint.
        output_dir: the run folder of this run.
        warn: is told of damaged checkpoints.

    Raises:
        CheckpointError: the one asked for by path is damaged or not there, or all of them are damaged.
    """
    if resume == "never":
        return None
    folder = output_dir if resume == "auto" else Path(resume).expanduser().absolute()
    if (folder / TRAINING / STATE_FILE).is_file():
        verify(folder)
        return _resumable(folder)
    found = newest_whole(folder / "checkpoints", warn)
    if found is None and resume != "auto":
        raise CheckpointError(
            f"checkpoint.resume {resume}: no whole checkpoint there: give a run folder with checkpoints/, or one of "
            "the folders in it"
        )
    if found is None and saved_steps(folder / "checkpoints"):
        raise CheckpointError(
            f"{folder}: all checkpoints are damaged, so there is nothing to go on from: start anew with "
            "--train.overwrite true, or give another train.output_dir"
        )
    return None if found is None else _resumable(found)


def _resumable(folder: Path) -> Resumable:
    try:
        return Resumable(folder, json.loads((folder / TRAINING / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint to go on from: {error}") from error


def refuse_another_run(resumable: Resumable, identity: Identity) -> None:
    """Training on with other rows or settings would make weights that no config describes.

    Raises:
        ConfigError: lists every difference.
    """
    differences = identity.differences(resumable.content["identity"])
    if differences:
        raise ConfigError(
            f"checkpoint.resume: {resumable.folder} belongs to a run with other rows or settings:\n"
            + "\n".join(f"- {line}" for line in differences)
            + "\nUndo the changes to go on with it, or start anew: another train.output_dir, or --train.overwrite true"
        )


@dataclass
class Snapshots:
    """Saves checkpoints of a run and the best model among them; puts a run back to where one was."""

    accelerator: Accelerator
    output_dir: Path
    config: CheckpointConfig
    identity: Identity
    loaded: LoadedModel
    inputs: InputSettings
    optimizer: torch.optim.Optimizer
    schedule: LearningRateSchedule
    throughput: Throughput
    earlier_seconds: float = 0.0  # of the starts of this run before this one
    started: float = field(default_factory=time.monotonic)
    best: Evaluation | None = None
    size: int = 0
    """Bytes of the checkpoint saved last, on the main process."""
    in_background: bool = False
    """Write while training goes on, from a copy in the host's memory; for devices that have a memory of their own."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _writing: Future[None] | None = None

    def keep_best(self, evaluation: Evaluation) -> None:
        """Remember the best evaluation; the checkpoint that follows it holds its model."""
        self.best = evaluation

    @property
    def wall_seconds(self) -> float:
        """Of all starts of this run."""
        return self.earlier_seconds + time.monotonic() - self.started

    def save(self, state: TrainState) -> None:
        """Write ``checkpoints/step-NNNNNNNN``, and ``best/`` when it is the best; called on all ranks at once.

        Raises:
            CheckpointError: the disk is full or not writable; the checkpoint before is as it was.
        """
        self.wait()
        state.saved_step = state.global_step
        own = {"rng": rng_state(), "throughput": self.throughput.state()}
        ranks = gather_object([own]) if self.accelerator.num_processes > 1 else [own]
        on_main_process(self.accelerator, lambda: self._begin(state, ranks))

    def wait(self) -> None:
        """Until what is being written is on disk; called on all ranks at once.

        Raises:
            CheckpointError: on every rank, when that failed.
        """
        if self.in_background:
            on_main_process(self.accelerator, lambda: None if self._writing is None else self._writing.result())

    def _begin(self, state: TrainState, ranks: list[dict[str, Any]]) -> None:
        content = self._content(state, ranks)
        if not self.in_background:
            self._write(content)
            return
        weights = on_host(self.loaded.model.state_dict())
        self._writing = self._thread.submit(self._write, on_host(content), weights)

    def _content(self, state: TrainState, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """What goes into the files of ``training/``."""
        scaler = self.accelerator.scaler
        return {
            "state": {
                "train_state": asdict(state),
                "identity": self.identity.values,
                "num_processes": len(ranks),
                "wall_seconds": self.wall_seconds,
            },
            "optimizer": self.optimizer.state_dict() if self.config.save_optimizer else None,
            "shared": {
                "schedule": self.schedule.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "best": None
                if self.best is None
                else {**asdict(self.best), "logits": torch.from_numpy(self.best.logits)},
            },
            "ranks": ranks,
        }

    def _write(self, content: Mapping[str, Any], weights: dict[str, torch.Tensor] | None = None) -> None:
        started = time.perf_counter()
        state = content["state"]["train_state"]
        folder = save_checkpoint(
            self.output_dir / "checkpoints",
            state["global_step"],
            lambda staged: self._fill(staged, content, weights),
            keep=self.config.save_total_limit,
            protected={state["best_step"]},
        )
        self.size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if state["best_step"] == state["global_step"]:
            promote(folder, self.output_dir / "best")
        seconds = time.perf_counter() - started
        self.throughput.longest_checkpoint = max(self.throughput.longest_checkpoint, seconds)

    def _fill(self, folder: Path, content: Mapping[str, Any], weights: dict[str, torch.Tensor] | None) -> None:
        save_model(folder, self.loaded.model, self.loaded.tokenizer, self.inputs, weights)
        training = folder / TRAINING
        training.mkdir()
        write_json(training / STATE_FILE, content["state"])
        if content["optimizer"] is not None:
            save_state(training / "optimizer.pt", content["optimizer"])
        save_state(training / "shared.pt", content["shared"])
        for rank, own in enumerate(content["ranks"]):
            save_state(training / f"rank-{rank:05d}.pt", own)

    def restore(self, resumable: Resumable) -> TrainState:
        """Put the optimizer, the schedule, the random numbers and all counts back; weights: :func:`load_weights`.

        With another number of processes than the checkpoint's the examples of each step stay the same, but dropout
        draws other numbers.
        """
        training = resumable.folder / TRAINING
        if resumable.is_exact:
            self.optimizer.load_state_dict(load_state(training / "optimizer.pt"))
        shared = load_state(training / "shared.pt")
        self.schedule.load_state_dict(shared["schedule"])
        if self.accelerator.scaler is not None and shared["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(shared["scaler"])
        if shared["best"] is not None:
            self.best = Evaluation(**{**shared["best"], "logits": shared["best"]["logits"].numpy()})
        self._restore_rank(training, resumable.content["num_processes"])
        self.earlier_seconds = resumable.content["wall_seconds"]
        return train_state(resumable.content)

    def _restore_rank(self, training: Path, saved_by: int) -> None:
        rank = self.accelerator.process_index
        if saved_by == self.accelerator.num_processes:
            own = load_state(training / f"rank-{rank:05d}.pt")
            self.throughput.restore(own["throughput"])
            set_rng_state(own["rng"])
            return
        ranks = [load_state(training / f"rank-{each:05d}.pt") for each in range(saved_by)]
        summed = ranks[0]["throughput"]
        sums = [each["throughput"]["loss_sum"] for each in ranks]
        summed["loss_sum"] = torch.stack(sums).sum() if rank == 0 else torch.zeros(())
        self.throughput.restore(summed)

    def tidy(self, resumable: Resumable, state: TrainState) -> None:
        """Make the run folder what it was when the checkpoint was saved; for one process.

        Later checkpoints go, and ``best/`` becomes the model that the checkpoint calls best: the run may have been
        killed before or after it was written. Every best model has a checkpoint, kept as long as it is the best.
        """
        remove_after(self.output_dir / "checkpoints", resumable.step)
        source = step_folder(resumable.folder.parent, state.best_step)
        if state.best_step == resumable.step:
            source = resumable.folder  # verified when it was found
        elif source.is_dir():
            verify(source)
        if state.best_step and source.is_dir():
            promote(source, self.output_dir / "best")


def on_host(value: Any, copies: dict[int, torch.Tensor] | None = None) -> Any:
    """A copy of nested dicts, lists and tuples in the host's memory; tensors that share their memory go on doing so."""
    copies = {} if copies is None else copies
    if isinstance(value, torch.Tensor):
        key = value.data_ptr() if value.numel() else id(value)
        if key not in copies or copies[key].shape != value.shape:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, Mapping):
        return {name: on_host(each, copies) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(each, copies) for each in value)
    return value


def train_state(content: Mapping[str, Any]) -> TrainState:
    """The state of training in a ``state.json``, which has no word for a best metric that is not a number."""
    state = TrainState(**content["train_state"])
    if state.best_step and state.best_metric is None:
        state.best_metric = math.nan
    return state


def load_weights(model: nn.Module, resumable: Resumable, inputs: InputSettings) -> None:
    """Give a model the weights of a checkpoint; before it is wrapped."""
    model.load_state_dict(load_trained_model(resumable.folder, inputs).model.state_dict())


def promote(checkpoint: Path, best: Path) -> None:
    """Make ``best`` the model of a checkpoint: the same files, linked where the disk can do that, else copied."""

    def link(folder: Path) -> None:
        for path in checkpoint.iterdir():
            if path.is_file() and path.name != MANIFEST:
                try:
                    os.link(path, folder / path.name)
                except OSError:
                    shutil.copyfile(path, folder / path.name)

    write_folder(best, link)
