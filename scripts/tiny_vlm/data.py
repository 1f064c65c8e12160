"""Generate the questions and images of dataset/shapes_qa."""

import argparse
import json
import random
from pathlib import Path

from tiny_vlm.measure import AskedQuestion, draw_questions
from tiny_vlm.texts import BY_TASK, SUM, TASKS, TEMPLATES

# Questions with an image, and sums without one; the splits have none in common.
SIZES = {"train": (376, 72), "test": (164, 28)}
DEFAULT_SEED = 7


def build(seed: int) -> dict[str, list[AskedQuestion]]:
    """Draw the questions of each split: some with an image, and sums without one."""
    rng = random.Random(seed)
    sums = [
        AskedQuestion(t.text, None, t.first, t.second, SUM)
        for t in (TEMPLATES[i] for i in BY_TASK[SUM])
    ]
    rng.shuffle(sums)
    splits = {}
    for number, (split, (num_images, num_sums)) in enumerate(SIZES.items()):
        rows = draw_questions(num_images, seed=seed + number, sums=0) + sums[:num_sums]
        sums = sums[num_sums:]
        rng.shuffle(rows)
        splits[split] = rows
    return splits


def write(folder: Path, splits: dict[str, list[AskedQuestion]]) -> None:
    """Write the images and a JSON Lines file of questions for each split."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = []
        for number, row in enumerate(rows):
            images = []
            if row.image:
                images = [f"images/{split}-{number:03d}.png"]
                row.image.save(folder / images[0], optimize=True)
            line = {
                "question": row.text,
                "images": images,
                "answer": row.answer,
                "task": TASKS[row.task],
            }
            lines.append(json.dumps(line) + "\n")
        folder.joinpath(f"{split}.jsonl").write_text("".join(lines))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dataset/shapes_qa"))
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    args = parser.parse_args(argv)
    write(args.out, build(args.seed))
