"""FLUX.1-Kontext: image editing, or text-to-image without a source image."""

import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor, nn

from flow_grpo.diffusion.models.flux import FluxAdapter, position_ids
from flow_grpo.diffusion.models.inputs import (
    Inputs,
    pack_latents,
    source_attention_kwargs,
    unpack_latents,
)
from flow_grpo.diffusion.models.prompt_cache import Embedding


class FluxKontextAdapter(FluxAdapter):
    """Adapter of FLUX.1-Kontext, with at most one source image."""

    pipeline_class = FluxKontextPipeline
    encoders = (*FluxAdapter.encoders, "vae")
    num_source_images = range(2)
    masks_source_images = True
    context_parallel = False

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt, and its source image as packed tokens ("source")."""
        embedding = super().encode_single(text)
        tokens = [pack_latents(self.source_latents(image)) for image in images]
        empty = embedding["embeds"].new_zeros(1, 0, self.transformer.config.in_channels)
        return {**embedding, "source": torch.cat([empty, *tokens], 1)}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Append the tokens of the source image to those of the sample, and drop their outputs."""
        lengths = inputs["source_lengths"]
        max_length = int(lengths.max())
        if not max_length:
            return super().forward(transformer, latents, timestep, inputs, guidance_scale)
        height, width = latents.shape[2:]
        tokens, side = pack_latents(latents), self.pixels_per_token()
        size = (self.source_size.height // side, self.source_size.width // side)
        ids = [
            position_ids(height // 2, width // 2, latents),
            position_ids(*size, latents, image_index=1),
        ]
        before = inputs["embeds"].shape[1] + tokens.shape[1]
        out = self.run_transformer(
            transformer,
            torch.cat([tokens, inputs["source"][:, :max_length]], 1),
            torch.cat(ids),
            timestep,
            inputs,
            guidance_scale,
            joint_attention_kwargs=source_attention_kwargs(lengths, before, latents.device),
        )
        return unpack_latents(out[:, : tokens.shape[1]], height, width)
