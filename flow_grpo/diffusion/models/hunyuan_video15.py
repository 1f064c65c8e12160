"""Adapt HunyuanVideo 1.5, text-to-video; an image is a video of one frame.

Its pipeline pads each prompt to 1000 tokens, quoted text in it to 256, and adds 729 tokens of an
image that text-to-video does not have. All of these are masked, so they are omitted here: the
output is the same, and a short video takes about half the time.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, HunyuanVideo15Pipeline
from PIL import Image
from torch import Tensor, nn

from flow_grpo.diffusion.models.base import (
    ATTENTION_SHARED_INPUTS,
    ATTENTION_TARGETS,
    Config,
    ModelAdapter,
    mlp_targets,
)
from flow_grpo.diffusion.models.inputs import Inputs, LatentGrid, Schedule, shifted_schedule
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.errors import UserError
from flow_grpo.perf.transfer import to_device


class HunyuanVideo15Adapter(ModelAdapter):
    """Adapt HunyuanVideo 1.5 text-to-video.

    The pipeline's guider, which has its guidance scale, is not used.
    """

    pipeline_class = HunyuanVideo15Pipeline
    encoders = ("text_encoder", "text_encoder_2")
    tokenizers = ("tokenizer", "tokenizer_2")
    encodes_images = False  # its VAE encodes videos
    masks_prompt_padding = True
    supports_cuda_graphs = False  # its forward selects tokens by their masks on the host
    fps = 24.0
    reads_image_features = False
    lora_targets = [*ATTENTION_TARGETS, *mlp_targets("ff", "ff_context")]  # noqa: RUF012
    shared_inputs = ATTENTION_SHARED_INPUTS

    def __init__(self, pipeline: DiffusionPipeline, **options: Any) -> None:
        """Freeze and place the components; the VAE decodes one video at a time, in tiles.

        It fails for several videos, and without tiles its memory is quadratic in their size.
        """
        pipeline.vae.use_slicing = True
        pipeline.vae.enable_tiling()
        super().__init__(pipeline, **options)
        pipeline.tokenizer_max_length = self.max_sequence_length

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return the geometry of the latents, which are compressed in time as well."""
        return LatentGrid(
            transformer["out_channels"],
            vae.get("spatial_compression_ratio", 16),
            transformer.get("patch_size", 1),
            frame_scale=vae.get("temporal_compression_ratio", 4),
        )

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        """Reject models that predict the mean velocity between two timesteps."""
        if transformer.get("use_meanflow"):
            raise UserError(
                "is a step-distilled or super-resolution model, which is not supported",
                field="use_meanflow",
                value=True,
            )

    @property
    def unused_modules(self) -> str:
        """Return a pattern of the last block's text layers and an unused image embedder."""
        last = len(self.transformer.transformer_blocks) - 1
        text = rf"transformer_blocks\.{last}\.(attn\.to_add_out|ff_context)"
        unused = text if self.reads_image_features else f"image_embedder|{text}"
        return rf"({unused})(\..*)?"

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt with Qwen2.5-VL, and the quoted text in it with ByT5.

        Returns:
            "embeds" and "glyphs", (1, L, D) each, without padding: "glyphs" is empty for a prompt
            without quotes. "is_glyph", (1, L, 1), is 1 for each of its tokens.
        """
        embeds, mask, glyphs, glyph_mask = self.pipeline.encode_prompt(
            [text], device=self.device, dtype=self.dtype
        )
        glyphs = glyphs[:, : int(glyph_mask.sum())]
        return {
            "embeds": embeds[:, : int(mask.sum())],
            "glyphs": glyphs,
            "is_glyph": torch.ones_like(glyphs[..., :1]),
        }

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """Return the noise levels, whose shift does not depend on the size."""
        sigmas = np.linspace(1.0, 0.0, num_steps + 1)[:-1]
        return shifted_schedule(self.copy_scheduler(), num_steps, None, sigmas)

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer on the latents, given latents and a mask of given frames."""
        embeds = inputs["embeds"]
        mask = torch.arange(embeds.shape[1]) < inputs["lengths"][:, None]
        return transformer(
            hidden_states=torch.cat([latents, self.given_latents(latents, inputs)], 1),
            timestep=timestep.to(latents.dtype),
            encoder_hidden_states=embeds,
            encoder_attention_mask=to_device(mask, latents.device),
            encoder_hidden_states_2=inputs["glyphs"],
            encoder_attention_mask_2=inputs["is_glyph"][..., 0].bool(),
            image_embeds=self.image_features(inputs),
            return_dict=False,
        )[0]

    def image_features(self, inputs: Inputs) -> Tensor:
        """Return the features of source images, (B, 0, D): none."""
        embeds = inputs["embeds"]
        return embeds.new_zeros(len(embeds), 0, self.transformer.config.image_embed_dim)

    def given_latents(self, latents: Tensor, inputs: Inputs) -> Tensor:
        """Return the given latents and a mask of given frames, (B, C + 1, F, H, W): none."""
        return torch.cat([torch.zeros_like(latents), torch.zeros_like(latents[:, :1])], 1)

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of both streams, without the embedders of patches and text."""
        return list(self.transformer.transformer_blocks)

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return latents / self.vae.config.scaling_factor

    def decode_latents(self, latents: Tensor) -> Tensor:
        videos = super().decode_latents(latents).transpose(1, 2)
        return videos[:, 0] if videos.shape[1] == 1 else videos
