"""Questions for judges, and parsers of their replies, which reject anything ambiguous.

Changing the wording of a question changes the scores of the judge.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

NO_TEXT = "[no text]"  # in brackets, so that no sign reads the same

OCR_QUESTION = f"""\
Which text is written in this picture? Copy it exactly as it is spelled there, mistakes included,
in reading order and on one line. Leave out what you cannot make out; do not guess. Answer with
the text alone. If the picture holds no legible text, answer {NO_TEXT}."""

GRADE_QUESTION = """\
An image generator was asked for:

{prompt}

Grade the picture it made, weighing two things equally. Fidelity: does it show everything that was
asked for, with the right number, colours, places and written words, and nothing that contradicts
it? Quality: is it sharp, well lit and well composed, without artefacts or broken shapes?

1 means useless, 2 poor, 3 fair, 4 good and 5 flawless; decimals such as 3.5 are welcome. Give your
reasons in one or two sentences, then end with a line of its own in this form:
Score: X"""

FINAL_SCORE_QUESTION = """\
You see a generated picture. This is the caption it was made for:

{prompt}

Go through what the caption mentions (things, properties, relations, actions, words) and say
whether the picture shows it. Then look at the picture itself: is it clear, plausible and pleasant
to look at? Put both into one grade between 1 (very bad) and 5 (very good); decimals are allowed.
The last line of your answer must be the grade:
Final Score: X"""

AXES_QUESTION = """\
You see a generated picture. This is the caption it was made for:

{prompt}

Grade three things separately, each between 1 (very bad) and 5 (very good), decimals allowed:
alignment, how well the picture matches the caption; coherence, how free it is of distortions and
of things that make no sense; style, how appealing it is, whatever it shows. Answer with
these three lines and nothing else:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z"""

PAIRWISE_QUESTION = """\
You see two pictures, picture 1 and then picture 2, that image generators made for this caption:

{prompt}

Which one is better? First weigh how well each shows what the caption asks for, with the right
things, number, colours, places and written words; where they are equal in that, which one is
sharper and has fewer broken shapes. Their order says nothing. Give your reasons in one or two
sentences, then end with a line of its own, with 1, 2 or tie for X:
Better: X"""


# VIEScore's two pairs of grades (Ku et al. 2024, arXiv 2312.14867): of an edit, and of an image.
EDIT_QUESTION = """\
You see a picture, or several, and then, as the last one, what an image editor made from it. The
editor was told:

{prompt}

Compare the last picture with what it was made from, and give two grades from 0 to 10. Success: 0
if the instruction was not followed at all, 10 if the change is exactly the one that was asked for.
Kept: 0 if it has become another scene, 10 if nothing has changed but what the instruction asks
for. A picture that is as it was has followed nothing. Give your reasons in one or two sentences,
then end with these two lines:
Success: X
Kept: Y"""

PERCEPTUAL_QUESTION = """\
You see a picture that was made by a machine. Whatever it shows, give two grades from 0 to 10.
Naturalness: 0 if it does not look real in the least, with wrong light, shadows, sizes or
distances, 10 if it could be a photograph, or a drawing by a skilled hand. Cleanness: 0 if most of
it is spoilt by distortions, watermarks, scratches, blurred faces, odd limbs or parts that do not
belong together, 10 if there is nothing of the kind. Give your reasons in one or two sentences,
then end with these two lines:
Naturalness: X
Cleanness: Y"""


MIN_GRADE, MAX_GRADE = 1.0, 5.0

_QUOTES = {'"': '"', "'": "'", "“": "”", "”": "”", "„": "“", "«": "»", "`": "`"}
_FENCE = re.compile(r"```[\w-]*\n(.*?)\n?[ \t]*```", re.DOTALL)


class NoScoreError(Exception):
    """A judge gave no valid score; the message is the reason."""


@dataclass(frozen=True)
class JudgeReply:
    """The reply of a judge."""

    text: str  # without reasoning
    cut_off: bool = False  # by max_tokens


def parse_completion(completion: Any) -> JudgeReply:
    """Return the reply in the JSON of a chat completion, without its reasoning.

    Raises:
        NoScoreError: There is none, or the judge refused.
    """
    try:
        choice = completion["choices"][0]
        cut_off = choice.get("finish_reason") == "length"
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError) as error:
        raise NoScoreError(f"not a chat completion: {excerpt(completion)}") from error
    if refusal:
        raise NoScoreError(f"the judge refused: {excerpt(refusal)}")
    text = _strip_thinking(content) if isinstance(content, str) else None
    if text is None:
        why = "max_tokens truncated its reasoning" if cut_off else "no content"
        raise NoScoreError(f"the judge sent no reply ({why}): {excerpt(content or choice)}")
    return JudgeReply(text.strip(), cut_off)


def parse_labelled_score(
    reply: JudgeReply, label: str, lowest: float = MIN_GRADE, highest: float = MAX_GRADE
) -> float:
    """Return the number after the last `label` and colon, as in "Score: 4".

    Raises:
        NoScoreError: There is none, or it is not from `lowest` to `highest`.
    """
    match = _last_match(_number_pattern(label, lowest, highest), reply, label, "number")
    number, scale = match.groups()
    score = float(number)
    if not lowest <= score <= highest or (scale and float(scale) != highest):
        raise NoScoreError(
            f"{match.group().strip()!r} is not on the scale from {lowest:g} to {highest:g}: "
            f"{excerpt(reply.text)}"
        )
    return score


def parse_labelled_winner(reply: JudgeReply, label: str) -> float:
    """Return whether the first of two images wins: 1, 0, or 1/2 for a tie.

    The verdict is 1, 2 or tie after the last `label` and colon, on a separate line.
    """
    winner = _last_match(_winner_pattern(label), reply, label, "winner").group(1)
    return {"1": 1.0, "2": 0.0}.get(winner, 0.5)


def parse_ocr_reply(reply: JudgeReply) -> str:
    """Return the text that a model read, without code fences or quotes; "" for `NO_TEXT`."""
    text = reply.text.strip()
    if fenced := _FENCE.fullmatch(text):
        text = fenced.group(1).strip()
    if len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1].strip()
    return "" if text.lower().rstrip(".") == NO_TEXT else text


def excerpt(text: Any, length: int = 80) -> str:
    """Return the beginning of `text`, on one line and in quotes."""
    line = " ".join(str(text).split())
    return repr(line if len(line) <= length else line[:length] + "…")


def _strip_thinking(content: str) -> str | None:
    """Return a reply without its reasoning, or None if that never ends.

    Some chat templates add the opening <think>, so that the reply has only the closing one.
    """
    reply = content.rpartition("</think>")[2]
    reply, opened, _ = reply.partition("<think>")
    return None if opened and not reply.strip() else reply


def _last_match(
    pattern: re.Pattern[str], reply: JudgeReply, label: str, what: str
) -> re.Match[str]:
    """Return the last match in a reply.

    Args:
        pattern: Pattern of the labelled value.
        reply: The reply.
        label: The label, for messages.
        what: What follows it, for messages.

    Raises:
        NoScoreError: If there is none, or the reply is truncated at the last one.
    """
    matches = list(pattern.finditer(reply.text))
    # A number at the very end of a truncated reply may lack its decimals.
    incomplete = not matches or not reply.text[matches[-1].end() :].strip(".")
    if reply.cut_off and incomplete:
        raise NoScoreError(
            f'max_tokens truncated the reply before "{label}" was complete: {excerpt(reply.text)}'
        )
    if not matches:
        raise NoScoreError(f'the reply has no {what} after "{label}": {excerpt(reply.text)}')
    return matches[-1]


_MARKUP = r"[ \t*_`\"']*"
_OPENING_BRACKET = rf"(?:[\[(<]{_MARKUP})?"


def _label_pattern(label: str) -> str:
    words = r"\s+".join(re.escape(word) for word in label.split())
    return rf"(?<![^\W_]){words}{_MARKUP}"


@functools.cache
def _number_pattern(label: str, lowest: float, highest: float) -> re.Pattern[str]:
    """Return the pattern of `Label: 4`, with the markup, ranges and scales that models write.

    The number must be on the line of its label: a list below it may begin with "1.".
    """
    stated_range = rf"\([ \t]*{lowest:g}[ \t]*(?:[-–—]|to)[ \t]*{highest:g}[ \t]*\)"
    number = r"([-+]?[0-9]+(?:\.[0-9]+)?)"
    # "4-5", "4,5" and "90%" are not scores, nor is the 4 in them.
    not_after = r"(?![0-9A-Za-z]|[.,][0-9]|[ \t]*(?:[-–—~]|to\b)[ \t]*[0-9]|[ \t]*%)"
    scale = r"(?:[ \t]*(?:/|out of)[ \t]*([0-9]+))?"
    return re.compile(
        rf"{_label_pattern(label)}(?:{stated_range}{_MARKUP})?[:：=]{_MARKUP}{_OPENING_BRACKET}"
        rf"{number}{not_after}{scale}",
        re.IGNORECASE,
    )


@functools.cache
def _winner_pattern(label: str) -> re.Pattern[str]:
    """Return the pattern of `Label: 1` on a separate line: "2 is better: 1 has no cat" is none."""
    noun = r"(?:(?:picture|image)[ \t]*)?"
    return re.compile(
        rf"^[^\w\n]*{_label_pattern(label)}[:：=]{_MARKUP}{_OPENING_BRACKET}{noun}(1|2|tie)[^\w\n]*$",
        re.IGNORECASE | re.MULTILINE,
    )
