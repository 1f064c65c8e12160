"""Qwen-Image-2.1: a single stream of text and image in which text does not attend to the image."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from diffusers import QwenImage21Pipeline
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from PIL import Image
from torch import Tensor, nn

from flow_grpo.diffusion.models.base import IMAGE_QKV, Config, ModelAdapter
from flow_grpo.diffusion.models.inputs import Conditioning, Inputs, LatentGrid, cat_padded
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.diffusion.models.qwen_image import QwenImageAdapter


class QwenImage21Adapter(QwenImageAdapter):
    """Adapter of Qwen-Image-2.1."""

    pipeline_class = QwenImage21Pipeline
    tokenizers = ("processor",)
    processors = MappingProxyType({"processor": "Qwen3VLProcessor"})
    unused_modules = None
    context_parallel = False
    lora_targets = [  # noqa: RUF012
        *(f"attn.{name}" for name in (*IMAGE_QKV, "to_out.0")),
        *(f"img_mlp.{name}" for name in ("proj", "gate_layer", "out")),
    ]
    shared_inputs = {"attn": (IMAGE_QKV,), "img_mlp": (("proj", "gate_layer"),)}  # noqa: RUF012
    guide = ModelAdapter.guide

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return a grid in units of 2 x 2 tokens; a token is one latent."""
        return LatentGrid(transformer["in_channels"], vae.get("scale_factor_spatial", 16))

    def num_image_tokens(self, height: int, width: int) -> int:
        return 4 * super().num_image_tokens(height, width)

    def encode_single(self, text: str) -> Embedding:
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
        """Run each sample by itself, since padding would move the image positions after the text.

        Samples are not grouped by length: all ranks have to make the same number of calls.
        """
        outputs, prefixes = [], inputs.get("prefix")
        for i, length in enumerate(inputs["lengths"].tolist()):
            row = slice(i, i + 1)
            text = inputs["embeds"][row, :length]
            if prefixes is None:
                prefix = self.encode_text_prefix(transformer, text)
            else:
                prefix = prefixes[row, :length]
            outputs.append(
                self.run_transformer(
                    transformer,
                    latents[row],
                    timestep[row],
                    text,
                    kv_cache=self.to_kv_cache(prefix),
                    kv_cache_mode="cached",
                )
            )
        return torch.cat(outputs).transpose(1, 2).unflatten(2, latents.shape[2:])

    def precompute(self, transformer: nn.Module, conditioning: Conditioning) -> Conditioning:
        """Add the text prefix of each prompt, which is the same in all steps."""
        inputs, negative = conditioning.inputs, conditioning.negative
        rows = [conditioning.positive, *([] if negative is None else [negative])]
        lengths, prefixes = inputs["lengths"].tolist(), {}
        for i in torch.cat(rows).tolist():  # equally many calls on all ranks
            text = inputs["embeds"][i : i + 1, : lengths[i]]
            prefixes[i] = self.encode_text_prefix(transformer, text)
        empty = prefixes[i][:, :0]  # for prompts of other samples
        prefix = cat_padded([prefixes.get(i, empty) for i in range(len(lengths))])
        return replace(conditioning, inputs={**inputs, "prefix": prefix})

    def encode_text_prefix(self, transformer: nn.Module, text: Tensor) -> Tensor:
        """Return keys and values of text embeddings (1, L, D), (1, L, layers x 2 x width).

        They depend neither on the image nor on the timestep, so both are arbitrary here.
        """
        cache = QwenImage21KVCache(self.transformer.config.num_layers)
        image = text.new_zeros(1, self.transformer.config.in_channels, 2, 2)
        timestep = text.new_zeros(1)
        self.run_transformer(
            transformer, image, timestep, text, kv_cache=cache, kv_cache_mode="extract"
        )
        return torch.stack([torch.stack(c.get(), 2) for c in cache.layer_caches], 2).flatten(2)

    def to_kv_cache(self, prefix: Tensor) -> QwenImage21KVCache:
        """Convert the output of `encode_text_prefix`, (1, L, layers x 2 x width), to a KV cache."""
        config = self.transformer.config
        layers, width = config.num_layers, config.attention_head_dim
        cache = QwenImage21KVCache(layers)
        for i, layer in enumerate(prefix.unflatten(2, (layers, 2, -1, width)).unbind(2)):
            cache.get_layer(i).store(*layer.unbind(2))
        return cache

    def run_transformer(
        self, transformer: nn.Module, latents: Tensor, timestep: Tensor, text: Tensor, **cache: Any
    ) -> Tensor:
        """Return the velocity of one sample as tokens, (1, HW, C).

        Args:
            transformer: The transformer, possibly wrapped.
            latents: (1, C, H, W).
            timestep: (1,).
            text: Text embeddings, (1, L, D).
            **cache: Arguments of the KV cache of the text.
        """
        (height, width), length = latents.shape[2:], text.shape[1]
        # The image follows the text; the mask counts it in groups of four tokens.
        is_image = torch.arange(length + height * width // 4, device=latents.device) >= length
        return transformer(
            hidden_states=latents.flatten(2).transpose(1, 2),
            timestep=timestep.to(latents.dtype) / 1000,
            encoder_hidden_states=text,
            img_shapes=[[(1, height, width)]],
            img_mask=is_image[None],
            return_dict=False,
            **cache,
        )[0]

    def blocks(self) -> list[nn.Module]:
        """Return no blocks: compilation would be repeated for every prompt length."""
        return []

    def source_latents(self, image: Image.Image) -> Tensor:
        return super().source_latents(image.convert("RGBA"))

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decode RGBA images and composite them on white."""
        colour, alpha = super().decode_latents(latents).clamp(-1, 1).split([3, 1], 1)
        return (colour - 1) * (alpha + 1) / 2 + 1
