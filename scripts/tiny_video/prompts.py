"""Generate dataset/moving_shapes: prompts of a coloured circle that moves, and then beeps."""

import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

from tiny.prompts import COLOURS

from flow_grpo.config.error_reporting import ScriptParser

DIRECTIONS = ("left", "right", "up", "down")
COUNTS = {1: "once", 2: "twice", 3: "three times"}
SHAPE = "circle"
VERBS = ("moves", "slides", "flies")  # which mean the same here
WORDS = [SHAPE, "then", "beeps", *VERBS, *DIRECTIONS, *COLOURS]
WORDS += " ".join(COUNTS.values()).split()
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Task:
    """What a video shows and how often it beeps; also its row in the dataset."""

    color: str
    direction: str
    beeps: int
    verb: str = VERBS[0]

    @property
    def text(self) -> str:
        article = "an" if self.color[0] in "aeiou" else "a"
        moving = f"{article} {self.color} {SHAPE} {self.verb} {self.direction}"
        return f"{moving}, then beeps {COUNTS[self.beeps]}"

    def row(self) -> dict:
        """Return the prompt with the metadata of the reward `moving_shape`."""
        meaning = {name: value for name, value in asdict(self).items() if name != "verb"}
        return {"prompt": self.text, "shape": SHAPE, **meaning}


@cache
def split_tasks() -> dict[str, list[Task]]:
    """Return the tasks, split into "train" and "test".

    A fifth of the combinations of color, direction and number of beeps is held out, with all verbs.
    """
    combinations = list(product(COLOURS, DIRECTIONS, COUNTS))
    rng = random.Random(0)
    rng.shuffle(combinations)
    tests = round(TEST_SHARE * len(combinations))
    parts = {"train": combinations[tests:], "test": combinations[:tests]}
    tasks = {
        split: [Task(*combination, verb) for combination in chosen for verb in VERBS]
        for split, chosen in parts.items()
    }
    for each in tasks.values():
        rng.shuffle(each)
    return tasks


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
