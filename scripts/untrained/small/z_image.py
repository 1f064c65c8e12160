"""A small Z-Image pipeline with random weights."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from untrained.small.components import (
    CHAT,
    in_eval_mode,
    kl_vae,
    qwen_sizes,
    qwen_tokenizer,
    rope_axes,
    seeded,
)


def build(
    *,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    refiner_layers: int = 1,
    text_width: int = 32,
    text_layers: int = 2,
    vae_channels: tuple[int, ...] = (8, 8, 8, 8),
    latent_channels: int = 16,
    seed: int = 0,
) -> ZImagePipeline:
    """Build the pipeline; image sides are multiples of 16."""
    tokenizer = qwen_tokenizer(["user", "assistant"], CHAT)
    text = Qwen3Config(**qwen_sizes(tokenizer, text_width, text_layers))
    with seeded(seed):
        transformer = ZImageTransformer2DModel(
            in_channels=latent_channels,
            dim=heads * head_width,
            n_layers=layers,
            n_refiner_layers=refiner_layers,
            n_heads=heads,
            n_kv_heads=heads,
            cap_feat_dim=text_width,
            axes_dims=list(rope_axes(head_width, 4)),
        )
        # The default, zeros, would hide errors in the padding.
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token, std=0.02)
        pipeline = ZImagePipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(vae_channels, latent_channels, scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=Qwen3Model(text),
            tokenizer=tokenizer,
        )
    return in_eval_mode(pipeline)
