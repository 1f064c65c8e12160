"""The small Qwen3-VL and its processor, built from transformers' classes."""

import json
from pathlib import Path

from tiny.saving import check_fits_fp16
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiny_vlm.images import FRAMES, HEIGHT, MERGE, PATCH, WIDTH
from tiny_vlm.texts import (
    END,
    IMAGE,
    PAD,
    SPECIAL,
    START,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCABULARY,
)

MAX_LENGTH = 512
MAX_ANSWER = 48  # tokens; the longest in the training data has 38
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}"
)


def build_model(
    *,
    text_layers: int = 6,
    vision_layers: int = 4,
    heads: int = 6,
    key_value_heads: int = 2,
    vision_heads: int = 4,
    vocabulary: int = len(VOCABULARY),
) -> Qwen3VLForConditionalGeneration:
    """Build the model with random weights, by default 3.8 M parameters; a head has 32 channels."""
    width, vision_width = 32 * heads, 32 * vision_heads
    text = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3,
        "num_hidden_layers": text_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": 32,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": START,
        "eos_token_id": END,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": vision_layers,
        "hidden_size": vision_width,
        "intermediate_size": 3 * vision_width,
        "num_heads": vision_heads,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": width,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
        max_new_tokens=MAX_ANSWER,
        do_sample=False,
        # an image token without an image makes the next forward pass fail
        suppress_tokens=[IMAGE, VIDEO],
    )
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character; unknown characters become padding."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=SPECIAL[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "image_token": SPECIAL[IMAGE],
            "video_token": SPECIAL[VIDEO],
        },
    )


def build_processor(
    tokenizer: PreTrainedTokenizerBase | None = None, pixels: int = HEIGHT * WIDTH
) -> PaddleOCRVLProcessor:
    """Build a processor of Qwen-VL's inputs without a video processor, which needs torchvision.

    Args:
        tokenizer: Tokenizer; None for that of tiny-vlm.
        pixels: Number of pixels to which all images are resized.
    """
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=FRAMES,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        min_pixels=pixels,
        max_pixels=pixels,
    )
    tokenizer = tokenizer or build_tokenizer()
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)


def save_fp16(
    model: PreTrainedModel, processor: PreTrainedTokenizerBase | ProcessorMixin, folder: Path
) -> None:
    """Save model and processor with float16 weights that load as float32 by default."""
    check_fits_fp16(model)
    model.half().save_pretrained(folder)
    processor.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parts = [config[name] for name in ("text_config", "vision_config") if name in config]
    for section in (config, *parts):
        section["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
