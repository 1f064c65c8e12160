"""GenEval's rules (arXiv 2310.11513): do the detected objects match the required ones?

A prompt's metadata has GenEval's layout:

    {"tag": "position",
     "include": [{"class": "dog", "count": 1},
                 {"class": "cup", "count": 1, "color": "red", "position": ["left of", 0]}],
     "exclude": [{"class": "dog", "count": 2}]}

"position" is a relation and the index in "include" of the object it refers to. The metadata of an
edit describes what should change; its "keep", in the same layout, what should be preserved.
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
_COCO_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant,
bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard,
sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle,
wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
computer mouse, tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
"""
COCO_CLASSES = tuple(name.strip() for name in _COCO_NAMES.split(","))
# Other names of these classes in label files.
CLASS_ALIASES = {
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
RELATIONS = ("left of", "right of", "above", "below")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# Centers must be further apart than this fraction of the summed sizes of the boxes.
MARGIN = 0.1
# The direction from one center to the other must be within 60 degrees of the axis.
MIN_DIRECTION_COSINE = 0.5

Box = tuple[float, float, float, float]  # left, top, right, bottom


def canonical_class_name(label: str) -> str:
    """Return GenEval's name of a COCO class."""
    return CLASS_ALIASES.get(label, label)


@dataclass(frozen=True)
class Detection:
    """A detected object."""

    name: str
    score: float
    box: Box
    colour: str | None = None  # if the task has colors
    mask: Any = field(default=None, compare=False, repr=False)  # (H, W) bool, or None


@dataclass(frozen=True)
class RequiredObject:
    """`count` objects of one class, optionally with a color and a position.

    The position is a relation to the objects of another entry.
    """

    name: str
    count: int = 1
    colour: str | None = None
    relation: str | None = None
    of: int = 0  # index of that other required object


@dataclass(frozen=True)
class Task:
    """What an image should show."""

    tag: str
    include: tuple[RequiredObject, ...]
    exclude: tuple[tuple[str, int], ...] = ()  # class, and the count that is too many
    keep: "Task | None" = None  # of an edit: what should be preserved

    @property
    def required_objects(self) -> tuple[RequiredObject, ...]:
        """All required objects, those to preserve included."""
        return (*self.include, *(self.keep.include if self.keep else ()))

    @property
    def colour_classes(self) -> set[str]:
        """Classes of the required objects with a color."""
        return {required.name for required in self.required_objects if required.colour}


@dataclass(frozen=True)
class GenEvalVerdict:
    """The result of checking a `Task` against the detections in an image."""

    strict: bool  # whether all rules hold, as in the benchmark
    graded: float  # in [0, 1], for training: mean credit over the rules


def parse_task(metadata: Mapping[str, Any]) -> Task | None:
    """Parse the metadata of a prompt; return None if it has no "include".

    Raises:
        UserError: The metadata is invalid.
    """
    if "include" not in metadata:
        return None
    include = [
        _parse_required_object(request, metadata) for request in _get_list(metadata, "include")
    ]
    keep = metadata.get("keep")
    if keep is not None and (not isinstance(keep, Mapping) or "include" not in keep):
        raise _metadata_error(metadata, 'keep must be an object with an "include"')
    if not include and not keep:  # an edit may only remove something
        raise _metadata_error(metadata, "include is empty; it must list objects")
    for index, required in enumerate(include):
        if required.relation and required.of not in range(index):
            raise _metadata_error(
                metadata, f"position refers to {required.of}, which must be an earlier index"
            )
    exclude = [
        _parse_required_object(request, metadata) for request in _get_list(metadata, "exclude")
    ]
    kept = parse_task({"prompt": metadata.get("prompt", ""), **keep}) if keep else None
    limits = tuple((excluded.name, excluded.count) for excluded in exclude)
    return Task(str(metadata.get("tag", "")), tuple(include), limits, kept)


def _get_list(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the list under `key`, [] if it is missing; raise a UserError for another type."""
    value = metadata.get(key) or []
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise _metadata_error(metadata, f"{key} must be a list")
    return value


def _parse_required_object(request: Any, metadata: Mapping[str, Any]) -> RequiredObject:
    """Parse an entry of "include"; raise a UserError that quotes `metadata` if it is invalid."""
    if not isinstance(request, Mapping) or not isinstance(request.get("class"), str):
        raise _metadata_error(metadata, f'{request!r} must be an object with a "class"')
    count = request.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _metadata_error(metadata, f"count={count!r} must be an integer >= 1")
    relation, of = None, 0
    if request.get("position") is not None:
        try:
            relation, of = request["position"]
        except (TypeError, ValueError) as error:
            raise _metadata_error(metadata, 'position must be like ["left of", 0]') from error
        if relation not in RELATIONS or isinstance(of, bool) or not isinstance(of, int):
            raise _metadata_error(
                metadata,
                f"position={[relation, of]!r} must be a relation ({', '.join(RELATIONS)}) and an "
                "index in include",
            )
    return RequiredObject(request["class"], count, request.get("color"), relation, of)


def _metadata_error(metadata: Mapping[str, Any], problem: str) -> UserError:
    prompt = metadata.get("prompt", "")
    return UserError(f"has invalid GenEval metadata: {problem}", field="prompt", value=prompt)


def spatial_relations(a: Box, b: Box) -> set[str]:
    """Return the relations of box `a` to box `b`, a subset of `RELATIONS`."""
    corners = np.array([a, b], dtype=float).reshape(2, 2, 2)
    offset = np.subtract(*corners.mean(axis=1))
    sizes = np.abs(corners[:, 1] - corners[:, 0]).sum(axis=0)
    distance = np.maximum(np.abs(offset) - MARGIN * sizes, 0) * np.sign(offset)
    if np.all(np.abs(distance) < 1e-3):
        return set()
    x, y = distance / np.linalg.norm(offset)
    found = {
        "left of": x < -MIN_DIRECTION_COSINE,
        "right of": x > MIN_DIRECTION_COSINE,
        "above": y < -MIN_DIRECTION_COSINE,
        "below": y > MIN_DIRECTION_COSINE,
    }
    return {name for name, holds in found.items() if holds}


def evaluate_task(task: Task, detections: Sequence[Detection]) -> GenEvalVerdict:
    """Check the detections in an image against a task."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        found.setdefault(detection.name, []).append(detection)
    names = [required.name for required in task.include]
    strict = True
    credits: list[float] = []  # one per rule
    groups: list[list[Detection]] = []  # by index in `include`; empty if a rule is violated
    for required in task.include:
        candidates = found.get(required.name, [])
        if names.count(required.name) > 1:  # a class in several colors: count its own only
            candidates = [d for d in candidates if d.colour == required.colour]
        group = candidates[: required.count]
        met = len(group) == required.count
        credits.append(_count_credit(len(candidates), required.count))
        if required.colour:
            matching = _count_colour(candidates, required.colour)
            credits.append(_count_credit(matching, required.count) if met else 0.0)
            met = met and _count_colour(group, required.colour) == required.count
        if required.relation:
            others = groups[required.of]
            placed = _fraction_placed(required.relation, group, others) if met else 0.0
            credits.append(placed)
            met = placed == 1
        groups.append(group if met else [])
        strict = strict and met
    for name, count in task.exclude:
        if len(found.get(name, [])) >= count:
            strict = False
            if name not in names:
                credits.append(0.0)
    return GenEvalVerdict(strict, float(np.mean(credits)) if credits else 1.0)


def _count_colour(detections: Sequence[Detection], colour: str) -> int:
    return sum(detection.colour == colour for detection in detections)


def _count_credit(found: int, required: int) -> float:
    return max(0.0, 1 - abs(found - required) / required)


def _fraction_placed(
    relation: str, group: Sequence[Detection], others: Sequence[Detection]
) -> float:
    pairs = [relation in spatial_relations(a.box, b.box) for a in group for b in others]
    return sum(pairs) / len(pairs) if pairs else 0.0
