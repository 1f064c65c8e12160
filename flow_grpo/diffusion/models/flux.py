"""FLUX.1: dev, which takes the guidance scale as an input, and schnell, which has none."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from flow_grpo.diffusion.models.base import (
    ATTENTION_SHARED_INPUTS,
    ATTENTION_TARGETS,
    Config,
    ModelAdapter,
    mlp_targets,
)
from flow_grpo.diffusion.models.inputs import Inputs, LatentGrid, pack_latents, unpack_latents
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.errors import UserError


class FluxAdapter(ModelAdapter):
    """Adapter of FLUX.1 dev and schnell."""

    pipeline_class = FluxPipeline
    encoders = ("text_encoder", "text_encoder_2")
    tokenizers = ("tokenizer", "tokenizer_2")
    # The names of q, k and v also match the single-stream blocks.
    lora_targets = [*ATTENTION_TARGETS, *mlp_targets("ff", "ff_context")]  # noqa: RUF012
    shared_inputs = ATTENTION_SHARED_INPUTS
    context_parallel = True

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        return LatentGrid(transformer["in_channels"] // 4, scale)

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        if not transformer.get("guidance_embeds"):
            reject_guidance("FLUX.1 (schnell)", guidance)

    @classmethod
    def is_guided(cls, scale: float) -> bool:
        """Return False: dev takes the scale as an input."""
        return False

    def encode_single(self, text: str) -> Embedding:
        """Encode a prompt with T5 ("embeds") and CLIP ("pooled")."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=[text],
            prompt_2=[text],
            device=self.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds, "pooled": pooled}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer on packed latents; `guidance_scale` is an input of dev."""
        height, width = latents.shape[2:]
        ids = position_ids(height // 2, width // 2, latents)
        out = self.run_transformer(
            transformer, pack_latents(latents), ids, timestep, inputs, guidance_scale
        )
        return unpack_latents(out, height, width)

    def run_transformer(
        self,
        transformer: nn.Module,
        tokens: Tensor,
        ids: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
        **options: Any,
    ) -> Tensor:
        """Run the transformer on tokens (B, N, 4 C) with position ids (N, 3)."""
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(tokens),), guidance_scale, device=tokens.device)
        return transformer(
            hidden_states=tokens,
            timestep=timestep.to(tokens.dtype) / 1000,
            guidance=guidance,
            pooled_projections=inputs["pooled"],
            encoder_hidden_states=inputs["embeds"],
            txt_ids=tokens.new_zeros(inputs["embeds"].shape[1], 3),
            img_ids=ids,
            return_dict=False,
            **options,
        )[0]


def reject_guidance(model: str, guidance: Mapping[str, float]) -> None:
    """Raise a UserError if any scale is above 1; `model` names one distilled without guidance."""
    for name, scale in guidance.items():
        if scale > 1:
            raise UserError(
                f"is incompatible with {model}, which was trained without guidance",
                field=name,
                value=scale,
                hint=f"set --config.{name}=1",
            )


def position_ids(height: int, width: int, like: Tensor, image_index: int = 0) -> Tensor:
    """Return (image index, row, column) of each token, (height x width, 3)."""
    rows = torch.arange(height, device=like.device, dtype=like.dtype)
    columns = torch.arange(width, device=like.device, dtype=like.dtype)
    grid = torch.cartesian_prod(rows, columns)
    return torch.cat([torch.full_like(grid[:, :1], image_index), grid], 1)
