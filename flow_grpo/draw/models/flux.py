"""FLUX.1: dev, which has its guidance embedded, and schnell, which has none."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from flow_grpo.draw.models.base import SIBLINGS, TARGETS, Config, ModelAdapter, mlp_targets
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Grid, Inputs, pack, unpack
from flow_grpo.errors import UserError


class FluxAdapter(ModelAdapter):
    pipeline_class = FluxPipeline
    encoders = ("text_encoder", "text_encoder_2")
    tokenizers = ("tokenizer", "tokenizer_2")
    # q, k and v are also those of the single blocks
    lora_targets = [*TARGETS, *mlp_targets("ff", "ff_context")]  # noqa: RUF012
    siblings = SIBLINGS

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        return Grid(transformer["in_channels"] // 4, scale)

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        if not transformer.get("guidance_embeds"):
            refuse_guidance("FLUX.1 (schnell)", guidance)

    @classmethod
    def is_guided(cls, scale: float) -> bool:
        """Never in two passes: dev takes the scale as an input."""
        return False

    def encode_one(self, text: str) -> Embedding:
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
        height, width = latents.shape[2:]
        ids = places(height // 2, width // 2, latents)
        out = self.run(transformer, pack(latents), ids, timestep, inputs, guidance_scale)
        return unpack(out, height, width)

    def run(
        self,
        transformer: nn.Module,
        tokens: Tensor,
        ids: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
        **options: Any,
    ) -> Tensor:
        """What the transformer makes of each of the tokens (B, N, 4 C) at the places `ids`."""
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


def refuse_guidance(model: str, guidance: Mapping[str, float]) -> None:
    for name, scale in guidance.items():
        if scale > 1:
            raise UserError(
                f"{name}={scale}: this {model} was trained without guidance; set --config.{name}=1"
            )


def places(height: int, width: int, like: Tensor, picture: int = 0) -> Tensor:
    """(height x width, 3): of each token the number of its picture, its row and its column."""
    rows, columns = (torch.arange(n, device=like.device, dtype=like.dtype) for n in (height, width))
    grid = torch.cartesian_prod(rows, columns)
    return torch.cat([torch.full_like(grid[:, :1], picture), grid], 1)
