"""Folders that are whole or absent: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    staged, previous = beside(target, "staged"), beside(target, "previous")
    try:
        put_back(previous, target)
        shutil.rmtree(staged, ignore_errors=True)
        missing = [path for path in target.parents if not path.exists()]
        staged.mkdir(parents=True)
        write(staged)
        for path in [*staged.rglob("*"), staged, *(path.parent for path in missing)]:
            flush(path)
        shutil.rmtree(previous, ignore_errors=True)
        if target.exists():
            target.rename(previous)
        staged.rename(target)
        flush(target.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(staged, ignore_errors=True)
        with suppress(OSError):
            put_back(previous, target)
        if not _is_of_the_disk(error):
            raise
        raise unwritable(target, error) from error


def beside(target: Path, state: str) -> Path:
    """A hidden neighbour, on the same disk, so that a rename is all it takes to make it ``target``."""
    return target.with_name(f".{target.name}.{state}")


def put_back(previous: Path, target: Path) -> None:
    """Undo half a replacement."""
    if previous.is_dir() and not target.exists():
        previous.rename(target)


def _is_of_the_disk(error: Exception) -> bool:
    """A full disk is an OSError to Python, but SafetensorError to safetensors, RuntimeError to ``torch.save``, and a
    bare Exception to tokenizers. Subclasses of RuntimeError are something else, such as memory used up."""
    return isinstance(error, OSError | SafetensorError) or type(error) in (RuntimeError, Exception)


def unwritable(target: Path, error: Exception) -> CheckpointError:
    """torch speaks of an "unexpected pos" on a full disk; the reason is the error that it met before that one."""
    reasons = (each.strerror for each in _chain(error) if isinstance(each, OSError) and each.strerror)
    reason = next(reasons, " ".join(str(error).split()))
    return CheckpointError(f"{target} cannot be written: {reason} (is there space, and permission?)")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def flush(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes what it may write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
