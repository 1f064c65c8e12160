"""Qwen-Image-2.1: one stream of text and picture, in which texts see nothing of pictures."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from diffusers import QwenImage21Pipeline
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from PIL import Image
from torch import Tensor, nn

from flow_grpo.draw.models.base import OF_IMAGE, Config, ModelAdapter
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Conditioning, Grid, Inputs, cat_padded
from flow_grpo.draw.models.qwen_image import QwenImageAdapter


class QwenImage21Adapter(QwenImageAdapter):
    pipeline_class = QwenImage21Pipeline
    tokenizers = ("processor",)
    processors = MappingProxyType({"processor": "Qwen3VLProcessor"})
    unused = None
    lora_targets = [  # noqa: RUF012
        *(f"attn.{name}" for name in (*OF_IMAGE, "to_out.0")),
        *(f"img_mlp.{name}" for name in ("proj", "gate_layer", "out")),
    ]
    siblings = {"attn": (OF_IMAGE,), "img_mlp": (("proj", "gate_layer"),)}  # noqa: RUF012
    guide = ModelAdapter.guide

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        """A token is one latent; sizes are counted in groups of 2 x 2."""
        return Grid(transformer["in_channels"], vae.get("scale_factor_spatial", 16))

    def tokens(self, height: int, width: int) -> int:
        return 4 * super().tokens(height, width)

    def encode_one(self, text: str) -> Embedding:
        embeds, _, _ = self.pipeline.encode_prompt(prompt=[text], device=self.device)
        return {"embeds": embeds}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Each sample on its own: a picture's place is counted from the end of its text, so that
        padding would move it. Not by length: all processes have to make as many calls."""
        found, known = [], inputs.get("prefix")
        for i, length in enumerate(inputs["lengths"].tolist()):
            own, texts = slice(i, i + 1), inputs["embeds"][i : i + 1, :length]
            prefix = self.prefix(transformer, texts) if known is None else known[own, :length]
            cache = dict(kv_cache=self.stored(prefix), kv_cache_mode="cached")
            found.append(self.run(transformer, latents[own], timestep[own], texts, **cache))
        return torch.cat(found).transpose(1, 2).unflatten(2, latents.shape[2:])

    def prepared(self, transformer: nn.Module, conditioning: Conditioning) -> Conditioning:
        """With the prefix of each text, which is the same at all steps and for all of a group."""
        inputs, negative = conditioning.inputs, conditioning.negative
        samples = [conditioning.positive, *([] if negative is None else [negative])]
        lengths, found = inputs["lengths"].tolist(), {}
        for i in torch.cat(samples).tolist():  # as many calls on all processes
            found[i] = self.prefix(transformer, inputs["embeds"][i : i + 1, : lengths[i]])
        none = found[i][:, :0]  # texts of other samples
        prefix = cat_padded([found.get(i, none) for i in range(len(lengths))])
        return replace(conditioning, inputs={**inputs, "prefix": prefix})

    def prefix(self, transformer: nn.Module, texts: Tensor) -> Tensor:
        """Keys and values of `texts` (1, L, D) in all layers, (1, L, layers x 2 x width). They see
        no picture and no time step: any will do."""
        cache = QwenImage21KVCache(self.transformer.config.num_layers)
        any_picture = texts.new_zeros(1, self.transformer.config.in_channels, 2, 2)
        given = any_picture, texts.new_zeros(1), texts
        self.run(transformer, *given, kv_cache=cache, kv_cache_mode="extract")
        return torch.stack([torch.stack(c.get(), 2) for c in cache.layer_caches], 2).flatten(2)

    def stored(self, prefix: Tensor) -> QwenImage21KVCache:
        config = self.transformer.config
        layers, width = config.num_layers, config.attention_head_dim
        cache = QwenImage21KVCache(layers)
        for i, known in enumerate(prefix.unflatten(2, (layers, 2, -1, width)).unbind(2)):
            cache.get_layer(i).store(*known.unbind(2))
        return cache

    def run(
        self, transformer: nn.Module, latents: Tensor, timestep: Tensor, texts: Tensor, **cache: Any
    ) -> Tensor:
        (height, width), length = latents.shape[2:], texts.shape[1]
        # where pictures are, in groups of four tokens: behind the text
        is_picture = torch.arange(length + height * width // 4, device=latents.device) >= length
        return transformer(
            hidden_states=latents.flatten(2).transpose(1, 2),
            timestep=timestep.to(latents.dtype) / 1000,
            encoder_hidden_states=texts,
            img_shapes=[[(1, height, width)]],
            img_mask=is_picture[None],
            return_dict=False,
            **cache,
        )[0]

    def blocks(self) -> list[nn.Module]:
        """None is compiled: each length of a text would be compiled anew."""
        return []

    def source_latents(self, picture: Image.Image) -> Tensor:
        return super().source_latents(picture.convert("RGBA"))

    def decode_latents(self, latents: Tensor) -> Tensor:
        """It draws transparent pictures: they are shown on white."""
        colour, alpha = super().decode_latents(latents).clamp(-1, 1).split([3, 1], 1)
        return (colour - 1) * (alpha + 1) / 2 + 1
