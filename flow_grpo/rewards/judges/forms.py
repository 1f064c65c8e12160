"""Reading what a judge answered. Where there is doubt there is a reason instead of a number."""

import functools
import re
from dataclasses import dataclass
from typing import Any

NO_TEXT = "[no text]"  # in brackets, so that no sign says the same

READ_QUESTION = f"""\
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

FINAL_QUESTION = """\
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

BETTER_QUESTION = """\
You see two pictures, picture 1 and then picture 2, that image generators made for this caption:

{prompt}

Which one is better? First weigh how well each shows what the caption asks for, with the right
things, number, colours, places and written words; where they are equal in that, which one is
sharper and has fewer broken shapes. Their order says nothing. Give your reasons in one or two
sentences, then end with a line of its own, with 1, 2 or tie for X:
Better: X"""


# VIEScore's two pairs of grades (Ku et al. 2024, arXiv 2312.14867): of an edit, and of a picture.
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

LOOK_QUESTION = """\
You see a picture that was made by a machine. Whatever it shows, give two grades from 0 to 10.
Naturalness: 0 if it does not look real in the least, with wrong light, shadows, sizes or
distances, 10 if it could be a photograph, or a drawing by a skilled hand. Cleanness: 0 if most of
it is spoilt by distortions, watermarks, scratches, blurred faces, odd limbs or parts that do not
belong together, 10 if there is nothing of the kind. Give your reasons in one or two sentences,
then end with these two lines:
Naturalness: X
Cleanness: Y"""


LOWEST, HIGHEST = 1.0, 5.0

_QUOTES = {'"': '"', "'": "'", "“": "”", "”": "”", "„": "“", "«": "»", "`": "`"}
_FENCE = re.compile(r"```[\w-]*\n(.*?)\n?[ \t]*```", re.DOTALL)


class Unscorable(Exception):
    """Why an image gets no score."""


@dataclass(frozen=True)
class Reply:
    text: str  # without the thinking
    cut_off: bool = False  # by max_tokens


def read_completion(completion: Any) -> Reply:
    """The answer in the JSON of a chat completion."""
    try:
        choice = completion["choices"][0]
        cut_off = choice.get("finish_reason") == "length"
        content, refusal = (choice["message"].get(key) for key in ("content", "refusal"))
    except (LookupError, TypeError, AttributeError) as error:
        raise Unscorable(f"this is no chat completion: {quote(completion)}") from error
    if refusal:
        raise Unscorable(f"the judge refused: {quote(refusal)}")
    spoken = _without_thinking(content) if isinstance(content, str) else None
    if spoken is None:
        why = "max_tokens cut it off before it said anything" if cut_off else "it has no content"
        raise Unscorable(f"the answer holds no reply, {why}: {quote(content or choice)}")
    return Reply(spoken.strip(), cut_off)


def labelled_score(
    answer: Reply, label: str, lowest: float = LOWEST, highest: float = HIGHEST
) -> float:
    """The number behind `label` and a colon; the last one where there are several."""
    match = _last(_number_pattern(label, lowest, highest), answer, label, "number")
    number, scale = match.groups()
    score = float(number)
    if not lowest <= score <= highest or (scale and float(scale) != highest):
        said, ends = match.group().strip(), f"{lowest:g} to {highest:g}"
        raise Unscorable(f"{said!r} is not on the scale from {ends}: {quote(answer.text)}")
    return score


def labelled_winner(answer: Reply, label: str) -> float:
    """Whether the first of two pictures wins: 1 or 0, or 1/2 for a tie. Behind `label` and a colon
    on a line of its own; the last one where there are several."""
    winner = _last(_winner_pattern(label), answer, label, "winner").group(1)
    return {"1": 1.0, "2": 0.0}.get(winner, 0.5)


def read_text(answer: Reply) -> str:
    """What a reader read in a picture: its answer without the wrapping some models add.

    Empty for `NO_TEXT`, which our question asks for where there is nothing to read.
    """
    text = answer.text.strip()
    if fenced := _FENCE.fullmatch(text):
        text = fenced.group(1).strip()
    if len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1].strip()
    return "" if text.lower().rstrip(".") == NO_TEXT else text


def quote(text: Any, length: int = 80) -> str:
    """The beginning of `text`, on one line and in quotes."""
    line = " ".join(str(text).split())
    return repr(line if len(line) <= length else line[:length] + "…")


def _without_thinking(content: str) -> str | None:
    """None where it never stops thinking. Some chat templates open the thought themselves."""
    reply = content.rpartition("</think>")[2]
    reply, opened, _ = reply.partition("<think>")
    return None if opened and not reply.strip() else reply


def _last(pattern: re.Pattern[str], answer: Reply, label: str, what: str) -> re.Match[str]:
    matches = list(pattern.finditer(answer.text))
    # A number at the very end of an answer that was cut off may lack its decimals.
    lost = not matches or not answer.text[matches[-1].end() :].strip(".")
    if answer.cut_off and lost:
        raise Unscorable(
            f'max_tokens cut the answer off before its "{label}" was complete: {quote(answer.text)}'
        )
    if not matches:
        raise Unscorable(f'the answer gives no {what} as its "{label}": {quote(answer.text)}')
    return matches[-1]


_MARK = r"[ \t*_`\"']*"
_OPENED = rf"(?:[\[(<]{_MARK})?"


def _label(label: str) -> str:
    words = r"\s+".join(re.escape(word) for word in label.split())
    return rf"(?<![^\W_]){words}{_MARK}"


@functools.cache
def _number_pattern(label: str, lowest: float, highest: float) -> re.Pattern[str]:
    """`Label: 4`, with the marks, ranges and scales that models put around it.

    The number stays on the line of its label: a list below it may begin with "1.".
    """
    stated_range = rf"\([ \t]*{lowest:g}[ \t]*(?:[-–—]|to)[ \t]*{highest:g}[ \t]*\)"
    number = r"([-+]?[0-9]+(?:\.[0-9]+)?)"
    # "4-5", "4,5" and "90%" are no scores, and 4 is not the score in them.
    not_after = r"(?![0-9A-Za-z]|[.,][0-9]|[ \t]*(?:[-–—~]|to\b)[ \t]*[0-9]|[ \t]*%)"
    scale = r"(?:[ \t]*(?:/|out of)[ \t]*([0-9]+))?"
    return re.compile(
        rf"{_label(label)}(?:{stated_range}{_MARK})?[:：=]{_MARK}{_OPENED}"
        rf"{number}{not_after}{scale}",
        re.IGNORECASE,
    )


@functools.cache
def _winner_pattern(label: str) -> re.Pattern[str]:
    """`Label: 1` on a line of its own: "2 is better: 1 has no cat" is a reason, not a verdict."""
    noun = r"(?:(?:picture|image)[ \t]*)?"
    return re.compile(
        rf"^[^\w\n]*{_label(label)}[:：=]{_MARK}{_OPENED}{noun}(1|2|tie)[^\w\n]*$",
        re.IGNORECASE | re.MULTILINE,
    )
