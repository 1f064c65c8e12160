"""A small Wan 2.1 text-to-video pipeline with random weights."""

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from untrained.small.components import in_eval_mode, seeded, t5_sizes, t5_tokenizer, video_vae


def build(
    *,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 2,
    vae_width: int = 8,
    vae: dict | None = None,  # further VAE settings
    latent_channels: int = 16,
    transformer: dict | None = None,  # further transformer settings
    boundary_ratio: float | None = None,  # if set, there are two transformers
    flow_shift: float = 3.0,  # 3 for 480p, 5 for 720p
    seed: int = 0,
    kind: type[DiffusionPipeline] = WanPipeline,
    **more: Any,  # further arguments of the pipeline
) -> DiffusionPipeline:
    """Build the pipeline; sides are multiples of 16, the number of frames is 4 n + 1."""
    tokenizer = t5_tokenizer()
    text = UMT5Config(vocab_size=len(tokenizer), **t5_sizes(text_width, text_layers))
    sizes = {
        "in_channels": latent_channels,
        "out_channels": latent_channels,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "text_dim": text_width,
        "ffn_dim": 4 * heads * head_width,
        "num_layers": layers,
        **(transformer or {}),
    }
    with seeded(seed):
        pipeline = kind(
            transformer=WanTransformer3DModel(**sizes),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
            ),
            vae=video_vae(AutoencoderKLWan, vae_width, **(vae or {})),
            text_encoder=UMT5EncoderModel(text),
            tokenizer=tokenizer,
            transformer_2=None if boundary_ratio is None else WanTransformer3DModel(**sizes),
            boundary_ratio=boundary_ratio,
            **more,
        )
    return in_eval_mode(pipeline)
