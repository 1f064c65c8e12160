"""Wan 2.2 5B: text-to-video, or image-to-video for prompts with a source image."""

import torch
from PIL import Image
from torch import Tensor, nn

from flow_grpo.diffusion.models.inputs import Conditioning, Inputs
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.perf.transfer import to_device


class Wan5BAdapter(WanAdapter):
    """Adapter of Wan 2.2 5B, which replaces the first frame by the source image, if there is one.

    Timesteps are per token, 0 for those of a given first frame. Batches without source images use
    one timestep per sample.
    """

    encoders = ("text_encoder", "vae")
    num_source_images = range(2)
    masks_source_images = True

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt, and its source image as the tokens of one frame ("source")."""
        embedding = super().encode_single(text)
        empty = embedding["embeds"].new_zeros(1, 0, self.vae.config.z_dim)
        source = torch.cat([empty, *(self.video_tokens(image, 1) for image in images)], 1)
        return {**embedding, "source": source}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer with given first frames; their velocity leads to the source image."""
        if not int(inputs["source_lengths"].max()):
            return super().forward(transformer, latents, timestep, inputs, guidance_scale)
        has_image, first = self.first_frames(inputs, latents)
        tokens = latents[0, 0].numel() // self.transformer.config.patch_size[1] ** 2
        steps = timestep[:, None].repeat(1, tokens)
        steps[:, : tokens // latents.shape[2]] *= ~has_image[:, None]
        filled = self.replace_first_frame(latents, has_image, first)
        velocity = super().forward(transformer, filled, steps, inputs, guidance_scale)
        # The velocity of a given frame leads to the image and does not depend on the weights, so it
        # does not affect the ratio.
        known = (latents[:, :, 0] - first) / (timestep / 1000)[:, None, None, None]
        return self.replace_first_frame(velocity, has_image, known.to(velocity.dtype))

    def finalize_latents(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Set given first frames, which the last step misses because timesteps are integers."""
        inputs = conditioning.select(conditioning.positive)
        if not int(inputs["source_lengths"].max()):
            return latents
        has_image, first = self.first_frames(inputs, latents)
        return self.replace_first_frame(latents, has_image, first.to(latents.dtype))

    def first_frames(self, inputs: Inputs, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return which samples have a first frame, (B,) bool, and the frames, (B, C, H, W)."""
        has_image = to_device(inputs["source_lengths"] > 0, latents.device)
        return has_image, inputs["source"].transpose(1, 2).unflatten(2, latents.shape[3:])

    def replace_first_frame(self, latents: Tensor, has_image: Tensor, first: Tensor) -> Tensor:
        """Replace the first frame of the samples that have one."""
        first = torch.where(has_image[:, None, None, None], first, latents[:, :, 0])
        return torch.cat([first[:, :, None], latents[:, :, 1:]], 2)
