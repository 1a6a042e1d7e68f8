#!/usr/bin/env python3
"""Write a large file of short labelled texts, to see how reading, checking and tokenising grow.

    scripts/make_million_rows.py /tmp/million.tsv
    scripts/make_million_rows.py --rows 100000 /tmp/hundred_thousand.tsv

The same numbers of rows give the same file. One row in a hundred is an exact copy of an earlier one.
"""

import argparse
import random
from pathlib import Path

CLASSES = ("business", "politics", "sport", "tech")
WORDS = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8").split()
WORDS = sorted({word for word in WORDS if word.isalpha()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    generator = random.Random(options.rows)
    copied = ""
    with options.path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("text\tlabel\n")
        for row in range(options.rows):
            if row % 100 != 99:
                words = generator.choices(WORDS, k=generator.randrange(3, 20))
                line = f"{' '.join(words)} {row}\t{generator.choice(CLASSES)}\n"
                copied = line if row % 100 == 0 else copied
            else:
                line = copied
            file.write(line)
    print(f"{options.path}: {options.rows:,} rows, {options.rows // 100:,} of them copies")


if __name__ == "__main__":
    main()
