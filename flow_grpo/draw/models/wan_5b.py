"""Wan 2.2 5B: text to video, or image to video where a prompt has a picture."""

import torch
from PIL import Image
from torch import Tensor, nn

from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Conditioning, Inputs
from flow_grpo.draw.models.wan import WanAdapter
from flow_grpo.speed.transfer import send


class Wan5BAdapter(WanAdapter):
    """A picture takes the place of the first frame, whose tokens are told that they have no noise:
    each token has a time step of its own. Of a text alone all are the same, and one will do."""

    encoders = ("text_encoder", "vae")
    sources = range(2)
    masks_sources = True

    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        embedding = super().encode_one(text)
        none = embedding["embeds"].new_zeros(1, 0, self.vae.config.z_dim)
        source = torch.cat([none, *(self.clip_tokens(picture, 1) for picture in pictures)], 1)
        return {**embedding, "source": source}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        if not int(inputs["source_lengths"].max()):
            return super().forward(transformer, latents, timestep, inputs, guidance_scale)
        has, first = self.first_frames(inputs, latents)
        tokens = latents[0, 0].numel() // self.transformer.config.patch_size[1] ** 2
        steps = timestep[:, None].repeat(1, tokens)
        steps[:, : tokens // latents.shape[2]] *= ~has[:, None]
        filled = self.begun(latents, has, first)
        velocity = super().forward(transformer, filled, steps, inputs, guidance_scale)
        # It leads to the picture, whatever the weights are: no ratio depends on this frame.
        known = (latents[:, :, 0] - first) / (timestep / 1000)[:, None, None, None]
        return self.begun(velocity, has, known.to(velocity.dtype))

    def finish(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Time steps are whole numbers: the last one leads only about to the picture."""
        inputs = conditioning.of(conditioning.positive)
        if not int(inputs["source_lengths"].max()):
            return latents
        has, first = self.first_frames(inputs, latents)
        return self.begun(latents, has, first.to(latents.dtype))

    def first_frames(self, inputs: Inputs, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples have one (B,), and what it is (B, C, H, W)."""
        has = send(inputs["source_lengths"] > 0, latents.device)
        return has, inputs["source"].transpose(1, 2).unflatten(2, latents.shape[3:])

    def begun(self, latents: Tensor, has: Tensor, first: Tensor) -> Tensor:
        """With these first frames, where there are any."""
        first = torch.where(has[:, None, None, None], first, latents[:, :, 0])
        return torch.cat([first[:, :, None], latents[:, :, 1:]], 2)
