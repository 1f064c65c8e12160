"""A question as the model reads it: its chat template, picture tokens and positions."""

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from flow_grpo.answer.models import family_of
from flow_grpo.answer.models.base import Seen
from flow_grpo.answer.special_tokens import ESCAPE, REJECT, LiteralText
from flow_grpo.answer.templates import render
from flow_grpo.data.questions import MARK, VIDEO_MARK, Question
from flow_grpo.data.videos import Clip, choose_frames, read_frames
from flow_grpo.errors import UserError, first_line
from flow_grpo.pictures import Picture, open_picture, read_picture

QUESTION, THINK = "{question}", "<think>"
IMAGE, VIDEO = "image", "video"  # parts of a chat's content
KINDS = {MARK: IMAGE, VIDEO_MARK: VIDEO}
NAMES = {IMAGE: "pictures", VIDEO: "videos"}
SAID = "(what the model said)"  # stands for it where a chat template writes what follows


@dataclass(frozen=True)
class EncodedPrompt:
    ids: Tensor  # (P,)
    positions: Tensor  # (axes, P)
    following: int  # the position of an answer's first token
    seen: tuple[Seen, ...] = ()  # its pictures and videos, as the model takes them
    sources: tuple[Hashable, ...] = ()  # one that is the same is the same picture or video

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
        video_fps: float = 2.0,
        video_frames: int = 32,
        video_pixels: int = 768 * 28 * 28,
        special_tokens: str = ESCAPE,
    ) -> None:
        if QUESTION not in question_format:
            raise UserError(f"question_format={question_format!r} must contain {QUESTION}")
        self.tokenizer, self.images = tokenizer, images
        self.family = family_of(model)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._system, self._format = system_prompt, question_format
        self._video = {"rate": video_fps, "most": video_frames}
        self._video_pixels = video_pixels
        self._opening = ""  # of an answer, written by the template
        self._literal = LiteralText(tokenizer, reject=special_tokens == REJECT)

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
        parts = self._asked(question) if question.shown else []
        order = [part["type"] for part in parts if part["type"] != "text"]
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
        text = self._literal.protect(text, where)
        turns = [("user", "?", 0), ("assistant", SAID, 0), ("user", text, len(pictures))]
        messages = [
            {"role": role, "content": self._content(said, where, count)}
            for role, said, count in turns
        ]
        _, found, after = self._written(messages, where).partition(SAID)
        if not found:
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out what the model "
                "said; name a model whose template keeps it"
            )
        ids = self._ids(after, where)
        if ids[:1] == answer[-1:].tolist():  # it has ended by itself
            ids = ids[1:]
        counts = [self._tokens_of(source, where) for source in pictures]
        ids = self._repeated(ids, {IMAGE: counts, VIDEO: []}, where)
        if len(ids) > most:
            raise UserError(
                f"{where} has {len(ids)} tokens, more than sample.max_observation_tokens={most}"
            )
        read = [read_picture(source, where) for source in pictures]
        return Observed(torch.tensor(ids), self.family.see(self.images, read) if read else [])

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
        return self._repeated(self.token_ids(question, clips), counts, question.where)

    def _repeated(self, ids: list[int], counts: dict[str, list[int]], where: str) -> list[int]:
        """The token ids, each placeholder repeated as often as its picture has tokens. A video has
        those of pictures too."""
        mark, left = self.family.image_token, {}
        for token, kind in ((mark, IMAGE), (self.family.video_token, VIDEO)):
            if ids.count(token) != len(counts[kind]):
                raise UserError(
                    f"{where} has {len(counts[kind])} {NAMES[kind]}, and its prompt as the chat "
                    f"template writes it has {ids.count(token)} places for them"
                )
            left[token] = iter(counts[kind])
        return [i for one in ids for i in ([mark] * next(left[one]) if one in left else [one])]

    def marked_once(self, prompt: EncodedPrompt) -> list[int]:
        """The token ids of a prompt without videos, one placeholder for each picture again."""
        ids, counts = prompt.ids.tolist(), iter([self.family.tokens_of(own) for own in prompt.seen])
        once, place = [], 0
        while place < len(ids):
            once.append(ids[place])
            place += next(counts) if ids[place] == self.family.image_token else 1
        return once

    def _asked(self, question: Question) -> Any:
        text = self._literal.protect(question.text, question.where)
        text = self._format.replace(QUESTION, text)
        return self._content(text, question.where, len(question.images), len(question.videos))

    def _content(self, text: str, where: str, images: int = 0, videos: int = 0) -> Any:
        """Pictures and videos stand where the text marks them, else all before it. Templates of
        models without pictures take a text."""
        if self.images is None:
            return text
        content = []
        for mark, count in {MARK: images, VIDEO_MARK: videos}.items():
            if mark not in text:
                content += [{"type": KINDS[mark]}] * count
            elif text.count(mark) != count:
                raise UserError(
                    f"{where} marks {text.count(mark)} places with {mark} and has {count} "
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
        system = self._literal.protect(question.system, question.where) or self._system
        messages = [{"role": "system", "content": system}] if system else []
        content = self._asked(question)
        messages.append({"role": "user", "content": content})
        text = self._written(messages, question.where, clips)
        self._opening = THINK if text.rstrip().endswith(THINK) else ""
        return self._ids(text, question.where)

    def _ids(self, text: str, where: str) -> list[int]:
        """Return the token ids of the rendered chat template; each has an embedding."""
        ids = self._literal.encode(text)
        name = self.tokenizer.name_or_path
        if not ids:
            raise UserError(
                f"the chat template of {name} renders nothing for {where}; fix its chat_template, "
                "or use another model"
            )
        if max(ids) >= self._vocabulary:
            raise UserError(
                f"the tokenizer of {name} returns token id {max(ids)} for {where}, but the model "
                f"has only {self._vocabulary} token embeddings; use the model's own tokenizer"
            )
        return ids

    def _written(
        self, messages: list[dict[str, Any]], where: str, clips: Sequence[Clip] = ()
    ) -> str:
        try:
            text = self.family.written(render(self.tokenizer, messages), clips)
            text.encode()  # which tells of half a character better than the tokenizer does
            return text
        except Exception as error:  # a template is a program, and fails in as many ways
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path} fails for {where} "
                f"({type(error).__name__}: {first_line(error)}); mend its chat_template, or name "
                "another model"
            ) from error


@contextmanager
def _explained(width: int, height: int, where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # of a side that is many times the other
        raise UserError(
            f"{where}: the model cannot see a picture of {width} x {height} pixels: "
            f"{first_line(error)}; cut it into pieces or leave it out"
        ) from error
