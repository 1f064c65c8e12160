"""Write dataset/products, dataset/places and dataset/digits, whose questions require tool calls.

    python scripts/make_tool_questions.py --out new/

Products require a Python interpreter. The colours of the places are random and can only be found by
searching `places/corpus.jsonl`. The digits are unreadable at the 32 x 32 pixels that tiny-zoom sees
of an image, and have to be zoomed in on.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

NUM_TRAIN, NUM_TEST, NUM_DOCUMENTS, SEED = 96, 64, 400, 0
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
COLOURS = ("blue", "brown", "gold", "green", "orange", "pink", "purple", "red", "white", "yellow")
FACTORS = range(32, 100)  # every product has four digits
PLACES = [a + b + c + d for a in CONSONANTS for b in VOWELS for c in CONSONANTS for d in VOWELS]
SIZE = 128  # width and height of an image, in pixels
BOXES = {  # left, top, right and bottom of the squares with a digit
    "top left": (16, 16, 24, 24),
    "top right": (104, 16, 112, 24),
    "bottom left": (16, 104, 24, 112),
    "bottom right": (104, 104, 112, 112),
}
GLYPHS = (  # 3 x 5 pixels of each digit, by rows
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111"),
    *("101101111001001", "111100111001111", "111100111101111", "111001001010010"),
    *("111101111101111", "111101111001111"),
)
Row = dict[str, str | list[str]]


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


def draw_digits(rng: random.Random, digits: Sequence[int]) -> Image.Image:
    """Draw small bright digits in the corners of a dark image, in the order of BOXES."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.randrange(50) for _ in range(3)))
    for digit, (left, top, *_) in zip(digits, BOXES.values(), strict=True):
        glyph = Image.frombytes("L", (3, 5), bytes(255 * int(dot) for dot in GLYPHS[digit]))
        colour = tuple(rng.randrange(180, 256) for _ in range(3))
        image.paste(colour, (left + 2, top + 1), mask=glyph)
    return image


def write_digits(folder: Path) -> list[Row]:
    """Write the images of both splits; return one question about each corner of each image."""
    rng, rows = random.Random(SEED), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for count in (NUM_TRAIN, NUM_TEST):
        answers = [i % len(GLYPHS) for i in range(count)]  # a constant guess is right in one of ten
        rng.shuffle(answers)
        for start in range(0, count, len(BOXES)):
            digits = answers[start : start + len(BOXES)]
            name = f"images/{len(rows) // len(BOXES):02d}.png"
            draw_digits(rng, digits).save(folder / name, optimize=True)
            for corner, digit in zip(BOXES, digits, strict=True):
                question = f"Which digit is {corner}?"
                rows.append({"question": question, "images": [name], "answer": str(digit)})
    return rows


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the datasets to the output directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    places = make_places()
    questions = {
        "products": make_products(),
        "places": ask_colours(places),
        "digits": write_digits(out / "digits"),
    }
    for name, rows in questions.items():
        write(out / name / "train.jsonl", rows[:NUM_TRAIN])
        write(out / name / "test.jsonl", rows[NUM_TRAIN:])
    documents = [{"text": f"{name} is {colour}."} for name, colour in sorted(places.items())]
    write(out / "places/corpus.jsonl", documents)


if __name__ == "__main__":
    main()
