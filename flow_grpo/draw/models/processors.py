"""Text encoders that see pictures have a processor where others have a tokenizer.

A processor's own loader takes the classes that its files name, which may be Python code of the
model's own, and needs torchvision. Here each is put together of parts whose classes are named.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from diffusers import DiffusionPipeline
from transformers import (
    CLIPImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    TokenizersBackend,
)

from flow_grpo.weights import check_loading_report, quiet_transformers

# Of those that read texts alone here, the tokenizer in their folder.
TOKENIZERS: dict[str, type[PreTrainedTokenizerBase]] = {
    "PixtralProcessor": TokenizersBackend,
    "Qwen3VLProcessor": Qwen2Tokenizer,
}
KNOWN = (*TOKENIZERS, "Qwen2VLProcessor", "CLIPImageProcessor")


class TextProcessor(Qwen3VLProcessor):
    """A processor less what pictures need; its pipeline asks for one, not for a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
    ) -> None:
        template = chat_template or tokenizer.chat_template
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        ProcessorMixin.__init__(self, tokenizer, chat_template=template)


class PictureProcessor(Qwen2VLProcessor):
    """Texts and pictures, without videos, for which transformers would want torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.video_processor = self.chat_template = None
        self.image_token, self.video_token = names = ["<|image_pad|>", "<|video_pad|>"]
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(names)

    def save_pretrained(self, folder: Any, **_: Any) -> None:
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


# pipelines are saved with the class that anybody can load
PictureProcessor.__name__ = Qwen2VLProcessor.__name__
PictureProcessor.__module__ = Qwen2VLProcessor.__module__


def load_processor(kind: str, model: str, part: str) -> Any:
    """What stands here for a processor of this class, one of KNOWN."""
    if kind in TOKENIZERS:
        tokenizer = TOKENIZERS[kind].from_pretrained(model, subfolder=part)
        return TextProcessor(tokenizer) if kind == "Qwen3VLProcessor" else tokenizer
    if kind == "CLIPImageProcessor":
        return CLIPImageProcessorPil.from_pretrained(model, subfolder=part)
    pictures = Qwen2VLImageProcessorPil.from_pretrained(model, subfolder=part)
    return PictureProcessor(pictures, Qwen2Tokenizer.from_pretrained(model, subfolder="tokenizer"))


def load_pipeline(kind: type[DiffusionPipeline], model: str, **settings: Any) -> DiffusionPipeline:
    """As `kind.from_pretrained` does, with our own processors and with checked encoders."""
    index = DiffusionPipeline.load_config(model).items()
    own = {
        part: load_processor(value[1], model, part)
        for part, value in index
        if isinstance(value, list | tuple) and value[-1] in KNOWN
    }
    # diffusers takes no tokenizer for a processor: it is given none first
    given = {n: p if isinstance(p, ProcessorMixin) else None for n, p in own.items()}
    for part, value in index:
        if part not in own and (encoder := encoder_class(value)) is not None:
            given[part] = load_encoder(encoder, model, part, **settings)
    pipeline = kind.from_pretrained(model, **settings, **given)
    pipeline.register_modules(**own)
    return pipeline


def encoder_class(value: Any) -> type[PreTrainedModel] | None:
    """The model of transformers that this value of a model_index.json names, None if it is none."""
    if not (isinstance(value, list | tuple) and len(value) == 2 and value[0] == "transformers"):
        return None
    kind = getattr(transformers, str(value[1]), None)
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


def load_encoder(
    kind: type[PreTrainedModel], model: str, part: str, **settings: Any
) -> PreTrainedModel:
    """Load a text encoder; reject files that lack tensors, for which transformers, called by
    diffusers, would draw random values."""
    local = Path(model) / part
    place = {"subfolder": part} if not local.is_dir() else {}
    with quiet_transformers():
        encoder, report = kind.from_pretrained(
            model if place else local,
            **place,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them
            **settings,
        )
    # published files have tensors of parts that an encoder does without
    check_loading_report(
        "pretrained.model", f"{model}/{part}", report, f"a {kind.__name__}", allow_unexpected=True
    )
    return encoder


@contextmanager
def with_token_types(encoder: PreTrainedModel) -> Iterator[None]:
    """Pass `mm_token_type_ids` to every forward pass of `encoder` that is called without them.

    Qwen2.5-VL gives image tokens 3-D rotary positions (time, height, width). transformers >= 5
    computes them from these ids, and without the ids silently uses 1-D positions, with which
    Qwen-Image-Edit was not trained. diffusers 0.42.1 does not pass them (its issue 14194).
    """

    def add_token_types(_: Any, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict]:
        if inputs.get("mm_token_type_ids") is None:
            ids = inputs["input_ids"] if "input_ids" in inputs else args[0]
            is_image = ids == encoder.config.image_token_id
            inputs = {**inputs, "mm_token_type_ids": is_image.int()}  # 0: text, 1: image
        return args, inputs

    handle = encoder.register_forward_pre_hook(add_token_types, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
