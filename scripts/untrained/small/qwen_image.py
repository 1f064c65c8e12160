"""A small Qwen-Image pipeline with random weights."""

from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from flow_grpo.diffusion.models.processors import ImageTextProcessor
from untrained.small.components import in_eval_mode, qwen_tokenizer, rope_axes, seeded, video_vae

# The pipeline drops the first 34 tokens of a prompt: its template, if each word is one token.
WORDS = str.split(
    "system|user|assistant|Describe| the| image| by| detailing| color| shape| size| texture|"
    " quantity| text| spatial| relationships| of| objects| and| background",
    "|",
)
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def build(
    *,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 2,
    vae_width: int = 8,
    kind: type[DiffusionPipeline] = QwenImagePipeline,
    words: list[str] = WORDS,
    seed: int = 0,
) -> DiffusionPipeline:
    """Build the pipeline, or an editing variant of class `kind`; sides are multiples of 16."""
    tokenizer = qwen_tokenizer(words, special=VISION)
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=text_width,
        intermediate_size=2 * text_width,
        num_hidden_layers=text_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "mrope_section": [text_width // 4 - 4, 2, 2]},
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=1,
        out_hidden_size=text_width,
        fullatt_block_indexes=[0],
    )
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    token_ids = dict(
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    extra = {}
    if kind is not QwenImagePipeline:
        image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=2**20)
        extra["processor"] = ImageTextProcessor(image_processor, tokenizer)
    with seeded(seed):
        pipeline = kind(
            transformer=QwenImageTransformer2DModel(
                num_layers=layers,
                attention_head_dim=head_width,
                num_attention_heads=heads,
                joint_attention_dim=text_width,
                axes_dims_rope=rope_axes(head_width, 8),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=0.9,
                base_image_seq_len=256,
                max_image_seq_len=8192,
                shift_terminal=0.02,
            ),
            vae=video_vae(AutoencoderKLQwenImage, vae_width),
            text_encoder=Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision, **token_ids)
            ),
            tokenizer=tokenizer,
            **extra,
        )
    return in_eval_mode(pipeline)
