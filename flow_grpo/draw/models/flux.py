"""FLUX.1: dev, which has its guidance embedded, and schnell, which has none."""

from collections.abc import Mapping

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
        for name, scale in guidance.items():
            if scale > 1 and not transformer.get("guidance_embeds"):
                raise UserError(
                    f"{name}={scale}: this FLUX.1 (schnell) was trained without guidance; "
                    f"set --config.{name}=1"
                )

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
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(latents),), guidance_scale, device=latents.device)
        out = transformer(
            hidden_states=pack(latents),
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=inputs["pooled"],
            encoder_hidden_states=inputs["embeds"],
            txt_ids=latents.new_zeros(inputs["embeds"].shape[1], 3),
            img_ids=places(height // 2, width // 2, latents),
            return_dict=False,
        )[0]
        return unpack(out, height, width)


def places(height: int, width: int, like: Tensor) -> Tensor:
    """(height x width, 3): of each token 0, its row and its column."""
    rows, columns = (torch.arange(n, device=like.device, dtype=like.dtype) for n in (height, width))
    grid = torch.cartesian_prod(rows, columns)
    return torch.cat([torch.zeros_like(grid[:, :1]), grid], 1)
