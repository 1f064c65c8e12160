"""Qwen-Image, text-to-image."""

import torch
from diffusers import QwenImagePipeline
from PIL import Image
from torch import Tensor, nn

from flow_grpo.diffusion.models.base import (
    ATTENTION_SHARED_INPUTS,
    ATTENTION_TARGETS,
    TOKEN_MULTIPLE,
    Config,
    ModelAdapter,
    mlp_targets,
    rescale_latents,
)
from flow_grpo.diffusion.models.inputs import Inputs, LatentGrid, pack_latents, unpack_latents
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.perf.transfer import to_device


class QwenImageAdapter(ModelAdapter):
    """Adapter of Qwen-Image."""

    pipeline_class = QwenImagePipeline
    # A space, as in the model's own examples and in Flow-GRPO (scripts/train_qwenimage.py).
    negative_prompt = " "
    masks_prompt_padding = True
    supports_cuda_graphs = False  # with a mask, its forward copies a scalar from the host
    lora_targets = [*ATTENTION_TARGETS, *mlp_targets("img_mlp", "txt_mlp")]  # noqa: RUF012
    shared_inputs = ATTENTION_SHARED_INPUTS
    context_parallel = True

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        return LatentGrid(transformer["in_channels"] // 4, 2 ** len(vae["temperal_downsample"]))

    @classmethod
    def prompt_tokens(cls, max_sequence_length: int) -> int:
        return TOKEN_MULTIPLE

    @property
    def unused_modules(self) -> str:
        """Pattern of the last block's text layers, whose output is not used."""
        last = len(self.transformer.transformer_blocks) - 1
        return rf"transformer_blocks\.{last}\.(attn\.to_add_out|txt_mlp)(\..*)?"

    def encode_single(self, text: str) -> Embedding:
        """Encode a prompt with Qwen2.5-VL ("embeds")."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=[text],
            device=self.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer on packed latents and source tokens; text padding is masked."""
        height, width = latents.shape[2:]
        embeds, lengths = inputs["embeds"], inputs["lengths"]
        mask = torch.arange(embeds.shape[1]) < lengths[:, None]
        tokens = pack_latents(latents)
        source, shapes = self.source_tokens(inputs)
        out = transformer(
            hidden_states=tokens if source is None else torch.cat([tokens, source], 1),
            timestep=timestep.to(latents.dtype) / 1000,
            encoder_hidden_states=embeds,
            # Always pass it: arithmetic must not depend on whether a prompt is the longest.
            encoder_hidden_states_mask=to_device(mask, latents.device),
            img_shapes=[[(1, height // 2, width // 2), *shapes]] * len(latents),
            return_dict=False,
        )[0]
        return unpack_latents(out[:, : tokens.shape[1]], height, width)

    def source_tokens(self, inputs: Inputs) -> tuple[Tensor | None, list[tuple[int, int, int]]]:
        """Return tokens to append to those of the sample and the (F, H, W) shape of each image."""
        return None, []

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
        """Apply guidance and rescale each token to the norm of the conditional velocity."""
        height, width = conditional.shape[2:]
        negative, positive = pack_latents(unconditional), pack_latents(conditional)
        guided = negative + scale * (positive - negative)
        rescale = positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack_latents(guided * rescale, height, width)

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        return rescale_latents(latents[:, :, None], self.vae.config)

    def source_latents(self, image: Image.Image) -> Tensor:
        pixels = self.pipeline.image_processor.preprocess(image)[:, :, None]
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode()
        return rescale_latents(latents, self.vae.config, back=True)[:, :, 0].to(self.dtype)

    def decode_latents(self, latents: Tensor) -> Tensor:
        return super().decode_latents(latents)[:, :, 0]
