"""Wan 2.1 and Wan 2.2 A14B, image to video: a clip that begins with a picture."""

from types import MappingProxyType

import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Inputs
from flow_grpo.draw.models.wan import WanAdapter

TEXT_TOKENS = 512  # Wan 2.1 counts on so many, and takes those before them for the picture's

OF_PICTURE = ("attn2.add_k_proj", "attn2.add_v_proj")


class WanImageToVideoAdapter(WanAdapter):
    pipeline_class = WanImageToVideoPipeline
    encoders = ("text_encoder", "image_encoder", "vae")
    processors = MappingProxyType({"image_processor": "CLIPImageProcessor"})
    sources = range(1, 2)

    @property
    def lora_targets(self) -> list[str]:
        sees = self.transformer.config.get("image_dim") is not None  # Wan 2.1
        return [*super().lora_targets, *(OF_PICTURE if sees else ())]

    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        [picture], embedding = pictures, super().encode_one(text)
        if self.transformer.config.get("image_dim") is not None:
            text = embedding["embeds"]
            embedding["embeds"] = F.pad(text, (0, 0, 0, TEXT_TOKENS - text.shape[1]))
            embedding["seen"] = self.pipeline.encode_image(picture, self.device)
        return {**embedding, "source": self.clip_tokens(picture, self.source_size.frames)}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Beside each latent: whether its frames are given, one channel for each, and what is."""
        source = inputs["source"].transpose(1, 2).unflatten(2, latents.shape[2:])
        given = torch.zeros_like(latents[:, : self.vae.config.scale_factor_temporal])
        given[:, :, 0] = 1
        latents = torch.cat([latents, given, source], 1)
        return super().forward(transformer, latents, timestep, inputs, guidance_scale)
