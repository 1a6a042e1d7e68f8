"""Checkpoints that are whole or absent: written beside their place, flushed to disk, listed by hash, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from finetune.errors import CheckpointError

MANIFEST = "manifest.json"
VERSION = 1  # of the layout of a checkpoint
_BLOCK_BYTES = 1 << 20


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step is."""
    return folder / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in ``folder``, whole or not, in order."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def save_checkpoint(
    folder: Path, step: int, write: Callable[[Path], None], *, keep: int | None = None, protected: Collection[int] = ()
) -> Path:
    """Let ``write`` fill the checkpoint of ``step``, add its manifest, and remove older checkpoints.

    The checkpoint appears under its name when all of it is on disk; older ones go only after that. A crash at any
    moment, or a full disk, leaves the checkpoints before as they were.

    Args:
        folder: that holds all checkpoints of a run.
        step: optimizer steps done.
        write: fills a new folder.
        keep: checkpoints to keep, the newest ones; None: all.
        protected: steps whose checkpoints are kept besides.

    Raises:
        CheckpointError: the disk is full or cannot be written; names the checkpoint that is still good.
    """

    def fill(staged: Path) -> None:
        write(staged)
        _write_manifest(staged, step)

    target = step_folder(folder, step)
    earlier = [each for each in saved_steps(folder) if each != step]
    _remove_leftovers(folder)
    try:
        write_folder(target, fill)
    except CheckpointError as error:
        usable = f"the checkpoint of step {earlier[-1]} is as it was" if earlier else "there is no checkpoint before it"
        raise CheckpointError(f"{error}; {usable}") from error
    kept = {step, *protected, *(earlier if keep is None else sorted([*earlier, step])[-keep:])}
    for each in earlier:
        if each not in kept:
            remove_checkpoint(folder, each)
    return target


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove a checkpoint; half removed it has another name already."""
    path = step_folder(folder, step)
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What crashed saves and removals left behind; ``write_folder`` itself puts a replaced checkpoint back."""
    for pattern in (".step-*.staged", ".step-*.removed"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*.previous"):
        _put_back(path, path.with_name(path.name[1:].removesuffix(".previous")))
        shutil.rmtree(path, ignore_errors=True)


def _write_manifest(folder: Path, step: int) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    content = {"version": VERSION, "step": step, "files": listed}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        CheckpointError: a file is missing or is not what was written; names it.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["version"], manifest["files"].items()
        expected = [(name, entry["bytes"], entry["sha256"]) for name, entry in files]
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it is not a whole checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} is damaged: {error}") from None
    if version != VERSION:
        raise CheckpointError(f"{checkpoint} has layout {version}, this finetune reads layout {VERSION}")
    for name, size, digest in expected:
        path = checkpoint / name
        try:
            if path.stat().st_size != size:
                raise CheckpointError(f"{path} is damaged: it has {path.stat().st_size:,} bytes instead of {size:,}")
            if _sha256(path) != digest:
                raise CheckpointError(f"{path} is damaged: its content is not what was written")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def newest_whole(folder: Path, on_damaged: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is as it was written; ``on_damaged`` is told what is wrong with newer ones."""
    _remove_leftovers(folder)
    for step in reversed(saved_steps(folder)):
        try:
            verify(step_folder(folder, step))
            return step_folder(folder, step)
        except CheckpointError as error:
            on_damaged(f"a checkpoint is passed over: {error}")
    return None


def save_state(path: Path, state: Any) -> None:
    """Write nested dicts, lists, numbers, texts and tensors."""
    torch.save(state, path)


def load_state(path: Path) -> Any:
    """Read what :func:`save_state` wrote; never runs code from the file.

    Raises:
        CheckpointError: it is missing, damaged, or holds something else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises OSError, RuntimeError, EOFError, UnpicklingError, …
        raise CheckpointError(f"{path} cannot be loaded: {' '.join(str(error).split())[:200]}") from error


def rng_state() -> dict[str, Any]:
    """The random generators of this process, as plain values and tensors: Python, numpy, torch and its CUDA device."""
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    key = torch.from_numpy(of_numpy["state"]["key"].astype(np.int64))  # torch.save knows no numpy array
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {**of_numpy, "state": {**of_numpy["state"], "key": key}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on from a :func:`rng_state`; a device that has none in it keeps its own."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    of_numpy = state["numpy"]
    key = of_numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**of_numpy, "state": {**of_numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a new folder and put it in the place of ``target``.

    A crash or a full disk leaves the previous folder as it was. (A crash between the two renames leaves it under the
    name ``.NAME.previous``; the next call puts it back first.)

    Raises:
        CheckpointError: the folder cannot be written; names it and the reason.
    """
    staged, previous = (target.with_name(f".{target.name}.{state}") for state in ("staged", "previous"))
    try:
        _put_back(previous, target)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        write(staged)
        for path in [*staged.rglob("*"), staged]:
            _flush(path)
        shutil.rmtree(previous, ignore_errors=True)
        if target.exists():
            target.rename(previous)
        staged.rename(target)
        shutil.rmtree(previous, ignore_errors=True)
        _flush(target.parent)
    except Exception as error:
        shutil.rmtree(staged, ignore_errors=True)
        _put_back(previous, target)
        if not _is_of_the_disk(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{target} cannot be written: {reason} (is there space, and permission?)") from error


def _put_back(previous: Path, target: Path) -> None:
    """Undo half a replacement."""
    if previous.is_dir() and not target.exists():
        previous.rename(target)


def _is_of_the_disk(error: Exception) -> bool:
    """A full disk is an OSError to Python, but SafetensorError to safetensors, RuntimeError to ``torch.save``, and a
    bare Exception to tokenizers."""
    return isinstance(error, OSError | SafetensorError | RuntimeError) or type(error) is Exception


def _flush(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
