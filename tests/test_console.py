"""What is printed, as text; nothing by a quiet console; and user's words never as markup."""

from __future__ import annotations

import sys
from io import StringIO

import pytest
from rich.console import Console

from finetune.console import TrainingProgress, make_console, print_plan, print_results

TRICKY = ["[red]alarm[/red]", "[/]", "[/bold", "a[b", ":heart:", "\\", "[link=x]", "[1]", "体育[新闻]"]


def recorder(**changes: object) -> Console:
    options = {"record": True, "file": StringIO(), "width": 110, "force_terminal": False, "highlight": False}
    return Console(**{**options, **changes})  # type: ignore[arg-type]


def lines(console: Console) -> list[str]:
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_plan() -> None:
    console = recorder()
    print_plan(console, {"train": ["train.tsv: 37 rows", "3 blank lines skipped"], "learning rate": "2e-05"})
    assert lines(console) == [
        "train          train.tsv: 37 rows",
        "               3 blank lines skipped",
        "learning rate  2e-05",
        "",
    ]


def test_a_long_line_is_folded_and_not_cut() -> None:
    console = recorder(width=40)
    path = "/data/" + "x" * 80
    print_plan(console, {"run folder": path})
    assert "".join(line.removeprefix("run folder").strip() for line in lines(console)) == path


@pytest.mark.parametrize("word", TRICKY)
def test_markup_in_the_plan(word: str) -> None:
    console = recorder()
    print_plan(console, {"labels": f"2 classes: {word} 3", "run folder": ["runs", f"/tmp/{word}"]})
    assert lines(console)[:3] == [
        f"labels      2 classes: {word} 3",
        "run folder  runs",
        f"            /tmp/{word}",
    ]


@pytest.mark.parametrize("word", TRICKY)
def test_markup_in_an_evaluation(word: str) -> None:
    console = recorder()
    TrainingProgress(console, 10).evaluation(5, 0.5, {"loss": 0.25, word: 0.5}, 1.25, is_best=True)
    assert lines(console) == [f"eval step 5 · epoch 0.50 · loss 0.2500 · {word} 0.5000 · 1.2 s ← best"]


@pytest.mark.parametrize("word", TRICKY)
def test_markup_in_the_results(word: str) -> None:
    console = recorder()
    per_class = [{"label": word, "precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 3}]
    print_results(console, {word: 0.5}, {word: (0.25, 0.75)}, per_class, {"model": f"runs/{word}"}, "rows")
    text = console.export_text()
    assert text.count(word) == 3
    assert "0.2500 – 0.7500" in text


def test_results() -> None:
    console = recorder()
    per_class = [
        {"label": "neg", "precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 3},
        {"label": "pos", "precision": 0.25, "recall": 0.0, "f1": 0.0, "support": 1234},
    ]
    metrics = {"loss": 0.125, "accuracy": 0.9, "own": 3.0}
    print_results(
        console, metrics, {"accuracy": (0.85, 0.95)}, per_class, {"stopped": "all steps done"}, "1,237 rows of test.tsv"
    )
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines(console)]
    assert ["1,237 rows of test.tsv"] in rows
    for expected in (
        ["metric", "value", "95 % interval"],
        ["loss", "0.1250", ""],
        ["accuracy", "0.9000", "0.8500 – 0.9500"],
        ["own", "3.0000", ""],
        ["label", "precision", "recall", "f1", "support"],
        ["neg", "0.5000", "1.0000", "0.6667", "3"],
        ["pos", "0.2500", "0.0000", "0.0000", "1234"],
        ["stopped  all steps done"],
    ):
        assert expected in rows


def test_many_classes_are_cut_with_a_word() -> None:
    console = recorder()
    per_class = [{"label": f"class {index}", "f1": 0.5} for index in range(33)]
    print_results(console, {"accuracy": 0.5}, {}, per_class, {}, "rows")
    text = console.export_text()
    assert "class 29" in text
    assert "class 30" not in text
    assert "… and 3 more classes" in text


def test_no_classes_no_table() -> None:
    console = recorder()
    print_results(console, {"mse": 0.5}, {}, [], {}, "rows")
    assert "By class" not in console.export_text()


def test_progress_without_a_terminal_is_about_twenty_lines() -> None:
    console = recorder()
    with TrainingProgress(console, 1000) as progress:
        for step in range(1, 1001):
            progress.at(step)
            if step % 10 == 0:
                progress.training(step, step / 500, 0.5, 42.4)
    got = lines(console)
    assert 19 <= len(got) <= 21
    assert got[0].startswith("step 10/1000 · epoch 0.02 · loss 0.5000 · 42 examples/s · about 0:0")
    assert got[0].endswith(" left")
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in got]
    assert steps == list(range(10, 1001, 50))
    assert all("\x1b" not in line and "\r" not in line for line in got)


def test_a_short_run_prints_every_line() -> None:
    console = recorder()
    with TrainingProgress(console, 3) as progress:
        for step in (1, 2, 3):
            progress.training(step, step / 3, 1.0, 10)
    got = lines(console)
    assert [line.split(" · ")[0] for line in got] == ["step 1/3", "step 2/3", "step 3/3"]
    assert got[-1].endswith("about 0:00 left")


@pytest.mark.parametrize(
    ("elapsed", "step", "expected"),
    [(30, 100, "4:30"), (600, 100, "1:30:00"), (0.4, 500, "0:00"), (59.6, 500, "1:00"), (36000, 10, "990:00:00")],
)
def test_time_left(monkeypatch: pytest.MonkeyPatch, elapsed: float, step: int, expected: str) -> None:
    """Of 1000 steps: as long for each of the rest as for each of those done."""
    console = recorder()
    now = [0.0]
    console.get_time = lambda: now[0]  # type: ignore[method-assign]
    with TrainingProgress(console, 1000) as progress:
        now[0] = elapsed
        progress.training(step, 1.0, 1.0, 1.0)
    assert lines(console)[0].endswith(f"about {expected} left")


def test_a_terminal_gets_a_bar() -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=110)
    with TrainingProgress(console, 10) as progress:
        progress.at(4)
        progress.training(4, 0.4, 0.125, 42)
    text = output.getvalue()
    assert "4/10" in text
    assert "loss 0.1250 · 42 examples/s" in text
    assert "step 4/10" not in text  # no line as well


@pytest.mark.parametrize("terminal", [True, False])
def test_a_quiet_console_prints_nothing_and_swallows_nothing(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What other ranks have: their warnings on standard error must still come through."""
    output = StringIO()
    console = Console(file=output, quiet=True, force_terminal=terminal)
    print_plan(console, {"train": "train.tsv"})
    with TrainingProgress(console, 10) as progress:
        progress.at(1)
        progress.training(1, 0.1, 0.5, 10)
        progress.evaluation(1, 0.1, {"loss": 0.5}, 1.0, is_best=True)
        print("a warning", file=sys.stderr)
    print_results(console, {"loss": 0.5}, {}, [], {"model": "best"}, "rows")
    assert output.getvalue() == ""
    assert capsys.readouterr().err == "a warning\n"


def test_make_console(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(visible=False).print("hidden")
    make_console(visible=True).print("shown")
    assert capsys.readouterr().out == "shown\n"
