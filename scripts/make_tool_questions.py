"""Write dataset/products and dataset/places, whose questions require tool calls.

    python scripts/make_tool_questions.py --out new/

Products require a Python interpreter. The colours of the places are random and can only be found by
searching `places/corpus.jsonl`.
"""

import argparse
import json
import random
from pathlib import Path

NUM_TRAIN, NUM_TEST, NUM_DOCUMENTS, SEED = 96, 64, 400, 0
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
COLOURS = ("blue", "brown", "gold", "green", "orange", "pink", "purple", "red", "white", "yellow")
FACTORS = range(32, 100)  # every product has four digits
PLACES = [a + b + c + d for a in CONSONANTS for b in VOWELS for c in CONSONANTS for d in VOWELS]
Row = dict[str, str]


def make_products() -> list[Row]:
    """Return the questions of both splits about products of two numbers."""
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    chosen = random.Random(SEED).sample(pairs, NUM_TRAIN + NUM_TEST)
    return [{"question": f"What is {a}*{b}?", "answer": str(a * b)} for a, b in chosen]


def make_places() -> dict[str, str]:
    """Return the colour of each place; the questions ask for those of the first places."""
    rng = random.Random(SEED)
    names = rng.sample(PLACES, NUM_DOCUMENTS)
    return {name.title(): rng.choice(COLOURS) for name in names}


def ask_colours(places: dict[str, str]) -> list[Row]:
    """Return the questions of both splits about the colours of places."""
    asked = list(places.items())[: NUM_TRAIN + NUM_TEST]
    return [{"question": f"What colour is {name}?", "answer": colour} for name, colour in asked]


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the datasets to the output directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    places = make_places()
    for name, rows in (("products", make_products()), ("places", ask_colours(places))):
        write(out / name / "train.jsonl", rows[:NUM_TRAIN])
        write(out / name / "test.jsonl", rows[NUM_TRAIN:])
    documents = [{"text": f"{name} is {colour}."} for name, colour in sorted(places.items())]
    write(out / "places/corpus.jsonl", documents)


if __name__ == "__main__":
    main()
