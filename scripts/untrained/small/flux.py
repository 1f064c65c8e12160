"""A small FLUX.1 pipeline with random weights."""

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextModel, T5Config, T5EncoderModel

from untrained.small.components import (
    clip_config,
    clip_tokenizer,
    in_eval_mode,
    kl_vae,
    rope_axes,
    seeded,
    t5_sizes,
    t5_tokenizer,
)


def build(
    *,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    single_layers: int = 2,
    text_width: int = 32,
    pooled_width: int | None = None,  # of CLIP; None: text_width
    text_layers: int = 2,
    vae_channels: tuple[int, ...] = (8, 8, 8, 8),
    latent_channels: int = 16,
    words: list[str] | None = None,  # single tokens; other text is one token per character
    guidance_embeds: bool = True,  # as in FLUX.1-dev; FLUX.1-schnell has none
    kind: type[FluxPipeline] | type[FluxKontextPipeline] = FluxPipeline,
    seed: int = 0,
) -> FluxPipeline | FluxKontextPipeline:
    """Build the pipeline; image sides are multiples of 16."""
    clip, t5 = clip_tokenizer(words), t5_tokenizer(words or ())
    sizes = t5_sizes(text_width, text_layers)
    with seeded(seed):
        pipeline = kind(
            transformer=FluxTransformer2DModel(
                in_channels=4 * latent_channels,  # packed 2 x 2
                num_layers=layers,
                num_single_layers=single_layers,
                attention_head_dim=head_width,
                num_attention_heads=heads,
                joint_attention_dim=text_width,
                pooled_projection_dim=pooled_width or text_width,
                guidance_embeds=guidance_embeds,
                axes_dims_rope=rope_axes(head_width, 8),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0,  # unused: the shift depends on the resolution
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
            ),
            vae=kl_vae(vae_channels, latent_channels, scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=CLIPTextModel(clip_config(clip, pooled_width or text_width, text_layers)),
            tokenizer=clip,
            text_encoder_2=T5EncoderModel(
                T5Config(vocab_size=len(t5), feed_forward_proj="gated-gelu", **sizes)
            ),
            tokenizer_2=t5,
        )
    return in_eval_mode(pipeline)
