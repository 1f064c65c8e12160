"""Generate dataset/moving_shapes: prompts of a coloured shape that moves, and then beeps."""

import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

from tiny.prompts import COLOURS, SHAPES

from flow_grpo.config.error_reporting import ScriptParser

DIRECTIONS = ("left", "right", "up", "down")
COUNTS = {1: "once", 2: "twice", 3: "three times"}
WORDS = ["moves", "then", "beeps", *DIRECTIONS, *COLOURS, *SHAPES]
WORDS += " ".join(COUNTS.values()).split()
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Task:
    """What a video shows and how often it beeps; also its row in the dataset."""

    shape: str
    color: str
    direction: str
    beeps: int

    @property
    def text(self) -> str:
        article = "an" if self.color[0] in "aeiou" else "a"
        moving = f"{article} {self.color} {self.shape} moves {self.direction}"
        return f"{moving}, then beeps {COUNTS[self.beeps]}"

    def row(self) -> dict:
        return {"prompt": self.text, **asdict(self)}


def all_tasks() -> list[Task]:
    """Return all 216 tasks, with the number of beeps changing fastest."""
    return [Task(*parts) for parts in product(SHAPES, COLOURS, DIRECTIONS, COUNTS)]


@cache
def split_tasks() -> dict[str, list[Task]]:
    """Return the tasks, split into "train" and "test"."""
    tasks = all_tasks()
    random.Random(0).shuffle(tasks)
    tests = round(TEST_SHARE * len(tasks))
    return {"train": tasks[tests:], "test": tasks[:tests]}


def write(folder: Path) -> None:
    """Write a JSON Lines file of tasks for each split."""
    folder.mkdir(parents=True)
    for split, tasks in split_tasks().items():
        path = folder / f"{split}_metadata.jsonl"
        lines = [json.dumps(task.row()) + "\n" for task in tasks]
        path.write_text("".join(lines), encoding="utf-8")
        print(f"wrote {len(tasks)} prompts to {path}")


def main(argv: list[str] | None = None) -> None:
    """Write the dataset to a new directory."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("dataset/moving_shapes"), help="new directory"
    )
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.fail(f"{args.out} already exists; remove it or choose a new directory with --out")
    write(args.out)
