"""A small HunyuanVideo 1.5 text-to-video pipeline with random weights."""

from inspect import signature

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from untrained.small.components import (
    CHAT,
    in_eval_mode,
    qwen_tokenizer,
    rope_axes,
    seeded,
    t5_sizes,
)

# The pipeline drops the first 108 tokens of a prompt: 16 of the template, and the system message
# as one token followed by its last characters.
SPELLED_CHARACTERS = 108 - 16 - 1
IMAGE_WIDTH = 12  # of the features of source images


def prompt_tokenizer() -> Qwen2Tokenizer:
    """Build a Qwen tokenizer with one token per byte and one for most of the system message."""
    given = signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    message = given["system_message"].default
    return qwen_tokenizer([], CHAT, special=[message[:-SPELLED_CHARACTERS]])


def build(
    *,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 4,  # the pipeline does not use the last two
    glyph_width: int = 24,
    vae_width: int = 8,
    latent_channels: int = 4,
    shift: float = 5.0,  # 5 for 480p, 9 for 720p
    transformer: dict | None = None,  # further transformer settings
    seed: int = 0,
) -> HunyuanVideo15Pipeline:
    """Build the pipeline; sides are multiples of 16, the number of frames is 4 n + 1.

    It has 17 MB, because a width of 2048 in the projection of quoted text is not configurable.
    """
    tokenizer, glyph_tokenizer = prompt_tokenizer(), ByT5Tokenizer()
    text = Qwen2_5_VLTextConfig(
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
    glyphs = T5Config(vocab_size=len(glyph_tokenizer), **t5_sizes(glyph_width, 1))
    sizes = {
        "in_channels": 2 * latent_channels + 1,
        "out_channels": latent_channels,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "num_layers": layers,
        "num_refiner_layers": 1,
        "text_embed_dim": text_width,
        "text_embed_2_dim": glyph_width,
        "image_embed_dim": IMAGE_WIDTH,
        "rope_axes_dim": rope_axes(head_width, 8),
        "task_type": "t2v",
        **(transformer or {}),
    }
    with seeded(seed):
        pipeline = HunyuanVideo15Pipeline(
            transformer=HunyuanVideo15Transformer3DModel(**sizes),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=AutoencoderKLHunyuanVideo15(
                latent_channels=latent_channels,
                block_out_channels=(vae_width,) * 5,
                layers_per_block=1,
            ),
            text_encoder=Qwen2_5_VLTextModel(text),
            tokenizer=tokenizer,
            text_encoder_2=T5EncoderModel(glyphs),
            tokenizer_2=glyph_tokenizer,
            guider=ClassifierFreeGuidance(guidance_scale=6.0),
        )
    return in_eval_mode(pipeline)
