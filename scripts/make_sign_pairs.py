"""Render preference pairs of signs for the small model: a crisp sign and a flawed one.

    python scripts/make_sign_pairs.py --out dataset/sign_pairs

Both images of a pair show the sign of the prompt in the same colours. The rejected one is blurred,
pale or misspelled by one letter, as the column `flaw` states. The words of train.jsonl are those
of dataset/ocr/train.txt, and the words of test.jsonl the held-out ones of test.txt.
"""

import json
import random
from itertools import cycle, islice
from pathlib import Path
from string import ascii_uppercase

from PIL import Image
from tiny.images import Degradation, draw
from tiny.prompts import sign_prompt
from tiny.words import split_words

from flow_grpo.config.error_reporting import ScriptParser

MISSPELLED = "misspelled"
FLAWS = {  # (share of the pairs, degradation of the rejected image)
    "blurred": (2, Degradation(blur_share=1.0, low_contrast_share=0.0)),
    "pale": (1, Degradation(blur_share=0.0, low_contrast_share=1.0)),
    MISSPELLED: (1, Degradation(blur_share=0.0, low_contrast_share=0.0)),
}
MAX_PAIRS = 100_000


def misspell(word: str, rng: random.Random) -> str:
    """Return a word with one letter replaced by another one."""
    place = rng.randrange(len(word))
    others = ascii_uppercase.replace(word[place], "")
    return word[:place] + rng.choice(others) + word[place + 1 :]


def draw_pair(word: str, flaw: str, rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Return the crisp and the flawed sign; the same seed gives both the same colours."""
    seed = rng.getrandbits(32)
    shown = misspell(word, rng) if flaw == MISSPELLED else word
    rejected = draw(sign_prompt(shown), degradation=FLAWS[flaw][1], seed=seed)
    return draw(sign_prompt(word), seed=seed), rejected


def write_split(folder: Path, split: str, words: list[str], flaws: list[str], seed: int) -> None:
    """Write the images of a split and its JSON Lines file; words are used in random order."""
    rng = random.Random(f"{split} {seed}")
    (folder / split).mkdir(parents=True)
    order = cycle(rng.sample(words, len(words)))
    lines = []
    for number, (word, flaw) in enumerate(zip(order, flaws, strict=False)):
        row = {"prompt": sign_prompt(word), "flaw": flaw}
        for column, image in zip(("chosen", "rejected"), draw_pair(word, flaw, rng), strict=True):
            row[column] = f"{split}/{number:04d}-{column}.png"
            image.save(folder / row[column])
        lines.append(json.dumps(row) + "\n")
    path = folder / f"{split}.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    print(f"wrote {len(lines)} pairs to {path}")


def write_pairs(folder: Path, pairs: int, held_out: int, flaw: str = "", seed: int = 0) -> None:
    """Write both splits; all rejected images have the given flaw, or each of them if it is ""."""
    shares = [name for name, (share, _) in FLAWS.items() for _ in range(share)]
    kinds = [flaw] if flaw else shares
    train, test = split_words(0)
    for split, words, count in (("train", train, pairs), ("test", test, held_out)):
        write_split(folder, split, words, list(islice(cycle(kinds), count)), seed)


def main() -> None:
    """Write the pairs to a new directory."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dataset/sign_pairs"))
    parser.add_argument("--pairs", type=int, default=512, help="pairs to train on")
    parser.add_argument("--held-out", type=int, default=96, help="pairs of held-out words")
    parser.add_argument("--flaw", choices=FLAWS, default="", help="default: all of them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        parser.fail(f"{args.out} already exists; remove it or choose a new directory with --out")
    for name, value in (("--pairs", args.pairs), ("--held-out", args.held_out)):
        if not 1 <= value <= MAX_PAIRS:
            parser.fail(f"{name}={value} must be from 1 to {MAX_PAIRS}")
    try:
        write_pairs(args.out, args.pairs, args.held_out, args.flaw, args.seed)
    except OSError as error:
        parser.fail(f"--out={args.out} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
