"""FLUX.1-Kontext: edits a picture as a text says, or draws from the text alone."""

import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor, nn

from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.flux import FluxAdapter, places
from flow_grpo.draw.models.inputs import Inputs, pack, source_mask, unpack


class FluxKontextAdapter(FluxAdapter):
    pipeline_class = FluxKontextPipeline
    encoders = (*FluxAdapter.encoders, "vae")
    sources = range(2)
    masks_sources = True

    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        embedding = super().encode_one(text)
        tokens = [pack(self.source_latents(picture)) for picture in pictures]
        none = embedding["embeds"].new_zeros(1, 0, self.transformer.config.in_channels)
        return {**embedding, "source": torch.cat([none, *tokens], 1)}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """The tokens of the source come after those that are drawn, and are cut off again."""
        lengths = inputs["source_lengths"]
        most = int(lengths.max())
        if not most:
            return super().forward(transformer, latents, timestep, inputs, guidance_scale)
        height, width = latents.shape[2:]
        drawn, side = pack(latents), self.pixels_per_token()
        size = (self.source_size.height // side, self.source_size.width // side)
        ids = [places(height // 2, width // 2, latents), places(*size, latents, picture=1)]
        before = inputs["embeds"].shape[1] + drawn.shape[1]
        out = self.run(
            transformer,
            torch.cat([drawn, inputs["source"][:, :most]], 1),
            torch.cat(ids),
            timestep,
            inputs,
            guidance_scale,
            joint_attention_kwargs=source_mask(lengths, before, latents.device),
        )
        return unpack(out[:, : drawn.shape[1]], height, width)
