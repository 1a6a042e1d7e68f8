"""How this process was launched: its profile, its gradient accumulation, its share of the machine.

A launch profile is an Accelerate YAML. Accelerate's schema has one slot for gradient accumulation,
``deepspeed_config``, and its launcher tells the script nothing about the profile, so the profile is found from the
launching process's command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
import logging
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from finetune.config import nearest
from finetune.cpu_memory import keep_freed_memory
from finetune.errors import ConfigError, FinetuneError, LaunchError, TrainingError

if TYPE_CHECKING:
    from accelerate import Accelerator

PROFILE_VARIABLE = "FINETUNE_PROFILE"
# What gloo and NCCL say when the process at the other end is gone.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


@dataclass(frozen=True)
class Launch:
    """What is known about the launch of this process, before any distributed group exists."""

    profile: Path | None = None
    """The Accelerate YAML, or None when the process was started without a launcher."""
    num_processes: int | None = None
    """Processes that were asked for over all machines."""
    profile_accumulation: int | None = None
    """gradient_accumulation_steps of the profile."""
    launcher_accumulation: int | None = None
    """--gradient_accumulation_steps on the launcher's command line."""
    threads_set_by_user: bool = False
    """Whether OMP_NUM_THREADS comes from the user and not from the launcher."""


def profiles_folder() -> Path:
    """Folder of the shipped launch profiles: in the wheel inside the package, in a checkout beside it."""
    package = Path(str(importlib.resources.files("finetune")))
    inside = package / "accelerate_configs"
    return inside if inside.is_dir() else package.parent / "accelerate_configs"


def profile_path(name: str) -> Path:
    """Path of a launch profile given as a file or as the name of a shipped one.

    Raises:
        LaunchError: when it is neither; the message lists the shipped profiles.
    """
    if os.path.isfile(name):
        return Path(name).resolve()
    shipped = {path.stem: path for path in sorted(profiles_folder().glob("*.yaml"))}
    if name in shipped:
        return shipped[name]
    raise LaunchError(
        f"--profile {name}: no such file, and no shipped profile of that name{nearest(name, shipped)} "
        f"(profiles: {', '.join(shipped)})"
    )


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Find out how this process was launched."""
    if PROFILE_VARIABLE in environ:  # `finetune train --profile` launched us and says so
        profile = Path(environ[PROFILE_VARIABLE])
        asked = environ.get(PROFILE_VARIABLE + "_PROCESSES")
        parent_environ: Mapping[str, str] = environ if environ.get(PROFILE_VARIABLE + "_THREADS") else {}
        return _launch_from(profile, int(asked) if asked else None, None, parent_environ)
    for ancestor in _ancestors():
        with contextlib.suppress(psutil.Error):
            arguments = launcher_arguments(ancestor.cmdline())
            if arguments is not None:
                options = _parse_launcher(arguments)
                # With --cpu and no --config_file, the launcher does not look at the default file.
                profile_name = options.config_file or (None if options.cpu else _default_profile())
                folder = ancestor.cwd()
                return _launch_from(
                    Path(folder, profile_name) if profile_name else None,
                    options.num_processes,
                    options.gradient_accumulation_steps,
                    ancestor.environ(),
                )
    return Launch(threads_set_by_user="OMP_NUM_THREADS" in environ)


def _ancestors() -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from psutil.Process().parents()


def launcher_arguments(command: Sequence[str]) -> list[str] | None:
    """The arguments after ``accelerate launch`` in a command line; None when it is another program's."""
    words = list(command)
    if words and re.match(r"(python|pypy)[0-9.]*[a-z]?(\.exe)?$", os.path.basename(words[0]).lower()):
        words = _after_interpreter(words[1:])
    if not words:
        return None
    program = os.path.basename(words[0]).removesuffix(".exe").removesuffix("-script.py")
    if program in ("accelerate", "accelerate.commands.accelerate_cli") and words[1:2] == ["launch"]:
        return words[2:]
    in_source = words[0].endswith(os.path.join("accelerate", "commands", "launch.py"))
    return words[1:] if in_source or program in ("accelerate-launch", "accelerate.commands.launch") else None


def _after_interpreter(words: list[str]) -> list[str]:
    """The script or module that Python runs, and its arguments."""
    while words and words[0].startswith("-"):
        if words[0].startswith("-m"):
            return [words[0][2:], *words[1:]] if len(words[0]) > 2 else words[1:]
        words = words[2 if words[0] in ("-W", "-X", "--check-hash-based-pycs") else 1 :]
    return words


def _parse_launcher(arguments: list[str]) -> Any:
    """Read launcher options with Accelerate's own parser, so that every spelling it takes is understood."""
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_known_args(arguments)[0]


def _default_profile() -> str | None:
    """Accelerate's default config file, which the launcher reads when no --config_file is given."""
    from accelerate.commands.config.config_args import default_config_file

    return default_config_file if os.path.isfile(default_config_file) else None


def _launch_from(
    profile: Path | None, num_processes: int | None, accumulation: int | str | None, environ: Mapping[str, str]
) -> Launch:
    content = _read_profile(profile) if profile else {}
    asked = num_processes if num_processes is not None else content.get("num_processes")
    section = content.get("deepspeed_config") or {}
    if not isinstance(section, dict):
        raise LaunchError(f"launch profile {profile}: deepspeed_config is {section!r}: it must hold settings below it")
    slot = section.get("gradient_accumulation_steps")
    return Launch(
        profile=profile,
        num_processes=None if asked is None else int(asked),
        profile_accumulation=None if slot is None else _steps(slot, f"{profile}: deepspeed_config"),
        launcher_accumulation=None if accumulation is None else _steps(accumulation, "accelerate launch"),
        threads_set_by_user="OMP_NUM_THREADS" in environ,
    )


def _read_profile(profile: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(profile.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"launch profile {profile} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise LaunchError(f"launch profile {profile} is not an Accelerate config: make one with `accelerate config`")
    return content


def _steps(value: object, source: str) -> int:
    try:
        steps = int(str(value))
    except ValueError:
        steps = 0
    if steps < 1:
        raise LaunchError(f"gradient_accumulation_steps is {value!r} ({source}): it must be an integer of at least 1")
    return steps


def resolve_accumulation(
    launch: Launch, configured: int | None, origin: str, environ: Mapping[str, str] = os.environ
) -> tuple[int | None, str]:
    """Gradient accumulation and where it comes from; ``(None, "default")`` when nobody says anything.

    Order: our command line, the launcher's command line, the environment variable, the profile, the run config.

    Args:
        launch: how this process was launched.
        configured: ``train.gradient_accumulation_steps``.
        origin: ``"command line"`` or the path of the YAML that set it.
        environ: environment variables.

    Raises:
        ConfigError: when the profile and the run config disagree and nothing above them decides.
    """
    if configured is not None and origin == "command line":
        return configured, "command line"
    if launch.launcher_accumulation is not None:
        return launch.launcher_accumulation, "accelerate launch --gradient_accumulation_steps"
    if environ.get(ACCUMULATION_VARIABLE):
        return _steps(environ[ACCUMULATION_VARIABLE], ACCUMULATION_VARIABLE), ACCUMULATION_VARIABLE
    in_profile = launch.profile_accumulation
    if in_profile is not None and configured is not None and in_profile != configured:
        raise ConfigError(
            f"gradient_accumulation_steps is {configured} in {origin} but {in_profile} in the launch profile "
            f"{launch.profile}: make them equal, drop one, or decide with --train.gradient_accumulation_steps"
        )
    if in_profile is not None:
        return in_profile, f"profile {launch.profile.stem if launch.profile else ''}"
    return (configured, origin) if configured is not None else (None, "default")


def on_cpu() -> bool:
    """Whether the job runs on CPUs: no accelerator here, the user asked for it, or several processes on a Mac."""
    import torch

    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on"):
        return True
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind is None or (kind.type == "mps" and world_size() > 1)


def world_size() -> int:
    """Processes of this job according to the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Processes of this job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is rank 0, also before any distributed group exists."""
    return os.environ.get("RANK", "0") == "0"


def is_restarted() -> bool:
    """Whether the launcher started this job anew after a process of it had died (``--max_restarts``)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def job_start() -> float | None:
    """When the launcher of this process was started, in seconds since the epoch; None without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        return parent.create_time() if parent else None
    return None


def process_start() -> float:
    """When this process was started, in seconds since the epoch."""
    return psutil.Process().create_time()


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this process when its launcher dies, so that it saves and ends (Linux).

    A launcher that is killed would leave its processes running: alone, and invisible to the scheduler.
    """
    launched = PROFILE_VARIABLE in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def check_before_start(launch: Launch) -> None:
    """Refuse a launch that cannot work, before any process waits for another one.

    Raises:
        LaunchError: more processes than GPUs on this machine, or float16 on a CPU.
    """
    import torch

    local = local_world_size()
    where = f"launch profile {launch.profile}" if launch.profile else "the launcher"
    if not on_cpu() and torch.cuda.is_available() and local > torch.cuda.device_count():
        raise LaunchError(
            f"{where} starts {local} processes on this machine, which has {torch.cuda.device_count()} GPU(s): "
            f"use --num_processes {torch.cuda.device_count()}, or try it out on the CPU with ACCELERATE_USE_CPU=1"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "fp16" and on_cpu():
        raise LaunchError(f"mixed_precision is fp16 in {where}, which needs a GPU: use bf16 or no on the CPU")


def resolve_precision(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """``mixed_precision`` of this run and why, in words: what the launch profile asks for, where the device has it."""
    asked = environ.get("ACCELERATE_MIXED_PRECISION")
    by_whom = "as the launch profile says" if asked else "without a launch profile that says otherwise"
    device = "CPU" if on_cpu() else "GPU"
    if asked == "bf16" and not has_bf16():
        return "no", f"float32: the launch profile says bf16, which this {device} does not have"
    if asked in (None, "no"):
        hint = f"; mixed_precision: bf16 would be faster on this {device}" if has_bf16() else ""
        return "no", f"float32, {by_whom}{hint}"
    return asked, f"{asked}, {by_whom}"


def has_bf16() -> bool:
    """Whether the device computes bfloat16 natively: AMX or AVX512-BF16 in a CPU, Ampere and later among GPUs."""
    import torch

    if on_cpu():
        return any(there for name, there in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def build_accelerator() -> Accelerator:
    """Accelerator for this launch.

    ``cpu=True`` without a GPU lets a multi-GPU profile connect its processes over gloo; the plugin keeps
    ACCELERATE_GRADIENT_ACCUMULATION_STEPS from scaling the loss a second time, since the loop accumulates by itself.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    is_on_cpu = on_cpu()
    if is_on_cpu:
        keep_freed_memory()
    connect_after_restart()
    return Accelerator(
        cpu=is_on_cpu,
        mixed_precision=resolve_precision()[0],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def is_compiled(accelerator: Accelerator) -> bool:
    """Whether the launch profile (``dynamo_config``) has models compiled."""
    from accelerate.utils import DynamoBackend

    plugin = accelerator.state.dynamo_plugin
    return plugin is not None and plugin.backend != DynamoBackend.NO


def connect_after_restart() -> None:
    """Connect the processes of a restarted job; of a job that starts for the first time Accelerate does so.

    torch's static rendezvous keeps one store for all restarts (torch 2.13), in which a new group finds the addresses
    of the dead one and waits for them. A prefix of its own keeps each attempt apart.
    """
    if not is_restarted() or world_size() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(
        f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}",
        TCPStore(address, port, world_size(), is_master=False),
    )
    backend = "gloo" if on_cpu() else "nccl"
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=world_size())


def check_connected(launch: Launch, accelerator: Accelerator) -> None:
    """Refuse copies that train side by side without knowing of each other.

    Raises:
        LaunchError: the group's size is not what the launcher started or the profile asks for.
    """
    expected = {"the launcher started": world_size()}
    if launch.num_processes is not None:
        expected[f"{launch.profile or 'accelerate launch'} asks for"] = launch.num_processes
    for who, count in expected.items():
        if count != accelerator.num_processes:
            raise LaunchError(
                f"{who} {count} processes, but {accelerator.num_processes} are connected: several processes need "
                "distributed_type MULTI_GPU in the profile (it runs on CPUs too; see accelerate_configs/ddp2.yaml)"
            )


def use_all_cores(launch: Launch) -> int:
    """Give each process its share of the cores; returns the number of threads.

    Launchers set OMP_NUM_THREADS=1 whatever the machine; a value that the user set is kept.
    """
    import torch

    if not launch.threads_set_by_user:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
        torch.set_num_threads(max(1, cores // local_world_size()))
    return torch.get_num_threads()


def relaunch(
    profile: str, program: Sequence[str], num_processes: int | None = None, max_restarts: int | None = None
) -> int:
    """Run ``finetune PROGRAM…`` under ``accelerate launch`` with a profile and return its exit code.

    The launcher runs in this process: its own account of a worker's exit would only bury the message that the worker
    has already printed. After ``max_restarts`` times starting again it gives up.
    """
    path = profile_path(profile)
    if "LOCAL_RANK" in os.environ:
        raise LaunchError(f"--profile {profile}: this process was launched already: leave out one of the two launches")
    _read_profile(path)
    os.environ[PROFILE_VARIABLE] = str(path)
    os.environ[PROFILE_VARIABLE + "_PROCESSES"] = "" if num_processes is None else str(num_processes)
    os.environ[PROFILE_VARIABLE + "_THREADS"] = "1" if "OMP_NUM_THREADS" in os.environ else ""
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # the last is Slurm's warning
    options = ["--config_file", str(path)]
    options += [] if num_processes is None else ["--num_processes", str(num_processes)]
    options += [] if max_restarts is None else ["--max_restarts", str(max_restarts)]
    return _launch([*options, "-m", "finetune", *program], path, max_restarts or 0)


def _launch(arguments: list[str], profile: Path, max_restarts: int) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for restart in range(max_restarts + 1):
        try:
            with _signals_forwarded():
                launch_command(launch_command_parser().parse_args(arguments))
            return 0
        except ChildFailedError as error:
            return _exit_code(max(failure.exitcode for failure in error.failures.values()))
        except subprocess.CalledProcessError as error:  # one process, which has no launcher that would start it again
            if error.returncode >= 0 or restart == max_restarts:
                return _exit_code(error.returncode)
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart + 1)
        except SignalException as error:  # Ctrl-C, or the scheduler ends the job
            _end_children()
            return 128 + (signal.SIGTERM if error.sigval == signal.SIGUSR1 else error.sigval)
        except ValueError as error:
            raise LaunchError(f"accelerate launch refuses the profile {profile}: {error}") from None
    return 0


@contextlib.contextmanager
def _signals_forwarded() -> Iterator[None]:
    """Let a single process, which Accelerate starts without a thought of signals, hear those of its launcher.

    torch's launcher of several processes installs its own handlers over these.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                child.send_signal(number)

    previous = {each: signal.signal(each, forward) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _end_children() -> None:
    """After a second Ctrl-C nobody waits for the workers any more."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


def _exit_code(code: int) -> int:
    """A failed worker's exit code; one that a signal ended has said nothing, so that is said here."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ": is the machine out of memory?" if name == "SIGKILL" else ""
        raise TrainingError(f"a training process was ended by {name}{hint}")
    return code


def leave_with_error(error: Exception, seconds: float = 10.0) -> int:
    """Print what went wrong once per job; returns the exit code: 2 for what a user can mend, 1 for a fault of ours.

    The launcher ends all ranks when the first one exits. While they are connected, the first that fails speaks, and
    the others, who fail because they lost it, wait for the launcher. Before that, all fail alike, and rank 0 speaks.
    A rank that is still there after ``seconds`` was alone with its error, and speaks too.
    """
    is_connected, is_first = _first_to_fail()
    if is_connected and any(word in str(error) for word in LOST_CONNECTION):
        error = TrainingError(
            "lost the connection to another process of this job: it failed, or was ended by a signal or by the system "
            "(is the machine out of memory?)"
        )
    if not (is_first if is_connected else is_main_process()):
        time.sleep(seconds)
    if isinstance(error, FinetuneError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    code = 2 if isinstance(error, FinetuneError) else 1
    if is_connected:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the interpreter's own end may wait for the other ranks
    return code


def _first_to_fail() -> tuple[bool, bool]:
    """Whether the ranks of this job are connected, and whether this is the first of them to say that it fails."""
    torch = sys.modules.get("torch")
    if torch is None or world_size() == 1 or not torch.distributed.is_initialized():
        return False, False
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return True, store.add(f"finetune/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    except RuntimeError:  # the store went down with the process that kept it
        return True, is_main_process()
