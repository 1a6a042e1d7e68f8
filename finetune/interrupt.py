"""Requests to stop: a signal to any process or a time limit, on which all processes act at the same place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from finetune.errors import Interrupted

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}  # SIGUSR1: Slurm's warning before the end
SAME_KEY_PRESS = 0.3  # seconds in which one Ctrl-C may reach a process twice: from the terminal and from its launcher
TIME_IS_UP = 1000  # stands among signal numbers for train.max_hours


class StopRequests:
    """Listens for signals while it is entered, and lets all processes agree on whether to stop.

    The processes exchange what they have heard while they compute: :meth:`ask` starts the exchange of one number,
    :meth:`answer` returns what came of it. Every process calls both, in turns and equally often; between them goes
    work that takes longer than the exchange, so that nobody waits for it.

    Args:
        deadline: time on the clock of ``time.monotonic()`` at which training is to end; None: never.

    Attributes:
        needed: seconds before the deadline at which to stop: what a step and a checkpoint take.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.needed = 0.0
        self._deadline = deadline
        self._heard = 0
        self._heard_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._group = dist.new_group(backend="gloo") if _is_distributed() else None
        self._asked: tuple[torch.Tensor, Any] | None = None

    def __enter__(self) -> StopRequests:
        self._previous = {each: signal.signal(each, self._hear) for each in EXIT_CODES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._heard == signal.SIGINT and now - self._heard_at > SAME_KEY_PRESS:
            os._exit(EXIT_CODES[signal.SIGINT])
        if self._heard != signal.SIGINT:
            self._heard, self._heard_at = number, now

    @contextmanager
    def round(self) -> Iterator[None]:
        """:meth:`ask` before, :meth:`answer` after the work inside."""
        self.ask()
        yield
        self.answer()

    def ask(self) -> None:
        """Start telling the others what this process has heard."""
        heard = self._heard
        if not heard and self._deadline is not None and time.monotonic() + self.needed > self._deadline:
            heard = TIME_IS_UP
        told = torch.tensor([heard])
        work = None if self._group is None else dist.all_reduce(told, dist.ReduceOp.MAX, self._group, async_op=True)
        self._asked = told, work

    def answer(self) -> None:
        """Learn what any process had heard when it was asked.

        Raises:
            Interrupted: on every process, when there was a request to stop on any.
        """
        assert self._asked is not None, "ask() comes first"
        told, work = self._asked
        if work is not None:
            work.wait()
        self._asked = None
        request = int(told)
        if request == TIME_IS_UP:
            raise Interrupted("train.max_hours", exit_code=0)
        if request:
            number = signal.Signals(request)
            raise Interrupted(number.name, EXIT_CODES[number])


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
