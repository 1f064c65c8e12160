"""Given responses: demonstrations, preference pairs and rated responses of language models.

A row has a prompt and what training compares (TRL's dataset types, docs/source/dataset_formats.md):

| rows            | columns                                                        |
|-----------------|----------------------------------------------------------------|
| demonstration   | `completion` or `response`, or a chat that ends with a response |
| preference pair | `chosen` and `rejected`                                        |
| rated response  | a demonstration with a boolean `label`                         |

A pair may have a `margin`, by which the preferred response is better; reward models read it.

The prompt is text or a chat in `messages`, `conversations`, `prompt`, `question`, `problem` or
LMM-R1's `message`, with images and videos as in questions. Responses are text or a list of turns
that ends with an assistant turn; the turns before it are the prompt if no column has one.
"""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from flow_grpo.data.chats import (
    ASSISTANT,
    IMAGE_PLACEHOLDER,
    USER,
    VIDEO_PLACEHOLDER,
    Chat,
    Turn,
    parse_chat,
)
from flow_grpo.data.columns import is_conversation, is_empty
from flow_grpo.data.images import cache_images, first_nonempty_column
from flow_grpo.data.questions import (
    CHAT_COLUMN,
    MAX_QUESTION,
    Question,
    QuestionLayout,
    first_rows,
    load_split,
    resolve_media,
)
from flow_grpo.data.rows import Row, check_text, join_with_or
from flow_grpo.errors import UserError

PROMPT_COLUMNS = (CHAT_COLUMN, "messages", "conversations", "prompt", "question", "problem")
RESPONSE_COLUMNS = ("completion", "response")
CHOSEN, REJECTED, LABEL, MARGIN = "chosen", "rejected", "label", "margin"
# what training reads: demonstrations, pairs, or responses with a label
ResponseKind = Literal["demonstrations", "pairs", "ratings"]
RESPONSE_KINDS: tuple[ResponseKind, ...] = get_args(ResponseKind)
logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class GivenResponse(Question):
    """A question with a response, or with a preferred and a rejected one."""

    response: str = ""  # the preferred one of a pair
    rejected: str | None = None  # None unless the row is a pair
    liked: bool = True
    margin: float = 0.0  # of a pair: how much better the preferred response is

    @property
    def responses(self) -> tuple[str, ...]:
        """The response, or the preferred and the rejected one."""
        return (self.response,) if self.rejected is None else (self.response, self.rejected)


@dataclass(frozen=True)
class ResponseLayout(QuestionLayout):
    """Row layout of given responses; see the module's docstring.

    Args:
        response: Column of the response; "" for the first of `RESPONSE_COLUMNS`.
        kind: What training needs of a row.
        all_turns: Whether every assistant turn of a demonstration is a response.
    """

    noun: ClassVar[str] = "response"
    required: ClassVar[str] = "a prompt and a response"

    response: str = ""
    kind: ResponseKind = "demonstrations"
    all_turns: bool = False

    def parse(self, row: Row, folder: Path, where: str) -> GivenResponse:
        """Convert a row to a given response; see `RowLayout.parse`."""
        image_column, video_column, images, videos = self.find_media(row, where)
        name = first_nonempty_column(row, self._resolve(self.text, PROMPT_COLUMNS))
        if self.text and name is None:
            raise UserError(
                f"has no column {self.text!r} (input_key), only {', '.join(row)}", field=where
            )
        prompt = _parse_prompt(row[name], f'{where}: "{name}"') if name else Chat([])
        used = {name, image_column, video_column, self.answer, self.answer.partition(".")[0]}
        rejected, liked, margin = None, True, 0.0
        if not is_empty(row.get(CHOSEN)) or not is_empty(row.get(REJECTED)):
            prompt, response, rejected = _parse_pair(row, prompt, name, where)
            margin = _parse_margin(row, where)
            used |= {CHOSEN, REJECTED, MARGIN}
        elif self.kind == "pairs":
            raise UserError(
                f"needs the columns {CHOSEN} and {REJECTED}, got {', '.join(row)}", field=where
            )
        else:
            columns = self._resolve(self.response, RESPONSE_COLUMNS)
            column = first_nonempty_column(row, columns)
            if all(not is_empty(row.get(name)) for name in columns) and len(columns) > 1:
                raise UserError(
                    f"has a response in each of the columns {join_with_or(columns)}",
                    field=where,
                    hint=f"remove one, or set --config.response_key={column}",
                )
            response = self._parse_response(row, prompt, column, where)
            used.add(column)
            if self.kind == "ratings" or self._is_rated(row):
                liked = _parse_label(row, where)
                used.add(LABEL)
        text = _check_prompt(prompt, name or CHOSEN, where)
        self.reject_unused(row, used, where)
        prompt.add_columns(images, videos, where)
        prompt.show_media_first()
        shown = "".join(turn.text for turn in prompt.turns)
        image_sources, video_sources = resolve_media(
            prompt, row, shown, self.media_folder(folder), where
        )
        image_sources = cache_images(image_sources, self.image_cache)
        answer = row.get(self.answer, "") if self.answer else ""
        answer = str(answer) if isinstance(answer, str | int | float) else ""
        return GivenResponse(
            prompt.turns[-1].text,
            image_sources,
            answer,
            {"question": text, "answer": answer},
            where,
            prompt.system,
            video_sources,
            tuple(prompt.turns[:-1]),
            response=response,
            rejected=rejected,
            liked=liked,
            margin=margin,
        )

    def _is_rated(self, row: Row) -> bool:
        """Return whether a demonstration has a label that looks like a rating."""
        label = str(row.get(LABEL)).lower()
        named = LABEL in (*self.metadata, self.answer)
        return not named and label in ("true", "false", "0", "1", "0.0", "1.0")

    def _parse_response(self, row: Row, prompt: Chat, column: str | None, where: str) -> str:
        """Return the response in `column`, or remove and return the last turn of the prompt."""
        in_chat = bool(prompt.turns) and prompt.turns[-1].role == ASSISTANT
        if column is not None and in_chat:
            raise UserError(
                f'has a response in its chat and in column "{column}"',
                field=where,
                hint=f"remove one, or set --config.metadata_columns={column}",
            )
        if in_chat:
            response = prompt.turns.pop().text
            check_text(response, "assistant turn", where, MAX_QUESTION)
            return response
        if column is None:
            wanted = f"column {self.response!r} (response_key)"
            if not self.response:
                wanted = f"column {join_with_or(RESPONSE_COLUMNS)}, and no chat ends with one"
            raise UserError(
                f"has no response: no {wanted}",
                field=where,
                hint=f"set --config.response_key to one of its columns: {', '.join(row)}",
            )
        before, response = _split_response(row[column], column, where)
        if before or _system_turn(row[column], where):
            raise UserError(
                f'has a prompt in column "{column}"', field=where, hint="move it to the prompt"
            )
        return response


def load_responses(source: str, layout: ResponseLayout, max_rows: int = 0) -> list[GivenResponse]:
    """Load the training rows of a dataset, or the first `max_rows`, for `layout.kind`.

    Pairs become a liked and a disliked response for ratings. Demonstrations are the preferred and
    the liked responses; how many others there were is logged.
    """
    rows = first_rows(load_split(source, "train", layout), max_rows, source)
    if layout.all_turns:
        rows = [each for row in rows for each in split_turns(row)]
    kept = [each for row in rows for each in _convert(row, layout.kind)]
    if left_out := len(rows) - len(kept):
        logger.info("%s: leaving out %d disliked of %d responses", source, left_out, len(rows))
    if not kept:
        raise UserError(
            f"has no liked response among its {len(rows)} rows", field="dataset", value=source
        )
    return kept


def split_turns(row: GivenResponse) -> Iterator[GivenResponse]:
    """Yield a demonstration for each assistant turn of a conversation, the last one at the end.

    Its prompt consists of the turns before it. The sum of their losses is the loss of the whole
    conversation with all other turns masked out.
    """
    turns = [*row.history, Turn(USER, row.text)]
    for number, turn in enumerate(turns):
        if turn.role != ASSISTANT:
            continue
        *before, last = turns[:number]
        if last.role != USER or not turn.text.strip():
            raise UserError(
                "has an assistant turn that is empty or does not follow a user turn",
                field=row.where,
                hint="remove it, or set --config.response_turns=last",
            )
        shown = "".join(each.text for each in turns[:number])
        yield replace(
            row,
            text=last.text,
            history=tuple(before),
            images=row.images[: shown.count(IMAGE_PLACEHOLDER)],
            videos=row.videos[: shown.count(VIDEO_PLACEHOLDER)],
            response=turn.text,
            metadata={**row.metadata, "question": last.text},
        )
    yield row


def _convert(row: GivenResponse, kind: ResponseKind) -> Iterator[GivenResponse]:
    """Yield what a row contributes to data of this kind."""
    if kind == "pairs":
        yield row
    elif kind == "ratings" and row.rejected is not None:
        yield replace(row, rejected=None)
        yield replace(row, response=row.rejected, rejected=None, liked=False)
    elif kind == "ratings" or row.liked:
        yield replace(row, rejected=None)


def _parse_prompt(value: Any, where: str) -> Chat:
    """Return the chat in a prompt column; text is a user turn."""
    if isinstance(value, list) or is_conversation(value):
        return parse_chat(value, where)
    if not isinstance(value, str):
        raise UserError(f"needs text or a list of turns, got {value!r:.80}", field=where)
    return Chat([Turn(USER, value)])


def _split_response(value: Any, column: str, where: str) -> tuple[list[Turn], str]:
    """Return the turns before a response, and the response; it is text or a list of turns."""
    if not isinstance(value, list) and not is_conversation(value):
        check_text(value, column, where, MAX_QUESTION)
        return [], value
    turns = parse_chat(value, f'{where}: "{column}"').turns
    if not turns or turns[-1].role != ASSISTANT:
        raise UserError("must end with an assistant turn", field=f'{where}: "{column}"')
    check_text(turns[-1].text, column, where, MAX_QUESTION)
    return turns[:-1], turns[-1].text


def _parse_pair(row: Row, prompt: Chat, name: str | None, where: str) -> tuple[Chat, str, str]:
    """Return the prompt of a pair, the preferred and the rejected response."""
    given = {column: row.get(column) for column in (CHOSEN, REJECTED)}
    is_text = all(isinstance(v, str) and not is_conversation(v) for v in given.values())
    if is_text and not prompt.turns:
        prompt, given = _split_common_prompt(given, where)
    before, chosen = _split_response(given[CHOSEN], CHOSEN, where)
    before_rejected, rejected = _split_response(given[REJECTED], REJECTED, where)
    systems = {c: _system_turn(given[c], f'{where}: "{c}"') for c in (CHOSEN, REJECTED)}
    if before != before_rejected or systems[CHOSEN] != systems[REJECTED]:
        raise UserError(f"has different prompts in {CHOSEN} and {REJECTED}", field=where)
    if before and not prompt.turns:
        prompt = parse_chat(given[CHOSEN], f'{where}: "{CHOSEN}"')
        prompt.turns.pop()
    elif (before and before != prompt.turns) or systems[CHOSEN] not in ("", prompt.system):
        raise UserError(f'has different prompts in "{name}" and {CHOSEN}', field=where)
    if chosen == rejected:
        raise UserError(
            f"has equal responses in {CHOSEN} and {REJECTED}: {chosen!r:.80}",
            field=where,
            hint="remove the row",
        )
    return prompt, chosen, rejected


def _system_turn(value: Any, where: str) -> str:
    """Return the system turn of a response that is a list of turns, "" if it has none."""
    return parse_chat(value, where).system if is_conversation(value) else ""


def _split_common_prompt(given: dict[str, str], where: str) -> tuple[Chat, dict[str, str]]:
    """Split two texts into their common start, up to a space, and two responses.

    This is TRL's implicit prompt of the standard format (trl/data_utils.py, extract_prompt), which
    may also split a word.
    """
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(*given.values(), strict=False))
    common = re.sub(r"\S*$", "", "".join(character for character, _ in equal)).rstrip()
    if not common:
        raise UserError(
            f"has no prompt, and {CHOSEN} and {REJECTED} have no common start",
            field=where,
            hint=f"add a column {join_with_or(PROMPT_COLUMNS)}",
        )
    rest = {name: text.removeprefix(common).lstrip() for name, text in given.items()}
    return Chat([Turn(USER, common)]), rest


def _parse_margin(row: Row, where: str) -> float:
    """Return the margin of a pair, a finite number; 0 if it has none."""
    margin = row.get(MARGIN)
    if is_empty(margin):
        return 0.0
    valid = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not valid or not math.isfinite(margin):
        raise UserError(
            f'needs a finite number in column "{MARGIN}", got {margin!r:.80}', field=where
        )
    return float(margin)


def _parse_label(row: Row, where: str) -> bool:
    """Return the label of a rated response, which must be a boolean."""
    label = row.get(LABEL)
    if not isinstance(label, bool):
        raise UserError(
            f'needs true or false in column "{LABEL}", got {label!r:.80}',
            field=where,
            hint=f"true: the response is liked; or set --config.metadata_columns={LABEL}",
        )
    return label


def _check_prompt(prompt: Chat, name: str, where: str) -> str:
    """Return the last user turn; reject a missing prompt, and one that is not user's turn."""
    if not prompt.turns:
        raise UserError(
            f"has no prompt: no column {join_with_or(PROMPT_COLUMNS)}, and no turn before the "
            "response",
            field=where,
            hint="add one, or set --config.input_key",
        )
    prompt.check_is_prompt(where)
    for turn in prompt.turns:
        check_text(turn.text, name, where, MAX_QUESTION)
    check_text(prompt.system, name, where, MAX_QUESTION, allow_blank=True)
    return prompt.turns[-1].text
