"""Where the seconds go between the start of the process and the first training step."""

from __future__ import annotations

import time


class Startup:
    """A clock that is told when each part of the start-up is done.

    Args:
        since: when the process was started, in seconds since the epoch.

    Attributes:
        seconds: of each part, in order.
    """

    def __init__(self, since: float) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = since

    def done(self, part: str) -> None:
        """What passed since the last call was this part."""
        now = time.time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._clock
        self._clock = now

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.seconds.values())

    def describe(self) -> str:
        """For the plan."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{self.total:.1f} s ({parts})"
