"""Draws the edits of dataset/edits: a source picture, an instruction, and what is right."""

import json
import random
from itertools import cycle
from pathlib import Path

import torch
from PIL import Image
from tiny.pictures import Painter
from tiny.prompts import COLOURS, MAX_SHAPES, SHAPES
from torch import Tensor

from flow_grpo.config.mistakes import Parser
from flow_grpo.rewards.frames import to_pil
from tiny_edit.edits import KINDS, Edit, Scene, edits_of, source_scenes, task_of

SIZES = {"train": 480, "test": 96}
GROUNDS = tuple(level / 255 for level in range(218, 256, 5))  # eight light greys


def draw_edits(split: str, count: int, seed: int) -> list[tuple[Edit, float]]:
    """As many of each kind, each of another scene while there are any, with the grey behind it."""
    rng = random.Random(seed)
    scenes = cycle(rng.sample(source_scenes()[split], len(source_scenes()[split])))
    chosen: list[Edit] = []
    while len(chosen) < count:
        kind = KINDS[len(chosen) % len(KINDS)]
        chosen += rng.sample(found := _of_kind(next(scenes), kind), min(1, len(found)))
    return [(edit, rng.choice(GROUNDS)) for edit in chosen]


def _of_kind(scene: Scene, kind: str) -> list[Edit]:
    """One per text: several targets may be right."""
    return list({edit.text: edit for edit in edits_of(scene) if edit.kind == kind}.values())


def encode_scenes(scenes: list[Scene]) -> tuple[Tensor, Tensor]:
    """Numbers of shapes (one more where there is none) and of colours, (N, 4) each."""
    cells = [[cell or (COLOURS[0], None) for cell in scene] for scene in scenes]
    shapes = [[SHAPES.index(s) if s else len(SHAPES) for _, s in row] for row in cells]
    return torch.tensor(shapes), torch.tensor([[COLOURS.index(c) for c, _ in row] for row in cells])


def paint(painter: Painter, shapes: Tensor, colours: Tensor, grounds: Tensor) -> Tensor:
    """(N, 3, 32, 96) in [0, 1]."""
    used = torch.full_like(shapes[:, 0], MAX_SHAPES)
    return painter.place(shapes, used, painter.colours[colours], grounds)


def pictures(edits: list[tuple[Edit, float]]) -> list[Image.Image]:
    """The sources."""
    shapes, colours = encode_scenes([edit.source for edit, _ in edits])
    grounds = torch.tensor([ground for _, ground in edits])
    return to_pil(paint(Painter(), shapes, colours, grounds))


def write(folder: Path, seed: int) -> None:
    folder.joinpath("images").mkdir(parents=True)
    for number, (split, count) in enumerate(SIZES.items()):
        edits = draw_edits(split, count, seed + number)
        lines = []
        for place, ((edit, _), picture) in enumerate(zip(edits, pictures(edits), strict=True)):
            image = f"images/{split}-{place:03d}.png"
            picture.save(folder / image, optimize=True)
            lines.append(json.dumps({"prompt": edit.text, "image": image, **task_of(edit)}) + "\n")
        folder.joinpath(f"{split}_metadata.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"wrote {count} edits to {folder}/{split}_metadata.jsonl")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dataset/edits"), help="a new folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.fail(f"{args.out} already exists; remove it or name a new folder with --out")
    write(args.out, args.seed)
