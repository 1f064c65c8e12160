"""Hand-made detections, and what GenEval's rules make of them."""

import pytest

from flow_grpo.errors import UserError
from flow_grpo.rewards.scorers.geneval.rules import (
    Detection,
    GenEvalVerdict,
    judge,
    parse_task,
    relations,
)


def thing(name: str, colour: str | None = None, at=(0, 0), size=(10, 10), score=0.9) -> Detection:
    """By the middle of its box."""
    (x, y), (w, h) = at, size
    return Detection(name, score, (x - w / 2, y - h / 2, x + w / 2, y + h / 2), colour)


def asked(*include: dict, exclude: tuple[dict, ...] = ()) -> dict:
    return {"tag": "any", "prompt": "p", "include": list(include), "exclude": list(exclude)}


def want(name: str, count: int = 1, color: str | None = None, position=None) -> dict:
    """As GenEval's files have it: keys that are not needed are not there."""
    request = {"class": name, "count": count}
    return request | {k: v for k, v in {"color": color, "position": position}.items() if v}


DOG, CAT, CUP = thing("dog"), thing("cat"), thing("cup")
ONE = asked(want("dog"))
TWO = asked(want("dog"), want("cat"))
THREE = asked(want("cup", 3), exclude=({"class": "cup", "count": 4},))
RED = asked(want("cup", 1, "red"))
TWO_RED = asked(want("cup", 2, "red"))
LEFT = asked(want("dog"), want("cat", position=["left of", 0]))
ABOVE = asked(want("dog"), want("cat", position=["above", 0]))
COLOURS = asked(want("dog", 1, "red"), want("cat", 1, "blue"))
SAME = asked(want("cup", 2, "red"), want("cup", 1, "blue"), exclude=({"class": "cup", "count": 4},))
NO_CAT = asked(want("dog"), exclude=({"class": "cat", "count": 1},))
ALL = asked(
    want("dog", 1, "red"),
    want("cat", 2, "blue", ["right of", 0]),
    exclude=({"class": "dog", "count": 2}, {"class": "cat", "count": 3}),
)

CASES = {
    # name: (asked for, found, strict, graded)
    "one thing": (ONE, [DOG], True, 1),
    "nothing": (ONE, [], False, 0),
    "another thing": (ONE, [CAT], False, 0),
    "one thing and another": (ONE, [DOG, CAT], True, 1),
    "two where one will do": (ONE, [DOG, DOG], True, 0),
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
    "right colour": (RED, [thing("cup", "red")], True, 1),
    "wrong colour": (RED, [thing("cup", "blue")], False, 0.5),
    "no colour": (RED, [CUP], False, 0.5),
    "right colour, wrong thing": (RED, [thing("dog", "red")], False, 0),
    "the surest one counts": (
        RED,
        [thing("cup", "red", score=0.5), thing("cup", "blue", score=0.9)],
        False,
        0.5,
    ),
    "the surest one is right": (
        RED,
        [thing("cup", "blue", score=0.5), thing("cup", "red", score=0.9)],
        True,
        0.5,
    ),
    "of two equally sure, the first": (RED, [thing("cup", "red"), thing("cup", "blue")], True, 0.5),
    "two of the colour": (TWO_RED, [thing("cup", "red")] * 2, True, 1),
    "one of two has it": (TWO_RED, [thing("cup", "red"), thing("cup", "blue")], False, 0.75),
    "one for two of the colour": (TWO_RED, [thing("cup", "red")], False, 0.25),
    "left": (LEFT, [DOG, thing("cat", at=(-30, 0))], True, 1),
    "right for left": (LEFT, [DOG, thing("cat", at=(30, 0))], False, 2 / 3),
    "above for left": (LEFT, [DOG, thing("cat", at=(0, -30))], False, 2 / 3),
    "left and a little up": (LEFT, [DOG, thing("cat", at=(-30, -10))], True, 1),
    "left and above": (LEFT, [DOG, thing("cat", at=(-30, -30))], True, 1),
    "above and left": (ABOVE, [DOG, thing("cat", at=(-30, -30))], True, 1),
    "touching": (LEFT, [DOG, thing("cat", at=(-10, 0))], True, 1),
    "overlapping by half": (LEFT, [DOG, thing("cat", at=(-5, 0))], True, 1),
    "overlapping too far": (LEFT, [DOG, thing("cat", at=(-3, 0))], False, 2 / 3),
    "at the margin": (LEFT, [DOG, thing("cat", at=(-2, 0))], False, 2 / 3),
    "in one place": (LEFT, [DOG, CAT], False, 2 / 3),
    "beside nothing": (LEFT, [thing("cat", at=(-30, 0))], False, 1 / 3),
    "nothing beside": (LEFT, [DOG], False, 1 / 3),
    "above": (ABOVE, [DOG, thing("cat", at=(0, -30))], True, 1),
    "below for above": (ABOVE, [DOG, thing("cat", at=(0, 30))], False, 2 / 3),
    "each its colour": (COLOURS, [thing("dog", "red"), thing("cat", "blue")], True, 1),
    "colours swapped": (COLOURS, [thing("dog", "blue"), thing("cat", "red")], False, 0.5),
    "one colour for both": (COLOURS, [thing("dog", "red"), thing("cat", "red")], False, 0.75),
    "one class, two colours": (
        SAME,
        [thing("cup", "blue"), thing("cup", "red"), thing("cup", "red")],
        True,
        1,
    ),
    "one class, colours swapped": (
        SAME,
        [thing("cup", "red"), thing("cup", "blue"), thing("cup", "blue")],
        False,
        0.5 / 4,
    ),
    "one class, one too many": (
        SAME,
        [thing("cup", "red")] * 3 + [thing("cup", "blue")],
        False,
        0.75,
    ),
    "not to be there": (NO_CAT, [DOG, CAT], False, 0.5),
    "and is not": (NO_CAT, [DOG, CUP], True, 1),
    "all of it": (
        ALL,
        [thing("dog", "red"), thing("cat", "blue", (30, 0)), thing("cat", "blue", (40, 5))],
        True,
        1,
    ),
    "one of two in its place": (
        ALL,
        [thing("dog", "red"), thing("cat", "blue", (30, 0)), thing("cat", "blue", (-30, 0))],
        False,
        (1 + 1 + 1 + 1 + 0.5) / 5,
    ),
    "the place of what has a wrong colour": (
        ALL,
        [thing("dog", "blue"), thing("cat", "blue", (30, 0)), thing("cat", "blue", (40, 5))],
        False,
        (1 + 0 + 1 + 1 + 0) / 5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case):
    metadata, found, strict, graded = CASES[case]
    verdict = judge(parse_task(metadata), found)
    assert verdict == GenEvalVerdict(strict, pytest.approx(graded))
    if strict and not metadata["exclude"]:  # more of other things changes nothing
        assert judge(parse_task(metadata), [*found, thing("kite")]) == verdict


def test_what_is_only_to_go_is_gone_or_is_not():
    task = parse_task({**asked(exclude=(want("cat"),)), "keep": asked(want("dog", 1, "red"))})
    assert task.coloured == {"dog"}
    assert judge(task, [DOG]) == GenEvalVerdict(True, 1.0)
    assert judge(task, [DOG, CAT]) == GenEvalVerdict(False, 0.0)


def test_what_is_beside_something_is_on_the_other_side_of_that():
    other = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    boxes = [
        thing("x", at=(x, y), size=(w, 8)).box for x in (-20, 0, 9) for y in (0, 7) for w in (4, 9)
    ]
    for a in boxes:
        for b in boxes:
            assert relations(a, b) == {other[relation] for relation in relations(b, a)}


def test_other_metadata_asks_for_nothing():
    assert parse_task({"prompt": "a cat"}) is None


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"include": []}, "include is empty"),
        ({"include": {"class": "dog"}}, "include must be a list"),
        ({"include": ["dog"]}, "'dog' must be an object"),
        ({"include": [{"class": "dog", "count": 0}]}, "count is 0"),
        ({"include": [{"class": "dog", "count": "two"}]}, "count is 'two'"),
        (
            {"include": [want("dog"), want("cat", position=["under", 0])]},
            "position is ['under', 0]",
        ),
        ({"include": [want("dog"), want("cat", position="left of 0")]}, "position must read like"),
        ({"include": [want("dog", position=["left of", 0])]}, "position refers to 0"),
        ({"include": [want("dog")], "keep": [want("cat")]}, "keep must be an object"),
        ({"include": [], "keep": {"include": []}}, "include is empty"),
    ],
)
def test_metadata_that_makes_no_sense_is_told(metadata, told):
    with pytest.raises(UserError) as error:
        parse_task({"prompt": "some prompt", **metadata})
    assert told in str(error.value)
    assert "some prompt" in str(error.value)
