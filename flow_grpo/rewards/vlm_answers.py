"""Reading what a judge answered. Where there is doubt there is a reason instead of a number."""

import functools
import re
from dataclasses import dataclass
from typing import Any

LOWEST, HIGHEST = 1.0, 5.0
NO_TEXT = "[no text]"  # in brackets, so that no sign says the same

_QUOTES = {'"': '"', "'": "'", "“": "”", "”": "”", "„": "“", "«": "»", "`": "`"}
_FENCE = re.compile(r"```[\w-]*\n(.*?)\n?[ \t]*```", re.DOTALL)


class Unscorable(Exception):
    """Why an image gets no score."""


@dataclass(frozen=True)
class Answer:
    text: str  # without the thinking
    cut_off: bool = False  # by max_tokens


def read_completion(completion: Any) -> Answer:
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
    return Answer(spoken.strip(), cut_off)


def labelled_score(answer: Answer, label: str) -> float:
    """The number from 1 to 5 behind `label` and a colon; the last one where there are several."""
    matches = list(_pattern(label).finditer(answer.text))
    # A number at the very end of an answer that was cut off may lack its decimals.
    lost = not matches or not answer.text[matches[-1].end() :].strip(".")
    if answer.cut_off and lost:
        raise Unscorable(
            f'max_tokens cut the answer off before its "{label}" was complete: {quote(answer.text)}'
        )
    if not matches:
        raise Unscorable(f'the answer gives no number as its "{label}": {quote(answer.text)}')
    number, scale = matches[-1].groups()
    score = float(number)
    if not LOWEST <= score <= HIGHEST or (scale and float(scale) != HIGHEST):
        said = matches[-1].group().strip()
        raise Unscorable(f"{said!r} is not on the scale from 1 to 5: {quote(answer.text)}")
    return score


def read_text(answer: Answer) -> str:
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


@functools.cache
def _pattern(label: str) -> re.Pattern[str]:
    """`Label: 4`, with the marks, ranges and scales that models put around it.

    The number stays on the line of its label: a list below it may begin with "1.".
    """
    words = r"\s+".join(re.escape(word) for word in label.split())
    mark = r"[ \t*_`\"']*"
    stated_range = r"\([ \t]*1[ \t]*(?:[-–—]|to)[ \t]*5[ \t]*\)"
    number = r"([-+]?[0-9]+(?:\.[0-9]+)?)"
    # "4-5", "4,5" and "90%" are no scores, and 4 is not the score in them.
    not_after = r"(?![0-9A-Za-z]|[.,][0-9]|[ \t]*(?:[-–—~]|to\b)[ \t]*[0-9]|[ \t]*%)"
    scale = r"(?:[ \t]*(?:/|out of)[ \t]*([0-9]+))?"
    return re.compile(
        rf"(?<![^\W_]){words}{mark}(?:{stated_range}{mark})?[:：=]{mark}(?:[\[(<]{mark})?"
        rf"{number}{not_after}{scale}",
        re.IGNORECASE,
    )
