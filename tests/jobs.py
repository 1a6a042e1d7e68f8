"""Training jobs of several processes that start in a second: forked from a process that has imported everything.

As a program it is that process: it reads ``{"argv": [...], "ranks": 2, "log": DIR, "env": {...}}`` lines, forks the
ranks of a job for each, and answers with their process ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent


class Job:
    """Connected processes of one job; each writes its output and its exit code beside the others'."""

    def __init__(self, pids: list[int], log: Path) -> None:
        self.log = log
        # Not their numbers, which are given to others when they run out.
        self.ranks = [_process(pid) for pid in pids]

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in ranks or range(len(self.ranks)):
            process = self.ranks[rank]
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                if process is not None:
                    process.send_signal(number)

    def kill(self) -> None:
        """As the machine does when it takes the job down: at once, and nobody is asked."""
        self.signal(signal.SIGKILL)
        self.wait()

    def is_running(self) -> bool:
        """Whether any process is still there."""
        return any(process is not None and process.is_running() for process in self.ranks)

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Exit codes when all processes have ended; None for one that a signal ended."""
        end, failed = time.monotonic() + seconds, 0.0
        files = [self.log / f"rank-{rank}.exit" for rank in range(len(self.ranks))]
        while self.is_running():
            if not failed and any(file.exists() and file.read_text() not in ("", "0") for file in files):
                failed = time.monotonic()
            if failed and time.monotonic() > failed + 2:  # as a launcher does, which waits less
                self.signal(signal.SIGKILL)
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"the job hangs after {seconds} s:\n{self.output()}")
            time.sleep(0.01)
        return [int(file.read_text()) if file.exists() else None for file in files]

    def output(self) -> str:
        """What all ranks have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.log.glob("rank-*t")))

    def streams(self) -> tuple[str, str]:
        """Standard output and error of the first rank."""
        return (self.log / "rank-0.out").read_text(), (self.log / "rank-0.err.txt").read_text()


def _process(pid: int) -> psutil.Process | None:
    """None when it has ended already."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


class Nursery:
    """Starts jobs; as a context manager it ends with all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )

    def start(self, argv: Sequence[object], ranks: int = 2, cwd: Path | None = None, **env: str) -> Job:
        """Start ``finetune ARGV`` in so many connected processes."""
        self._count += 1
        log = self.folder / f"job-{self._count:03d}"
        log.mkdir()
        order = {"argv": list(map(str, argv)), "ranks": ranks, "log": str(log), "env": env}
        order["cwd"] = str(cwd or self.folder)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Job(json.loads(self._process.stdout.readline()), log)

    def run(self, argv: Sequence[object], ranks: int = 2, **env: str) -> Job:
        """Start a job, wait for its end, which has to be a good one."""
        job = self.start(argv, ranks, **env)
        codes = job.wait()
        assert codes == [0] * ranks, f"{codes}\n{job.output()}"
        return job

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve() -> None:
    import evaluate  # noqa: F401  # what a training run imports by the way
    import wandb  # noqa: F401

    import finetune.cli
    import finetune.run  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks, so nobody has to
    for line in sys.stdin:
        order = json.loads(line)
        port = str(free_port())
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                _become(rank, order, port)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


def _become(rank: int, order: dict[str, object], port: str) -> None:
    """Turn this fork into one rank of a job."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log, ranks = Path(str(order["log"])), int(str(order["ranks"]))
    os.chdir(str(order["cwd"]))
    for stream, name in ((1, "out"), (2, "err.txt")):
        os.dup2(os.open(log / f"rank-{rank}.{name}", os.O_CREAT | os.O_WRONLY), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    place: dict[str, object] = (
        {}
        if ranks == 1
        else {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    )
    os.environ.update({name: str(value) for name, value in place.items()})
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_MIXED_PRECISION="no")
    os.environ.update(order["env"])  # type: ignore[call-overload]
    if patch := os.environ.get("FINETUNE_TEST_PATCH"):
        exec(compile(patch, "patch", "exec"), {"rank": rank})

    def leave(code: int) -> None:
        (log / f"rank-{rank}.exit").write_text(str(code))

    real_exit = os._exit
    os._exit = lambda code: (leave(code), real_exit(code))  # type: ignore[assignment]
    import finetune.cli

    try:
        code = finetune.cli.main(list(map(str, order["argv"])))  # type: ignore[arg-type, call-overload]
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code)
    real_exit(code)


if __name__ == "__main__":
    _serve()
