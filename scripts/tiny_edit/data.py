"""Generate dataset/edits: source images, instructions and the expected result of each edit."""

import json
import random
from itertools import cycle
from pathlib import Path

import torch
from PIL import Image
from tiny.images import Painter
from tiny.prompts import COLOURS, MAX_SHAPES, SHAPES
from torch import Tensor

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.rewards.frames import to_pil
from tiny_edit.edits import KINDS, Edit, Scene, geneval_task, list_edits, source_scenes

SIZES = {"train": 480, "test": 96}
GROUNDS = tuple(level / 255 for level in range(218, 256, 5))  # eight light greys


def draw_edits(split: str, count: int, seed: int) -> list[tuple[Edit, float]]:
    """Sample edits, equally many of each kind and of different scenes, with background greys."""
    rng = random.Random(seed)
    scenes = cycle(rng.sample(source_scenes()[split], len(source_scenes()[split])))
    chosen: list[Edit] = []
    while len(chosen) < count:
        kind = KINDS[len(chosen) % len(KINDS)]
        found = _edits_of_kind(next(scenes), kind)
        chosen += rng.sample(found, min(1, len(found)))
    return [(edit, rng.choice(GROUNDS)) for edit in chosen]


def _edits_of_kind(scene: Scene, kind: str) -> list[Edit]:
    """Return one edit per instruction, for which several targets may be correct."""
    return list({edit.text: edit for edit in list_edits(scene) if edit.kind == kind}.values())


def encode_scenes(scenes: list[Scene]) -> tuple[Tensor, Tensor]:
    """Return indices of shapes (`len(SHAPES)` for empty cells) and of colours, (N, 4) each."""
    cells = [[cell or (COLOURS[0], None) for cell in scene] for scene in scenes]
    shapes = [[SHAPES.index(s) if s else len(SHAPES) for _, s in row] for row in cells]
    return torch.tensor(shapes), torch.tensor([[COLOURS.index(c) for c, _ in row] for row in cells])


def paint(painter: Painter, shapes: Tensor, colours: Tensor, grounds: Tensor) -> Tensor:
    """Return images (N, 3, 32, 96) in [0, 1]."""
    used = torch.full_like(shapes[:, 0], MAX_SHAPES)
    return painter.place(shapes, used, painter.colours[colours], grounds)


def source_images(edits: list[tuple[Edit, float]]) -> list[Image.Image]:
    shapes, colours = encode_scenes([edit.source for edit, _ in edits])
    grounds = torch.tensor([ground for _, ground in edits])
    return to_pil(paint(Painter(), shapes, colours, grounds))


def write(folder: Path, seed: int) -> None:
    """Write the source images and a JSON Lines file of edits for each split."""
    folder.joinpath("images").mkdir(parents=True)
    for number, (split, count) in enumerate(SIZES.items()):
        edits = draw_edits(split, count, seed + number)
        lines = []
        for index, ((edit, _), image) in enumerate(zip(edits, source_images(edits), strict=True)):
            path = f"images/{split}-{index:03d}.png"
            image.save(folder / path, optimize=True)
            row = {"prompt": edit.text, "image": path, **geneval_task(edit)}
            lines.append(json.dumps(row) + "\n")
        folder.joinpath(f"{split}_metadata.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"wrote {count} edits to {folder}/{split}_metadata.jsonl")


def main(argv: list[str] | None = None) -> None:
    """Write the dataset to a new directory."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dataset/edits"), help="new directory")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.fail(f"{args.out} already exists; remove it or choose a new directory with --out")
    write(args.out, args.seed)
