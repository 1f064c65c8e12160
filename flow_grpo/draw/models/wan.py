"""Wan 2.1, text to video; a picture is a video of one frame."""

from collections.abc import Mapping

from diffusers import WanPipeline
from torch import Tensor, nn

from flow_grpo.draw.models.base import Config, ModelAdapter, standardised
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Grid, Inputs, Schedule
from flow_grpo.errors import UserError


class WanAdapter(ModelAdapter):
    pipeline_class = WanPipeline
    cudnn_attention = True
    lora_targets = [  # noqa: RUF012
        f"{attention}.{name}"
        for attention in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    siblings = {"attn1": (("to_q", "to_k", "to_v"),), "attn2": (("to_k", "to_v"),)}  # noqa: RUF012

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        return Grid(
            transformer["in_channels"],
            vae.get("scale_factor_spatial", 8),
            transformer["patch_size"][1],
            frame_scale=vae.get("scale_factor_temporal", 4),
        )

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        for name in ("boundary_ratio", "expand_timesteps"):
            if pipeline.get(name):
                raise UserError(
                    f"this Wan has {name}={pipeline[name]}: it is Wan 2.2, and only Wan 2.1 can be "
                    "trained"
                )

    def encode_one(self, text: str) -> Embedding:
        embeds, _ = self.pipeline.encode_prompt(
            prompt=[text],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return {"embeds": embeds}

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """Its own is of second order, with corrections; here its noise levels are taken."""
        scheduler = self.own_scheduler()
        scheduler.set_timesteps(num_steps)
        return Schedule(
            tuple(scheduler.sigmas.tolist()), tuple(scheduler.timesteps.float().tolist())
        )

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        return transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["embeds"],
            return_dict=False,
        )[0]

    def scaled(self, latents: Tensor) -> Tensor:
        return standardised(latents, self.vae.config)

    def decode_latents(self, latents: Tensor) -> Tensor:
        clips = super().decode_latents(latents).transpose(1, 2)
        return clips[:, 0] if clips.shape[1] == 1 else clips

    def vae_width(self) -> int:
        return self.vae.config.base_dim
