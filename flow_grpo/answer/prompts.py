"""A question as the model reads it: its chat template, picture tokens and positions."""

import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from flow_grpo.answer.models import family_of
from flow_grpo.answer.models.base import Seen
from flow_grpo.data.questions import MARK, Question
from flow_grpo.errors import UserError, first_line
from flow_grpo.pictures import Picture, open_picture, read_picture

QUESTION, THINK = "{question}", "<think>"
SAID = "(what the model said)"  # stands for it where a chat template writes what follows
MOST_STEPS = 2_000_000  # of a chat template for one prompt; published ones take some hundreds


@dataclass(frozen=True)
class EncodedPrompt:
    ids: Tensor  # (P,)
    positions: Tensor  # (axes, P)
    following: int  # the position of an answer's first token
    seen: tuple[Seen, ...] = ()  # its pictures, as the model takes them
    sources: tuple[Hashable, ...] = ()  # one that is the same is the same picture
    request: Any = None  # as an engine takes it that reads pictures by itself

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Observed:
    """An observation, as the model reads it before its next answer."""

    ids: Tensor  # (S,)
    seen: list[Seen]


class PromptEncoder:
    """The tokenizer and the image processor of a model, and what its family makes of both."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        images: Any,
        model: nn.Module,
        *,
        system_prompt: str = "",
        question_format: str = QUESTION,
    ) -> None:
        if QUESTION not in question_format:
            raise UserError(f"question_format={question_format!r} must contain {QUESTION}")
        self.tokenizer, self.images = tokenizer, images
        self.family = family_of(model)
        self._system, self._format = system_prompt, question_format
        self._opening = ""  # of an answer, written by the template

    def encode(self, question: Question) -> EncodedPrompt:
        pictures = [read_picture(source, question.where) for source in question.images]
        seen = self.family.see(self.images, pictures) if pictures else []
        ids = torch.tensor(self._expanded(question, [self.family.tokens_of(p) for p in seen]))
        positions = self.family.positions(ids, seen)
        return EncodedPrompt(ids, positions, int(positions.max()) + 1, tuple(seen), question.images)

    def followed(
        self,
        so_far: EncodedPrompt,
        tokens: Tensor,  # (T,), answers and observations
        seen: Sequence[Seen] = (),  # the pictures of those
        sources: Sequence[Hashable] = (),
    ) -> EncodedPrompt:
        """A conversation and what follows in it, as one prompt."""
        ids, every = torch.cat([so_far.ids, tokens]), (*so_far.seen, *seen)
        positions = self.family.positions(ids, every)
        return EncodedPrompt(
            ids, positions, int(positions.max()) + 1, every, (*so_far.sources, *sources)
        )

    def observation(
        self, text: str, pictures: Sequence[Picture], answer: Tensor, where: str, most: int
    ) -> "Observed":
        """What an environment returned after an `answer` (T,), with all that the chat template
        writes between that answer and the next: `most` tokens. What was said before is not written
        again: it stays as it was sampled."""
        turns = [("user", "?", 0), ("assistant", SAID, 0), ("user", text, len(pictures))]
        messages = [
            {"role": role, "content": self._content(said, count, where)}
            for role, said, count in turns
        ]
        _, found, after = self._written(messages, where).partition(SAID)
        if not found:
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out what the model "
                "said; name a model whose template keeps it"
            )
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        if ids[:1] == answer[-1:].tolist():  # it has ended by itself
            ids = ids[1:]
        ids = self._repeated(ids, [self._tokens_of(source, where) for source in pictures], where)
        if len(ids) > most:
            raise UserError(
                f"{where} has {len(ids)} tokens, more than sample.max_observation_tokens={most}"
            )
        read = [read_picture(source, where) for source in pictures]
        return Observed(torch.tensor(ids), self.family.see(self.images, read) if read else [])

    def length(self, question: Question) -> int:
        """Tokens of its prompt, from the sizes of its pictures alone."""
        counts = [self._tokens_of(source, question.where) for source in question.images]
        return len(self._expanded(question, counts))

    def _tokens_of(self, source: Picture, where: str) -> int:
        with open_picture(source, where) as picture:
            width, height = picture.size
        try:
            return self.family.count_tokens(self.images, height, width)
        except ValueError as error:  # of a side that is many times the other
            raise UserError(
                f"{where}: the model cannot see a picture of {width} x {height} pixels: "
                f"{first_line(error)}; cut it into pieces or leave it out"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """An answer, with the tag that the chat template has opened for it, as of DeepSeek-R1."""
        return self._opening + self.tokenizer.decode(tokens, skip_special_tokens=True)

    def check_lengths(self, questions: Sequence[Question], most: int) -> int:
        """Refuse a question that does not fit: what is cut off may be the question itself.

        Returns the length of the longest.
        """
        longest = 0
        for question in questions:
            longest = max(longest, length := self.length(question))
            if length > most:
                raise UserError(
                    f"{question.where} has {length} tokens, more than max_prompt_length={most}; "
                    "leave it out, shrink its pictures or raise --config.max_prompt_length"
                )
        return longest

    def _expanded(self, question: Question, counts: Sequence[int]) -> list[int]:
        """The token ids, each picture's placeholder repeated as often as it has tokens."""
        return self._repeated(self.token_ids(question), counts, question.where)

    def _repeated(self, ids: list[int], counts: Sequence[int], where: str) -> list[int]:
        mark = self.family.image_token
        if ids.count(mark) != len(counts):
            raise UserError(
                f"{where} has {len(counts)} pictures, and its prompt as the chat template "
                f"writes it has {ids.count(mark)} places for them"
            )
        left = iter(counts)
        return [i for one in ids for i in [one] * (next(left) if one == mark else 1)]

    def token_ids(self, question: Question) -> list[int]:
        """The chat as its template writes it, with one placeholder for each picture."""
        system = question.system or self._system
        messages = [{"role": "system", "content": system}] if system else []
        text = self._format.replace(QUESTION, question.text)
        content = self._content(text, len(question.images), question.where)
        messages.append({"role": "user", "content": content})
        text = self._written(messages, question.where)
        self._opening = THINK if text.rstrip().endswith(THINK) else ""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _content(self, text: str, pictures: int, where: str) -> Any:
        """Templates of models without pictures take a text."""
        return text if self.images is None else _content(text, pictures, where)

    def _written(self, messages: list[dict[str, Any]], where: str) -> str:
        try:
            text = _write(self.tokenizer, messages)
            text.encode()  # which tells of half a character better than the tokenizer does
            return text
        except Exception as error:  # a template is a program, and fails in as many ways
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path} fails for {where} "
                f"({type(error).__name__}: {first_line(error)}); mend its chat_template, or name "
                "another model"
            ) from error


def _write(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """The chat as the template has it; one that never ends is stopped, after a number of steps and
    not of seconds, which other work on the machine would use up."""
    steps, before = itertools.count(), sys.gettrace()

    def watch(frame: FrameType, event: str, _: Any) -> Callable | None:
        if next(steps) > MOST_STEPS:
            raise TimeoutError(f"no end after {MOST_STEPS:,} steps")
        return watch if frame.f_code.co_filename == "<template>" else None

    sys.settrace(watch)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    finally:
        sys.settrace(before)


def _content(text: str, pictures: int, where: str) -> list[dict[str, str]]:
    """Pictures stand where the text marks them, else all before it."""
    picture = {"type": "image"}
    if MARK not in text:
        return [picture] * pictures + [{"type": "text", "text": text}]
    first, *rest = text.split(MARK)
    if len(rest) != pictures:
        raise UserError(f"{where} marks {len(rest)} places with {MARK} and has {pictures} pictures")
    content = [{"type": "text", "text": first}]
    for part in rest:
        content += [picture, {"type": "text", "text": part}]
    return [part for part in content if part.get("text") != ""]
