"""Every scene and every edit that the small model knows, and what GenEval's rules ask of each.

A scene is a row of four cells, each with a coloured shape or empty. No shape is there twice, so
that "the circle" is clear. A tenth of the scenes is for testing: none of their edits is trained on.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from tiny.prompts import COLOURS, MAX_SHAPES, SHAPES, Group

KINDS = ("make", "remove", "turn", "put")
SIDES = ("left of", "right of")
WORDS = [*KINDS, "the", "a", "an", "into", "left", "right", "of", *COLOURS, *SHAPES]
TEST_SHARE = 0.1

Thing = tuple[str, str]  # a colour and a shape
Scene = tuple[Thing | None, ...]  # four cells, from left to right


@dataclass(frozen=True)
class Edit:
    text: str
    source: Scene
    target: Scene  # one that is right; what is put somewhere may also stand in another cell
    at: int  # the cell that changes
    by: str = ""  # the shape that what is put there stands beside
    side: str = ""

    @property
    def kind(self) -> str:
        return self.text.split()[0]


def things(scene: Scene) -> list[Thing]:
    return [thing for thing in scene if thing]


@cache
def source_scenes() -> dict[str, list[Scene]]:
    """Scenes to edit, of two or three shapes, for training and for testing."""
    kinds = [None, *product(COLOURS, SHAPES)]
    scenes = [
        scene
        for scene in product(kinds, repeat=MAX_SHAPES)
        if len(things(scene)) > 1 and len({s for _, s in things(scene)}) == len(things(scene))
    ]
    random.Random(0).shuffle(scenes)
    tests = round(TEST_SHARE * len(scenes))
    return {"train": scenes[tests:], "test": scenes[:tests]}


def with_cell(scene: Scene, at: int, thing: Thing | None) -> Scene:
    return (*scene[:at], thing, *scene[at + 1 :])


def edits_of(scene: Scene) -> Iterator[Edit]:
    absent = [shape for shape in SHAPES if shape not in {s for _, s in things(scene)}]
    for at, thing in enumerate(scene):
        if thing is None:
            yield from _puts(scene, at, absent)
            continue
        colour, shape = thing
        yield Edit(f"remove the {shape}", scene, with_cell(scene, at, None), at)
        for other in COLOURS:
            if other != colour:
                target = with_cell(scene, at, (other, shape))
                yield Edit(f"make the {shape} {other}", scene, target, at)
        for other in absent:
            target = with_cell(scene, at, (colour, other))
            yield Edit(f"turn the {shape} into a {other}", scene, target, at)


def _puts(scene: Scene, at: int, absent: list[str]) -> Iterator[Edit]:
    for (there, thing), shape, colour in product(enumerate(scene), absent, COLOURS):
        if thing:
            side = SIDES[at > there]
            text = f"put {Group(1, colour, shape)} {side} the {thing[1]}"
            yield Edit(text, scene, with_cell(scene, at, (colour, shape)), at, thing[1], side)


def strays(scene: Scene) -> list[Scene]:
    """The scene with another colour of one of its shapes."""
    return [
        with_cell(scene, at, (other, thing[1]))
        for at, thing in enumerate(scene)
        if thing
        for other in COLOURS
        if other != thing[0]
    ]


def task_of(edit: Edit) -> dict[str, Any]:
    """In GenEval's layout: what is asked for, and under "keep" the rest of the scene, in its order
    from left to right, with nothing else beside it."""
    before, after = edit.source[edit.at], edit.target[edit.at]
    include = [_request(edit.by)] if edit.by else []
    exclude = [_request(before[1])] if before and (not after or before[1] != after[1]) else []
    if after:
        place = {"position": [edit.side, 0]} if edit.by else {}
        include.append({**_request(after[1]), "color": after[0], **place})
        exclude.append(_request(after[1], 2))
    rest = things(with_cell(edit.source, edit.at, None))
    kept = [{**_request(shape), "color": colour} for colour, shape in rest]
    for place, request in enumerate(kept[1:]):
        request["position"] = ["right of", place]
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
