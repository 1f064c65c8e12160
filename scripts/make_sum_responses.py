"""Write given responses to the sums in dataset/sums: 200 preference pairs.

python scripts/make_sum_responses.py --out new/sum_responses

The preferred response has the tags that the rewards parse, with one of three thoughts; the rejected
one is right without them, as the most likely response of assets/tiny-text, or wrong.
"""

import argparse
import json
import random
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIRS, SEED = 200, 0


def make_rows() -> list[dict[str, str]]:
    """Return pairs of the training questions in random order, each with a response only once."""
    lines = (ROOT / "dataset/sums/train.jsonl").read_text("utf-8").splitlines()
    rows = []
    for row in map(json.loads, lines):
        total = int(row["answer"])
        terms = re.search(r"(\d+\+\d+)", row["question"])[1]
        wrong = f"<think>{terms}</think><answer>{total + 1}</answer>"
        for thought, rejected in (
            (terms, f"{terms}={total}"),
            (f"is {total}", wrong),
            (f"{total}", f"{total}"),
        ):
            chosen = f"<think>{thought}</think><answer>{total}</answer>"
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
