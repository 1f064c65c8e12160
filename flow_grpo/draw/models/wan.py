"""Wan 2.1 and Wan 2.2 A14B, text to video; a picture is a video of one frame."""

from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline, WanPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.draw.models.base import Config, ModelAdapter, standardised
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.experts import SECOND, Experts
from flow_grpo.draw.models.inputs import Grid, Inputs, Schedule
from flow_grpo.errors import UserError


class WanAdapter(ModelAdapter):
    pipeline_class = WanPipeline
    encodes_pictures = False  # its VAE is one of clips
    lora_targets = [  # noqa: RUF012
        f"{attention}.{name}"
        for attention in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    siblings = {"attn1": (("to_q", "to_k", "to_v"),), "attn2": (("to_k", "to_v"),)}  # noqa: RUF012

    def network(self, pipeline: DiffusionPipeline) -> nn.Module:
        ratio = pipeline.config.get("boundary_ratio")
        if ratio is None:
            return pipeline.transformer
        self.can_replay = False  # which of the two runs is decided on the host
        boundary = ratio * pipeline.scheduler.config.num_train_timesteps
        return Experts(pipeline.transformer, pipeline.transformer_2, boundary)

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        return Grid(
            transformer["out_channels"],
            vae.get("scale_factor_spatial", 8),
            transformer["patch_size"][1],
            frame_scale=vae.get("scale_factor_temporal", 4),
        )

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        ratio, second = pipeline.get("boundary_ratio"), pipeline.get(SECOND) or [None]
        if (ratio is None) != (second[0] is None):
            raise UserError(
                f"this Wan has boundary_ratio={ratio} and {SECOND}={second[-1]}; it must have both "
                "or neither"
            )

    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        # of this class for all: that of image-to-video pipelines fails where ftfy is missing
        embeds = WanPipeline._get_t5_prompt_embeds(
            self.pipeline,
            [text],
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
            encoder_hidden_states_image=inputs.get("seen"),
            return_dict=False,
        )[0]

    def scale_at(self, timestep: Tensor, scale: float) -> float | Tensor:
        if self.guidance_scale_2 is None:
            return scale
        early = timestep >= self.transformer.boundary
        return torch.where(early, scale, self.guidance_scale_2)[:, None, None, None, None]

    def scaled(self, latents: Tensor) -> Tensor:
        return standardised(latents, self.vae.config)

    def decode_latents(self, latents: Tensor) -> Tensor:
        clips = super().decode_latents(latents).transpose(1, 2)
        return clips[:, 0] if clips.shape[1] == 1 else clips

    def clip_tokens(self, picture: Image.Image, frames: int) -> Tensor:
        """Latents of a clip that begins with a picture, and is grey from there on: (1, tokens, C),
        as the transformer takes them."""
        pixels = self.pipeline.video_processor.preprocess(picture)[:, :, None]
        clip = F.pad(pixels, (0, 0, 0, 0, 0, frames - 1)).to(self.device, self.vae.dtype)
        latents = self.vae.encode(clip).latent_dist.mode().to(self.dtype)
        return standardised(latents, self.vae.config, back=True).flatten(2).transpose(1, 2)
