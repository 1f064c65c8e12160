"""Write given responses to the sums in dataset/sums: 200 preference pairs.

    python scripts/make_sum_responses.py --out new/sum_responses

The chosen response is the correct one of the four forms of assets/tiny-text. The rejected one is
wrong, or correct without tags: the most likely response of the model, or the result alone. Each of
the 72 questions occurs in two or three pairs.
"""

import argparse
import json
import random
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIRS, SEED = 200, 0


def make_rows() -> list[dict[str, str]]:
    """Return distinct pairs of the training questions in random order."""
    lines = (ROOT / "dataset/sums/train.jsonl").read_text("utf-8").splitlines()
    rows = []
    for row in map(json.loads, lines):
        total = int(row["answer"])
        terms = re.search(r"(\d+\+\d+)", row["question"])[1]
        wrong = f"<think>{terms}</think><answer>{total + 1}</answer>"
        chosen = f"<think>{terms}</think><answer>{total}</answer>"
        for rejected in (f"{terms}={total}", wrong, f"{total}"):
            rows.append({"question": row["question"], "chosen": chosen, "rejected": rejected})
    random.Random(SEED).shuffle(rows)
    return rows[:PAIRS]


def main() -> None:
    """Write train.jsonl to the output directory, which must not exist."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in make_rows())
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
