"""``finetune check``: what it prints, writes and returns."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from conftest import reviews, write_tsv

from finetune.cli import main

CASES = Path(__file__).parent / "data" / "cases"
LEAKS = CASES / "31_duplicates_leak"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def files(train: Path, dev: Path | None, folder: Path) -> list[object]:
    arguments: list[object] = ["--data.train_file", train, "--data.cache_dir", folder / "cache"]
    return arguments + (["--data.validation_file", dev] if dev else [])


def test_warnings_leave_the_exit_code_at_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *files(LEAKS / "train.tsv", LEAKS / "dev.tsv", tmp_path))
    assert code == 0
    assert "Data check: 4 warnings" in out
    assert "dev rows that are in train: 2 exactly, 3 normalised" in out
    assert "train.tsv:3 and " in out
    assert "Lengths in characters" in out and "With --model.name_or_path" in out


def test_with_a_model_lengths_are_in_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], bert: Path) -> None:
    path = write_tsv(tmp_path / "train.tsv", [*reviews(40), ("very " * 100, "pos")])
    output = tmp_path / "report.json"
    code, out, _ = run(
        capsys, *files(path, None, tmp_path), "--model.name_or_path", bert, "--data.max_length", 500, "--output", output
    )
    assert code == 0
    assert "Lengths in tokens" in out and f"report: {output}" in out
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["max_length"] == 64  # what the model takes
    assert list(report["splits"]) == ["train"]
    assert report["splits"]["train"]["rows"] == 41  # of the file, whatever is held back for the baselines
    assert report["splits"]["train"]["lengths"]["cut"]["64"] == [pytest.approx(1 / 41), pytest.approx(38 / total(path))]
    assert [each["name"].split(" ")[0] for each in report["baselines"]] == ["most", "TF-IDF"]


def total(path: Path) -> int:
    """Words, with two special tokens a row."""
    return sum(len(line.split("\t")[0].split()) + 2 for line in path.read_text(encoding="utf-8").splitlines()[1:])


def test_mistakes_of_all_files_are_found_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_tsv(tmp_path / "train.tsv", [("a", "x"), ("b",)])
    dev = write_tsv(tmp_path / "dev.tsv", [("c", "x"), ("d", "x", "y")])
    output = tmp_path / "report.html"
    code, out, err = run(capsys, *files(train, dev, tmp_path), "--output", output)
    assert code == 1
    assert "Data check: 2 errors" in out
    assert "train.tsv:3: 1 field, 2 expected" in out and "dev.tsv:3: 3 fields, 2 expected" in out
    assert not err
    assert "dev.tsv:3: 3 fields" in output.read_text(encoding="utf-8")


def test_a_dev_label_that_training_lacks_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CASES / "19_unseen_dev_label"
    code, out, _ = run(capsys, *files(folder / "train.tsv", folder / "dev.tsv", tmp_path))
    assert code == 1
    assert "dev.tsv:5: 'mixed'" in out


def test_a_run_config_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data:\n  train_file: {LEAKS / 'train.tsv'}\n  cache_dir: {tmp_path}\ntrain:\n  seed: 3\n", encoding="utf-8"
    )
    code, out, _ = run(capsys, "--config", config)
    assert code == 0 and "no data.validation_file" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "data.train_file is required"),
        (["--data.train_file", "a.tsv", "--output", "report.pdf"], "--output report.pdf: the name must end in .html"),
        (["--data.train_file", "a.tsv", "--output", "nowhere/a.html"], "nowhere does not exist"),
        (["--data.train_fil", "a.tsv"], "did you mean data.train_file?"),
        (["--data.train_file", "a.tsv", "--model.name_or_path", "./nowhere"], "there is no such folder"),
    ],
)
def test_mistakes_in_the_command(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and said in err


def test_help_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "--output FILE" in out and "--data.train_file" in out and "--model.name_or_path" in out
    assert "--optim." not in out


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], bert: Path) -> None:
    """Read back as a page: classes, lengths, leaks, and a label that is no markup."""
    label = "<script>alert(1)</script>"
    train = [
        *[(f"good {'film ' * (row % 9)}{row}", label) for row in range(20)],
        *[(f"bad {row}", "负") for row in range(10)],
    ]
    output = tmp_path / "report.html"
    arguments = files(write_tsv(tmp_path / "a.tsv", train), write_tsv(tmp_path / "b.tsv", train[:1]), tmp_path)
    code, _, _ = run(capsys, *arguments, "--model.name_or_path", bert, "--output", output)
    assert code == 0
    page = output.read_text(encoding="utf-8")
    root = ET.fromstring(page[page.index("<body") : page.index("</html>")])
    assert "<script" not in page
    sections = {section.findtext("h2"): section for section in root.iter("section")}
    assert list(sections) == ["Warnings", "Rows", "Classes", "Lengths in tokens", "What a model must beat"]
    cells = [["".join(cell.itertext()) for cell in row] for row in sections["Classes"].iter("tr")]
    assert cells == [
        ["class", "train", "share", "dev", "share"],
        [label, "20", "66.7%", "1", "100.0%"],
        ["负", "10", "33.3%", "0", "0.0%"],
    ]
    assert "1 exactly, 1 normalised" in "".join(sections["Rows"].itertext())
    titles = ["".join(rect.itertext()) for rect in sections["Lengths in tokens"].iter("rect")]
    assert sum(int(title.split(" ")[0]) for title in titles) == 31  # each row is in one bar
    assert "a.tsv:2" in "".join(sections["Warnings"].itertext())
