"""Checkpoints that are whole or absent: written beside their place, listed by hash, flushed to disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import CheckpointError
from finetune.folders import beside, flush, put_back, unwritable, write_folder

MANIFEST = "manifest.json"
VERSION = 1  # of the layout of a checkpoint
_BLOCK_BYTES = 1 << 20
_ARRAY = "numpy.ndarray"  # key that marks a tensor as an array in a state

# ---------------------------------------------------------------- the checkpoints of a run


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step is."""
    return folder / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in ``folder``, damaged or not, in order.

    Raises:
        CheckpointError: ``folder`` is there but cannot be read.
    """
    return sorted(step for step in _steps_named(folder) if step_folder(folder, step).is_dir())


def save_checkpoint(
    folder: Path, step: int, write: Callable[[Path], None], *, keep: int | None = None, protected: Collection[int] = ()
) -> Path:
    """Let ``write`` fill the checkpoint of ``step``, add its manifest, and remove older checkpoints.

    The checkpoint appears under its name when all of it is on disk; older ones go only after that. A crash at any
    moment, or a full disk, leaves the checkpoints before as they were. One process saves at a time.

    Args:
        folder: that holds all checkpoints of a run.
        step: optimizer steps done. A checkpoint that it has already is replaced.
        write: fills a new folder; ``manifest.json`` is added to it.
        keep: checkpoints to keep, the newest ones; None: all. The one just written always stays.
        protected: steps whose checkpoints are kept besides.

    Raises:
        CheckpointError: the disk is full or cannot be written; names the checkpoint that can still be used.
    """
    target = step_folder(folder, step)

    def fill(staged: Path) -> None:
        write(staged)
        _write_manifest(staged, step)

    try:
        _finish_interrupted(folder)
        write_folder(target, fill)
    except (CheckpointError, OSError) as error:
        problem = error if isinstance(error, CheckpointError) else unwritable(target, error)
        raise CheckpointError(f"{problem}; {_what_is_left(folder)}") from error
    try:
        _rotate(folder, {step, *protected}, keep)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{target} is saved, but older checkpoints cannot be removed: {reason}") from error
    return target


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest. Files that the manifest does not list do no harm.

    Raises:
        CheckpointError: a file is missing, cannot be read or is not what was written; names it.
    """
    manifest = checkpoint / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        version = content["version"]
        if version != VERSION:
            raise CheckpointError(f"{checkpoint} has layout {version}, this finetune reads layout {VERSION}")
        step = int(content["step"])
        listed = [(str(name), int(entry["bytes"]), entry["sha256"]) for name, entry in content["files"].items()]
    except FileNotFoundError:
        raise CheckpointError(f"{manifest} is missing: this is not a whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{manifest} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} is damaged: {type(error).__name__}: {error}") from error
    if _step_of(checkpoint) not in (None, step):
        raise CheckpointError(f"{manifest} is damaged: it is of step {step}")
    for name, size, digest in listed:
        _verify_file(checkpoint / name, size, digest)


def newest_whole(folder: Path, on_damaged: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is as it was written; changes nothing on disk.

    A checkpoint that was about to be replaced when the process died is found under the name it had then.

    Args:
        folder: that holds all checkpoints of a run; need not exist.
        on_damaged: told about each newer checkpoint that is damaged: which one, which file, and what is wrong.

    Raises:
        CheckpointError: ``folder`` is there but cannot be read.
    """
    for step in sorted(_steps_named(folder), reverse=True):
        target = step_folder(folder, step)
        for path in filter(Path.is_dir, (target, beside(target, "previous"))):
            try:
                verify(path)
                return path
            except CheckpointError as error:
                on_damaged(f"a checkpoint is passed over: {error}")
    return None


def _steps_named(folder: Path) -> set[int]:
    try:
        steps = {_step_of(path) for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    return {step for step in steps if step is not None}


def _step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint, also of one that was about to be replaced."""
    match = re.fullmatch(r"step-([0-9]+)|\.step-([0-9]+)\.previous", path.name)
    return int(match[1] or match[2]) if match else None


def _what_is_left(folder: Path) -> str:
    """For the message of a save that failed."""
    try:
        usable = newest_whole(folder, lambda defect: None)
    except CheckpointError:
        usable = None
    return f"the checkpoint {usable.name} is intact" if usable else f"there is no whole checkpoint in {folder}"


def _rotate(folder: Path, kept: Collection[int], keep: int | None) -> None:
    steps = saved_steps(folder)
    surplus = [] if keep is None else steps[: max(len(steps) - keep, 0)]
    _remove(folder, [step for step in surplus if step not in kept])


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, of a run that goes on from ``step``: they are damaged or given up.

    Raises:
        CheckpointError: they cannot be removed.
    """
    try:
        _remove(folder, [each for each in saved_steps(folder) if each > step])
    except OSError as error:
        raise CheckpointError(f"{folder}: checkpoints cannot be removed: {error.strerror or error}") from error


def _remove(folder: Path, steps: Collection[int]) -> None:
    """Half removed, a checkpoint no longer has its name."""
    removed = [step_folder(folder, step) for step in steps]
    for path in removed:
        path.rename(beside(path, "deleted"))
    if removed:
        flush(folder)  # or a power cut may bring a half deleted one back under its own name
    for path in removed:
        shutil.rmtree(beside(path, "deleted"), ignore_errors=True)  # the next save tries again


def _finish_interrupted(folder: Path) -> None:
    """Complete what a crashed save or rotation left undone."""
    for path in folder.glob(".step-*.previous"):
        put_back(path, path.with_name(path.name[1:].removesuffix(".previous")))
    for pattern in (".step-*.staged", ".step-*.deleted", ".step-*.previous"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------- the files of a checkpoint


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    content = {"version": VERSION, "step": step, "files": files}
    # Without a newline at the end, which could be cut off unnoticed.
    (folder / MANIFEST).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _verify_file(path: Path, size: int, digest: str) -> None:
    try:
        found = path.stat().st_size
        if found != size:  # before reading gigabytes
            raise CheckpointError(f"{path} is damaged: it has {found:,} bytes instead of {size:,}")
        if _sha256(path) != digest:
            raise CheckpointError(f"{path} is damaged: its content is not what was written (sha256)")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: a damaged name
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- states


def save_state(path: Path, state: Mapping[Any, Any]) -> None:
    """Write nested dicts, lists and tuples of numbers, texts, bytes, None, tensors and numpy arrays.

    Numpy scalars become Python's; subclasses of dict become dicts.

    Raises:
        TypeError: there is something else in it, which :func:`load_state` would refuse; says where.
        OSError, RuntimeError: it cannot be written.
    """
    plain = _to_plain(state, path.name)
    with path.open("wb") as file:  # a file and not its name: torch then keeps the OSError that says what went wrong
        torch.save(plain, file)


def load_state(path: Path) -> Any:
    """Read what :func:`save_state` wrote, tensors on the CPU; never runs code from the file.

    Raises:
        CheckpointError: it is missing, damaged, or holds anything but plain values.
    """
    try:
        return _from_plain(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:  # torch's own message advises to load the file all the same
        raise CheckpointError(
            f"{path} cannot be loaded: it is damaged, or holds more than plain values and tensors, which could run code"
        ) from error
    except Exception as error:  # torch raises OSError, RuntimeError, EOFError, …
        raise CheckpointError(f"{path} cannot be loaded: {' '.join(str(error).split())[:200]}") from error


def _to_plain(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {_to_plain(key, place): _to_plain(each, f"{place}[{key!r}]") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_plain(each, f"{place}[{index}]") for index, each in enumerate(value))
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    raise TypeError(f"{place} is a {type(value).__name__}, which no state may hold")


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _from_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_from_plain(each) for each in value)
    return value


def rng_state() -> dict[str, Any]:
    """The random generators of this process, as plain values and tensors: Python, numpy, torch, and torch's current
    CUDA device where there is one."""
    kind, words, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go on from a :func:`rng_state`; a device that has none in it keeps its own."""
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
