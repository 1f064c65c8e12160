"""Load processors of vision-language text encoders without executing code of the model.

A processor's own loader uses the classes named in its files, which may be code of the model, and
needs torchvision. Here each processor is assembled from known classes.
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
    SiglipImageProcessorPil,
    TokenizersBackend,
)

from flow_grpo.weight_checks import check_loading_report, quiet_transformers

# Processors that are only used for text here, with the class of the tokenizer in their directory.
TOKENIZERS: dict[str, type[PreTrainedTokenizerBase]] = {
    "PixtralProcessor": TokenizersBackend,
    "Qwen3VLProcessor": Qwen2Tokenizer,
}
# Image processors, with the class that does not need torchvision.
IMAGE_PROCESSORS = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
}
SUPPORTED_PROCESSORS = (*TOKENIZERS, *IMAGE_PROCESSORS, "Qwen2VLProcessor")


class TextProcessor(Qwen3VLProcessor):
    """Processor without image support, for a pipeline that requires a processor."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
    ) -> None:
        template = chat_template or tokenizer.chat_template
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        ProcessorMixin.__init__(self, tokenizer, chat_template=template)


class ImageTextProcessor(Qwen2VLProcessor):
    """Processor of text and images without videos, which would need torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.video_processor = self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)

    def save_pretrained(self, folder: Any, **_: Any) -> None:
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


# Pipelines are saved with the name of the stock class, so that any installation can load them.
ImageTextProcessor.__name__ = Qwen2VLProcessor.__name__
ImageTextProcessor.__module__ = Qwen2VLProcessor.__module__


def load_processor(kind: str, model: str, part: str) -> Any:
    """Load the replacement of a processor.

    Args:
        kind: Class in model_index.json, one of SUPPORTED_PROCESSORS.
        model: Pipeline directory or hub id.
        part: Component name.
    """
    if kind in TOKENIZERS:
        tokenizer = TOKENIZERS[kind].from_pretrained(model, subfolder=part)
        return TextProcessor(tokenizer) if kind == "Qwen3VLProcessor" else tokenizer
    if kind in IMAGE_PROCESSORS:
        return IMAGE_PROCESSORS[kind].from_pretrained(model, subfolder=part)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(model, subfolder=part)
    tokenizer = Qwen2Tokenizer.from_pretrained(model, subfolder="tokenizer")
    return ImageTextProcessor(image_processor, tokenizer)


def load_pipeline(kind: type[DiffusionPipeline], model: str, **settings: Any) -> DiffusionPipeline:
    """Load a pipeline like `kind.from_pretrained`, with safe processors and checked encoders."""
    index = DiffusionPipeline.load_config(model).items()
    processors = {
        part: load_processor(value[1], model, part)
        for part, value in index
        if isinstance(value, list | tuple) and value[-1] in SUPPORTED_PROCESSORS
    }
    # diffusers rejects a tokenizer where it expects a processor: pass None and register it later.
    components = {n: p if isinstance(p, ProcessorMixin) else None for n, p in processors.items()}
    for part, value in index:
        if part not in processors and (encoder := encoder_class(value)) is not None:
            components[part] = load_encoder(encoder, model, part, **settings)
    pipeline = kind.from_pretrained(model, **settings, **components)
    pipeline.register_modules(**processors)
    return pipeline


def transformers_class(value: Any) -> type | None:
    """Return the class of transformers that a value of model_index.json names, or None."""
    if not (isinstance(value, list | tuple) and len(value) == 2 and value[0] == "transformers"):
        return None
    kind = getattr(transformers, str(value[1]), None)
    return kind if isinstance(kind, type) else None


def encoder_class(value: Any) -> type[PreTrainedModel] | None:
    """Return the model class of transformers that a value of model_index.json names, or None."""
    kind = transformers_class(value)
    return kind if kind is not None and issubclass(kind, PreTrainedModel) else None


def load_encoder(
    kind: type[PreTrainedModel], model: str, part: str, **settings: Any
) -> PreTrainedModel:
    """Load a text encoder and reject files that lack tensors.

    When called by diffusers, transformers would initialise them at random.
    """
    local = Path(model) / part
    source, subfolder = (local, {}) if local.is_dir() else (model, {"subfolder": part})
    with quiet_transformers():
        encoder, report = kind.from_pretrained(
            source,
            **subfolder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # listed in the report
            **settings,
        )
    # Published files contain tensors of parts that an encoder does not have.
    check_loading_report(
        "pretrained.model", f"{model}/{part}", report, f"a {kind.__name__}", allow_unexpected=True
    )
    return encoder


@contextmanager
def passing_token_types(encoder: PreTrainedModel) -> Iterator[None]:
    """Pass `mm_token_type_ids` to every forward pass of `encoder` that is called without them.

    Qwen2.5-VL gives image tokens 3-D rotary positions (time, height, width). transformers >= 5
    computes them from these ids, and without the ids silently uses 1-D positions, with which
    Qwen-Image-Edit was not trained. diffusers 0.42.1 does not pass them (its issue 14194).
    """

    def add_token_types(_: Any, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict]:
        """Forward pre-hook: add the ids, 1 for image tokens and 0 for text."""
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
