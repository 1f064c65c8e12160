"""Write large pictures in which a few shapes stand somewhere, too small to be told apart once the
model has shrunk them to its size, with the place where they are.

python examples/look_closer/make_data.py --out look_closer
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image

SHAPES = Path(__file__).parents[2] / "dataset/shapes_qa"
TASKS = ("one shape", "two shapes")  # "How many circles?", "How many circles plus squares?"
TIMES = 8  # larger than a picture of shapes, in width and height


def write(out: Path, seed: int) -> None:
    rng = random.Random(seed)
    (out / "images").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = []
        for row in map(json.loads, (SHAPES / f"{split}.jsonl").read_text().splitlines()):
            if row["task"] in TASKS:
                shapes = Image.open(SHAPES / row["images"][0])
                width, height = shapes.size
                left, top = (rng.randrange(TIMES) * side for side in shapes.size)
                large = Image.new("RGB", (TIMES * width, TIMES * height))
                large.paste(shapes, (left, top))
                large.save(out / row["images"][0], compress_level=1)
                lines.append({**row, "box": [left, top, left + width, top + height]})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"{split}.jsonl").write_text(text)
        print(f"wrote {out / split}.jsonl, {len(lines)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("look_closer"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.seed)


if __name__ == "__main__":
    main()
