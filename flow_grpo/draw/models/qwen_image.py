"""Qwen-Image."""

import torch
from diffusers import QwenImagePipeline
from PIL import Image
from torch import Tensor, nn

from flow_grpo.draw.models.base import (
    SIBLINGS,
    TARGETS,
    Config,
    ModelAdapter,
    mlp_targets,
    standardised,
)
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Grid, Inputs, pack, unpack
from flow_grpo.speed.transfer import send


class QwenImageAdapter(ModelAdapter):
    pipeline_class = QwenImagePipeline
    # A space, as in the model's own examples and in Flow-GRPO (scripts/train_qwenimage.py).
    negative_prompt = " "
    masks_texts = True
    can_replay = False  # with a mask, its forward brings a number from the host each time
    lora_targets = [*TARGETS, *mlp_targets("img_mlp", "txt_mlp")]  # noqa: RUF012
    siblings = SIBLINGS

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        return Grid(transformer["in_channels"] // 4, 2 ** len(vae["temperal_downsample"]))

    @property
    def unused(self) -> str:
        """What the last block makes of texts goes nowhere."""
        last = len(self.transformer.transformer_blocks) - 1
        return rf"transformer_blocks\.{last}\.(attn\.to_add_out|txt_mlp)(\..*)?"

    def encode_one(self, text: str) -> Embedding:
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
        height, width = latents.shape[2:]
        embeds, lengths = inputs["embeds"], inputs["lengths"]
        mask = torch.arange(embeds.shape[1]) < lengths[:, None]
        drawn = pack(latents)
        source, shapes = self.source_tokens(inputs)
        out = transformer(
            hidden_states=drawn if source is None else torch.cat([drawn, source], 1),
            timestep=timestep.to(latents.dtype) / 1000,
            encoder_hidden_states=embeds,
            # always: whether a text is the longest of its batch must not change the arithmetic
            encoder_hidden_states_mask=send(mask, latents.device),
            img_shapes=[[(1, height // 2, width // 2), *shapes]] * len(latents),
            return_dict=False,
        )[0]
        return unpack(out[:, : drawn.shape[1]], height, width)

    def source_tokens(self, inputs: Inputs) -> tuple[Tensor | None, list[tuple[int, int, int]]]:
        """What comes after the tokens that are drawn, and the shape of each picture in it."""
        return None, []

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
        """Each token keeps the length that it has with the prompt."""
        height, width = conditional.shape[2:]
        without, prompt = pack(unconditional), pack(conditional)
        guided = without + scale * (prompt - without)
        length = prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * length, height, width)

    def scaled(self, latents: Tensor) -> Tensor:
        return standardised(latents[:, :, None], self.vae.config)

    def source_latents(self, picture: Image.Image) -> Tensor:
        pixels = self.pipeline.image_processor.preprocess(picture)[:, :, None]
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode()
        return standardised(latents, self.vae.config, back=True)[:, :, 0].to(self.dtype)

    def decode_latents(self, latents: Tensor) -> Tensor:
        return super().decode_latents(latents)[:, :, 0]
