"""A folder is the old one or the new one, whatever goes wrong in between."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from finetune.errors import CheckpointError, DataError
from finetune.folders import write_folder

NAMES = ("model", "sub/vocabulary")


def writer(content: str):  # type: ignore[no-untyped-def]
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        for name in NAMES:
            (folder / name).write_text(content)

    return write


def content_of(folder: Path) -> set[str] | None:
    """What the files of a folder hold; None where there is no folder."""
    if not folder.exists():
        return None
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["model", "sub", "sub/vocabulary"]
    return {(folder / name).read_text() for name in NAMES}


def refuse(folder: Path) -> None:
    raise DataError("not now")


def test_a_folder_is_written_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "best"
    write_folder(target, writer("old"))
    assert content_of(target) == {"old"}
    write_folder(target, writer("new"))
    assert content_of(target) == {"new"}
    assert os.listdir(target.parent) == ["best"]  # nothing is left over


def test_a_failure_keeps_the_folder_and_its_own_type(tmp_path: Path) -> None:
    target = tmp_path / "best"
    write_folder(target, writer("old"))

    def fail(folder: Path) -> None:
        writer("new")(folder)
        raise DataError("no such label")

    with pytest.raises(DataError, match="no such label"):
        write_folder(target, fail)
    with pytest.raises(KeyError):  # a bug of ours keeps its traceback
        write_folder(target, lambda folder: {}["missing"])

    def use_up(folder: Path) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):  # a RuntimeError, but not of the disk
        write_folder(target, use_up)
    assert content_of(target) == {"old"}
    assert os.listdir(tmp_path) == ["best"]


def test_an_interrupted_write_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "best"
    write_folder(target, writer("old"))

    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(target, interrupted)
    assert content_of(target) == {"old"}
    write_folder(target, writer("new"))
    assert content_of(target) == {"new"}
    assert os.listdir(tmp_path) == ["best"]


CRASH = """
import os, sys
from pathlib import Path
from finetune import folders

left = int(sys.argv[2])

def counted(function):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os._exit(9)  # as a killed process: nothing is cleaned up
        return function(*arguments, **options)
    return call

for place, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink")):
    setattr(place, name, counted(getattr(place, name)))

def write(folder):
    os.makedirs(folder / "sub")
    for name in ("model", "sub/vocabulary"):
        (folder / name).write_text("new")

folders.write_folder(Path(sys.argv[1]), write)
"""


def test_a_process_killed_at_any_point(tmp_path: Path) -> None:
    """Before each of the calls that change the disk, one after the other, until none is left."""
    outcomes = []
    for point in range(1, 100):
        target = tmp_path / str(point) / "best"
        write_folder(target, writer("old"))
        done = subprocess.run(
            [sys.executable, "-c", CRASH, str(target), str(point)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode == 0:
            break
        assert done.returncode == 9, done.stderr
        found = content_of(target)
        outcomes.append(found)
        if found is None:
            assert content_of(target.with_name(".best.previous")) == {"old"}
            while_writing = []

            def refuse(folder: Path, target: Path = target, seen: list[object] = while_writing) -> None:
                seen.append(content_of(target))
                raise DataError("not now")

            with pytest.raises(DataError):
                write_folder(target, refuse)
            assert while_writing == [{"old"}]  # put back before anything else
            assert content_of(target) == {"old"}
        else:
            assert found in ({"old"}, {"new"})
        write_folder(target, writer("newer"))
        assert content_of(target) == {"newer"}
        assert os.listdir(target.parent) == ["best"]
    assert content_of(target) == {"new"}
    assert len(outcomes) >= 8
    assert outcomes.count(None) == 1  # between the two renames
    order = [{"old"}, None, {"new"}]
    assert outcomes == sorted(outcomes, key=order.index)


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "best"
    write_folder(target, writer("old"))
    real = Path.rename

    def rename(self: Path, other: Path) -> Path:
        if self.name == ".best.staged":
            raise OSError(5, "Input/output error")
        return real(self, other)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match=r"best cannot be written: Input/output error"):
        write_folder(target, writer("new"))
    assert content_of(target) == {"old"}
    assert os.listdir(tmp_path) == ["best"]


def test_the_old_folder_cannot_be_put_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing any more between the two renames."""
    target = tmp_path / "best"
    write_folder(target, writer("old"))
    real, calls = Path.rename, []

    def rename(self: Path, other: Path) -> Path:
        calls.append(self.name)
        if len(calls) > 1:
            raise OSError(30, "Read-only file system")
        return real(self, other)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(CheckpointError, match=r"best cannot be written: Read-only file system"):
            write_folder(target, writer("new"))
    assert calls == ["best", ".best.staged", ".best.previous"]
    with pytest.raises(DataError):
        write_folder(target, refuse)
    assert content_of(target) == {"old"}


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/best cannot be written: Not a directory"):
        write_folder(tmp_path / "file" / "best", writer("new"))


def test_the_reason_is_what_came_first(tmp_path: Path) -> None:
    """On a full disk ``torch.save`` meets the OSError, and then raises a RuntimeError that says less."""

    def write(folder: Path) -> None:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 576 vs 534")

    with pytest.raises(CheckpointError, match=r"best cannot be written: No space left on device \(is there space"):
        write_folder(tmp_path / "best", write)

    def fail(folder: Path) -> None:
        raise RuntimeError("unexpected pos\n 576 vs 534")

    with pytest.raises(CheckpointError, match=r"best cannot be written: unexpected pos 576 vs 534 \(is there space"):
        write_folder(tmp_path / "best", fail)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from finetune.errors import CheckpointError
from finetune.folders import write_folder
from finetune.model import InputSettings, load_model, save_model

checkpoint, target, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
loaded = load_model(checkpoint, label_names=("a", "b"), problem_type="single_label_classification", max_length=8)
inputs = InputSettings("text", None, "label", 8, "single_label_classification", ",")
writers = {
    "model": lambda folder: save_model(folder, loaded.model, loaded.tokenizer, inputs),
    "tokenizer": lambda folder: loaded.tokenizer.save_pretrained(folder),
    "torch": lambda folder: torch.save({"a": torch.zeros(10000)}, folder / "optimizer.pt"),
    "text": lambda folder: (folder / "a.txt").write_text("a" * 10000),
}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for name, write in writers.items():
    try:
        write_folder(target, write)
    except CheckpointError as error:
        assert f"{target} cannot be written: " in str(error)
        print(name)
"""


@pytest.mark.parametrize("limit", [200, 2000])
def test_a_full_disk(bert: Path, tmp_path: Path, limit: int) -> None:
    """Here a limit on the size of files, which safetensors, tokenizers, torch and Python all report differently."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    assert hasattr(signal, "SIGXFSZ")
    target = tmp_path / "best"
    write_folder(target, writer("old"))
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(bert), str(target), str(limit)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["model", "tokenizer", "torch", "text"]
    assert content_of(target) == {"old"}
    assert os.listdir(tmp_path) == ["best"]
