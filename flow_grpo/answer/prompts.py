"""A question as the model reads it: its chat template, picture tokens and positions."""

import itertools
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from flow_grpo.answer.models import family_of
from flow_grpo.answer.models.base import Seen
from flow_grpo.data.questions import MARK, VIDEO_MARK, Question
from flow_grpo.data.videos import Clip, choose_frames, read_frames
from flow_grpo.errors import UserError, first_line
from flow_grpo.pictures import Picture, open_picture, read_picture

QUESTION, THINK = "{question}", "<think>"
IMAGE, VIDEO = "image", "video"  # parts of a chat's content
KINDS = {MARK: IMAGE, VIDEO_MARK: VIDEO}
NAMES = {IMAGE: "pictures", VIDEO: "videos"}
MOST_STEPS = 2_000_000  # of a chat template for one prompt; published ones take some hundreds


@dataclass(frozen=True)
class EncodedPrompt:
    ids: Tensor  # (P,)
    positions: Tensor  # (axes, P)
    following: int  # the position of an answer's first token
    seen: tuple[Seen, ...] = ()  # its pictures and videos, as the model takes them
    sources: tuple[Hashable, ...] = ()  # one that is the same is the same picture or video
    request: Any = None  # as an engine takes it that reads pictures by itself

    def __len__(self) -> int:
        return len(self.ids)


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
        video_fps: float = 2.0,
        video_frames: int = 32,
        video_pixels: int = 768 * 28 * 28,
    ) -> None:
        if QUESTION not in question_format:
            raise UserError(f"question_format={question_format!r} must contain {QUESTION}")
        self.tokenizer, self.images = tokenizer, images
        self.family = family_of(model)
        self._system, self._format = system_prompt, question_format
        self._video = {"rate": video_fps, "most": video_frames}
        self._video_pixels = video_pixels
        self._opening = ""  # of an answer, written by the template

    def encode(self, question: Question) -> EncodedPrompt:
        family, where, clips = self.family, question.where, self._clips(question)
        pictures = [read_picture(source, where) for source in question.images]
        images = family.see(self.images, pictures) if pictures else []
        videos = [
            family.watch(self.images, read_frames(video, clip, where), clip, self._video_pixels)
            for video, clip in zip(question.videos, clips, strict=True)
        ]
        counts = {
            IMAGE: [family.tokens_of(own) for own in images],
            VIDEO: [count for own in videos for count in family.tokens_of_video(own)],
        }
        ids = torch.tensor(self._expanded(question, clips, counts))
        left = {
            IMAGE: zip(images, question.images, strict=True),
            VIDEO: zip(videos, question.videos, strict=True),
        }
        order = [part["type"] for part in self._content(question) if part["type"] != "text"]
        pairs = [next(left[kind]) for kind in order]
        seen, sources = zip(*pairs, strict=True) if pairs else ((), ())
        positions = family.positions(ids, seen)
        return EncodedPrompt(ids, positions, int(positions.max()) + 1, seen, sources)

    def _clips(self, question: Question) -> list[Clip]:
        """Which frames of its videos are shown."""
        if question.videos and self.family.video_token is None:
            raise UserError(
                f"{question.where}: asks about a video, and this model is shown none; take one of "
                'Qwen\'s that sees, leave the row out, or give some frames of it as "images"'
            )
        return [choose_frames(video, question.where, **self._video) for video in question.videos]

    def length(self, question: Question) -> int:
        """Tokens of its prompt, from the sizes of its pictures and videos alone."""
        clips, videos = self._clips(question), []
        for clip in clips:
            with _explained(clip.width, clip.height, question.where):
                videos += self.family.count_frames(self.images, clip, self._video_pixels)
        images = [self._tokens_of(source, question.where) for source in question.images]
        return len(self._expanded(question, clips, {IMAGE: images, VIDEO: videos}))

    def _tokens_of(self, source: Picture, where: str) -> int:
        with open_picture(source, where) as picture:
            width, height = picture.size
        with _explained(width, height, where):
            return self.family.count_tokens(self.images, height, width)

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
                shorter = "shrink its pictures"
                if question.videos:
                    shorter = "lower --config.video_frames or --config.video_pixels,"
                raise UserError(
                    f"{question.where} has {length} tokens, more than max_prompt_length={most}; "
                    f"leave it out, {shorter} or raise --config.max_prompt_length"
                )
        return longest

    def _expanded(
        self, question: Question, clips: Sequence[Clip], counts: dict[str, list[int]]
    ) -> list[int]:
        """The token ids, each placeholder repeated as often as its picture has tokens. A video has
        those of pictures too."""
        ids, mark, left = self.token_ids(question, clips), self.family.image_token, {}
        for token, kind in ((mark, IMAGE), (self.family.video_token, VIDEO)):
            if ids.count(token) != len(counts[kind]):
                raise UserError(
                    f"{question.where} has {len(counts[kind])} {NAMES[kind]}, and its prompt as "
                    f"the chat template writes it has {ids.count(token)} places for them"
                )
            left[token] = iter(counts[kind])
        return [i for one in ids for i in ([mark] * next(left[one]) if one in left else [one])]

    def _content(self, question: Question) -> list[dict[str, str]]:
        """Pictures and videos stand where the text marks them, else all before it."""
        text = self._format.replace(QUESTION, question.text)
        there = {MARK: len(question.images), VIDEO_MARK: len(question.videos)}
        content = []
        for mark, count in there.items():
            if mark not in text:
                content += [{"type": KINDS[mark]}] * count
            elif text.count(mark) != count:
                raise UserError(
                    f"{question.where} marks {text.count(mark)} places with {mark} and has {count} "
                    f"{NAMES[KINDS[mark]]}"
                )
        for part in re.split(f"({MARK}|{VIDEO_MARK})", text):
            if part in KINDS:
                content.append({"type": KINDS[part]})
            elif part:
                content.append({"type": "text", "text": part})
        return content

    def token_ids(self, question: Question, clips: Sequence[Clip] = ()) -> list[int]:
        """The chat as its template writes it, with one placeholder for each picture."""
        system = question.system or self._system
        messages = [{"role": "system", "content": system}] if system else []
        # templates of models without pictures take a text
        content = self._format.replace(QUESTION, question.text)
        if self.images is not None:
            content = self._content(question)
        messages.append({"role": "user", "content": content})
        try:
            text = self.family.written(_write(self.tokenizer, messages), clips)
            self._opening = THINK if text.rstrip().endswith(THINK) else ""
            text.encode()  # which tells of half a character better than the tokenizer does
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template is a program, and fails in as many ways
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path} fails for {question.where} "
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


@contextmanager
def _explained(width: int, height: int, where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # of a side that is many times the other
        raise UserError(
            f"{where}: the model cannot see a picture of {width} x {height} pixels: "
            f"{first_line(error)}; cut it into pieces or leave it out"
        ) from error
