"""All scenes and edits of the small editing model, and their GenEval rules.

A scene is a row of four cells, each empty or with a coloured shape. No shape occurs twice, so that
"the circle" is unambiguous. A tenth of the scenes is held out with all their edits.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from tiny.prompts import COLOURS, MAX_SHAPES, SHAPES, Group

KINDS = ("make", "remove", "turn", "put")
WORDS = [*KINDS, "the", "a", "an", "into", "left", "right", "of", *COLOURS, *SHAPES]
TEST_SHARE = 0.1

ColouredShape = tuple[str, str]  # colour, shape
Scene = tuple[ColouredShape | None, ...]  # four cells, from left to right


@dataclass(frozen=True)
class Edit:
    """An instruction with its source scene and a correct result."""

    text: str
    source: Scene
    target: Scene  # one correct result; an inserted shape may also go into another cell
    cell: int  # index of the cell that changes
    neighbour: str = ""  # the shape next to which one is inserted
    side: str = ""  # "left of" or "right of" the neighbour

    @property
    def kind(self) -> str:
        return self.text.split()[0]


def coloured_shapes(scene: Scene) -> list[ColouredShape]:
    return [item for item in scene if item]


@cache
def source_scenes() -> dict[str, list[Scene]]:
    """Return the scenes of two or three shapes, split into "train" and "test"."""
    kinds = [None, *product(COLOURS, SHAPES)]
    scenes = []
    for scene in product(kinds, repeat=MAX_SHAPES):
        shapes = [shape for _, shape in coloured_shapes(scene)]
        if len(shapes) > 1 and len({*shapes}) == len(shapes):
            scenes.append(scene)
    random.Random(0).shuffle(scenes)
    tests = round(TEST_SHARE * len(scenes))
    return {"train": scenes[tests:], "test": scenes[:tests]}


def replace_cell(scene: Scene, cell: int, item: ColouredShape | None) -> Scene:
    return (*scene[:cell], item, *scene[cell + 1 :])


def list_edits(scene: Scene) -> Iterator[Edit]:
    """Yield all edits of a scene."""
    absent = [shape for shape in SHAPES if shape not in {s for _, s in coloured_shapes(scene)}]
    for cell, item in enumerate(scene):
        if item is None:
            yield from _insertions(scene, cell, absent)
            continue
        colour, shape = item
        yield Edit(f"remove the {shape}", scene, replace_cell(scene, cell, None), cell)
        for other in COLOURS:
            if other != colour:
                target = replace_cell(scene, cell, (other, shape))
                yield Edit(f"make the {shape} {other}", scene, target, cell)
        for other in absent:
            target = replace_cell(scene, cell, (colour, other))
            yield Edit(f"turn the {shape} into a {other}", scene, target, cell)


def _insertions(scene: Scene, cell: int, absent: list[str]) -> Iterator[Edit]:
    for (neighbour, item), shape, colour in product(enumerate(scene), absent, COLOURS):
        if item:
            side = "right of" if cell > neighbour else "left of"
            text = f"put {Group(1, colour, shape)} {side} the {item[1]}"
            yield Edit(text, scene, replace_cell(scene, cell, (colour, shape)), cell, item[1], side)


def recoloured(scene: Scene) -> list[Scene]:
    """Return all scenes in which one shape has another colour."""
    return [
        replace_cell(scene, cell, (other, item[1]))
        for cell, item in enumerate(scene)
        if item
        for other in COLOURS
        if other != item[0]
    ]


def geneval_task(edit: Edit) -> dict[str, Any]:
    """Return an edit as a GenEval task.

    "include" and "exclude" describe the instruction, "keep" the rest of the scene: its shapes from
    left to right and nothing else.
    """
    before, after = edit.source[edit.cell], edit.target[edit.cell]
    include = [_request(edit.neighbour)] if edit.neighbour else []
    exclude = [_request(before[1])] if before and (not after or before[1] != after[1]) else []
    if after:
        position = {"position": [edit.side, 0]} if edit.neighbour else {}
        include.append({**_request(after[1]), "color": after[0], **position})
        exclude.append(_request(after[1], 2))
    rest = coloured_shapes(replace_cell(edit.source, edit.cell, None))
    kept = [{**_request(shape), "color": colour} for colour, shape in rest]
    for index, request in enumerate(kept[1:]):
        request["position"] = ["right of", index]
    edited = {each[1] for each in (before, after) if each}
    counts = {shape: 2 if shape in {s for _, s in rest} else 1 for shape in SHAPES}
    others = [_request(s, count) for s, count in counts.items() if s not in edited]
    return {
        "tag": edit.kind,
        "include": include,
        "exclude": exclude,
        "keep": {"include": kept, "exclude": [*others, _request("smudge")]},
    }


def _request(shape: str, count: int = 1) -> dict[str, Any]:
    return {"class": shape, "count": count}
