"""Diffusion models of published sizes with random weights, for benchmarks without downloads.

Their text encoders have the published width but one layer, unless `whole_encoders` is set.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline

from untrained import small
from untrained.encoders import ENCODERS, resize_encoder
from untrained.vlm import default_dtype


@dataclass(frozen=True)
class FullSizeModel:
    """Config fields of a published model."""

    family: str
    transformer: dict[str, Any]
    vae: dict[str, Any] = field(default_factory=dict)  # where they differ from the class defaults
    text: dict[str, Any] = field(default_factory=dict)  # arguments of the small family's `build`
    more: dict[str, dict[str, Any]] = field(default_factory=dict)  # config of further components


KL_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD3_VAE = {**KL_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}
FLUX_VAE = {**KL_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159}
SHORT = {"text_layers": 1}
WAN_14B = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "text_dim": 4096,
    "ffn_dim": 13824,
    "num_layers": 40,
}
WAN22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
# The connectors project the hidden states of the small text encoder to the width of each stream;
# they have one layer instead of eight.
LTX23 = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    "rope_type": "split",
}
LTX23_CONNECTORS = {
    "caption_channels": 32,
    "text_proj_in_factor": 3,
    "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 1,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_layers": 1,
    "audio_gated_attn": True,
    "rope_type": "split",
    "per_modality_projections": True,
    "proj_bias": True,
}
LTX2_VAE = {
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}


def klein(layers: int, single_layers: int, heads: int, text_width: int) -> FullSizeModel:
    """Describe a FLUX.2-klein of these sizes.

    The pipeline reads hidden states of several text layers, so the text encoder keeps all of these
    layers, with narrow MLPs.
    """
    transformer = {
        "num_layers": layers,
        "num_single_layers": single_layers,
        "num_attention_heads": heads,
        "joint_attention_dim": 3 * text_width,
        "guidance_embeds": False,
    }
    return FullSizeModel("flux2_klein", transformer, text={"text_width": text_width})


FLUX = FullSizeModel(
    "flux",
    {
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    },
    FLUX_VAE,
    {**SHORT, "text_width": 4096, "pooled_width": 768},
)
QWEN_IMAGE = FullSizeModel(
    "qwen_image",
    {
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
    text={**SHORT, "text_width": 3584},
)
FULL = {
    "sd3.5-medium": FullSizeModel(
        "sd3",
        {
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        SD3_VAE,
        {**SHORT, "text_width": 1024, "joint_width": 4096, "max_length": 77},
    ),
    "flux.1-dev": FLUX,
    "flux.1-kontext-dev": replace(FLUX, family="flux_kontext"),
    "flux.2-4b-klein": klein(5, 20, 24, 2560),
    "flux.2-9b-klein": klein(8, 24, 32, 4096),
    "flux.2-dev": FullSizeModel("flux2", {}, text={"text_width": 5120}),
    "qwen-image-2.1": FullSizeModel("qwen_image_21", {}, text={**SHORT, "text_width": 4096}),
    "qwen-image": QWEN_IMAGE,
    "qwen-image-edit": replace(QWEN_IMAGE, family="qwen_image_edit"),
    "z-image": FullSizeModel(
        "z_image",
        {"dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "cap_feat_dim": 2560},
        FLUX_VAE,
        {"text_layers": 2, "text_width": 2560},  # the pipeline reads the last but one
    ),
    "wan2.1-1.3b": FullSizeModel(
        "wan",
        {
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "text_dim": 4096,
            "ffn_dim": 8960,
            "num_layers": 30,
        },
        text={**SHORT, "text_width": 4096},
    ),
    "wan2.2-5b": FullSizeModel(
        "wan22",
        {
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "in_channels": 48,
            "out_channels": 48,
            "text_dim": 4096,
            "ffn_dim": 14336,
            "num_layers": 30,
        },
        WAN22_VAE,
        {**SHORT, "text_width": 4096},
    ),
    "wan2.1-14b": FullSizeModel("wan", WAN_14B, text={**SHORT, "text_width": 4096}),
    "wan2.2-a14b": FullSizeModel("wan22_a14b", WAN_14B, text={**SHORT, "text_width": 4096}),
    "ltx-2.3": FullSizeModel(
        "ltx2",
        LTX23,
        LTX2_VAE,
        more={"connectors": LTX23_CONNECTORS, "audio_vae": {}, "vocoder": {}},
    ),
}


def build(
    name: str, device: torch.device, dtype: torch.dtype, *, whole_encoders: bool = False
) -> DiffusionPipeline:
    """Build a pipeline of `FULL` with random weights."""
    full = FULL[name]
    pipeline = small.build(full.family, **full.text)
    parts = pipeline.components
    torch.manual_seed(0)
    with device, default_dtype(dtype):
        if whole_encoders:
            for encoder, sizes in ENCODERS[name].items():
                parts[encoder] = resize_encoder(parts[encoder], sizes)
        for part in ("transformer", "transformer_2"):
            if parts.get(part) is not None:
                parts[part] = type(parts[part])(**full.transformer)
        for part, config in {"vae": full.vae, **full.more}.items():
            parts[part] = type(parts[part])(**config)
    names = ("boundary_ratio", "expand_timesteps")
    settings = {k: v for k, v in pipeline.config.items() if k in names}
    return type(pipeline)(**parts, **settings)
