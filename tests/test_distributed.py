"""Work that one process does for all: results and errors reach every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

from finetune.distributed import first_on_each_node, on_every_process, on_main_process
from finetune.errors import DataError, TrainingError

ALL = (on_main_process, on_every_process, first_on_each_node)


class ByHand(DataError):
    """A user's error."""


def alone() -> Any:
    return SimpleNamespace(num_processes=1, is_main_process=True, is_local_main_process=True, process_index=0)


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("function", ALL)
def test_a_single_process_does_the_work_once(function: Callable[..., Any]) -> None:
    calls: list[int] = []
    result = object()

    def work() -> object:
        calls.append(1)
        return result

    assert function(alone(), work) is result
    assert calls == [1]
    assert function(alone(), lambda: None) is None


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("error", [ByHand("line 3"), KeyError("a bug"), OSError(28, "No space left on device")])
def test_a_single_process_gets_its_own_error(function: Callable[..., Any], error: Exception) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        function(alone(), work)
    assert caught.value is error  # with its traceback


@pytest.mark.parametrize("function", ALL)
def test_ctrl_c_is_no_error_to_pass_around(function: Callable[..., Any]) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        function(alone(), work)


# ---------------------------------------------------------------- two processes

# Each rank writes what it saw; the test knows what it has to be.
SCRIPT = """
import json, sys, time
from pathlib import Path
from accelerate import Accelerator
from finetune.distributed import disconnect, first_on_each_node, on_every_process, on_main_process
from finetune.errors import ConfigError, DataError

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
folder = Path(sys.argv[1])


def told(function, work):
    try:
        return function(accelerator, work)
    except Exception as error:
        return [type(error).__name__, str(error)]


def fail_on(ranks, make_error, otherwise):
    def work():
        if rank in ranks:
            raise make_error(f"from rank {rank}")
        return otherwise

    return work


def slowly():
    # Rank 0 is slow: without the order rank 1 would look before the file is there.
    if rank == 0:
        time.sleep(1)
        (folder / "cache").write_text("from rank 0")
        return "built"
    return (folder / "cache").read_text() if (folder / "cache").exists() else "too early"


def not_called():
    (folder / f"called-on-{rank}").touch()
    return rank


seen = {
    "processes": accelerator.num_processes,
    "main result": told(on_main_process, lambda: {"rank": rank, "nothing": None}),
    "main none": told(on_main_process, lambda: None),
    "main ours": told(on_main_process, fail_on({0}, DataError, "fine")),
    "main bug": told(on_main_process, fail_on({0}, KeyError, "fine")),
    "main only": told(on_main_process, not_called),
    "every result": told(on_every_process, lambda: rank + 10),
    "every rank 0": told(on_every_process, fail_on({0}, ConfigError, "fine")),
    "every rank 1": told(on_every_process, fail_on({1}, ConfigError, "fine")),
    "every both": told(on_every_process, fail_on({0, 1}, DataError, "fine")),
    "every bug 1": told(on_every_process, fail_on({1}, ZeroDivisionError, "fine")),
    "first order": told(first_on_each_node, slowly),
    "first rank 0": told(first_on_each_node, fail_on({0}, DataError, "reached")),
    "first rank 1": told(first_on_each_node, fail_on({1}, DataError, "reached")),
    "still in step": told(on_main_process, lambda: "yes"),
}
(folder / f"{rank}.json").write_text(json.dumps(seen))
disconnect(accelerator)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """What rank 0 and rank 1 of a real job saw."""
    folder = tmp_path_factory.mktemp("distributed")
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    profile = REPOSITORY / "accelerate_configs/ddp2.yaml"
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(profile)]
    done = subprocess.run(
        [*start, str(script), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rank_0, rank_1 = (yaml.safe_load((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return rank_0, rank_1, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "on_rank_0", "on_rank_1"),
    [
        ("processes", 2, 2),
        # Rank 0 works for both.
        ("main result", {"rank": 0, "nothing": None}, {"rank": 0, "nothing": None}),
        ("main none", None, None),
        ("main ours", ["DataError", "from rank 0"], ["DataError", "from rank 0"]),
        (
            "main bug",
            ["KeyError", "'from rank 0'"],
            ["TrainingError", "another process failed: KeyError: 'from rank 0'"],
        ),
        ("main only", 0, 0),
        # Both work.
        ("every result", 10, 11),
        ("every rank 0", ["ConfigError", "from rank 0"], ["ConfigError", "from rank 0"]),
        ("every rank 1", ["ConfigError", "from rank 1"], ["ConfigError", "from rank 1"]),
        ("every both", ["DataError", "from rank 0"], ["DataError", "from rank 1"]),
        (
            "every bug 1",
            ["TrainingError", "another process failed: ZeroDivisionError: from rank 1"],
            ["ZeroDivisionError", "from rank 1"],
        ),
        # Rank 0 first, then rank 1.
        ("first order", "built", "from rank 0"),
        ("first rank 0", ["DataError", "from rank 0"], ["DataError", "from rank 0"]),
        ("first rank 1", ["DataError", "from rank 1"], ["DataError", "from rank 1"]),
        ("still in step", "yes", "yes"),
    ],
)
def test_two_processes(
    case: str, on_rank_0: object, on_rank_1: object, seen: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    rank_0, rank_1, _ = seen
    assert rank_0[case] == on_rank_0
    assert rank_1[case] == on_rank_1


@pytest.mark.slow
def test_rank_1_leaves_the_main_process_its_work(seen: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    folder = seen[2]
    assert (folder / "called-on-0").exists()
    assert not (folder / "called-on-1").exists()


def test_the_error_of_another_rank_is_one_that_the_command_line_prints() -> None:
    """Only FinetuneErrors end without a traceback; the rank that failed shows its own."""
    from finetune.distributed import _portable

    ours, bug = _portable(ByHand("line 3")), _portable(KeyError("x"))
    assert type(ours) is ByHand
    assert str(ours) == "line 3"
    assert type(bug) is TrainingError
    assert str(bug) == "another process failed: KeyError: 'x'"
