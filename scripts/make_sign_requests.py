"""Write requests for signs in many wordings, the dataset of the preset `tiny_enhancer`.

    python scripts/make_sign_requests.py --out new/sign_requests

A row has the request (`question`), such as `sign DOG crisp`, and the prompt that its image is
scored against (`prompt`), such as `a sign that says "DOG"`. The train and test splits use the words
of the splits of dataset/ocr.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tiny.prompts import sign_prompt
from tiny.words import split_words

REQUESTS = (
    "sign {word} crisp",
    "sign with {word}",
    "draw the word {word}",
    "{word} on a sign",
    "please write {word}",
    "a board for {word}",
    "crisp sign {word} please",
    "make a sign: {word}",
    "I need {word} as a sign",
    "show me {word}",
    "{word} sign",
    "shop sign {word}",
)
SEED = 0


def make_rows(split: str, words: list[str]) -> Iterator[dict[str, str]]:
    """Yield one request per word, in a random wording."""
    rng = random.Random(f"{split} {SEED}")
    for word in words:
        yield {"question": rng.choice(REQUESTS).format(word=word), "prompt": sign_prompt(word)}


def main() -> None:
    """Write train.jsonl and test.jsonl to the output directory, which must not exist."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    folder.mkdir(parents=True)
    for split, words in zip(("train", "test"), split_words(), strict=True):
        lines = "".join(json.dumps(row) + "\n" for row in make_rows(split, words))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
