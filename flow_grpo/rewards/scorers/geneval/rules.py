"""GenEval's rules (arXiv 2310.11513): does what was detected match what was asked for?

A prompt's metadata asks in GenEval's own layout:

    {"tag": "position",
     "include": [{"class": "dog", "count": 1},
                 {"class": "cup", "count": 1, "color": "red", "position": ["left of", 0]}],
     "exclude": [{"class": "dog", "count": 2}]}

"position" names a relation and the place in "include" of what it is a relation to.

An edit asks for what should change; its "keep" asks, in the same layout, for the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flow_grpo.errors import UserError

SHAPES = ("circle", "square", "triangle")
RGB = {
    "red": (0.86, 0.10, 0.12),
    "orange": (0.98, 0.55, 0.08),
    "yellow": (0.95, 0.88, 0.12),
    "green": (0.12, 0.62, 0.22),
    "blue": (0.12, 0.28, 0.86),
    "purple": (0.52, 0.16, 0.68),
}


NAMES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    *("traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat"),
    *("dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack"),
    *("umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball"),
    *("kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple"),
    *("sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair"),
    *("couch", "potted plant", "bed", "dining table", "toilet", "tv", "laptop"),
    *("computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven"),
    *("toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear"),
    *("hair drier", "toothbrush"),
)
# What label files call them otherwise.
OTHER_NAMES = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
}


def own_name(label: str) -> str:
    return OTHER_NAMES.get(label, label)


RELATIONS = ("left of", "right of", "above", "below")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# Centres must be apart by more than this share of the summed sizes of their boxes.
MARGIN = 0.1
# Of the direction from one centre to the other: within 60 degrees of the axis.
SLANT = 0.5

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Detection:
    name: str
    score: float
    box: Box
    colour: str | None = None  # where it was asked for
    mask: Any = field(
        default=None, compare=False, repr=False
    )  # (H, W) bool, if the detector has it


@dataclass(frozen=True)
class Wanted:
    """`count` things of one class, of one colour, each in one relation to another group's."""

    name: str
    count: int = 1
    colour: str | None = None
    relation: str | None = None
    of: int = 0  # the place of that other group


@dataclass(frozen=True)
class Task:
    tag: str
    include: tuple[Wanted, ...]
    exclude: tuple[tuple[str, int], ...] = ()  # a class, and from how many on it is wrong
    keep: "Task | None" = None  # of an edit: what should stay as it was

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """What is asked for, and what should stay."""
        return (*self.include, *(self.keep.include if self.keep else ()))

    @property
    def coloured(self) -> set[str]:
        """Classes whose colours matter."""
        return {wanted.name for wanted in self.wanted if wanted.colour}


@dataclass(frozen=True)
class GenEvalVerdict:
    strict: bool  # as the benchmark counts: all rules hold
    graded: float  # in [0, 1], for training: the mean of what each rule was met to


def parse_task(metadata: Mapping[str, Any]) -> Task | None:
    """What a prompt's metadata asks for; None if it asks for nothing here."""
    if "include" not in metadata:
        return None
    include = [_wanted(request, metadata) for request in _list(metadata, "include")]
    keep = metadata.get("keep")
    if keep is not None and (not isinstance(keep, Mapping) or "include" not in keep):
        raise _bad(metadata, 'keep must be an object with an "include"')
    if not include and not keep:  # an edit may only take something away
        raise _bad(metadata, "include is empty; it must name what to draw")
    for place, wanted in enumerate(include):
        if wanted.relation and wanted.of not in range(place):
            raise _bad(metadata, f"position refers to {wanted.of}: it must be an earlier place")
    exclude = [
        (w.name, w.count) for w in (_wanted(r, metadata) for r in _list(metadata, "exclude"))
    ]
    kept = parse_task({"prompt": metadata.get("prompt", ""), **keep}) if keep else None
    return Task(str(metadata.get("tag", "")), tuple(include), tuple(exclude), kept)


def _list(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = metadata.get(key) or []
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise _bad(metadata, f"{key} must be a list")
    return value


def _wanted(request: Any, metadata: Mapping[str, Any]) -> Wanted:
    if not isinstance(request, Mapping) or not isinstance(request.get("class"), str):
        raise _bad(metadata, f'{request!r} must be an object with a "class"')
    count = request.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _bad(metadata, f"count is {count!r}; it must be a whole number, 1 or more")
    relation, of = None, 0
    if request.get("position") is not None:
        try:
            relation, of = request["position"]
        except (TypeError, ValueError) as error:
            raise _bad(metadata, 'position must read like ["left of", 0]') from error
        if relation not in RELATIONS or isinstance(of, bool) or not isinstance(of, int):
            raise _bad(
                metadata,
                f"position is {[relation, of]!r}; it must be a relation ({', '.join(RELATIONS)}) "
                "and a place in include",
            )
    return Wanted(request["class"], count, request.get("color"), relation, of)


def _bad(metadata: Mapping[str, Any], what: str) -> UserError:
    return UserError(f"GenEval metadata of {metadata.get('prompt', '')!r}: {what}")


def relations(a: Box, b: Box) -> set[str]:
    """In which of the four `a` stands to `b`."""
    corners = np.array([a, b], dtype=float).reshape(2, 2, 2)
    offset = np.subtract(*corners.mean(axis=1))
    sizes = np.abs(corners[:, 1] - corners[:, 0]).sum(axis=0)
    clear = np.maximum(np.abs(offset) - MARGIN * sizes, 0) * np.sign(offset)
    if np.all(np.abs(clear) < 1e-3):
        return set()
    x, y = clear / np.linalg.norm(offset)
    found = {"left of": x < -SLANT, "right of": x > SLANT, "above": y < -SLANT, "below": y > SLANT}
    return {name for name, holds in found.items() if holds}


def judge(task: Task, detections: Sequence[Detection]) -> GenEvalVerdict:
    """Whether the detections are what the task asks for, and why not."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        found.setdefault(detection.name, []).append(detection)
    asked = [wanted.name for wanted in task.include]
    strict, credits, groups = True, [], []
    for wanted in task.include:
        every = found.get(wanted.name, [])
        if asked.count(wanted.name) > 1:  # one class in several colours: by its own alone
            every = [d for d in every if d.colour == wanted.colour]
        group = every[: wanted.count]
        met = len(group) == wanted.count
        credits.append(_closeness(len(every), wanted.count))
        if wanted.colour:
            credits.append(_closeness(_count(every, wanted.colour), wanted.count) if met else 0.0)
            met = met and _count(group, wanted.colour) == wanted.count
        if wanted.relation:
            share = _share_placed(wanted.relation, group, groups[wanted.of]) if met else 0.0
            credits.append(share)
            met = share == 1
        groups.append(group if met else [])
        strict = strict and met
    for name, count in task.exclude:
        if len(found.get(name, [])) >= count:
            strict = False
            if name not in asked:
                credits.append(0.0)
    return GenEvalVerdict(strict, float(np.mean(credits)) if credits else 1.0)


def _count(things: Sequence[Detection], colour: str) -> int:
    return sum(thing.colour == colour for thing in things)


def _closeness(found: int, wanted: int) -> float:
    return max(0.0, 1 - abs(found - wanted) / wanted)


def _share_placed(relation: str, group: Sequence[Detection], others: Sequence[Detection]) -> float:
    pairs = [relation in relations(a.box, b.box) for a in group for b in others]
    return sum(pairs) / len(pairs) if pairs else 0.0
