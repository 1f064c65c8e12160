"""Prompts of the small model: signs with a word, and scenes of coloured shapes."""

import re
from dataclasses import dataclass
from itertools import product

from flow_grpo.rewards.scorers.geneval.rules import RGB, SHAPES

MAX_SHAPES = 4
COLOURS = tuple(RGB)
COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4}
RELATIONS = ("left of", "right of", "and")

# Single tokens of the CLIP tokenizer, so that a prompt fits in 16; other text is one per character.
KEYWORDS = [
    "sign",
    "that",
    "says",
    "left",
    "right",
    "of",
    "and",
    *COUNTS,
    *COLOURS,
    *SHAPES,
    *(shape + "s" for shape in SHAPES),
]

_GROUP = rf"({'|'.join(COUNTS)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})s?"
_SCENE = re.compile(rf"{_GROUP}(?: ({'|'.join(RELATIONS)}) {_GROUP})?")
_SIGN = re.compile(r'a sign that says "([A-Z]{3,6})"')


@dataclass(frozen=True)
class Group:
    """`count` shapes of one colour."""

    count: int
    colour: str
    shape: str

    def __str__(self) -> str:
        if self.count == 1:
            article = "an" if self.colour[0] in "aeiou" else "a"
            return f"{article} {self.colour} {self.shape}"
        number = ("two", "three", "four")[self.count - 2]
        return f"{number} {self.colour} {self.shape}s"


@dataclass(frozen=True)
class Scene:
    """One group, or two groups and their relation."""

    first: Group
    relation: str | None = None
    second: Group | None = None

    def __str__(self) -> str:
        return f"{self.first} {self.relation} {self.second}" if self.second else str(self.first)

    @property
    def left_to_right(self) -> tuple[Group, ...]:
        """Return the groups in drawing order; `and` keeps the order of the prompt."""
        if self.second is None:
            return (self.first,)
        if self.relation == "right of":
            return (self.second, self.first)
        return (self.first, self.second)


def sign_prompt(word: str) -> str:
    return f'a sign that says "{word}"'


def parse_sign(prompt: str) -> str | None:
    """Return the word of a sign prompt, or None for other prompts."""
    match = _SIGN.fullmatch(prompt)
    return match[1] if match else None


def parse_scene(prompt: str) -> Scene | None:
    """Return the scene of a scene prompt, or None for other prompts."""
    match = _SCENE.fullmatch(prompt)
    if match is None:
        return None
    count, colour, shape, relation, count_2, colour_2, shape_2 = match.groups()
    first = Group(COUNTS[count], colour, shape)
    if relation is None:
        return Scene(first)
    return Scene(first, relation, Group(COUNTS[count_2], colour_2, shape_2))


def scenes_by_kind() -> list[list[Scene]]:
    """Return all training scenes: one group; left or right of; two groups with `and`."""
    kinds = list(product(COLOURS, SHAPES))
    pairs = [(a, b) for a, b in product(kinds, kinds) if a != b]
    single = [Scene(Group(n, *kind)) for n in range(1, MAX_SHAPES + 1) for kind in kinds]
    placed = [
        Scene(Group(1, *a), relation, Group(1, *b))
        for relation in ("left of", "right of")
        for a, b in pairs
    ]
    joined = [
        Scene(Group(n, *a), "and", Group(m, *b))
        for n, m in product(range(1, MAX_SHAPES), repeat=2)
        if n + m <= MAX_SHAPES
        for a, b in pairs
    ]
    return [single, placed, joined]
