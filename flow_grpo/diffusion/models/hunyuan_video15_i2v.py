"""Adapt HunyuanVideo 1.5, image-to-video: the source image is the first frame."""

from types import MappingProxyType

import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from PIL import Image
from torch import Tensor

from flow_grpo.diffusion.models.hunyuan_video15 import HunyuanVideo15Adapter
from flow_grpo.diffusion.models.inputs import Inputs
from flow_grpo.diffusion.models.prompt_cache import Embedding


class HunyuanVideo15ImageToVideoAdapter(HunyuanVideo15Adapter):
    """Adapt HunyuanVideo 1.5 image-to-video, with one source image.

    The pipeline chooses the size of the video from the aspect ratio of the image; here the image is
    resized to the size of the video.
    """

    pipeline_class = HunyuanVideo15ImageToVideoPipeline
    encoders = (*HunyuanVideo15Adapter.encoders, "image_encoder", "vae")
    processors = MappingProxyType({"feature_extractor": "SiglipImageProcessor"})
    num_source_images = range(1, 2)
    reads_image_features = True

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt, and its source image with SigLIP ("seen") and the VAE ("source")."""
        [image] = images
        latents = self.pipeline._get_image_latents(
            vae=self.vae,
            image_processor=self.pipeline.video_processor,
            image=image,
            height=image.height,
            width=image.width,
            device=self.device,
        )
        return {
            **super().encode_single(text),
            "seen": self.pipeline.encode_image(image, 1, self.device, self.dtype),
            "source": latents.to(self.dtype).flatten(2).transpose(1, 2),
        }

    def image_features(self, inputs: Inputs) -> Tensor:
        """Return the features of the source images, (B, tokens, D)."""
        return inputs["seen"]

    def given_latents(self, latents: Tensor, inputs: Inputs) -> Tensor:
        """Return the latents of the first frame and a mask of it, (B, C + 1, F, H, W)."""
        first = inputs["source"].transpose(1, 2).unflatten(2, latents.shape[3:])
        given = super().given_latents(latents, inputs)
        frame = torch.cat([first.to(latents.dtype), torch.ones_like(given[:, :1, 0])], 1)
        return torch.cat([frame[:, :, None], given[:, :, 1:]], 2)
