"""What the person at the terminal sees: the plan before, a progress bar during, tables after.

Other ranks get the same objects with a quiet console, so that nobody has to ask who prints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def make_console(visible: bool) -> Console:
    """A console on standard output; silent where ``visible`` is false."""
    width = None if sys.stdout.isatty() else 110
    return Console(quiet=not visible, width=width, highlight=False, soft_wrap=False)


def print_plan(console: Console, plan: Mapping[str, str | Sequence[str]]) -> None:
    """Print ``{name: line or lines}`` as two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, lines in plan.items():
        for position, line in enumerate([lines] if isinstance(lines, str) else lines):
            table.add_row("" if position else name, Text(line))
    console.print(table)
    console.print()


def print_warning(console: Console, text: str) -> None:
    """Print one line that stands out."""
    console.print(Text("warning: ", style="bold yellow") + Text(text), soft_wrap=True)


class TrainingProgress:
    """A bar with rate and remaining time; plain lines where the output is not a terminal."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console, self._total = console, total_steps
        self._latest = ""
        self._next_line = 0
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[latest]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=console.quiet or not console.is_terminal,  # a quiet bar would swallow warnings
            transient=True,
        )
        self._task = self._bar.add_task("", total=total_steps, latest="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def at(self, step: int) -> None:
        """Optimizer steps done."""
        self._bar.update(self._task, completed=step)

    def training(self, step: int, epoch: float, loss: float, examples_per_second: float) -> None:
        """Show the latest training metrics."""
        left = (self._total - step) / max(step, 1)
        self._latest = f"loss {loss:.4f} · {examples_per_second:.0f} examples/s"
        self._bar.update(self._task, latest=self._latest)
        if not self._console.is_terminal and step >= self._next_line:
            self._next_line = step + max(self._total // 20, 1)  # about twenty lines over the run
            elapsed = self._bar.tasks[0].elapsed or 0.0
            self._console.print(
                f"step {step}/{self._total} · epoch {epoch:.2f} · {self._latest} · about {_clock(elapsed * left)} left"
            )

    def warn(self, text: str) -> None:
        """Print one line that stays."""
        print_warning(self._console, text)

    def evaluation(self, step: int, epoch: float, metrics: Mapping[str, float], seconds: float, is_best: bool) -> None:
        """Print one line that stays."""
        values = escape(" · ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        mark = "[bold green] ← best[/]" if is_best else ""
        self._console.print(
            f"[bold]eval[/] step {step} · epoch {epoch:.2f} · {values} · {seconds:.1f} s{mark}", emoji=False
        )


def print_results(
    console: Console,
    metrics: Mapping[str, float],
    intervals: Mapping[str, Sequence[float]],
    per_class: Sequence[Mapping[str, object]],
    facts: Mapping[str, str | Sequence[str]],
    title: str,
) -> None:
    """Print the metrics of a model with their intervals, the classes, and where everything is."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name, justify in (("metric", "left"), ("value", "right"), ("95 % interval", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, value in metrics.items():
        low_high = intervals.get(name)
        table.add_row(Text(name), f"{value:.4f}", f"{low_high[0]:.4f} – {low_high[1]:.4f}" if low_high else "")
    console.print()
    console.print(table)
    if per_class:
        classes = Table(title="By class", title_justify="left", title_style="bold")
        for column in per_class[0]:
            classes.add_column(str(column), justify="left" if column == "label" else "right")
        for row in per_class[:30]:
            classes.add_row(*(f"{v:.4f}" if isinstance(v, float) else Text(str(v)) for v in row.values()))
        console.print(classes)
        if len(per_class) > 30:
            console.print(f"… and {len(per_class) - 30} more classes")
    print_plan(console, facts)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
