"""A folder is the old one or the new one, whatever goes wrong in between."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    set_rng_state,
    verify,
    write_folder,
)
from finetune.errors import CheckpointError, DataError

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


CHANGES_OF_THE_DISK = ("fsync", "rename", "mkdir", "rmdir", "unlink", "open", "replace")


def killed_at(point: int, save: Callable[[], object]) -> bool:
    """Save in a process that ends, as if killed, before its nth change of the disk; whether it came to that."""
    child = os.fork()
    if child == 0:
        left = point

        def counted(function):  # type: ignore[no-untyped-def]
            def call(*arguments: object, **options: object) -> object:
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(9)
                return function(*arguments, **options)

            return call

        for name in CHANGES_OF_THE_DISK:
            setattr(os, name, counted(getattr(os, name)))
        try:
            save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_process_killed_at_any_point(tmp_path: Path) -> None:
    """Before each of the calls that change the disk, one after the other, until none is left."""
    outcomes = []
    for point in range(1, 100):
        target = tmp_path / str(point) / "best"
        write_folder(target, writer("old"))
        if not killed_at(point, lambda target=target: write_folder(target, writer("new"))):
            break
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


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/best cannot be written: Not a directory"):
        write_folder(tmp_path / "file" / "best", writer("new"))


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from finetune.checkpoint import write_folder
from finetune.errors import CheckpointError
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


# ---------------------------------------------------------------- checkpoints of steps


def fill(content: str):  # type: ignore[no-untyped-def]
    def write(folder: Path) -> None:
        (folder / "training").mkdir()
        for name in FILES:
            (folder / name).write_text(content)

    return write


FILES = ("model.safetensors", "training/optimizer.pt")


def steps(folder: Path) -> list[int]:
    """Checkpoints by name, and that nothing else is there."""
    names = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("step-") for name in names), names
    return [int(name.removeprefix("step-")) for name in names]


def warned(folder: Path) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return newest_whole(folder, said.append), said


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 120, fill("abc"))
    assert path == tmp_path / "step-00000120"
    manifest = json.loads((path / "manifest.json").read_text())
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc": FIPS 180-2, appendix B.1
    entry = {"bytes": 3, "sha256": digest}
    assert manifest == {"version": 1, "step": 120, "files": dict.fromkeys(sorted(FILES), entry)}
    verify(path)


@pytest.mark.parametrize(
    ("keep", "protected", "left"),
    [
        (None, (), [1, 2, 3, 4, 5]),
        (1, (), [5]),
        (2, (), [4, 5]),
        (2, (1,), [1, 4, 5]),
        (2, (5,), [4, 5]),
        (1, (2, 3, 9), [2, 3, 5]),
        (9, (), [1, 2, 3, 4, 5]),
    ],
)
def test_older_checkpoints_go(tmp_path: Path, keep: int | None, protected: tuple[int, ...], left: list[int]) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, fill("x"), keep=keep, protected=protected)
    assert steps(tmp_path) == left


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    """As after a restart from an earlier step; the one just saved stays, whatever its number."""
    for step, content in ((2, "old"), (4, "old"), (2, "new")):
        save_checkpoint(tmp_path, step, fill(content), keep=1)
    assert steps(tmp_path) == [2, 4]
    assert (tmp_path / "step-00000002" / FILES[0]).read_text() == "new"


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("defect", ["truncate", "delete", "flip", "append"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, defect: str) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, fill("content"))
    for step in (4, 6):
        path = tmp_path / f"step-{step:08d}" / name
        content = path.read_bytes()
        flipped = bytes([content[0] ^ 1]) + content[1:]
        changed = {"truncate": content[:-2], "delete": None, "flip": flipped, "append": content + b"]"}[defect]
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
    found, said = warned(tmp_path)
    assert found == tmp_path / "step-00000002"
    assert len(said) == 2 and "step-00000006" in said[0] and "step-00000004" in said[1]
    assert all(name.split("/")[-1] in text for text in said)


def test_a_manifest_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, fill("x")) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(CheckpointError, match="has layout 7, this finetune reads layout 1"):
        verify(path.parent)


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert warned(tmp_path) == (None, [])
    assert warned(tmp_path / "nowhere") == (None, [])


def test_a_save_killed_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    found_steps = []
    for point in range(1, 200):
        folder = tmp_path / str(point)
        for step, content in ((2, "two"), (3, "three"), (4, "four")):
            save_checkpoint(folder, step, fill(content))
        (folder / "step-00000003" / "half").write_text("of a crashed run")  # not in its manifest, which does no harm
        is_killed = killed_at(
            point, lambda folder=folder: save_checkpoint(folder, 6, fill("six"), keep=2, protected={2})
        )
        found, said = warned(folder)
        assert found is not None and said == []
        expected = {4: "four", 6: "six"}
        step = int(found.name.removeprefix("step-"))
        found_steps.append(step)
        assert {(found / name).read_text() for name in FILES} == {expected[step]}
        verify(folder / "step-00000002")  # the best one is there all the time
        save_checkpoint(folder, 8, fill("eight"), keep=2, protected={2})
        assert steps(folder)[0] == 2 and steps(folder)[-1] == 8  # and nothing is left lying about
        if not is_killed:
            break
    else:
        raise AssertionError("the save never came to its end")
    assert found_steps == sorted(found_steps) and set(found_steps) == {4, 6}
    assert len(found_steps) > 15


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root can make a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    def torch_tensors(folder: Path) -> None:
        torch.save({"a": torch.zeros(25_000)}, folder / "optimizer.pt")  # 100 kB

    save_checkpoint(small_disk, 2, torch_tensors)
    save_checkpoint(small_disk, 4, torch_tensors, keep=1)
    save_checkpoint(small_disk, 6, torch_tensors)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(small_disk, 8, torch_tensors)
    assert "step-00000008 cannot be written" in str(caught.value)
    assert str(caught.value).endswith("; the checkpoint of step 6 is as it was")
    assert steps(small_disk) == [4, 6]
    verify(small_disk / "step-00000006")


def test_the_first_checkpoint_on_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint before it"):
        save_checkpoint(small_disk, 2, lambda folder: (folder / "a").write_bytes(bytes(300_000)))  # type: ignore[func-returns-value]
    assert steps(small_disk) == []


# ---------------------------------------------------------------- states


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {"a": [1, 2.5, None, True, "文"], "b": {"c": torch.arange(3), 4: torch.tensor(math.inf)}, "d": []}
    save_state(tmp_path / "state.pt", state)
    again = load_state(tmp_path / "state.pt")
    assert again["a"] == state["a"] and again["d"] == []
    assert torch.equal(again["b"]["c"], torch.arange(3)) and again["b"][4] == math.inf


class Harmful:
    def __reduce__(self) -> object:
        return os.mkdir, ("harm",)


def test_nothing_in_a_state_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harmful()}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be loaded"):
        load_state(tmp_path / "state.pt")
    assert not (tmp_path / "harm").exists()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> tuple[object, ...]:
        return random.random(), random.gauss(), np.random.randn(3).tolist(), torch.randn(2).tolist()

    random.gauss()  # the second of a pair is kept by the generator
    np.random.randn()
    save_state(tmp_path / "rng.pt", rng_state())
    first = draw()
    assert draw() != first
    set_rng_state(load_state(tmp_path / "rng.pt"))
    assert draw() == first
