"""Create large images with small shapes that are unrecognizable at the model's resolution.

    python examples/look_closer/make_data.py --out look_closer

Each row has the bounding box of the shapes as `box`.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image

SHAPES = Path(__file__).parents[2] / "dataset/shapes_qa"
TASKS = ("one shape", "two shapes")  # "How many circles?", "How many circles plus squares?"
SCALE = 8  # width and height of the large image, relative to the original


def write(out: Path, seed: int) -> None:
    rng = random.Random(seed)
    (out / "images").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = []
        for row in map(json.loads, (SHAPES / f"{split}.jsonl").read_text().splitlines()):
            if row["task"] in TASKS:
                shapes = Image.open(SHAPES / row["images"][0])
                width, height = shapes.size
                left, top = (rng.randrange(SCALE) * side for side in shapes.size)
                large = Image.new("RGB", (SCALE * width, SCALE * height))
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
