#!/usr/bin/env python3
"""Write a large file of short labelled texts, to see how reading, checking and tokenising grow.

    scripts/make_million_rows.py /tmp/million.tsv
    scripts/make_million_rows.py /tmp/hundred_thousand.tsv --rows 100_000 --seed 1

The rows follow from the seed. A text has 4 to 24 words, two of which tell its topic, and ends with its own number, so
that texts are alike only where that is meant. What there is, is printed as JSON:

- duplicate: every 100th row repeats the one before it, text and label;
- conflict: every 1,000th row repeats the text before it with another label instead;
- near_duplicate: rows 50, 150, 250 and so on repeat the one before them in capitals and with a full stop.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TOPICS = {
    "business": "market shares profit bank investors prices economy trade company sales",
    "health": "doctors patients hospital disease vaccine treatment medicine surgery clinic diet",
    "politics": "minister parliament election vote government party policy senator campaign law",
    "sport": "match goal team season coach league players champion tournament race",
    "technology": "software computer internet phone users network digital device browser chip",
}
LABELS = list(TOPICS)
COMMON = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get here between both "
    "life being under never day same another know while last might us great old year off come since against go came "
    "right used take three yesterday announced reported surprisingly nevertheless unexpectedly throughout"
)


def rows(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """``(text, label, kind)`` of each row; the kind is unique or one of those above."""
    generator = random.Random(seed)
    topics, common = {label: words.split() for label, words in TOPICS.items()}, COMMON.split()
    text = label = ""
    for number in range(1, count + 1):
        if number % 1000 == 0:
            yield text, LABELS[LABELS.index(label) - 1], "conflict"
        elif number % 100 == 0:
            yield text, label, "duplicate"
        elif number % 100 == 50:
            yield f"{text.upper()}.", label, "near_duplicate"
        else:
            label = generator.choice(LABELS)
            words = generator.choices(common, k=generator.randrange(2, 23)) + generator.choices(topics[label], k=2)
            generator.shuffle(words)
            text = f"{' '.join(words)} {number}"
            yield text, label, "unique"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    with options.path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("text\tlabel\n")
        for text, label, kind in rows(options.rows, options.seed):
            file.write(f"{text}\t{label}\n")
            kinds[kind] += 1
    print(json.dumps({"rows": kinds.total(), "classes": len(LABELS), **kinds}))


if __name__ == "__main__":
    main()
