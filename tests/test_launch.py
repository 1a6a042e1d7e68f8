"""How a launch is recognised, what it decides, and what is refused before anybody waits."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from conftest import REPOSITORY, Finetune

from finetune import launch
from finetune.errors import ConfigError, DataError, LaunchError, TrainingError
from finetune.launch import (
    ACCUMULATION_VARIABLE,
    Launch,
    check_before_start,
    check_connected,
    find_launch,
    launcher_arguments,
    leave_with_error,
    profile_path,
    profiles_folder,
    relaunch,
    resolve_accumulation,
    resolve_precision,
    use_all_cores,
)

#                    processes  accumulation  machines  precision
PROFILES = {
    "cpu": (1, None, 1, "bf16"),
    "ddp2": (2, None, 1, "bf16"),
    "ddp2_accum10": (2, 10, 1, "bf16"),
    "ddp8": (8, None, 1, "bf16"),
    "multinode": (16, None, 2, "bf16"),
    "single_gpu": (1, None, 1, "bf16"),
    "single_gpu_accum": (1, 4, 1, "bf16"),
}
LAUNCHER_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_CPU")


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand on a machine without a GPU, whatever starts the tests on whatever machine."""
    for name in (*LAUNCHER_VARIABLES, "ACCELERATE_MIXED_PRECISION", ACCUMULATION_VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# ---------------------------------------------------------------- gradient accumulation: who decides

YAML = "run.yaml"
PROFILE = Path("/profiles/mine.yaml")
LAUNCHER = "accelerate launch --gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("ours", "launcher", "variable", "profile", "run_config", "decided"),
    [
        # each speaks alone
        (2, None, None, None, None, (2, "command line")),
        (None, 3, None, None, None, (3, LAUNCHER)),
        (None, None, "4", None, None, (4, ACCUMULATION_VARIABLE)),
        (None, None, None, 5, None, (5, "profile mine")),
        (None, None, None, None, 6, (6, YAML)),
        (None, None, None, None, None, (None, "default")),
        # each against all below it
        (2, 3, "4", 5, 6, (2, "command line")),
        (None, 3, "4", 5, 6, (3, LAUNCHER)),
        (None, None, "4", 5, 6, (4, ACCUMULATION_VARIABLE)),
        # the profile and the run config agree
        (None, None, None, 6, 6, (6, "profile mine")),
        # the command line takes the place of the run config's value, so the profile has nobody to disagree with
        (2, None, None, 5, None, (2, "command line")),
        (None, None, "", 5, None, (5, "profile mine")),
    ],
)
def test_accumulation_in_order_of_precedence(
    ours: int | None,
    launcher: int | None,
    variable: str | None,
    profile: int | None,
    run_config: int | None,
    decided: tuple[int | None, str],
) -> None:
    started = Launch(profile=PROFILE, profile_accumulation=profile, launcher_accumulation=launcher)
    environ = {} if variable is None else {ACCUMULATION_VARIABLE: variable}
    configured, origin = (ours, "command line") if ours is not None else (run_config, YAML)
    assert resolve_accumulation(started, configured, origin, environ) == decided


def test_profile_and_run_config_must_agree() -> None:
    started = Launch(profile=PROFILE, profile_accumulation=10)
    with pytest.raises(ConfigError) as caught:
        resolve_accumulation(started, 4, YAML, {})
    assert str(caught.value) == (
        "gradient_accumulation_steps is 4 in run.yaml but 10 in the launch profile /profiles/mine.yaml: "
        "make them equal, drop one, or decide with --train.gradient_accumulation_steps"
    )


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_an_impossible_environment_variable(value: str) -> None:
    message = rf"gradient_accumulation_steps is '{value}' \({ACCUMULATION_VARIABLE}\): .* integer of at least 1"
    with pytest.raises(LaunchError, match=message):
        resolve_accumulation(Launch(), None, "default", {ACCUMULATION_VARIABLE: value})


# ---------------------------------------------------------------- whose command line it is


@pytest.mark.parametrize(
    "start",
    [
        "accelerate launch",
        "/x/bin/accelerate launch",
        "C:/x/accelerate.exe launch",
        "accelerate-launch",
        "/x/bin/accelerate-launch",
        "python -m accelerate.commands.launch",
        "python3.11 -u -m accelerate.commands.launch",
        "/x/bin/python3 -X dev -W ignore -m accelerate.commands.launch",
        "python -maccelerate.commands.launch",
        "python -m accelerate.commands.accelerate_cli launch",
        "python /x/bin/accelerate launch",
        "/x/bin/python3.13t -u -W error -X utf8 /x/bin/accelerate launch",
        "python /x/bin/accelerate-launch",
        "python /x/site-packages/accelerate/commands/launch.py",
    ],
)
def test_launchers(start: str) -> None:
    given = ["--config_file", "a.yaml", "-m", "finetune", "train", "--train.seed", "1"]
    assert launcher_arguments([*start.split(), *given]) == given
    assert launcher_arguments(start.split()) == []


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "python -u",
        "python -m",
        "bash",
        "accelerate",
        "accelerate config",
        "accelerate env launch",
        "accelerates launch",
        "python train.py",
        "python train.py accelerate launch",
        "python -m pytest accelerate launch",
        "python -c pass accelerate launch",
        "vim accelerate launch",
        "grep -r accelerate launch",
        "tail -f accelerate-launch",
        "python -m finetune train --profile ddp2",
        "python -m torch.distributed.run --nproc_per_node 2 -m finetune train",
        "torchrun -m finetune train",
        "less /x/accelerate/commands/launch.py",
        "python -W ignore -X dev train.py accelerate launch",
    ],
)
def test_other_programs(command: str) -> None:
    assert launcher_arguments(command.split()) is None


class Ancestor:
    """A process as psutil shows it."""

    def __init__(
        self, command: str | list[str], cwd: str | Path = "/nowhere", environ: dict[str, str] | None = None
    ) -> None:
        self._command = command.split() if isinstance(command, str) else command
        self._cwd, self._environ = cwd, environ or {}

    def cmdline(self) -> list[str]:
        return self._command

    def cwd(self) -> str:
        return str(self._cwd)

    def environ(self) -> dict[str, str]:
        return self._environ


class Hidden(Ancestor):
    """A process of another user."""

    def cmdline(self) -> list[str]:
        raise psutil.AccessDenied(pid=1)


Started = Callable[..., None]


@pytest.fixture
def started_by(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Give this process other ancestors, and no default config file of Accelerate."""

    def start(*ancestors: Ancestor) -> None:
        monkeypatch.setattr(launch, "_ancestors", lambda: iter(ancestors))

    monkeypatch.setattr(launch, "_default_profile", lambda: None)
    return start


def write_profile(path: Path, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", **content}), encoding="utf-8")
    return path


def test_no_launcher(started_by: Started) -> None:
    started_by(Ancestor("bash"), Ancestor("python train.py accelerate launch"))
    assert find_launch({}) == Launch()
    assert find_launch({"OMP_NUM_THREADS": "3"}) == Launch(threads_set_by_user=True)


@pytest.mark.parametrize("spelling", ["--config_file profiles/a.yaml", "--config-file=profiles/a.yaml"])
def test_the_profile_is_sought_where_the_launcher_ran(
    spelling: str, started_by: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    profile = write_profile(
        there / "profiles/a.yaml", num_processes=4, deepspeed_config={"gradient_accumulation_steps": 7}
    )
    write_profile(here / "profiles/a.yaml", num_processes=1, deepspeed_config={"gradient_accumulation_steps": 1})
    monkeypatch.chdir(here)
    started_by(Ancestor("bash"), Ancestor(f"accelerate launch {spelling} -m finetune train", there), Ancestor("init"))
    assert find_launch({}) == Launch(profile=profile, num_processes=4, profile_accumulation=7)


def test_an_absolute_profile_and_options_of_the_launcher(started_by: Started, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "a.yaml", num_processes=4)
    options = f"--config_file={profile} --num_processes 3 --gradient_accumulation_steps=5"
    ours = "-m finetune train --num_processes 9 --gradient_accumulation_steps 9 --config_file other.yaml"
    started_by(Ancestor(f"python /x/bin/accelerate launch {options} {ours}", environ={"OMP_NUM_THREADS": "2"}))
    assert find_launch({}) == Launch(
        profile=profile, num_processes=3, launcher_accumulation=5, threads_set_by_user=True
    )


def test_the_launchers_own_default_for_accumulation_is_nobodys_wish(started_by: Started) -> None:
    """Accelerate says 1 when nobody says anything, which must not overrule a profile or run config."""
    started_by(Ancestor("accelerate launch -m finetune train"))
    assert find_launch({}) == Launch()


def test_threads_that_only_the_launcher_set_are_not_the_users(started_by: Started) -> None:
    started_by(Ancestor("accelerate launch -m finetune train", environ={}))
    assert not find_launch({"OMP_NUM_THREADS": "1"}).threads_set_by_user


def test_the_nearest_launcher_counts(started_by: Started, tmp_path: Path) -> None:
    near, far = write_profile(tmp_path / "near.yaml"), write_profile(tmp_path / "far.yaml")
    started_by(
        Hidden("sudo"),
        Ancestor(f"accelerate launch --config_file {near} a.py"),
        Ancestor(f"accelerate launch --config_file {far} a.py"),
    )
    assert find_launch({}).profile == near


def test_accelerates_default_config_file(started_by: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = write_profile(tmp_path / "default.yaml", num_processes=2)
    other = write_profile(tmp_path / "other.yaml", num_processes=5)
    monkeypatch.setattr(launch, "_default_profile", lambda: str(default))
    started_by(Ancestor("accelerate launch -m finetune train"))
    assert find_launch({}) == Launch(profile=default, num_processes=2)
    started_by(Ancestor(f"accelerate launch --config_file {other} -m finetune train"))
    assert find_launch({}).profile == other
    # The launcher does not read its default file under --cpu, so neither may its 2 processes be expected.
    started_by(Ancestor("accelerate launch --cpu -m finetune train"))
    assert find_launch({}) == Launch()


def test_the_place_of_accelerates_default_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    assert launch._default_profile() is None
    path.touch()
    assert launch._default_profile() == str(path)


def test_a_launch_by_our_own_option_says_so_itself(started_by: Started, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "a.yaml", num_processes=4, deepspeed_config={"gradient_accumulation_steps": 10})
    started_by(Ancestor(f"accelerate launch --config_file {tmp_path / 'other.yaml'} a.py"))
    environ = {"FINETUNE_PROFILE": str(profile), "FINETUNE_PROFILE_PROCESSES": "", "FINETUNE_PROFILE_THREADS": ""}
    by_us = Launch(profile=profile, num_processes=4, profile_accumulation=10)
    assert find_launch(environ) == by_us
    assert find_launch({**environ, "OMP_NUM_THREADS": "1"}) == by_us
    with_threads = {**environ, "OMP_NUM_THREADS": "1", "FINETUNE_PROFILE_THREADS": "1"}
    assert find_launch(with_threads) == replace(by_us, threads_set_by_user=True)
    assert find_launch({**environ, "FINETUNE_PROFILE_PROCESSES": "3"}) == replace(by_us, num_processes=3)


def test_the_real_ancestors_of_a_process() -> None:
    code = "from finetune.launch import _ancestors; print([process.pid for process in _ancestors()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert yaml.safe_load(done.stdout)[0] == os.getpid()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "cannot be read: while parsing"),
        ("- a\n", "is not an Accelerate config: make one with `accelerate config`"),
        ("", "is not an Accelerate config"),
        ("deepspeed_config: {gradient_accumulation_steps: many}", "gradient_accumulation_steps is 'many'"),
        ("deepspeed_config: {gradient_accumulation_steps: 0}", "gradient_accumulation_steps is 0"),
        ("deepspeed_config: {gradient_accumulation_steps: auto}", "must be an integer of at least 1"),
        ("deepspeed_config: 4", "deepspeed_config is 4: it must hold settings below it"),
    ],
)
def test_profiles_that_are_none(content: str, said: str, started_by: Started, tmp_path: Path) -> None:
    profile = tmp_path / "a.yaml"
    profile.write_text(content, encoding="utf-8")
    started_by(Ancestor(f"accelerate launch --config_file {profile} a.py"))
    with pytest.raises(LaunchError) as caught:
        find_launch({})
    assert str(profile) in str(caught.value)
    assert said in str(caught.value)


def test_a_profile_that_is_gone(started_by: Started, tmp_path: Path) -> None:
    started_by(Ancestor("accelerate launch --config_file gone.yaml a.py", tmp_path))
    with pytest.raises(LaunchError, match=rf"^launch profile {re.escape(str(tmp_path))}/gone\.yaml cannot be read"):
        find_launch({})


# ---------------------------------------------------------------- the shipped profiles


def test_the_shipped_profiles() -> None:
    assert sorted(path.stem for path in profiles_folder().iterdir()) == sorted(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_a_shipped_profile_is_what_its_name_says(name: str, started_by: Started) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    processes, accumulation, machines, precision = PROFILES[name]
    path = profile_path(name)
    loaded = load_config_from_file(str(path))  # refuses keys that Accelerate does not know
    assert isinstance(loaded, ClusterConfig)
    assert (loaded.num_processes, loaded.num_machines, loaded.mixed_precision) == (processes, machines, precision)
    assert loaded.distributed_type.value == ("MULTI_GPU" if processes > 1 else "NO")
    assert loaded.use_cpu is (name == "cpu")
    started_by(Ancestor(["accelerate", "launch", "--config_file", str(path), "-m", "finetune", "train"]))
    assert find_launch({}) == Launch(profile=path, num_processes=processes, profile_accumulation=accumulation)


@pytest.mark.parametrize("name", PROFILES)
def test_a_shipped_profile_is_commented(name: str) -> None:
    text = profile_path(name).read_text(encoding="utf-8")
    lines = text.splitlines()
    start = f"accelerate launch --config_file accelerate_configs/{name}.yaml"
    comments = [line for line in lines if line.startswith("#")]
    assert lines[0] == comments[0] != "#"
    assert any(start in comment for comment in comments)
    assert any("mixed_precision" in below for line, below in itertools.pairwise(lines) if line[:1] == "#")
    if "deepspeed_config" in text:
        assert lines[lines.index("deepspeed_config:") - 1].startswith("#")
    assert max(map(len, lines)) <= 120


def test_a_profile_by_name_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_path("ddp2") == REPOSITORY / "accelerate_configs/ddp2.yaml"
    own = write_profile(tmp_path / "own.yaml")
    monkeypatch.chdir(tmp_path)
    assert profile_path("own.yaml") == profile_path(str(own)) == own
    write_profile(tmp_path / "ddp2")
    assert profile_path("ddp2") == tmp_path / "ddp2"  # a file goes first, as for --config


@pytest.mark.parametrize(("name", "meant"), [("dpp2", ": did you mean ddp2?"), ("tpu-pod", ""), ("", "")])
def test_an_unknown_profile_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(LaunchError) as caught:
        profile_path(name)
    assert str(caught.value) == (
        f"--profile {name}: no such file, and no shipped profile of that name{meant} "
        "(profiles: cpu, ddp2, ddp2_accum10, ddp8, multinode, single_gpu, single_gpu_accum)"
    )


# ---------------------------------------------------------------- refused before anybody waits


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that this machine has GPUs."""
    import torch

    def pretend(count: int, bf16: bool = True) -> None:
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: bf16)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla P40")

    return pretend


def test_more_processes_than_gpus(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    started = Launch(profile=PROFILE, num_processes=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_before_start(started)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(LaunchError) as caught:
        check_before_start(started)
    assert str(caught.value) == (
        "launch profile /profiles/mine.yaml starts 4 processes on this machine, which has 2 GPU(s): "
        "use --num_processes 2, or try it out on the CPU with ACCELERATE_USE_CPU=1"
    )
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")  # the remedy works
    check_before_start(started)


def test_processes_are_counted_per_machine(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_before_start(Launch(num_processes=16))


def test_a_machine_without_gpus_takes_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_before_start(Launch(num_processes=8))


@pytest.mark.parametrize(
    ("count", "bf16", "precision", "said"),
    [
        (0, False, "no", None),
        (0, False, "bf16", None),
        (0, False, "fp16", "mixed_precision is fp16 in the launcher, which needs a GPU: use bf16 or no on the CPU"),
        (1, True, "fp16", None),
        (1, True, "bf16", None),
        (1, False, "fp16", None),
        (1, False, "bf16", None),  # it runs in float32
    ],
)
def test_precision(
    count: int,
    bf16: bool,
    precision: str,
    said: str | None,
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if count:
        gpus(count, bf16)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    if said is None:
        check_before_start(Launch())
        return
    with pytest.raises(LaunchError) as caught:
        check_before_start(Launch())
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("asked", "bf16", "precision", "said"),
    [
        ("bf16", True, "bf16", "bf16, as the launch profile says"),
        ("bf16", False, "no", "float32: the launch profile says bf16, which this {} does not have"),
        ("fp16", False, "fp16", "fp16, as the launch profile says"),
        ("no", False, "no", "float32, as the launch profile says"),
        ("no", True, "no", "float32, as the launch profile says; mixed_precision: bf16 would be faster on this {}"),
        (None, False, "no", "float32, without a launch profile that says otherwise"),
    ],
)
@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_bfloat16_where_the_device_has_it(
    device: str,
    asked: str | None,
    bf16: bool,
    precision: str,
    said: str,
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "GPU":
        gpus(1, bf16)
    monkeypatch.setattr(
        "torch.cpu.get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": bf16, "amx_bf16": False}
    )
    environ = {} if asked is None else {"ACCELERATE_MIXED_PRECISION": asked}
    assert resolve_precision(environ) == (precision, said.format(device))


def test_fp16_on_the_cpu_of_a_machine_with_gpus(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(LaunchError, match=r"fp16 in launch profile /profiles/mine\.yaml, which needs a GPU"):
        check_before_start(Launch(profile=PROFILE))


@pytest.mark.parametrize(("value", "used"), [("true", True), ("1", True), ("False", False), ("0", False), ("", False)])
def test_the_cpu_by_request(value: str, used: bool, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    assert launch.on_cpu() is used


@pytest.mark.parametrize(("processes", "used"), [(1, False), (2, True)])
def test_several_processes_on_a_mac_use_the_cpu(processes: int, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert launch.on_cpu() is used


@pytest.mark.parametrize(
    ("world", "asked", "connected", "who"),
    [
        (None, None, 1, None),
        ("2", 2, 2, None),
        ("2", None, 2, None),  # torchrun
        ("2", 2, 1, "the launcher started 2 processes, but 1 are connected"),
        (None, 2, 1, "/profiles/mine.yaml asks for 2 processes, but 1 are connected"),
        ("1", 1, 2, "the launcher started 1 processes, but 2 are connected"),
    ],
)
def test_processes_that_do_not_know_of_each_other(
    world: str | None, asked: int | None, connected: int, who: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    accelerator: Any = SimpleNamespace(num_processes=connected)
    started = Launch(profile=PROFILE, num_processes=asked)
    if who is None:
        check_connected(started, accelerator)
        return
    with pytest.raises(LaunchError) as caught:
        check_connected(started, accelerator)
    assert str(caught.value).startswith(who)
    assert "MULTI_GPU" in str(caught.value)


def test_processes_asked_for_without_a_profile() -> None:
    accelerator: Any = SimpleNamespace(num_processes=1)
    with pytest.raises(LaunchError, match=r"^accelerate launch asks for 2 processes, but 1 are connected"):
        check_connected(Launch(num_processes=2), accelerator)


# ---------------------------------------------------------------- threads


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A machine with 10 cores; gives the number of threads that was set, and resets it."""
    import torch

    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)), raising=False)
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("local", "share"), [(None, 10), ("1", 10), ("2", 5), ("4", 2), ("16", 1)])
def test_each_process_gets_its_share_of_the_cores(
    local: str | None, share: int, threads: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert use_all_cores(Launch()) == share
    assert threads() == share


def test_threads_that_the_user_set_are_kept(threads: Callable[[], int]) -> None:
    import torch

    torch.set_num_threads(3)
    assert use_all_cores(Launch(threads_set_by_user=True)) == 3
    assert threads() == 3


# ---------------------------------------------------------------- errors are said once


def test_rank_0_speaks_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    assert leave_with_error(DataError("no such file")) == 2
    assert slept == []
    assert capsys.readouterr() == ("", "error: no such file\n")


def test_other_ranks_let_rank_0_speak_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said_before_waiting: list[str] = []
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        said_before_waiting.append(capsys.readouterr().err)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("time.sleep", sleep)
    assert leave_with_error(DataError("mine alone"), seconds=4) == 2
    assert (waited, said_before_waiting) == ([4], [""])
    assert capsys.readouterr().err == "error: mine alone\n"


# ---------------------------------------------------------------- --profile


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], list[Any]]:
    """Take the place of Accelerate's launcher; gives the list of the options that it is called with."""

    def install(outcome: BaseException | None) -> list[Any]:
        calls: list[Any] = []

        def launch_command(options: Any) -> None:
            calls.append((options, {name: os.environ[name] for name in os.environ if name.startswith("FINETUNE_")}))
            if outcome:
                raise outcome

        monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)
        monkeypatch.setattr("finetune.launch._end_children", lambda: None)  # here they are those of other tests
        return calls

    for name in ("FINETUNE_PROFILE", "FINETUNE_PROFILE_PROCESSES", "FINETUNE_PROFILE_THREADS"):
        monkeypatch.setenv(name, "")  # so that what relaunch sets is undone after the test
        monkeypatch.delenv(name)
    return install


def child_failure(*exit_codes: int) -> Exception:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in enumerate(exit_codes)}
    return ChildFailedError("finetune", failures)


def interrupted() -> Exception:
    import signal

    from torch.distributed.elastic.multiprocessing.api import SignalException

    return SignalException("stopped", signal.SIGINT)


def test_relaunch_calls_accelerates_launcher(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = launcher(None)
    arguments = ["train", "--config", "demo", "--train.seed", "-1"]
    assert relaunch("ddp2_accum10", arguments) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert relaunch("ddp2", arguments, num_processes=3) == 0
    (first, told_first), (second, told_second) = calls
    profiles = REPOSITORY / "accelerate_configs"
    assert first.config_file == str(profiles / "ddp2_accum10.yaml")
    assert (first.module, first.training_script, first.training_script_args) == (True, "finetune", arguments)
    assert (first.num_processes, second.num_processes) == (None, 3)
    # What the workers are told is what find_launch makes of it.
    assert find_launch(told_first) == Launch(
        profile=profiles / "ddp2_accum10.yaml", num_processes=2, profile_accumulation=10
    )
    assert find_launch({**told_second, "OMP_NUM_THREADS": "4"}) == Launch(
        profile=profiles / "ddp2.yaml", num_processes=3, threads_set_by_user=True
    )


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (lambda: subprocess.CalledProcessError(2, "python"), 2),
        (lambda: subprocess.CalledProcessError(1, "python"), 1),
        (lambda: child_failure(2), 2),
        (lambda: child_failure(2, -15), 2),  # rank 0 left with an error, the launcher ended rank 1
        (lambda: child_failure(-15, 1), 1),
        (interrupted, 130),  # as a shell counts: 128 + the signal's number
    ],
)
def test_relaunch_returns_the_workers_exit_code(outcome: Callable[[], Exception], code: int, launcher: Any) -> None:
    launcher(outcome())
    assert relaunch("ddp2", ["train"]) == code


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            lambda: subprocess.CalledProcessError(-9, "python"),
            "a training process was ended by SIGKILL: is the machine out of memory?",
        ),
        (lambda: child_failure(-9, -15), "a training process was ended by SIGKILL: is the machine out of memory?"),
        (lambda: child_failure(-15, -9), "a training process was ended by SIGKILL: is the machine out of memory?"),
        (lambda: child_failure(-11), "a training process was ended by SIGSEGV"),
    ],
)
def test_a_worker_that_a_signal_ended_cannot_speak_for_itself(
    outcome: Callable[[], Exception], said: str, launcher: Any
) -> None:
    launcher(outcome())
    with pytest.raises(TrainingError) as caught:
        relaunch("ddp2", ["train"])
    assert str(caught.value) == said


def test_relaunch_refuses_what_the_launcher_refuses(launcher: Any, tmp_path: Path) -> None:
    launcher(ValueError("The config file had unknown keys (['gradient_accumulation'])"))
    profile = write_profile(tmp_path / "a.yaml")
    with pytest.raises(LaunchError) as caught:
        relaunch(str(profile), ["train"])
    assert str(caught.value) == (
        f"accelerate launch refuses the profile {profile}: The config file had unknown keys (['gradient_accumulation'])"
    )


def test_relaunch_checks_the_profile_first(launcher: Any, tmp_path: Path) -> None:
    calls = launcher(None)
    (tmp_path / "a.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(LaunchError, match="cannot be read"):
        relaunch(str(tmp_path / "a.yaml"), ["train"])
    with pytest.raises(LaunchError, match="no such file"):
        relaunch("no_such_profile", ["train"])
    assert calls == []


def test_one_launch_inside_another_is_refused(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that each launch two would train twice, into one run folder."""
    calls = launcher(None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(LaunchError, match=r"^--profile ddp2: this process was launched already"):
        relaunch("ddp2", ["train"])
    assert calls == []


# ---------------------------------------------------------------- real launches

MODEL = ("--model.name_or_path", "bert", "--tracking.trackers", "[]")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_a_missing_file_is_said_once_by_two_processes(finetune: Finetune, tmp_path: Path) -> None:
    done = finetune("train", "--profile", "ddp2", "--data.train_file", "missing.tsv", *MODEL, env=NO_GPU)
    assert done.returncode == 2
    assert done.stderr.startswith("error: missing.tsv: no such file")
    assert done.stderr.count("missing.tsv") == 1
    # Neither a traceback nor the launcher's own account of the workers that left.
    for noise in ("Traceback", "Error", "exitcode", "local_rank", "torch.distributed"):
        assert noise not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["our --profile", "accelerate launch"])
def test_copies_that_do_not_know_of_each_other_are_refused(how: str, finetune: Finetune, tmp_path: Path) -> None:
    """A MULTI_CPU profile with two processes makes Accelerate start one."""
    profile = write_profile(tmp_path / "cpus.yaml", distributed_type="MULTI_CPU", num_processes=2, use_cpu=True)
    arguments = ("train", "--data.train_file", "missing.tsv", *MODEL)
    if how == "our --profile":
        done = finetune(*arguments, "--profile", "cpus.yaml", env=NO_GPU)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    else:
        done = finetune(*arguments, profile=profile, env=NO_GPU)
        assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: {profile} asks for 2 processes, but 1 are connected: several processes need "
        "distributed_type MULTI_GPU in the profile (it runs on CPUs too; see accelerate_configs/ddp2.yaml)"
    ]


@pytest.mark.slow
def test_an_unknown_key_in_a_profile(finetune: Finetune, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "a.yaml", num_processes=2, gradient_accumulation_steps=4)
    done = finetune("train", "--profile", profile, "--data.train_file", "missing.tsv", *MODEL, env=NO_GPU)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: accelerate launch refuses the profile {profile}: ")
    assert "gradient_accumulation_steps" in done.stderr
    assert "Traceback" not in done.stderr
