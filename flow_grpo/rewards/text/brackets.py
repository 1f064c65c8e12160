"""Bracket matching in formulas."""

import re
from itertools import accumulate


def find_group_end(text: str, start: int) -> int:
    """Return the end of the LaTeX group at `start`: brackets, a number, a command or a letter.

    It is the index after the last character.
    """
    while start < len(text) and text[start] in " -+":
        start += 1
    if text[start : start + 1] not in ("(", "[", "{"):
        found = re.compile(r"\\[A-Za-z]+|\d+|.").match(text, start)
        return found.end() if found else len(text)
    ends = (index for index, (_, depth) in enumerate(bracket_depths(text[start:])) if depth == 0)
    return start + next(ends, len(text)) + 1


def bracket_depths(text: str) -> list[tuple[str, int]]:
    """Return each character with the number of brackets that are open after it."""
    steps = ((character in "([{") - (character in ")]}") for character in text)
    return list(zip(text, accumulate(steps), strict=True))


def split_top_level(text: str, marks: str) -> list[str]:
    """Split a text at those of the `marks` that are outside brackets, and strip the parts."""
    depths = enumerate(bracket_depths(text))
    splits = [k for k, (mark, depth) in depths if mark in marks and depth == 0]
    starts, ends = [0, *(k + 1 for k in splits)], [*splits, len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
