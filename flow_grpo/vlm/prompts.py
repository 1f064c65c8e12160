"""Encode questions as prompts: chat template, image and video tokens, position ids."""

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from flow_grpo.chat_templates import render_chat_template
from flow_grpo.data.chats import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from flow_grpo.data.questions import Question
from flow_grpo.data.videos import FrameSelection, read_frames, select_frames
from flow_grpo.errors import UserError, first_line
from flow_grpo.images import ImageSource, open_image, read_image
from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.models.base import ImageLayout, VisionInputs
from flow_grpo.vlm.special_tokens import ESCAPE, REJECT, LiteralText

QUESTION_PLACEHOLDER, THINK_TAG = "{question}", "<think>"
IMAGE, VIDEO = "image", "video"  # types of content parts in a chat message
MEDIA_TYPES = {IMAGE_PLACEHOLDER: IMAGE, VIDEO_PLACEHOLDER: VIDEO}
# stands for a response when rendering the part of the chat template that follows it
RESPONSE_PLACEHOLDER = "(response of the model)"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt of P tokens."""

    ids: Tensor  # (P,)
    positions: Tensor  # (axes, P)
    next_position: int  # position id of the response's first token
    vision_inputs: tuple[VisionInputs, ...] = ()  # per image or video, in order
    sources: tuple[Hashable, ...] = ()  # per image or video; equal sources are the same image

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class EncodedObservation:
    """An observation with the template text around it, up to the next response."""

    ids: Tensor  # (S,)
    vision_inputs: list[VisionInputs]


class PromptEncoder:
    """Encodes questions and observations for a model.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        image_processor: The model's image processor; None for a text-only model.
        model: The model, for its family and vocabulary size.
        system_prompt: System message of questions that have none; "" for no message.
        question_format: Text of the user message, with `{question}` as placeholder.
        video_fps: Frames per second to show of a video.
        video_frames: Maximum number of frames to show of a video.
        video_pixels: Maximum number of pixels per frame.
        special_tokens: "escape" or "reject" special tokens in questions and observations.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: Any,
        model: nn.Module,
        *,
        system_prompt: str = "",
        question_format: str = QUESTION_PLACEHOLDER,
        video_fps: float = 2.0,
        video_frames: int = 32,
        video_pixels: int = 768 * 28 * 28,
        special_tokens: str = ESCAPE,
    ) -> None:
        if QUESTION_PLACEHOLDER not in question_format:
            raise UserError(
                f"must contain {QUESTION_PLACEHOLDER}",
                field="question_format",
                value=question_format,
            )
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.family = get_family(model)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._system, self._format = system_prompt, question_format
        self._video_options = {"rate": video_fps, "max_frames": video_frames}
        self._video_pixels = video_pixels
        self._response_prefix = ""  # start of the response, written by the template
        self._literal = LiteralText(tokenizer, reject=special_tokens == REJECT)
        self.family.marker_ids(tokenizer)  # raises an error if one is missing

    def encode(self, question: Question) -> EncodedPrompt:
        """Return the prompt of a question with its preprocessed images and videos."""
        family, where, selected = self.family, question.where, self._select_video_frames(question)
        images = self._preprocess_images(question.images, where)
        videos = [
            family.preprocess_video(
                self.image_processor, read_frames(video, frames, where), frames, self._video_pixels
            )
            for video, frames in zip(question.videos, selected, strict=True)
        ]
        counts = [count for video in videos for count in family.num_video_tokens(video)]
        ids = torch.tensor(
            self._expanded_ids(question, selected, list(map(family.image_layout, images)), counts)
        )
        remaining = {
            IMAGE: zip(images, question.images, strict=True),
            VIDEO: zip(videos, question.videos, strict=True),
        }
        contents = self._user_contents(question) if question.shown else []
        parts = [part for content in contents for part in content]
        order = [part["type"] for part in parts if part["type"] != "text"]
        pairs = [next(remaining[kind]) for kind in order]
        vision_inputs, sources = zip(*pairs, strict=True) if pairs else ((), ())
        return self._with_positions(ids, vision_inputs, sources)

    def encode_conversations(
        self,
        question: Question,
        responses: Sequence[str],
        vision_inputs: Sequence[VisionInputs] | None = None,
    ) -> list[EncodedPrompt]:
        """Return the whole conversation of a question and each of several given responses.

        It ends with what the chat template writes after a response.

        Args:
            question: The question, without videos.
            responses: Texts of the responses.
            vision_inputs: Its images, if they are preprocessed already.
        """
        if vision_inputs is None:
            vision_inputs = self._preprocess_images(question.images, question.where)
        layouts = list(map(self.family.image_layout, vision_inputs))
        sources = question.images or tuple(map(id, vision_inputs))
        return [
            self._with_positions(torch.tensor(ids), tuple(vision_inputs), sources)
            for ids in self._conversation_ids(question, responses, layouts)
        ]

    def conversation_lengths(self, question: Question, responses: Sequence[str]) -> list[int]:
        """Return the number of tokens of each conversation, from the sizes of images only."""
        layouts = [self._predict_layout(source, question.where) for source in question.images]
        return [len(ids) for ids in self._conversation_ids(question, responses, layouts)]

    def _conversation_ids(
        self, question: Question, responses: Sequence[str], layouts: Sequence[ImageLayout]
    ) -> Iterator[list[int]]:
        """Yield the token ids of a question with each response.

        Args:
            question: The question; its videos are not part of the conversation.
            responses: Texts of the responses.
            layouts: Number of tokens of each slice of each image.
        """
        where = question.where
        system = self._escape(question.system, where)
        before = [{"role": "system", "content": system}] if system else []
        left = len(layouts)
        for turn in question.history:
            shown = turn.text.count(IMAGE_PLACEHOLDER)
            left -= shown
            text = self._escape(turn.text, where, placeholders=True)
            before.append({"role": turn.role, "content": self._build_content(text, where, shown)})
        text = self._escape(question.text, where, placeholders=True)
        before.append({"role": "user", "content": self._build_content(text, where, left)})
        for response in responses:
            text = self._escape(response, where)
            # not `_build_content`: a placeholder in a response is plain text
            content = text if self.image_processor is None else [{"type": "text", "text": text}]
            messages = [*before, {"role": "assistant", "content": content}]
            chat = self._render_chat(messages, where, add_generation_prompt=False)
            ids = self._tokenize(chat, where)
            yield self._expand_placeholders(ids, layouts, where)

    def _preprocess_images(self, sources: Sequence[ImageSource], where: str) -> list[VisionInputs]:
        loaded = [read_image(source, where) for source in sources]
        return self.family.preprocess_images(self.image_processor, loaded) if loaded else []

    def _with_positions(
        self, ids: Tensor, vision_inputs: tuple[VisionInputs, ...], sources: tuple[Hashable, ...]
    ) -> EncodedPrompt:
        positions = self.family.compute_positions(ids, vision_inputs)
        return EncodedPrompt(ids, positions, int(positions.max()) + 1, vision_inputs, sources)

    def _select_video_frames(self, question: Question) -> list[FrameSelection]:
        """Return the frames to show of each video; reject videos if the model has no support."""
        if question.videos and self.family.video_token is None:
            raise UserError(
                "has a video, which the model does not support",
                field=question.where,
                hint='use a Qwen-VL model, remove the row, or give some frames as "images"',
            )
        return [
            select_frames(video, question.where, **self._video_options) for video in question.videos
        ]

    def append_tokens(
        self,
        conversation: EncodedPrompt,
        tokens: Tensor,
        vision_inputs: Sequence[VisionInputs] = (),
        sources: Sequence[Hashable] = (),
    ) -> EncodedPrompt:
        """Return a conversation extended by tokens (T,) and their images, as one prompt."""
        return self._with_positions(
            torch.cat([conversation.ids, tokens]),
            (*conversation.vision_inputs, *vision_inputs),
            (*conversation.sources, *sources),
        )

    def encode_observation(
        self,
        text: str,
        images: Sequence[ImageSource],
        response: Tensor,
        where: str,
        limit: int,
        shown: int = 0,
    ) -> EncodedObservation:
        """Encode an observation with all template text between two responses.

        Earlier turns are not rendered again: their tokens stay as sampled.

        Args:
            text: Text of the observation.
            images: Its images.
            response: Tokens (T,) of the response before it.
            where: What to call it in error messages.
            limit: Maximum number of tokens.
            shown: Number of images that precede it in the conversation.
        """
        text = self._escape(text, where, placeholders=True)
        messages = [
            {"role": "user", "content": self._build_content("?", where)},
            {"role": "assistant", "content": self._build_content(RESPONSE_PLACEHOLDER, where)},
            {"role": "user", "content": self._build_content(text, where, len(images))},
        ]
        _, found, after = self._render_chat(messages, where).partition(RESPONSE_PLACEHOLDER)
        if not found:
            raise UserError(
                "omits earlier responses",
                field=f"chat template of {self.tokenizer.name_or_path}",
                hint="use a model whose template keeps them",
            )
        ids = self._tokenize(after, where)
        if ids[:1] == response[-1:].tolist():  # the response already has its stop token
            ids = ids[1:]
        layouts = [self._predict_layout(source, where) for source in images]
        ids = self._expand_placeholders(ids, layouts, where, shown=shown)
        if len(ids) > limit:
            raise UserError(
                f"has {len(ids)} tokens, more than sample.max_observation_tokens={limit}",
                field=where,
            )
        return EncodedObservation(torch.tensor(ids), self._preprocess_images(images, where))

    def prompt_length(self, question: Question) -> int:
        """Return the number of prompt tokens, from the sizes of images and videos only."""
        selected, videos = self._select_video_frames(question), []
        for selection in selected:
            with _image_size_errors(selection.width, selection.height, question.where):
                videos += self.family.count_video_tokens(
                    self.image_processor, selection, self._video_pixels
                )
        images = [self._predict_layout(source, question.where) for source in question.images]
        return len(self._expanded_ids(question, selected, images, videos))

    def _predict_layout(self, source: ImageSource, where: str) -> ImageLayout:
        """Return the number of tokens of each slice of an image, from its header only."""
        with open_image(source, where) as image:
            width, height = image.size
        with _image_size_errors(width, height, where):
            return self.family.predict_layout(self.image_processor, height, width)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a response's text, with the tag that the template opened for it (DeepSeek-R1)."""
        return self._response_prefix + self.tokenizer.decode(tokens, skip_special_tokens=True)

    def check_prompt_lengths(self, questions: Sequence[Question], limit: int) -> int:
        """Reject overlong prompts: truncation could remove the question itself.

        Returns:
            The length of the longest prompt.
        """
        longest = 0
        for question in questions:
            length = self.prompt_length(question)
            longest = max(longest, length)
            if length > limit:
                shorter = "shrink its images"
                if question.videos:
                    shorter = "lower --config.video_frames or --config.video_pixels"
                raise UserError(
                    f"has {length} tokens, more than max_prompt_length={limit}",
                    field=question.where,
                    hint=f"remove it, {shorter}, or raise --config.max_prompt_length",
                )
        return longest

    def _expanded_ids(
        self,
        question: Question,
        selected: Sequence[FrameSelection],
        layouts: Sequence[ImageLayout],
        video_counts: Sequence[int],
    ) -> list[int]:
        ids = self.token_ids(question, selected)
        return self._expand_placeholders(ids, layouts, question.where, video_counts=video_counts)

    def _expand_placeholders(
        self,
        ids: list[int],
        layouts: Sequence[ImageLayout],
        where: str,
        *,
        video_counts: Sequence[int] = (),
        shown: int = 0,
    ) -> list[int]:
        """Replace each placeholder with the tokens of its image or video.

        The tokens of a video are image tokens as well.

        Args:
            ids: Token ids of the rendered chat.
            layouts: Number of tokens of each slice of each image.
            where: What to call the chat in error messages.
            video_counts: Number of tokens of each placeholder of a video.
            shown: Number of images that precede these in the conversation.
        """
        family, encode = self.family, self._literal.encode
        images = [
            family.image_ids(self.image_processor, layout, number, encode)
            for number, layout in enumerate(layouts, shown)
        ]
        videos, remaining = [[family.image_token] * count for count in video_counts], {}
        for token, kind, parts in (
            (family.image_token, IMAGE, images),
            (family.video_token, VIDEO, videos),
        ):
            if ids.count(token) != len(parts):
                raise UserError(
                    f"has {len(parts)} {kind}s, but the chat template renders "
                    f"{ids.count(token)} placeholders for them",
                    field=where,
                )
            remaining[token] = iter(parts)
        expanded = []
        for token in ids:
            expanded += next(remaining[token]) if token in remaining else [token]
        return expanded

    def collapse_image_tokens(self, prompt: EncodedPrompt) -> list[int]:
        """Return the token ids of a prompt without videos, with one placeholder per image."""
        ids = prompt.ids.tolist()
        counts = iter([self.family.num_image_tokens(image) for image in prompt.vision_inputs])
        collapsed, position = [], 0
        while position < len(ids):
            collapsed.append(ids[position])
            position += next(counts) if ids[position] == self.family.image_token else 1
        return collapsed

    def encode_response(self, text: str, where: str, stop: int) -> Tensor:
        """Return the tokens (T,) of a given response, as if the policy had sampled it.

        A tag that the template opens, and a stop token at the end, may be part of the text or not.

        Args:
            text: The response.
            where: File and row, the `field` of errors.
            stop: Id of the stop token to append.
        """
        text = text.removesuffix(self.tokenizer.decode([stop]))
        if self._response_prefix and text.startswith(self._response_prefix):
            text = text.removeprefix(self._response_prefix).lstrip("\n")
        return torch.tensor([*self._literal.encode(self._escape(text, where)), stop])

    def _escape(self, text: str, where: str, *, placeholders: bool = False) -> str:
        """Escape all special tokens of a text.

        Args:
            text: The text.
            where: What to call it in error messages.
            placeholders: Whether `<image>` and `<video>` stand for images and videos; those of a
                text-only model are text.
        """
        keep = placeholders and self.image_processor is not None
        return self._literal.escape_special_tokens(text, where, keep_placeholders=keep)

    def stop_token(self, stop: Sequence[int]) -> int:
        """Return the token of `stop` that the template writes after a response, or the first."""
        where = "a response"
        messages = [
            {"role": "user", "content": self._build_content("?", where)},
            {"role": "assistant", "content": self._build_content(RESPONSE_PLACEHOLDER, where)},
        ]
        _, _, after = self._render_chat(messages, where).partition(RESPONSE_PLACEHOLDER)
        return next((token for token in self._literal.encode(after) if token in stop), stop[0])

    def _user_contents(self, question: Question) -> list[Any]:
        """Return the contents of the turns of a question, the last of which has its text."""
        where = question.where
        texts = [self._escape(turn.text, where, placeholders=True) for turn in question.history]
        last = self._escape(question.text, where, placeholders=True)
        texts.append(self._format.replace(QUESTION_PLACEHOLDER, last))
        counts = [(text.count(IMAGE_PLACEHOLDER), text.count(VIDEO_PLACEHOLDER)) for text in texts]
        if not question.history:
            counts = [(len(question.images), len(question.videos))]
        return [
            self._build_content(text, where, *count)
            for text, count in zip(texts, counts, strict=True)
        ]

    def _build_content(self, text: str, where: str, images: int = 0, videos: int = 0) -> Any:
        """Return the content of a chat message.

        Images and videos are inserted at their placeholders in the text, or before it if it has
        none. Templates of text-only models take a string.
        """
        if self.image_processor is None:
            return text
        content = []
        for placeholder, count in {IMAGE_PLACEHOLDER: images, VIDEO_PLACEHOLDER: videos}.items():
            kind = MEDIA_TYPES[placeholder]
            if placeholder not in text:
                content += [{"type": kind}] * count
            elif text.count(placeholder) != count:
                raise UserError(
                    f"has {text.count(placeholder)} {placeholder} placeholders but {count} {kind}s",
                    field=where,
                )
        for part in re.split(f"({IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER})", text):
            if part in MEDIA_TYPES:
                content.append({"type": MEDIA_TYPES[part]})
            elif part:
                content.append({"type": "text", "text": part})
        return content

    def token_ids(self, question: Question, selected: Sequence[FrameSelection] = ()) -> list[int]:
        """Return the token ids of the rendered chat, with one placeholder per image.

        If the template opens a <think> tag, `decode` will prepend it to responses from now on.
        """
        system = self._escape(question.system, question.where) or self._system
        messages = [{"role": "system", "content": system}] if system else []
        roles = [*(turn.role for turn in question.history), "user"]
        contents = self._user_contents(question)
        messages += [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        text = self._render_chat(messages, question.where, selected)
        self._response_prefix = THINK_TAG if text.rstrip().endswith(THINK_TAG) else ""
        return self._tokenize(text, question.where)

    def _tokenize(self, text: str, where: str) -> list[int]:
        """Return the token ids of rendered text, each of which has an embedding."""
        ids = self._literal.encode(text)
        name = self.tokenizer.name_or_path
        if not ids:
            raise UserError(
                f"renders nothing for {where}",
                field=f"chat template of {name}",
                hint="fix its chat_template, or use another model",
            )
        if max(ids) >= self._vocabulary:
            raise UserError(
                f"returns token id {max(ids)} for {where}, but the model has only "
                f"{self._vocabulary} token embeddings",
                field=f"tokenizer of {name}",
                hint="use the model's own tokenizer",
            )
        return ids

    def _render_chat(
        self,
        messages: list[dict[str, Any]],
        where: str,
        selected: Sequence[FrameSelection] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the rendered chat; any error of the template becomes a UserError.

        Args:
            messages: Messages of the chat.
            where: File and row of the question.
            selected: Frames of the chat's videos.
            add_generation_prompt: Whether the chat ends with the start of a response.
        """
        try:
            text = render_chat_template(
                self.tokenizer, messages, add_generation_prompt=add_generation_prompt
            )
            text = self.family.complete_chat(text, selected)
            text.encode()  # reports lone surrogates more clearly than the tokenizer
            return text
        except Exception as error:  # a template is a program and can raise anything
            raise UserError(
                f"fails for {where} ({type(error).__name__}: {first_line(error)})",
                field=f"chat template of {self.tokenizer.name_or_path}",
                hint="fix its chat_template, or use another model",
            ) from error


@contextmanager
def _image_size_errors(width: int, height: int, where: str) -> Iterator[None]:
    """Context manager that turns an image processor's ValueError into a UserError.

    Processors raise it for extreme aspect ratios.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"has an image of {width} x {height} pixels, which the model rejects: "
            f"{first_line(error)}",
            field=where,
            hint="split it into parts or remove it",
        ) from error
