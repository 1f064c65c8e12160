"""A small Stable Diffusion 3 pipeline with random weights."""

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import ByT5Tokenizer, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from untrained.small.components import (
    clip_config,
    clip_tokenizer,
    in_eval_mode,
    kl_vae,
    seeded,
    t5_sizes,
)


def build(
    *,
    width: int = 32,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 2,
    joint_width: int | None = None,  # of T5; None: the sum of both CLIPs
    vae_channels: tuple[int, ...] = (8, 16, 16),
    latent_channels: int = 4,
    words: list[str] | None = None,
    max_length: int = 32,
    qk_norm: str | None = "rms_norm",  # as in SD3.5; SD3 has none
    seed: int = 0,
) -> StableDiffusion3Pipeline:
    """Build the pipeline; image sides are multiples of 8, at most 256."""
    tokenizer = clip_tokenizer(words, max_length)
    clip = clip_config(tokenizer, text_width, text_layers)
    joint_width = joint_width or 2 * text_width
    t5 = T5Config(vocab_size=384, **t5_sizes(joint_width, 2))  # ByT5: 256 bytes and special tokens
    with seeded(seed):
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=32,
                patch_size=2,
                in_channels=latent_channels,
                out_channels=latent_channels,
                num_layers=layers,
                attention_head_dim=16 if width < 64 else 32,
                num_attention_heads=width // (16 if width < 64 else 32),
                joint_attention_dim=joint_width,
                caption_projection_dim=width,
                pooled_projection_dim=2 * text_width,
                pos_embed_max_size=32,
                qk_norm=qk_norm,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(vae_channels, latent_channels, scaling_factor=1.0, shift_factor=0.0),
            text_encoder=CLIPTextModelWithProjection(clip),
            tokenizer=tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(clip),
            tokenizer_2=tokenizer,
            text_encoder_3=T5EncoderModel(t5),
            tokenizer_3=ByT5Tokenizer(),
        )
    return in_eval_mode(pipeline)
