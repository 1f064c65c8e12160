"""A small FLUX.2-klein pipeline with random weights."""

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from untrained.small.components import (
    CHAT,
    in_eval_mode,
    kl_vae,
    qwen_sizes,
    qwen_tokenizer,
    seeded,
)

TEXT_LAYERS = 27  # the pipeline reads layers 9, 18 and 27


def build(
    *,
    text_width: int = 32,
    text_layers: int = TEXT_LAYERS,
    is_distilled: bool = False,
    seed: int = 0,
    **sizes,
) -> Flux2KleinPipeline:
    """Build the pipeline; image sides are multiples of 16."""
    tokenizer = qwen_tokenizer(["user", "assistant"], CHAT)
    text = Qwen3Config(**qwen_sizes(tokenizer, text_width, text_layers))
    with seeded(seed):
        pipeline = Flux2KleinPipeline(
            **image_components(text_width, guidance_embeds=False, **sizes),
            text_encoder=Qwen3ForCausalLM(text),
            tokenizer=tokenizer,
            is_distilled=is_distilled,
        )
    return in_eval_mode(pipeline)


def image_components(
    text_width: int,
    *,
    guidance_embeds: bool,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    single_layers: int = 2,
    vae_channels: tuple[int, ...] = (8, 8, 8, 8),
    latent_channels: int = 16,
) -> dict:
    """Build transformer, scheduler and VAE."""
    vae = kl_vae(vae_channels, latent_channels, AutoencoderKLFlux2)
    # The defaults, mean 0 and variance 1, would hide errors in the normalization.
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return dict(
        transformer=Flux2Transformer2DModel(
            in_channels=4 * latent_channels,  # packed 2 x 2
            num_layers=layers,
            num_single_layers=single_layers,
            attention_head_dim=head_width,
            num_attention_heads=heads,
            joint_attention_dim=3 * text_width,  # three text layers are concatenated
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(head_width // 4,) * 4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,  # unused: the shift depends on the resolution and the number of steps
            use_dynamic_shifting=True,
        ),
        vae=vae,
    )
