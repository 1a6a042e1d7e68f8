"""Where the numbers of a run go: a JSONL file always; Weights & Biases and TensorBoard on top.

The loop sees one object, :class:`Trackers`, and never asks which of them are on. Only the main process holds real
ones; every other rank gets an empty ``Trackers()``. A tracker that fails never stops training: the first failure of
each is logged, the others go on.

Nothing heavy is imported here: a tracker imports its own library when it starts.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np

from finetune.config import TrackerName
from finetune.errors import ConfigError

TRACKER_NAMES: tuple[str, ...] = get_args(TrackerName)
# W&B shows at most this many rows of a table and cuts off the rest: a larger matrix is sent without its zeros.
MAX_TABLE_ROWS = 10_000

logger = logging.getLogger(__name__)

WandbMode = Literal["online", "offline", "shared", "disabled"]


class Tracker(ABC):
    """One destination of metrics. Methods may raise; :class:`Trackers` contains the damage."""

    name: str
    run_id: str | None = None

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        """Record the metrics of one optimizer step; steps never decrease."""

    def log_evaluation_tables(
        self,
        step: int,
        *,
        label_names: Sequence[str],
        confusion: np.ndarray | None,
        per_class: Sequence[Mapping[str, object]],
    ) -> None:
        """Record the tables of one evaluation; call it after :meth:`log` of the same step.

        Rows of ``confusion`` are the true labels, columns the predicted ones; ``per_class`` rows share their keys.
        """
        return

    @abstractmethod
    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        """Write the results of the whole run and close."""

    def suspend(self) -> None:
        """Close a run that is going to be continued; its latest step may not be complete."""
        self.finish({}, failed=True)

    @abstractmethod
    def describe(self) -> str:
        """Where to look, in one phrase."""


class Trackers:
    """Every tracker of a run behind one interface; as a context manager, an exception ends the run as failed."""

    def __init__(self, members: Sequence[Tracker] = ()) -> None:
        self._members = tuple(members)
        self._failed: set[str] = set()
        self._finished = False

    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        self._each(lambda tracker: tracker.log(metrics, step, epoch))

    def log_evaluation_tables(
        self,
        step: int,
        *,
        label_names: Sequence[str],
        confusion: np.ndarray | None,
        per_class: Sequence[Mapping[str, object]],
    ) -> None:
        self._each(
            lambda tracker: tracker.log_evaluation_tables(
                step, label_names=label_names, confusion=confusion, per_class=per_class
            )
        )

    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        """Close all trackers; only the first call counts."""
        if not self._finished:
            self._finished = True
            self._each(lambda tracker: tracker.finish(summary, failed))

    def suspend(self) -> None:
        """Close all trackers of a run that is going to be continued."""
        if not self._finished:
            self._finished = True
            self._each(lambda tracker: tracker.suspend())

    @property
    def run_id(self) -> str | None:
        """The W&B run id: the one given, where W&B is on."""
        return next((tracker.run_id for tracker in self._members if tracker.run_id), None)

    def describe(self) -> str:
        return "; ".join(tracker.describe() for tracker in self._members)

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in self._members:
            try:
                action(tracker)
            except Exception as error:
                if tracker.name not in self._failed:
                    self._failed.add(tracker.name)
                    logger.warning("%s failed, training goes on without it: %s", tracker.name, _one_line(error))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish({}, failed=kind is not None)


def start_trackers(
    names: Sequence[str],
    *,
    output_dir: Path,
    config: Mapping[str, object],
    project: str,
    run_name: str | None,
    group: str | None,
    tags: Sequence[str],
    run_id: str | None = None,
    resumed_step: int | None = None,
    evaluated_step: int | None = None,
) -> Trackers:
    """Start the named trackers and the JSONL file; call it in the main process only.

    ``run_id`` names the W&B run, or continues it. ``resumed_step`` is the step of the checkpoint that training goes on
    from, ``evaluated_step`` that of its last evaluation (default: the same): what was logged after them is about to be
    logged again, so it is dropped.
    """
    for name in names:
        if name not in TRACKER_NAMES:
            nearest = difflib.get_close_matches(name, TRACKER_NAMES, n=1, cutoff=0.0)[0]
            known = ", ".join(TRACKER_NAMES)
            raise ConfigError(f"tracking.trackers: unknown {name!r}, did you mean {nearest!r}? Known: {known}")

    output_dir.mkdir(parents=True, exist_ok=True)
    jsonl = JsonlTracker(output_dir, resumed_step, evaluated_step)
    members: list[Tracker] = [jsonl]
    try:
        if "tensorboard" in names:
            members.append(TensorBoardTracker(output_dir, config, resumed_step))
        if "wandb" in names:
            members.extend(_start_wandb(output_dir, config, project, run_name, group, tags, run_id, jsonl.kept))
    except BaseException:
        Trackers(members).finish({}, failed=True)
        raise
    return Trackers(members)


def _start_wandb(*arguments: Any) -> list[Tracker]:
    """The W&B tracker, or nothing where it cannot start for a reason that no setting mends."""
    try:
        return [WandbTracker(*arguments)]
    except (ConfigError, ImportError):
        raise
    except Exception as error:
        logger.warning("W&B did not start, training goes on without it: %s", _one_line(error))
        return []


class JsonlTracker(Tracker):
    """``metrics.jsonl``: one JSON object a call of ``log``, on disk when the call returns. NaN and inf become null."""

    name = "metrics.jsonl"

    def __init__(self, output_dir: Path, resumed_step: int | None, evaluated_step: int | None) -> None:
        self.path = output_dir / "metrics.jsonl"
        self.kept: list[dict[str, float]] = []
        """The entries of an earlier start that still hold."""
        if resumed_step is not None:
            self.kept = _entries_until(
                self.path, resumed_step, resumed_step if evaluated_step is None else evaluated_step
            )
        rewritten = self.path.with_suffix(".tmp")
        rewritten.write_text("".join(f"{json.dumps(entry)}\n" for entry in self.kept), encoding="utf-8")
        rewritten.replace(self.path)
        self.file = self.path.open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, "epoch": epoch, **numbers}, allow_nan=False) + "\n")

    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        self.file.close()

    def describe(self) -> str:
        return str(self.path)


def _entries_until(path: Path, last_step: int, last_evaluation: int) -> list[dict[str, float]]:
    """The whole entries of a metrics file up to a step; a process killed while writing leaves half a line."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        is_evaluation = any(name.startswith("eval/") for name in entry)
        if entry["step"] <= (last_evaluation if is_evaluation else last_step):
            kept.append(entry)
    return kept


class WandbTracker(Tracker):
    """One Weights & Biases run: online for those who are logged in, else offline; never a prompt, never a long wait.

    Steps only ever rise, also over several starts: what an earlier start has sent or written is not logged again, and
    what it lost when it was killed (W&B writes offline files in blocks of 32 KiB) is logged from ``metrics.jsonl``.
    """

    name = "W&B"

    def __init__(
        self,
        output_dir: Path,
        config: Mapping[str, object],
        project: str,
        run_name: str | None,
        group: str | None,
        tags: Sequence[str],
        run_id: str | None,
        earlier: Sequence[Mapping[str, float]],
    ) -> None:
        import wandb

        def start(mode: WandbMode) -> wandb.Run:
            # The mode must also be global: with it in init() alone an "offline" process sends telemetry when it
            # exits, which took 10 s on a network that swallows packets (wandb 0.31).
            wandb.setup(settings=wandb.Settings(mode=mode, silent=True))
            return wandb.init(
                mode=mode,
                dir=output_dir,
                config=dict(config),
                project=project,
                name=run_name,
                group=group,
                tags=list(tags) or None,
                id=run_id,
                resume="allow" if run_id else None,
                settings=wandb.Settings(
                    silent=True,
                    console="off",  # it would store every redraw of the progress bar, 2 KB a second
                    disable_git=True,
                    disable_code=True,
                    save_code=False,
                    init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)),
                    finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", 300)),
                ),
            )

        self.mode, self.reason = wandb_mode()
        try:
            self.run = start(self.mode)
        except (wandb.errors.UsageError, ValueError) as error:
            raise ConfigError(f"tracking: W&B refuses project {project!r}, run {run_name!r}: {error}") from error
        except wandb.Error as error:
            if self.mode not in ("online", "shared"):
                raise
            logger.warning("W&B did not start online, the run is kept offline: %s", _one_line(error))
            wandb.teardown()  # it still holds the run id
            self.mode, self.reason = "offline", "it did not start online"
            self.run = start(self.mode)

        self.run_id = self.run.id if self.mode != "disabled" else None
        self.run.define_metric("train/global_step")
        self.run.define_metric("*", step_metric="train/global_step")
        self._row: dict[str, Any] = {}  # of the latest step, until the next: an evaluation joins it
        self._step = 0
        self._last_step = self.run.step - 1 if self.mode == "online" else _last_offline_step(self.run)
        for entry in earlier:
            metrics = {
                name: value for name, value in entry.items() if name not in ("step", "epoch") and value is not None
            }
            self.log(metrics, int(entry["step"]), entry["epoch"])

    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        if step > self._last_step:
            if step != self._step:
                self._send()
            self._step = step
            self._row |= {"train/global_step": step, "train/epoch": epoch, **metrics}

    def _send(self) -> None:
        if self._row:
            self.run.log(self._row, step=self._step, commit=True)
        self._row = {}

    def log_evaluation_tables(
        self,
        step: int,
        *,
        label_names: Sequence[str],
        confusion: np.ndarray | None,
        per_class: Sequence[Mapping[str, object]],
    ) -> None:
        import wandb

        tables: dict[str, Any] = {}
        if confusion is not None:
            # The chart is drawn by a definition on the server, which expects these columns.
            columns = ["Actual", "Predicted", "nPredictions"]
            tables["eval/confusion_matrix"] = wandb.plot_table(
                vega_spec_name="wandb/confusion_matrix/v1",
                data_table=wandb.Table(columns=list(columns), data=_confusion_cells(confusion, label_names)),
                fields={column: column for column in columns},
                string_fields={"title": f"Confusion matrix at step {step}"},
            )
        if per_class:
            tables["eval/per_class"] = wandb.Table(
                columns=list(per_class[0]), data=[list(row.values()) for row in per_class]
            )
        self._row |= tables  # of the latest step: with a step of their own, those of an earlier (best) one are ignored

    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        import wandb

        try:
            self._send()  # before the summary, or the last row would overwrite it
            self.run.summary.update(dict(summary))
            self.run.finish(exit_code=int(failed))
        finally:
            wandb.teardown()  # forget the mode and the login: another run in this process decides anew

    def suspend(self) -> None:
        import wandb

        try:
            if self.mode == "online":
                self.run.mark_preempting()
            self.run.finish(exit_code=1)
        finally:
            wandb.teardown()

    def describe(self) -> str:
        if self.mode == "disabled":
            return f"W&B disabled ({self.reason})"
        if self.mode == "offline":
            run_dir = Path(self.run.dir).parent
            return f"W&B offline ({self.reason}): {run_dir.parent}; upload with `wandb sync {run_dir}`"
        return f"W&B {self.mode}: {self.run.url}"


def _last_offline_step(run: Any) -> int:
    """The last step in the offline files of earlier starts; -1 for none. Files of a killed start may hold nothing."""
    last, own = -1, Path(run.dir).parent
    for folder in own.parent.glob(f"offline-run-*-{run.id}"):
        if folder != own:
            command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            step = json.loads(shown.stdout)["step"] if shown.returncode == 0 else None
            last = max(last, -1 if step is None else int(step))
    return last


def wandb_mode() -> tuple[WandbMode, str]:
    """How W&B is going to run, and why.

    An explicit choice (``WANDB_MODE``, or ``wandb offline`` in a settings file) wins, except that online needs
    credentials: ``WANDB_API_KEY``, netrc, a settings file or an identity token. They are tried against the server
    for at most ``WANDB_HTTP_TIMEOUT`` seconds, 10 by default; without any, nothing touches the network.
    """
    import wandb

    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if settings.mode == "disabled":
        return "disabled", "as configured"
    if settings.mode in ("offline", "dryrun"):
        return "offline", "as configured"
    try:
        if not wandb.login(prompt=False, verify=True):
            return "offline", "no login found"
    except wandb.errors.AuthenticationError as error:
        logger.warning("W&B cannot log in, the run is kept offline: %s", _one_line(error))
        return "offline", f"cannot log in at {settings.base_url}"
    return ("shared" if settings.mode == "shared" else "online"), "logged in"


class TensorBoardTracker(Tracker):
    """Event files in ``tensorboard/``: scalars under the same names, tables as text."""

    name = "TensorBoard"

    def __init__(self, output_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tracking.trackers: 'tensorboard' is not installed. Run `pip install tensorboard`, or leave it out."
            ) from error
        self.log_dir = output_dir / "tensorboard"
        purge_step = None if resumed_step is None else resumed_step + 1
        self.writer = SummaryWriter(self.log_dir, purge_step=purge_step)
        self.writer.add_text("config", f"```\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, metrics: Mapping[str, float], step: int, epoch: float) -> None:
        for name, value in {"train/epoch": epoch, **metrics}.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_evaluation_tables(
        self,
        step: int,
        *,
        label_names: Sequence[str],
        confusion: np.ndarray | None,
        per_class: Sequence[Mapping[str, object]],
    ) -> None:
        if confusion is not None:
            rows = [[name, *counts] for name, counts in zip(label_names, confusion.tolist(), strict=True)]
            self.writer.add_text("eval/confusion_matrix", _markdown(["true \\ predicted", *label_names], rows), step)
        if per_class:
            rows = [list(row.values()) for row in per_class]
            self.writer.add_text("eval/per_class", _markdown(list(per_class[0]), rows), step)

    def finish(self, summary: Mapping[str, object], failed: bool) -> None:
        rows: list[Sequence[object]] = [("state", "failed" if failed else "finished"), *summary.items()]
        self.writer.add_text("summary", _markdown(["result", "value"], rows))
        self.writer.close()

    def describe(self) -> str:
        return f"TensorBoard: `tensorboard --logdir {self.log_dir}`"


def _confusion_cells(confusion: np.ndarray, label_names: Sequence[str]) -> list[list[str | int]]:
    """The matrix as rows of (true label, predicted label, count)."""
    keep_zeros = confusion.size <= MAX_TABLE_ROWS
    return [
        [label_names[true], label_names[predicted], int(count)]
        for (true, predicted), count in np.ndenumerate(confusion)
        if count or keep_zeros
    ]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
