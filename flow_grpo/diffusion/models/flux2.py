"""FLUX.2: klein, with two-pass guidance or distilled without, and dev, with embedded guidance."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.diffusion.models.base import (
    ATTENTION_SHARED_INPUTS,
    ATTENTION_TARGETS,
    Config,
    ModelAdapter,
)
from flow_grpo.diffusion.models.flux import reject_guidance
from flow_grpo.diffusion.models.inputs import (
    Inputs,
    LatentGrid,
    Schedule,
    shifted_schedule,
    source_attention_kwargs,
)
from flow_grpo.diffusion.models.prompt_cache import Embedding


class Flux2KleinAdapter(ModelAdapter):
    """Adapter of FLUX.2 klein, with up to four source images."""

    pipeline_class = Flux2KleinPipeline
    encoders = ("text_encoder", "vae")
    num_source_images = range(5)
    shared_inputs = ATTENTION_SHARED_INPUTS
    context_parallel = True

    @property
    def lora_targets(self) -> list[str]:
        """LoRA targets; single blocks by number, because others have a list as `attn.to_out`."""
        ends = [f"{ff}.linear_{end}" for ff in ("ff", "ff_context") for end in ("in", "out")]
        singles = range(len(self.transformer.single_transformer_blocks))
        outs = [f"single_transformer_blocks.{i}.attn.to_out" for i in singles]
        return [*ATTENTION_TARGETS, *ends, "attn.to_qkv_mlp_proj", *outs]

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return the grid of latents that are packed 2 x 2 before noise is added."""
        return LatentGrid(transformer["in_channels"], 2 ** len(vae["block_out_channels"]), patch=1)

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        if pipeline.get("is_distilled"):
            reject_guidance("FLUX.2 (klein, distilled)", guidance)

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt, and its source images as a sequence of tokens ("source")."""
        embeds, _ = self.pipeline.encode_prompt(
            [text], self.device, max_sequence_length=self.max_sequence_length
        )
        empty = embeds.new_zeros(1, self.transformer.config.in_channels, 0)
        latents = [self.source_latents(image).flatten(2) for image in images]
        return {"embeds": embeds, "source": torch.cat([empty, *latents], 2).transpose(1, 2)}

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        mu = compute_empirical_mu(self.num_image_tokens(height, width), num_steps)
        return shifted_schedule(self.copy_scheduler(), num_steps, mu)

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Append the tokens of source images to those of the sample, and drop their outputs."""
        device, (height, width) = latents.device, latents.shape[2:]
        embeds, lengths = inputs["embeds"], inputs["source_lengths"]
        num_tokens = height * width
        tokens = [latents.flatten(2).transpose(1, 2)]
        ids = [position_ids(height, width, device=device)]
        if max_length := int(lengths.max()):
            rows, columns = (pixels // self.pixels_per_token() for pixels in self.source_size[:2])
            tokens.append(inputs["source"][:, :max_length])
            # FLUX.2 places source image n (from 1) at time 10 n.
            for n in range(1, max_length // (rows * columns) + 1):
                ids.append(position_ids(rows, columns, time=10 * n, device=device))
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(latents),), guidance_scale, device=device)
        out = transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=guidance,
            encoder_hidden_states=embeds,
            # With a batch dimension, as context parallelism expects.
            txt_ids=position_ids(text_length=embeds.shape[1], device=device)[None],
            img_ids=torch.cat(ids)[None],
            joint_attention_kwargs=source_attention_kwargs(
                lengths, embeds.shape[1] + num_tokens, device
            ),
            return_dict=False,
        )[0]
        return out[:, :num_tokens].transpose(1, 2).unflatten(2, (height, width))

    def statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the VAE's packed latents, (C, 1, 1) each."""
        norm = self.vae.bn
        mean, variance = norm.running_mean.to(like), norm.running_var.to(like)
        return mean[:, None, None], (variance + norm.eps).sqrt()[:, None, None]

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        mean, std = self.statistics(latents)
        return latents * std + mean

    def from_vae_latents(self, latents: Tensor) -> Tensor:
        mean, std = self.statistics(latents)
        return (F.pixel_unshuffle(latents, 2) - mean) / std

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Unpack (B, 4 C, H, W) to (B, C, 2 H, 2 W), channels before positions, and decode."""
        return super().decode_latents(F.pixel_shuffle(latents, 2))


class Flux2Adapter(Flux2KleinAdapter):
    """Adapter of FLUX.2 dev, which takes the guidance scale as an input."""

    pipeline_class = Flux2Pipeline
    processors = MappingProxyType({"tokenizer": "PixtralProcessor"})
    num_source_images = range(11)

    @classmethod
    def is_guided(cls, scale: float) -> bool:
        """Return False: dev takes the scale as an input."""
        return False


def position_ids(
    height: int = 1, width: int = 1, text_length: int = 1, *, time: int = 0, device: torch.device
) -> Tensor:
    """Return (time, row, column, text position) of each token, (tokens, 4)."""
    axes = (torch.arange(n, device=device) for n in (height, width, text_length))
    return torch.cartesian_prod(torch.arange(time, time + 1, device=device), *axes)
