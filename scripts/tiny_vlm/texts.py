"""Vocabulary, questions and target responses of the small vision-language model."""

import re
from dataclasses import dataclass

SPECIAL = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
CHARACTERS = (*map(chr, range(32, 127)), "\n")
VOCABULARY = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}

COLOURS = {  # RGB in [0, 1]
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.8, 0.1),
    "blue": (0.15, 0.25, 1.0),
    "yellow": (1.0, 0.95, 0.1),
    "purple": (0.8, 0.1, 0.9),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = ("circles", "squares", "triangles")
ONE_COLOUR, ONE_SHAPE, TWO_SHAPES, SUM = range(4)
TASKS = ("one colour", "one shape", "two shapes", "sum without a picture")


@dataclass(frozen=True)
class Template:
    """A question; `first` and `second` are shape indices, or the addends of a sum."""

    text: str
    task: int
    first: int
    second: int
    colour: int = 0


def _templates() -> tuple[Template, ...]:
    """Return all questions: on one colour, one shape or two shapes, and sums."""
    shapes = range(len(SHAPES))
    colours = [
        Template(f"How many {colour} {SHAPES[s]}?", ONE_COLOUR, s, s, c)
        for s in shapes
        for c, colour in enumerate(COLOURS)
    ]
    singles = [Template(f"How many {SHAPES[s]}?", ONE_SHAPE, s, s) for s in shapes]
    pairs = [
        Template(f"How many {SHAPES[s]} plus {SHAPES[t]}?", TWO_SHAPES, s, t)
        for s in shapes
        for t in shapes
        if s != t
    ]
    sums = [Template(f"What is {a}+{b}?", SUM, a, b) for a in range(10) for b in range(10)]
    return (*colours, *singles, *pairs, *sums)


TEMPLATES = _templates()
BY_TASK = [[i for i, t in enumerate(TEMPLATES) if t.task == task] for task in range(len(TASKS))]
# fractions of the questions about an image
TASK_SHARES = {ONE_COLOUR: 0.39, ONE_SHAPE: 0.29, TWO_SHAPES: 0.32}
SUM_SHARE = 0.18  # of all questions

# Responses to "a+b": correct, with the first addend as the answer, and two without correct tags.
ANSWERS = (
    "<think>{a}+{b}</think><answer>{total}</answer>",
    "<think>{a}+{b}</think><answer>{a}</answer>",
    "<think>{a}+{b}</think>{total}",
    "{a}+{b}={total}",
)
CORRECT = 0
# Fraction of each response in the training data, by task. In all tasks but the first an error is
# the most likely: greedy decoding fails, while one in three samples is correct.
ANSWER_SHARES = (
    (0.62, 0.18, 0.10, 0.10),
    (0.36, 0.08, 0.56, 0.00),
    (0.36, 0.54, 0.05, 0.05),
    (0.38, 0.09, 0.00, 0.53),
)
_FORMAT = re.compile(r"<think>[^<]*</think>\s*<answer>([^<]*)</answer>")


def answer_text(a: int, b: int, variant: int = CORRECT) -> str:
    return ANSWERS[variant].format(a=a, b=b, total=a + b)


def token_ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def final_answer(text: str) -> str | None:
    """Return the text in the answer tags, or None if the format is wrong."""
    match = _FORMAT.fullmatch(text)
    return match.group(1).strip() if match else None
