"""FLUX.2: klein, guided in two passes or distilled to need none; dev, with embedded guidance."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.draw.models.base import SIBLINGS, TARGETS, Config, ModelAdapter
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.flux import refuse_guidance
from flow_grpo.draw.models.inputs import Grid, Inputs, Schedule, shifted_schedule, source_mask


class Flux2KleinAdapter(ModelAdapter):
    pipeline_class = Flux2KleinPipeline
    encoders = ("text_encoder", "vae")
    sources = range(5)
    siblings = SIBLINGS

    @property
    def lora_targets(self) -> list[str]:
        """Those of the single blocks by number: `attn.to_out` is a list of layers in the others."""
        ends = [f"{ff}.linear_{end}" for ff in ("ff", "ff_context") for end in ("in", "out")]
        singles = range(len(self.transformer.single_transformer_blocks))
        outs = [f"single_transformer_blocks.{i}.attn.to_out" for i in singles]
        return [*TARGETS, *ends, "attn.to_qkv_mlp_proj", *outs]

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        """Latents have been packed 2 x 2 before noise is added."""
        return Grid(transformer["in_channels"], 2 ** len(vae["block_out_channels"]), patch=1)

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        if pipeline.get("is_distilled"):
            refuse_guidance("FLUX.2 (klein, distilled)", guidance)

    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        most = self.max_sequence_length
        embeds, _ = self.pipeline.encode_prompt([text], self.device, max_sequence_length=most)
        none = embeds.new_zeros(1, self.transformer.config.in_channels, 0)
        latents = [self.source_latents(picture).flatten(2) for picture in pictures]
        return {"embeds": embeds, "source": torch.cat([none, *latents], 2).transpose(1, 2)}

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        mu = compute_empirical_mu(self.tokens(height, width), num_steps)
        return shifted_schedule(self.own_scheduler(), num_steps, mu)

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Tokens of sources come after those that are drawn, and are cut off again."""
        device, (height, width) = latents.device, latents.shape[2:]
        drawn, embeds, lengths = latents.flatten(2), inputs["embeds"], inputs["source_lengths"]
        tokens, ids = [drawn.transpose(1, 2)], [places(height, width, device=device)]
        if most := int(lengths.max()):
            size = [pixels // self.pixels_per_token() for pixels in self.source_size[:2]]
            tokens.append(inputs["source"][:, :most])
            times = range(10, 10 * (most // (size[0] * size[1])) + 1, 10)
            ids += [places(*size, time=time, device=device) for time in times]
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(latents),), guidance_scale, device=device)
        out = transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=guidance,
            encoder_hidden_states=embeds,
            txt_ids=places(words=embeds.shape[1], device=device),
            img_ids=torch.cat(ids),
            joint_attention_kwargs=source_mask(lengths, embeds.shape[1] + drawn.shape[2], device),
            return_dict=False,
        )[0]
        return out[:, : drawn.shape[2]].transpose(1, 2).unflatten(2, (height, width))

    def statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the VAE's packed latents, (C, 1, 1) each."""
        norm = self.vae.bn
        mean, variance = norm.running_mean.to(like), norm.running_var.to(like)
        return mean[:, None, None], (variance + norm.eps).sqrt()[:, None, None]

    def scaled(self, latents: Tensor) -> Tensor:
        mean, std = self.statistics(latents)
        return latents * std + mean

    def unscaled(self, latents: Tensor) -> Tensor:
        mean, std = self.statistics(latents)
        return (F.pixel_unshuffle(latents, 2) - mean) / std

    def decode_latents(self, latents: Tensor) -> Tensor:
        """(B, 4 C, H, W) to (B, C, 2 H, 2 W) first: this model packs channels before places."""
        return super().decode_latents(F.pixel_shuffle(latents, 2))


class Flux2Adapter(Flux2KleinAdapter):
    pipeline_class = Flux2Pipeline
    processors = MappingProxyType({"tokenizer": "PixtralProcessor"})
    sources = range(11)

    @classmethod
    def is_guided(cls, scale: float) -> bool:
        """Never in two passes: dev takes the scale as an input."""
        return False


def places(
    height: int = 1, width: int = 1, words: int = 1, *, time: int = 0, device: torch.device
) -> Tensor:
    """(tokens, 4): of each token its time, row, column and place in the text."""
    axes = (torch.arange(n, device=device) for n in (height, width, words))
    return torch.cartesian_prod(torch.arange(time, time + 1, device=device), *axes)
