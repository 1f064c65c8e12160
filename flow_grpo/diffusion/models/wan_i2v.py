"""Wan 2.1 and Wan 2.2 A14B, image-to-video: the source image is the first frame."""

from types import MappingProxyType

import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.diffusion.models.inputs import Inputs
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.diffusion.models.wan import WanAdapter

PADDED_TEXT_LENGTH = 512  # Wan 2.1 treats all tokens before the last 512 as those of the image
IMAGE_KV_TARGETS = ("attn2.add_k_proj", "attn2.add_v_proj")


class WanImageToVideoAdapter(WanAdapter):
    """Adapter of Wan image-to-video, with one source image."""

    pipeline_class = WanImageToVideoPipeline
    encoders = ("text_encoder", "image_encoder", "vae")
    processors = MappingProxyType({"image_processor": "CLIPImageProcessor"})
    num_source_images = range(1, 2)

    @property
    def lora_targets(self) -> list[str]:
        attends_to_image = self.transformer.config.get("image_dim") is not None  # Wan 2.1
        return [*super().lora_targets, *(IMAGE_KV_TARGETS if attends_to_image else ())]

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt, and its source image as a padded video ("source").

        Wan 2.1 also takes its CLIP features ("seen").
        """
        [image] = images
        embedding = super().encode_single(text)
        if self.transformer.config.get("image_dim") is not None:
            embeds = embedding["embeds"]
            embedding["embeds"] = F.pad(embeds, (0, 0, 0, PADDED_TEXT_LENGTH - embeds.shape[1]))
            embedding["seen"] = self.pipeline.encode_image(image, self.device)
        return {**embedding, "source": self.video_tokens(image, self.source_size.frames)}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer on the latents, a mask of given frames and the given latents.

        All three are concatenated along the channels.
        """
        source = inputs["source"].transpose(1, 2).unflatten(2, latents.shape[2:])
        given = torch.zeros_like(latents[:, : self.vae.config.scale_factor_temporal])
        given[:, :, 0] = 1
        latents = torch.cat([latents, given, source], 1)
        return super().forward(transformer, latents, timestep, inputs, guidance_scale)
