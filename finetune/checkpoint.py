"""Folders that are whole or absent: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from finetune.errors import CheckpointError


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
