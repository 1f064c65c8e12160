"""Wan 2.1 and Wan 2.2 A14B, text-to-video; an image is a video of one frame."""

from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline, WanPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.diffusion.models.base import Config, ModelAdapter, rescale_latents
from flow_grpo.diffusion.models.experts import SECOND_TRANSFORMER, Experts
from flow_grpo.diffusion.models.inputs import Inputs, LatentGrid, Schedule
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.errors import UserError


class WanAdapter(ModelAdapter):
    """Adapter of Wan text-to-video."""

    pipeline_class = WanPipeline
    encodes_images = False  # its VAE encodes videos
    context_parallel = context_parallel_sources = True
    lora_targets = [  # noqa: RUF012
        f"{attention}.{name}"
        for attention in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    shared_inputs = {"attn1": (("to_q", "to_k", "to_v"),), "attn2": (("to_k", "to_v"),)}  # noqa: RUF012

    def select_transformer(self, pipeline: DiffusionPipeline) -> nn.Module:
        """Return the transformer, or both of Wan 2.2 A14B as `Experts`, without CUDA graphs."""
        ratio = pipeline.config.get("boundary_ratio")
        if ratio is None:
            return pipeline.transformer
        self.supports_cuda_graphs = False  # the transformer is selected on the host
        boundary = ratio * pipeline.scheduler.config.num_train_timesteps
        return Experts(pipeline.transformer, pipeline.transformer_2, boundary)

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return the geometry of the latents, which are compressed in time as well."""
        return LatentGrid(
            transformer["out_channels"],
            vae.get("scale_factor_spatial", 8),
            transformer["patch_size"][1],
            frame_scale=vae.get("scale_factor_temporal", 4),
        )

    @classmethod
    def prompt_tokens(cls, max_sequence_length: int) -> int:
        return 0

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        """Reject a model_index.json with only one of `boundary_ratio` and a second transformer."""
        ratio, second = pipeline.get("boundary_ratio"), pipeline.get(SECOND_TRANSFORMER) or [None]
        if (ratio is None) != (second[0] is None):
            raise UserError(
                f"is incompatible with {SECOND_TRANSFORMER}={second[-1]}; model_index.json must "
                "have both or neither",
                field="boundary_ratio",
                value=ratio,
            )

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt with UMT5 ("embeds"); `images` are for subclasses."""
        # For all pipelines: the method of the image-to-video pipeline fails without ftfy.
        embeds = WanPipeline._get_t5_prompt_embeds(
            self.pipeline,
            [text],
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return {"embeds": embeds}

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """Return the noise levels of the pipeline's scheduler, a multistep predictor-corrector."""
        scheduler = self.copy_scheduler()
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
        """Run the transformer; guidance is in two passes, so `guidance_scale` is ignored."""
        return transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["embeds"],
            encoder_hidden_states_image=inputs.get("seen"),
            return_dict=False,
        )[0]

    def guidance_at(self, timestep: Tensor, scale: float) -> float | Tensor:
        """Return `scale`, or `guidance_scale_2` at timesteps of the second transformer."""
        if self.guidance_scale_2 is None:
            return scale
        early = timestep >= self.transformer.boundary
        return torch.where(early, scale, self.guidance_scale_2)[:, None, None, None, None]

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return rescale_latents(latents, self.vae.config)

    def decode_latents(self, latents: Tensor) -> Tensor:
        videos = super().decode_latents(latents).transpose(1, 2)
        return videos[:, 0] if videos.shape[1] == 1 else videos

    def video_tokens(self, image: Image.Image, frames: int) -> Tensor:
        """Encode a video whose first frame is `image` and whose others are grey, (1, tokens, C)."""
        pixels = self.pipeline.video_processor.preprocess(image)[:, :, None]
        video = F.pad(pixels, (0, 0, 0, 0, 0, frames - 1)).to(self.device, self.vae.dtype)
        latents = self.vae.encode(video).latent_dist.mode().to(self.dtype)
        return rescale_latents(latents, self.vae.config, back=True).flatten(2).transpose(1, 2)
