"""GenEval's rules on hand-made detections."""

import pytest
from user_errors import raises_user_error

from flow_grpo.rewards.scorers.geneval.rules import (
    Detection,
    GenEvalVerdict,
    evaluate_task,
    parse_task,
    spatial_relations,
)


def obj(name: str, colour: str | None = None, at=(0, 0), size=(10, 10), score=0.9) -> Detection:
    """Build a detection from the center and size of its box."""
    (x, y), (w, h) = at, size
    return Detection(name, score, (x - w / 2, y - h / 2, x + w / 2, y + h / 2), colour)


def meta(*include: dict, exclude: tuple[dict, ...] = ()) -> dict:
    return {"tag": "any", "prompt": "p", "include": list(include), "exclude": list(exclude)}


def spec(name: str, count: int = 1, color: str | None = None, position=None) -> dict:
    """Build a request as in GenEval's files, without keys that are not needed."""
    spec = {"class": name, "count": count}
    return spec | {k: v for k, v in {"color": color, "position": position}.items() if v}


DOG, CAT, CUP = obj("dog"), obj("cat"), obj("cup")
ONE = meta(spec("dog"))
TWO = meta(spec("dog"), spec("cat"))
THREE = meta(spec("cup", 3), exclude=({"class": "cup", "count": 4},))
RED = meta(spec("cup", 1, "red"))
TWO_RED = meta(spec("cup", 2, "red"))
LEFT = meta(spec("dog"), spec("cat", position=["left of", 0]))
ABOVE = meta(spec("dog"), spec("cat", position=["above", 0]))
COLOURS = meta(spec("dog", 1, "red"), spec("cat", 1, "blue"))
SAME = meta(spec("cup", 2, "red"), spec("cup", 1, "blue"), exclude=({"class": "cup", "count": 4},))
NO_CAT = meta(spec("dog"), exclude=({"class": "cat", "count": 1},))
ALL = meta(
    spec("dog", 1, "red"),
    spec("cat", 2, "blue", ["right of", 0]),
    exclude=({"class": "dog", "count": 2}, {"class": "cat", "count": 3}),
)

CASES = {
    # name: (metadata, detections, strict, graded)
    "one thing": (ONE, [DOG], True, 1),
    "nothing": (ONE, [], False, 0),
    "another thing": (ONE, [CAT], False, 0),
    "one thing and another": (ONE, [DOG, CAT], True, 1),
    "two instead of one": (ONE, [DOG, DOG], True, 0),
    "both": (TWO, [CAT, DOG], True, 1),
    "one of both": (TWO, [CAT], False, 0.5),
    "neither": (TWO, [CUP], False, 0),
    "both and more": (TWO, [CAT, DOG, CUP, CUP], True, 1),
    "three": (THREE, [CUP] * 3, True, 1),
    "two for three": (THREE, [CUP] * 2, False, 2 / 3),
    "one for three": (THREE, [CUP], False, 1 / 3),
    "none for three": (THREE, [DOG], False, 0),
    "four for three": (THREE, [CUP] * 4, False, 2 / 3),
    "six for three": (THREE, [CUP] * 6, False, 0),
    "nine for three": (THREE, [CUP] * 9, False, 0),
    "right colour": (RED, [obj("cup", "red")], True, 1),
    "wrong colour": (RED, [obj("cup", "blue")], False, 0.5),
    "no colour": (RED, [CUP], False, 0.5),
    "right colour, wrong thing": (RED, [obj("dog", "red")], False, 0),
    "the highest score counts": (
        RED,
        [obj("cup", "red", score=0.5), obj("cup", "blue", score=0.9)],
        False,
        0.5,
    ),
    "the highest score is right": (
        RED,
        [obj("cup", "blue", score=0.5), obj("cup", "red", score=0.9)],
        True,
        0.5,
    ),
    "the first of equal scores": (RED, [obj("cup", "red"), obj("cup", "blue")], True, 0.5),
    "two of the colour": (TWO_RED, [obj("cup", "red")] * 2, True, 1),
    "one of two has the colour": (TWO_RED, [obj("cup", "red"), obj("cup", "blue")], False, 0.75),
    "one for two of the colour": (TWO_RED, [obj("cup", "red")], False, 0.25),
    "left": (LEFT, [DOG, obj("cat", at=(-30, 0))], True, 1),
    "right for left": (LEFT, [DOG, obj("cat", at=(30, 0))], False, 2 / 3),
    "above for left": (LEFT, [DOG, obj("cat", at=(0, -30))], False, 2 / 3),
    "left and a little up": (LEFT, [DOG, obj("cat", at=(-30, -10))], True, 1),
    "left and above": (LEFT, [DOG, obj("cat", at=(-30, -30))], True, 1),
    "above and left": (ABOVE, [DOG, obj("cat", at=(-30, -30))], True, 1),
    "touching": (LEFT, [DOG, obj("cat", at=(-10, 0))], True, 1),
    "overlapping by half": (LEFT, [DOG, obj("cat", at=(-5, 0))], True, 1),
    "overlapping too far": (LEFT, [DOG, obj("cat", at=(-3, 0))], False, 2 / 3),
    "at the margin": (LEFT, [DOG, obj("cat", at=(-2, 0))], False, 2 / 3),
    "at the same position": (LEFT, [DOG, CAT], False, 2 / 3),
    "no object to be left of": (LEFT, [obj("cat", at=(-30, 0))], False, 1 / 3),
    "no object on the left": (LEFT, [DOG], False, 1 / 3),
    "above": (ABOVE, [DOG, obj("cat", at=(0, -30))], True, 1),
    "below for above": (ABOVE, [DOG, obj("cat", at=(0, 30))], False, 2 / 3),
    "each its colour": (COLOURS, [obj("dog", "red"), obj("cat", "blue")], True, 1),
    "colours swapped": (COLOURS, [obj("dog", "blue"), obj("cat", "red")], False, 0.5),
    "one colour for both": (COLOURS, [obj("dog", "red"), obj("cat", "red")], False, 0.75),
    "one class, two colours": (
        SAME,
        [obj("cup", "blue"), obj("cup", "red"), obj("cup", "red")],
        True,
        1,
    ),
    "one class, colours swapped": (
        SAME,
        [obj("cup", "red"), obj("cup", "blue"), obj("cup", "blue")],
        False,
        0.5 / 4,
    ),
    "one class, one too many": (
        SAME,
        [obj("cup", "red")] * 3 + [obj("cup", "blue")],
        False,
        0.75,
    ),
    "excluded but present": (NO_CAT, [DOG, CAT], False, 0.5),
    "excluded and absent": (NO_CAT, [DOG, CUP], True, 1),
    "all rules": (
        ALL,
        [obj("dog", "red"), obj("cat", "blue", (30, 0)), obj("cat", "blue", (40, 5))],
        True,
        1,
    ),
    "one of two in its position": (
        ALL,
        [obj("dog", "red"), obj("cat", "blue", (30, 0)), obj("cat", "blue", (-30, 0))],
        False,
        (1 + 1 + 1 + 1 + 0.5) / 5,
    ),
    "position relative to a wrong colour": (
        ALL,
        [obj("dog", "blue"), obj("cat", "blue", (30, 0)), obj("cat", "blue", (40, 5))],
        False,
        (1 + 0 + 1 + 1 + 0) / 5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case):
    metadata, found, strict, graded = CASES[case]
    verdict = evaluate_task(parse_task(metadata), found)
    assert verdict == GenEvalVerdict(strict, pytest.approx(graded))
    if strict and not metadata["exclude"]:  # further objects change nothing
        assert evaluate_task(parse_task(metadata), [*found, obj("kite")]) == verdict


def test_an_edit_may_only_remove_objects():
    task = parse_task({**meta(exclude=(spec("cat"),)), "keep": meta(spec("dog", 1, "red"))})
    assert task.colour_classes == {"dog"}
    assert evaluate_task(task, [DOG]) == GenEvalVerdict(True, 1.0)
    assert evaluate_task(task, [DOG, CAT]) == GenEvalVerdict(False, 0.0)


def test_spatial_relations_are_antisymmetric():
    inverse = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    boxes = [
        obj("x", at=(x, y), size=(w, 8)).box for x in (-20, 0, 9) for y in (0, 7) for w in (4, 9)
    ]
    for a in boxes:
        for b in boxes:
            assert spatial_relations(a, b) == {inverse[name] for name in spatial_relations(b, a)}


def test_other_metadata_has_no_task():
    assert parse_task({"prompt": "a cat"}) is None


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ({"include": []}, "include is empty"),
        ({"include": {"class": "dog"}}, "include must be a list"),
        ({"include": ["dog"]}, "'dog'"),
        ({"include": [{"class": "dog", "count": 0}]}, "count=0"),
        ({"include": [{"class": "dog", "count": "two"}]}, "count='two'"),
        ({"include": [spec("dog"), spec("cat", position=["under", 0])]}, "position=['under', 0]"),
        ({"include": [spec("dog"), spec("cat", position="left of 0")]}, 'position must be like ["'),
        ({"include": [spec("dog", position=["left of", 0])]}, "position refers to 0"),
        ({"include": [spec("dog")], "keep": [spec("cat")]}, "keep"),
        ({"include": [], "keep": {"include": []}}, "include is empty"),
    ],
)
def test_invalid_metadata_is_rejected(metadata, shown):
    with raises_user_error(shown, field="prompt", value="some prompt"):
        parse_task({"prompt": "some prompt", **metadata})
