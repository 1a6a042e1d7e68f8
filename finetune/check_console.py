"""The data report of ``finetune check`` at the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.data.check import DataCheck

SEVERITIES = {"error": ("error", "bold red"), "warning": ("warning", "bold yellow"), "info": ("note", "bold cyan")}


def print_check(console: Console, report: DataCheck) -> None:
    """Print a data report: a verdict, the splits, their classes and lengths, baselines, and all findings."""
    counts = Counter(SEVERITIES[finding.severity][0] for finding in report.findings)
    colour = "red" if counts["error"] else "yellow" if counts["warning"] else "green"
    verdict = " · ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items())
    console.print(Text(f"Data check: {verdict or 'nothing to say'}", style=f"bold {colour}"))
    console.print()
    if report.splits:
        _print_splits(console, report)
        _print_classes(console, report)
        _print_lengths(console, report)
    if report.baselines:
        _print_baselines(console, report)
    for finding in report.findings:
        name, style = SEVERITIES[finding.severity]
        console.print(Text(f"{name}: ", style=style) + Text(finding.message), soft_wrap=True)
        for line in (*finding.places, *([f"→ {finding.remedy}"] if finding.remedy else [])):
            console.print(Text(f"    {line}", style="dim"), soft_wrap=True)  # a place stays in one piece, to be copied


def _table(title: str, *columns: str) -> Table:
    """A table whose columns of numbers have names that end in ``#``."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name.rstrip("#"), justify="right" if name.endswith("#") else "left")
    return table


def _print_splits(console: Console, report: DataCheck) -> None:
    table = _table("Rows", "split", "rows#", "repeated#", "contradicting texts#", "empty texts#", "unknown tokens#")
    for name, facts in report.splits.items():
        unknown = "" if facts.unknown_share is None else f"{facts.unknown_share:.2%}"
        numbers = (facts.rows, facts.repeated_rows, facts.conflicting_texts, facts.empty_texts)
        table.add_row(name, *(f"{number:,}" for number in numbers), unknown)
    console.print(table)
    if report.leaks:
        exact, near = report.leaks["exact"], report.leaks["normalised"]
        console.print(f"dev rows that are in train: {exact:,} exactly, {near:,} normalised")
    else:
        console.print("no data.validation_file: training would hold rows back, copies of a text on one side")
    console.print()


def _print_classes(console: Console, report: DataCheck) -> None:
    classes = report.splits["train"].classes
    if not classes:
        return
    table = _table("Classes", "class", "")
    for split in report.splits:
        table.add_column(split, justify="right")
        table.add_column("share", justify="right")
    most = max(classes.values())
    for name, count in sorted(classes.items(), key=lambda item: -item[1])[:30]:
        bar = Text("█" * max(1, round(20 * count / most)) if count else "", style="cyan")
        cells = []
        for facts in report.splits.values():
            cells += [f"{facts.classes[name]:,}", f"{facts.classes[name] / facts.rows:.1%}"]
        table.add_row(Text(name), bar, *cells)
    console.print(table)
    if len(classes) > 30:
        console.print(f"… and {len(classes) - 30} smaller classes")
    console.print()


def _print_lengths(console: Console, report: DataCheck) -> None:
    unit = report.splits["train"].lengths.unit
    table = _table(f"Lengths in {unit}", "split", "median#", "95 %#", "99 %#", "longest#")
    cuts = list(report.splits["train"].lengths.cut)
    for level in cuts:
        table.add_column(f"longer than {level}", justify="right")
    for name, facts in report.splits.items():
        values = (f"{facts.lengths.percentiles[percent]:,.0f}" for percent in (50, 95, 99, 100))
        table.add_row(name, *values, *(f"{facts.lengths.cut[level][0]:.1%}" for level in cuts))
    console.print(table)
    if not cuts:
        console.print("With --model.name_or_path: lengths in tokens, what is cut, and unknown tokens.")
    console.print()


def _print_baselines(console: Console, report: DataCheck) -> None:
    names = list(report.baselines[0].metrics)
    table = _table("What a model must beat on the dev rows", "baseline", *(f"{name}#" for name in names))
    if report.baselines[0].interval:
        table.add_column("95 % interval of accuracy", justify="right")
    for baseline in report.baselines:
        interval = [f"{baseline.interval[0]:.4f} – {baseline.interval[1]:.4f}"] if baseline.interval else []
        table.add_row(baseline.name, *(f"{value:.4f}" for value in baseline.metrics.values()), *interval)
    console.print(table)
    console.print()
