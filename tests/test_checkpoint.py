"""A checkpoint is whole or absent, whatever goes wrong while it is written, and damage is never loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import REPOSITORY

from finetune.checkpoint import (
    load_state,
    newest_whole,
    rng_state,
    save_checkpoint,
    save_state,
    saved_steps,
    set_rng_state,
    verify,
)
from finetune.errors import CheckpointError, DataError

FILES = ("model.safetensors", "training/optimizer.pt")


def writer(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "training").mkdir()
        for name in FILES:
            (folder / name).write_text(content)

    return write


def content_of(checkpoint: Path) -> str:
    """What its files hold, all the same; and that there are no others."""
    names = sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    assert names == ["manifest.json", *FILES]
    content = {(checkpoint / name).read_text() for name in FILES}
    assert len(content) == 1
    return content.pop()


def found_in(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what was said of damaged ones."""
    said: list[str] = []
    return newest_whole(folder, said.append), said


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


# ---------------------------------------------------------------- saving


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    path = save_checkpoint(folder, 120, writer("abc"))
    assert path == folder / "step-00000120"
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc": FIPS 180-2, appendix B.1
    entry = {"bytes": 3, "sha256": digest}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest == {"version": 1, "step": 120, "files": dict.fromkeys(FILES, entry)}
    verify(path)
    assert found_in(folder) == (path, [])


def test_files_larger_than_a_block_are_hashed_whole(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, lambda folder: (folder / "a").write_text("a" * 1_000_000 * 3) and None)
    entry = json.loads((path / "manifest.json").read_text())["files"]["a"]
    done = subprocess.run(["sha256sum", str(path / "a")], capture_output=True, text=True, check=True)
    assert entry == {"bytes": 3_000_000, "sha256": done.stdout.split()[0]}


@pytest.mark.parametrize(
    ("saved", "keep", "protected", "left"),
    [
        ((1, 2, 3, 4, 5), None, (), (1, 2, 3, 4, 5)),
        ((1, 2, 3, 4, 5), 1, (), (5,)),
        ((1, 2, 3, 4, 5), 2, (), (4, 5)),
        ((1, 2, 3, 4, 5), 9, (), (1, 2, 3, 4, 5)),
        ((1, 2, 3, 4, 5), 2, (1,), (1, 4, 5)),  # the best is kept besides
        ((1, 2, 3, 4, 5), 2, (5,), (4, 5)),  # the best is among the newest
        ((1, 2, 3, 4, 5), 1, (2, 3, 9), (2, 3, 5)),
        ((9, 10, 100), 2, (), (10, 100)),  # as numbers, not as names
        ((2, 4, 2), 1, (), (2, 4)),  # after a restart from an earlier step: the one just written stays
        ((2, 4, 6, 3), 2, (), (3, 4, 6)),
        ((99_999_999, 100_000_000, 100_000_001), 2, (), (100_000_000, 100_000_001)),
    ],
)
def test_older_checkpoints_go(
    tmp_path: Path, saved: tuple[int, ...], keep: int | None, protected: tuple[int, ...], left: tuple[int, ...]
) -> None:
    for step in saved:
        save_checkpoint(tmp_path, step, writer("x"), keep=keep, protected=protected)
    assert saved_steps(tmp_path) == list(left)
    assert set(os.listdir(tmp_path)) == set(steps(*left))


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, writer("old"))
    path = save_checkpoint(tmp_path, 2, writer("new"))
    assert content_of(path) == "new"
    assert names_in(tmp_path) == steps(2)


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-000000004").mkdir()
    (tmp_path / ".notes").mkdir()
    before = names_in(tmp_path)
    assert found_in(tmp_path) == (None, [])
    save_checkpoint(tmp_path, 5, writer("five"), keep=1)
    save_checkpoint(tmp_path, 6, writer("six"), keep=1)
    assert saved_steps(tmp_path) == [6]
    assert names_in(tmp_path) == sorted([*before, *steps(6)])


def test_an_error_of_the_writer_keeps_its_type(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, writer("two"))
    for error in (DataError("no such label"), KeyError("missing"), torch.OutOfMemoryError("out of memory")):

        def fail(folder: Path, error: Exception = error) -> None:
            writer("half")(folder)
            raise error

        with pytest.raises(type(error)) as caught:
            save_checkpoint(tmp_path, 4, fail, keep=1)
        assert caught.value is error
    assert names_in(tmp_path) == steps(2)


def test_a_manifest_of_the_writer_is_replaced(tmp_path: Path) -> None:
    """As when it copies another checkpoint."""
    other = save_checkpoint(tmp_path, 2, writer("two"))
    path = save_checkpoint(tmp_path, 4, lambda folder: shutil.copytree(other, folder, dirs_exist_ok=True) and None)
    verify(path)
    assert content_of(path) == "two"
    verify(other)


def test_what_can_still_be_used_is_not_a_guess(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, FULL)

    for step in (2, 4):
        save_checkpoint(tmp_path, step, writer("x"))
    with pytest.raises(CheckpointError, match=r"; the checkpoint step-00000004 is intact$"):
        save_checkpoint(tmp_path, 6, full)
    (tmp_path / "step-00000004" / FILES[0]).write_text("y")
    with pytest.raises(CheckpointError, match=r"; the checkpoint step-00000002 is intact$"):
        save_checkpoint(tmp_path, 6, full)
    (tmp_path / "step-00000002" / FILES[0]).write_text("y")
    with pytest.raises(CheckpointError, match="; there is no whole checkpoint in "):
        save_checkpoint(tmp_path, 6, full)
    assert names_in(tmp_path) == steps(2, 4)


def test_everything_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what was not flushed, so the order of the calls matters: files, their folders, rename, folder
    above; only then older checkpoints get another name, and once that is on disk they go."""
    folder = tmp_path / "run" / "checkpoints"
    events: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "unlink", "rmdir")}

    def fsync(descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        path = next(path for path in [tmp_path, *tmp_path.rglob("*")] if path.stat().st_ino == inode)
        events.append(("flush", path.relative_to(tmp_path).as_posix()))
        real["fsync"](descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append(("rename", f"{source.name} {target.name}"))
        real["rename"](source, target)

    def removing(name: str) -> Callable[..., None]:
        def call(path: str, **options: Any) -> None:
            events.append(("remove", os.path.basename(path)))
            real[name](path, **options)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "unlink", removing("unlink"))
    monkeypatch.setattr(os, "rmdir", removing("rmdir"))

    save_checkpoint(folder, 1, writer("one"))
    staged = "run/checkpoints/.step-00000001.staged"
    renamed = events.index(("rename", ".step-00000001.staged step-00000001"))
    assert sorted(events[:renamed]) == sorted(
        ("flush", path)
        for path in (
            *(f"{staged}/{name}" for name in (*FILES, "manifest.json", "training")),
            staged,
            ".",  # where run/ is new
            "run",  # where checkpoints/ is new
        )
    )
    assert events[renamed + 1 :] == [("flush", "run/checkpoints")]

    events.clear()
    save_checkpoint(folder, 2, writer("two"), keep=1)
    renamed = events.index(("rename", ".step-00000002.staged step-00000002"))
    assert {kind for kind, _ in events[:renamed]} == {"flush"}
    assert events[renamed + 1 : renamed + 4] == [
        ("flush", "run/checkpoints"),
        ("rename", "step-00000001 .step-00000001.deleted"),
        ("flush", "run/checkpoints"),
    ]
    assert {kind for kind, _ in events[renamed + 4 :]} == {"remove"}
    assert events[-1] == ("remove", ".step-00000001.deleted")

    events.clear()
    save_checkpoint(folder, 2, writer("again"), keep=1)
    renamed = events.index(("rename", "step-00000002 .step-00000002.previous"))
    assert {kind for kind, _ in events[:renamed]} == {"flush"}
    assert events[renamed + 1 : renamed + 3] == [
        ("rename", ".step-00000002.staged step-00000002"),
        ("flush", "run/checkpoints"),
    ]
    assert {kind for kind, _ in events[renamed + 3 :]} == {"remove"}


# ---------------------------------------------------------------- crashes and broken disks

# One process for all points: each save runs in a fork of it, and dies or meets an error at its nth change of the disk.
DRIVER = """
import errno, json, os, shutil, sys
from pathlib import Path
from finetune import checkpoint

how, step, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

def save(folder, point):
    left = point

    def change(event="", arguments=()):
        nonlocal left
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            return  # for reading
        left -= 1
        if how == "kill" and left == 0:
            os._exit(9)
        if (how == "fail once" and left == 0) or (how == "fail on" and left <= 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(staged):
        (staged / "training").mkdir()
        for name in ("model.safetensors", "training/optimizer.pt"):
            with (staged / name).open("w") as file:
                file.write("ne")
                file.flush()
                change()  # half of a file is there
                file.write("w")

    real = os.fsync
    os.fsync = lambda descriptor: (change(), real(descriptor))
    changes = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"}
    sys.addaudithook(lambda event, arguments: change(event, arguments) if event in changes else None)
    said = None
    try:
        checkpoint.save_checkpoint(folder, step, write, keep=2, protected={2})
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    touched, left = left <= 0, sys.maxsize  # what follows is no part of the save
    (folder.parent / f"{point}.json").write_text(json.dumps([touched, said]))

point = 0
while True:
    point += 1
    folder = root / str(point)
    shutil.copytree(root / "start", folder)
    child = os.fork()
    if child == 0:
        try:
            save(folder, point)
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0 and not json.loads((root / f"{point}.json").read_text())[0]:
        break  # the save came to its end before this point
    assert code == (9 if how == "kill" else 0) and point < 200, (code, point)
print(point - 1)
"""

FULL = "No space left on device"
OLD = {2: "two", 3: "three", 4: "four"}


def at_every_point(tmp_path: Path, how: str, step: int) -> list[Path]:
    """Folders after a save of ``step`` ("new") over checkpoints of steps 2, 3, 4 met its end at point 1, 2, …; the
    last is of a save that met nothing."""
    start = tmp_path / "start"
    for each, content in OLD.items():
        save_checkpoint(start, each, writer(content))
    for name in (".step-00000005.staged", ".step-00000001.deleted"):  # of earlier crashes
        shutil.copytree(start / "step-00000002", start / name)
        (start / name / "manifest.json").unlink()
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, how, str(step), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 25  # or the points are not what they are meant to be
    return [tmp_path / str(point) for point in range(1, points + 2)]


def assert_the_next_save_is_clean(folder: Path) -> None:
    path = save_checkpoint(folder, 8, writer("eight"), keep=2, protected={2})
    assert content_of(path) == "eight"
    assert set(names_in(folder)) in ({*steps(2, 4, 8)}, {*steps(2, 6, 8)})
    assert found_in(folder) == (path, [])
    assert content_of(folder / "step-00000002") == "two"


def whole(folder: Path) -> dict[int, str]:
    """Checkpoints under their own names; each must be whole."""
    for step in saved_steps(folder):
        verify(folder / f"step-{step:08d}")
    return {step: content_of(folder / f"step-{step:08d}") for step in saved_steps(folder)}


def test_killed_at_any_point_of_a_save(tmp_path: Path) -> None:
    outcomes = []
    for folder in at_every_point(tmp_path, "kill", step=6):
        outcomes.append(whole(folder))
        newest = max(outcomes[-1])
        assert found_in(folder) == (folder / f"step-{newest:08d}", [])
        assert_the_next_save_is_clean(folder)
    # Nothing changes until the new one is whole, and nothing goes before that.
    order = [OLD, {**OLD, 6: "new"}, {2: "two", 4: "four", 6: "new"}]
    assert outcomes == sorted(outcomes, key=order.index)
    assert all(outcomes.count(each) > 1 for each in order)


def test_killed_at_any_point_of_a_save_of_the_same_step(tmp_path: Path) -> None:
    found_content, names = [], []
    for folder in at_every_point(tmp_path, "kill", step=4):
        found, said = found_in(folder)
        assert found is not None and said == []
        found_content.append(content_of(found))
        names.append(found.name)
        assert whole(folder).items() >= {2: "two"}.items()
        assert_the_next_save_is_clean(folder)
        assert content_of(folder / "step-00000004") == found_content[-1]  # put back where it was
    assert found_content == sorted(found_content, key=["four", "new"].index)
    assert names.count(".step-00000004.previous") == 1  # between the two renames
    assert set(names) == {".step-00000004.previous", "step-00000004"}


@pytest.mark.parametrize("how", ["fail once", "fail on"])
@pytest.mark.parametrize("step", [6, 4])
def test_an_error_of_the_disk_at_any_point_of_a_save(tmp_path: Path, how: str, step: int) -> None:
    """``fail on``: a disk that has become read-only by itself."""
    failed = 0
    for folder in at_every_point(tmp_path, how, step):
        _, said = json.loads((tmp_path / f"{folder.name}.json").read_text())
        found, damaged = found_in(folder)
        assert found is not None and damaged == []
        content = content_of(found)
        target = folder / f"step-{step:08d}"
        if said in (None, f"CheckpointError: {target} is saved, but older checkpoints cannot be removed: {FULL}"):
            assert (found.name, content) == (target.name, "new")  # the next save removes what could not be removed
        else:
            failed += 1
            assert said == (
                f"CheckpointError: {target} cannot be written: {FULL} (is there space, and permission?); "
                f"the checkpoint {found.name} is intact"
            )
            assert content in ("four", "new")  # new: when it was the folder above that could not be flushed
            assert whole(folder).items() >= {2: "two", 3: "three"}.items()
            if how == "fail once":
                assert not (folder / f".step-{step:08d}.staged").exists()
                assert found.name in steps(4, 6)
        assert_the_next_save_is_clean(folder)
    # Two folders and three files are made, the second halves of two files written, three files and two folders are
    # flushed, then a rename, or two, and the folder above. The 8 removals of leftovers before may fail.
    changes = 2 + 3 + 2 + 5 + (1 if step == 6 else 2) + 1
    assert failed == (changes if how == "fail once" else 8 + changes)


def test_an_interrupted_replacement_on_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 4, writer("four")).rename(tmp_path / ".step-00000004.previous")

    def refuse(self: Path, other: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 6, writer("six"))
    assert str(caught.value) == (
        f"{tmp_path}/step-00000006 cannot be written: Read-only file system (is there space, and permission?); "
        "the checkpoint .step-00000004.previous is intact"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root can make a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def tensors(folder: Path) -> None:
    save_state(folder / "optimizer.pt", {"a": torch.zeros(25_000)})  # 100 kB


def test_a_disk_that_is_full(small_disk: Path) -> None:
    for step in (2, 4, 6):
        save_checkpoint(small_disk, step, tensors, keep=1)  # the old one goes after the new one: room for two is needed
    save_checkpoint(small_disk, 8, tensors)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(small_disk, 10, tensors, keep=1)
    assert str(caught.value) == (
        f"{small_disk}/step-00000010 cannot be written: No space left on device (is there space, and permission?); "
        "the checkpoint step-00000008 is intact"
    )
    assert names_in(small_disk) == steps(6, 8)
    verify(small_disk / "step-00000008")
    with (small_disk / "step-00000008" / "optimizer.pt").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="the checkpoint step-00000006 is intact"):
        save_checkpoint(small_disk, 10, lambda folder: tensors(folder) or (folder / "b").write_bytes(bytes(200_000)))  # type: ignore[func-returns-value]


def test_the_first_checkpoint_on_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(small_disk, 2, lambda folder: (folder / "a").write_bytes(bytes(300_000)) and None)
    assert "cannot be written: No space left on device" in str(caught.value)
    assert str(caught.value).endswith(f"; there is no whole checkpoint in {small_disk}")
    assert names_in(small_disk) == []


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    save_checkpoint(small_disk, 2, tensors)
    (small_disk / ".step-00000004.staged").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(small_disk, 4, tensors)
    assert "step-00000004 cannot be written: " in str(caught.value)
    assert str(caught.value).endswith("; the checkpoint step-00000002 is intact")
    assert found_in(small_disk) == (small_disk / "step-00000002", [])  # and can be gone on from


def test_a_folder_without_permission(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, tensors)
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write everywhere")
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000004 cannot be written: Permission denied .*00002 is intact"
        ):
            save_checkpoint(tmp_path, 4, tensors)
    finally:
        tmp_path.chmod(0o700)
    assert names_in(tmp_path) == steps(2)


def test_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written: .*; there is no whole checkpoint in"):
        save_checkpoint(tmp_path / "file", 2, tensors)
    with pytest.raises(CheckpointError, match=r"file cannot be read: Not a directory"):
        found_in(tmp_path / "file")


# ---------------------------------------------------------------- verifying and finding


def damage(path: Path, defect: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if defect == "truncated":
        path.write_bytes(content[:-1])
    elif defect == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif defect == "appended":
        path.write_bytes(content + b"]")
    elif defect == "emptied":
        path.write_bytes(b"")
    elif defect == "a folder":
        path.mkdir()
    else:
        assert defect == "deleted"


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("defect", ["truncated", "deleted", "flipped", "appended", "emptied", "a folder"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, name: str, defect: str) -> None:
    for step in (2, 4, 6, 8):
        save_checkpoint(tmp_path, step, writer("content"))
    for step in steps(4, 6):
        damage(tmp_path / step / name, defect)
    (tmp_path / "step-00000002" / FILES[0]).unlink()
    assert found_in(tmp_path) == (tmp_path / "step-00000008", [])  # no older one is looked at
    damage(tmp_path / "step-00000008" / name, defect)
    (tmp_path / "step-00000003").mkdir()
    shutil.copytree(tmp_path / "step-00000006", tmp_path / ".step-00000009.staged")
    found, said = found_in(tmp_path)
    assert found is None
    assert [text.split(": ")[0] for text in said] == ["a checkpoint is passed over"] * 5
    for text, step in zip(said, (8, 6, 4, 3, 2), strict=True):
        file = {3: "manifest.json", 2: FILES[0]}.get(step, name)
        assert f"{tmp_path}/step-{step:08d}/{file} " in text
    what = {
        "truncated": "is damaged: it has 6 bytes instead of 7",
        "deleted": "is missing",
        "flipped": "is damaged: its content is not what was written (sha256)",
        "appended": "is damaged: it has 8 bytes instead of 7",
        "emptied": "is damaged: it has 0 bytes instead of 7",
        "a folder": "is damaged: it has ",
    }
    if name != "manifest.json":
        assert what[defect] in said[0]
    elif defect in ("deleted", "a folder"):
        assert {"deleted": "is missing", "a folder": "cannot be read: Is a directory"}[defect] in said[0]
    else:
        assert "manifest.json is damaged: JSONDecodeError: " in said[0]


def test_any_bit_of_a_manifest(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 120, writer("content")) / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="step-00000120"):
                verify(path.parent)
    path.write_bytes(content)
    verify(path.parent)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"version": 7, "files": [], "new": "layout"}, r"step-00000120 has layout 7, this finetune reads layout 1$"),
        ({"version": 1, "step": 120}, r"manifest\.json is damaged: KeyError: 'files'$"),
        ({"version": 1, "step": 121, "files": {}}, r"manifest\.json is damaged: it is of step 121$"),
        ({"version": 1, "step": 120, "files": ["model.safetensors"]}, r"manifest\.json is damaged: AttributeError"),
        ({"version": 1, "step": 120, "files": {"a": 3}}, r"manifest\.json is damaged: TypeError"),
        ({"version": 1, "step": 120, "files": {"a": {"bytes": [], "sha256": ""}}}, r"json is damaged: TypeError"),
        ({"version": 1, "step": None, "files": {}}, r"manifest\.json is damaged: TypeError"),
        ({"version": 1, "step": 120, "files": {"a\0": {"bytes": 1, "sha256": ""}}}, r"cannot be read: embedded null"),
        ([], r"manifest\.json is damaged: TypeError"),
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, manifest: object, message: str) -> None:
    path = save_checkpoint(tmp_path, 120, writer("x"))
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        verify(path)


def test_a_copy_under_another_name_is_as_good(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 120, writer("x"))
    shutil.copytree(path, tmp_path / "mine")
    (tmp_path / "mine" / "notes.txt").write_text("a file more does no harm")
    verify(tmp_path / "mine")


def test_finding_changes_nothing(tmp_path: Path) -> None:
    """The folder may be another run's that is saving this very moment."""
    save_checkpoint(tmp_path, 2, writer("two"))
    save_checkpoint(tmp_path, 4, writer("four"))
    (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.previous")
    for name in (".step-00000004.staged", ".step-00000006.staged", ".step-00000001.deleted"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    assert found_in(tmp_path) == (tmp_path / ".step-00000004.previous", [])
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert found_in(tmp_path) == (None, [])
    assert found_in(tmp_path / "nowhere") == (None, [])
    assert saved_steps(tmp_path / "nowhere") == []


# ---------------------------------------------------------------- states


def assert_same(one: Any, other: Any) -> None:
    """Equal in values and types, all the way down."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, torch.Tensor | np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one == other).all()
    else:
        assert one == other


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "text": "文",
        "bytes": b"\x00\xff",
        "numbers": [1, -(2**70), 2.5, float("inf"), True, False, None],
        "nested": {"tuple": (1, (2, [3])), "empty": [{}, [], ()], 4: {"int": "key"}},
        "tensors": [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 2)],
        "arrays": [
            np.arange(6, dtype=np.uint32).reshape(2, 3).T,
            np.array(1.5),
            np.zeros((0, 2), np.float16),
            np.array([True]),
            np.array([1 + 2j]),
            np.broadcast_to(np.float32(7), (2, 2)),  # cannot be written to
        ],
    }
    save_state(tmp_path / "state.pt", state)
    assert_same(load_state(tmp_path / "state.pt"), state)


def test_a_state_is_made_plain(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    save_state(tmp_path / "state.pt", {"a": np.float64(0.5), np.int64(1): OrderedDict(b=np.True_), "p": parameter})
    assert_same(load_state(tmp_path / "state.pt"), {"a": 0.5, 1: {"b": True}, "p": torch.ones(2)})


def test_an_optimizer_goes_on(tmp_path: Path) -> None:
    def start() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        weight = torch.tensor([1.0, 2.0], requires_grad=True)
        return weight, torch.optim.AdamW([weight], lr=0.1)

    def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (weight**3).sum().backward()
        optimizer.step()

    weight, optimizer = start()
    for _ in range(3):
        step(weight, optimizer)
    save_state(tmp_path / "optimizer.pt", optimizer.state_dict())
    other, again = start()
    with torch.no_grad():
        other.copy_(weight)
    again.load_state_dict(load_state(tmp_path / "optimizer.pt"))
    step(weight, optimizer)
    step(other, again)
    assert torch.equal(weight, other)


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize("value", [Colour.RED, {1, 2}, object(), Path("a"), Pair(1), np.array(["a"])])
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: object) -> None:
    with pytest.raises(
        TypeError, match=rf"^state\.pt\['a'\]\[1\] is a {type(value).__name__}, which no state may hold"
    ):
        save_state(tmp_path / "state.pt", {"a": [1, value]})
    assert names_in(tmp_path) == []


class Harmful:
    def __reduce__(self) -> object:
        return os.mkdir, ("harm",)


def test_nothing_in_a_state_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harmful()}, tmp_path / "zip.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": Harmful()}, protocol=2))
    for name in ("zip.pt", "pickle.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} cannot be loaded: .*, which could run code$"):
            load_state(tmp_path / name)
    assert not (tmp_path / "harm").exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert (tmp_path / "harm").exists()  # it would have done harm


@pytest.mark.parametrize("defect", ["truncated", "emptied", "deleted", "a folder"])
def test_a_damaged_state(tmp_path: Path, defect: str) -> None:
    save_state(tmp_path / "state.pt", {"a": torch.arange(100)})
    damage(tmp_path / "state.pt", defect)
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be loaded: "):
        load_state(tmp_path / "state.pt")


# ---------------------------------------------------------------- random numbers


def draw() -> tuple[object, ...]:
    dropped = torch.nn.functional.dropout(torch.ones(50), 0.5).tolist()
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.randn(3).tolist(),
        np.random.rand(),
        torch.randn(3).tolist(),
        dropped,
    )


def test_random_numbers_go_on(tmp_path: Path) -> None:
    random.gauss(0, 1)  # both Python and numpy keep the second of a pair
    np.random.randn()
    save_state(tmp_path / "rng.pt", rng_state())
    first = draw()
    second = draw()
    assert not any(one == other for one, other in zip(first, second, strict=True))
    set_rng_state(load_state(tmp_path / "rng.pt"))
    assert draw() == first
    assert draw() == second


def test_the_state_of_random_numbers_travels_between_processes() -> None:
    """As plain values: by pickle, which gathers it, and by torch with weights_only."""
    state = pickle.loads(pickle.dumps(rng_state()))
    kinds = {type(value) for value in (*state["python"], *state["python"][1], *state["numpy"], *state["numpy"][1])}
    assert kinds <= {int, float, str, list, tuple, type(None)}
    first = draw()
    set_rng_state(state)
    assert draw() == first


def test_random_numbers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, by stand-ins: it is saved where there is one and restored where there are both."""
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without = rng_state()
    assert "cuda" not in without
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    state = rng_state()
    set_rng_state(without)
    assert restored == []
    set_rng_state(state)
    assert [tensor.tolist() for tensor in restored] == [[7]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_rng_state(state)
    assert len(restored) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_a_real_gpu_go_on(tmp_path: Path) -> None:
    save_state(tmp_path / "rng.pt", rng_state())
    first = torch.randn(3, device="cuda")
    assert not torch.equal(torch.randn(3, device="cuda"), first)
    set_rng_state(load_state(tmp_path / "rng.pt"))
    assert torch.equal(torch.randn(3, device="cuda"), first)
