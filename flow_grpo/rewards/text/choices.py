"""The letters that an answer to a multiple-choice question commits to.

`B. 12` and `(B) 12` have the label of a choice; `B or C` does not commit to one. All functions take
text without LaTeX styles (`math_parsing.strip_styles`).
"""

import re

_LABEL = re.compile(
    r"(?:\(\s*([A-J])\s*\)\s*[.:]?|([A-J])\s*\)|([A-J])[.:](?=\s|$))\s*(.*)", re.DOTALL
)
_SINGLE_LETTER = re.compile(
    r"(?:(?i:option|choice|answer)\s*:?\s*)?[(\[]?\s*([A-Ja-j])\s*[)\]]?[.:]?"
)
_LETTER = r"[(\[{'\"]*([A-J])[)\]}'\".:]*"
_LETTER_LIST = re.compile(
    rf"[\[{{(]?\s*{_LETTER}(?:(?:\s*[,;&+]\s*(?:and\s+)?|\s+and\s+|\s+){_LETTER})+"
)
_JOINED = re.compile(r"[A-J]{2,10}")
_LATER_LABEL = re.compile(r"(?:^|[\s,;])(?:\(([A-J])\)|([A-J])[).:](?=\s|$))")
_ALTERNATIVE_LETTER = re.compile(
    r"(?:\b(?i:or|either|neither|maybe|perhaps|possibly|probably|but|not|also)\b|/)"
    r"(?:\s+\w+){0,2}?\s*\(?[A-J]\)?(?![\w'])"
)
# "I" is a letter here, but a word in "the answer is, I think, B"
_STATED_LETTERS = re.compile(
    r"\b(?i:answers?|options?|choices?)(?i:\s+(?:is|are))?:?\s*"
    r"((?:\(?(?:[A-HJ]|I(?!,? [a-z]))\)?(?![\w'])[\s,;&/]*(?:(?i:and|or)\b\s*)?)+)"
)


def split_label(text: str) -> tuple[str, str]:
    """Return the letter and the rest of `B. 12` or `(B) 12`; ("", text) without a label."""
    found = _LABEL.fullmatch(text)
    letter = found and (found[1] or found[2] or found[3])
    return (letter, found[4].strip()) if letter else ("", text)


def choice_letters(text: str) -> frozenset[str]:
    """Return the letters that an answer commits to; empty for a hedge such as `B or C`.

    `B`, `(b)`, `B. a dog` and `Option B` have one letter; `A, C`, `AC` and `A. cat, C. dog` two.
    """
    if found := _SINGLE_LETTER.fullmatch(text):
        return frozenset(found[1].upper())
    without_hedge = re.sub(r"\bor\b|/|\?", ",", text)
    if without_hedge != text and _LETTER_LIST.fullmatch(without_hedge):
        return frozenset()
    if _LETTER_LIST.fullmatch(text):
        return frozenset(re.findall(r"(?<![A-Za-z])[A-J](?![A-Za-z])", text))
    if _JOINED.fullmatch(text) and len(set(text)) == len(text):
        return frozenset(text)
    letter, rest = split_label(text)
    if not letter and (found := re.match(r"([A-J]),\s+(?![A-J]\b)", text)):
        letter, rest = found[1], text[found.end() :]
    if not letter or _ALTERNATIVE_LETTER.search(f" {rest}"):
        return frozenset()
    later = {one or other for one, other in _LATER_LABEL.findall(rest)}
    return frozenset({letter, *later})


def stated_letters(text: str) -> frozenset[str]:
    """Return the letters in the last phrase like "the answer is B"; empty without one."""
    found = _STATED_LETTERS.findall(text)
    if not found or re.search(r"\b(?i:or)\b|/", found[-1]):
        return frozenset()
    return frozenset(re.findall(r"[A-J]", found[-1]))
