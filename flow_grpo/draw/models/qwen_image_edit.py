"""Qwen-Image-Edit, and Edit-Plus (2509, 2511), which takes up to three pictures."""

from types import MappingProxyType

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image
from torch import Tensor

from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Inputs, pack
from flow_grpo.draw.models.processors import with_token_types
from flow_grpo.draw.models.qwen_image import QwenImageAdapter


class QwenImageEditAdapter(QwenImageAdapter):
    pipeline_class = QwenImageEditPipeline
    encoders = ("text_encoder", "vae")
    processors = MappingProxyType({"processor": "Qwen2VLProcessor"})
    sources = range(1, 2)

    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        images = [self.seen(picture) for picture in pictures]
        with with_token_types(self.pipeline.text_encoder):
            embeds, _ = self.pipeline.encode_prompt(prompt=[text], image=images, device=self.device)
        tokens = [pack(self.source_latents(picture)) for picture in pictures]
        return {"embeds": embeds, "source": torch.cat(tokens, 1)}

    def seen(self, picture: Image.Image) -> Image.Image:
        """As the text encoder gets it."""
        return picture

    def source_tokens(self, inputs: Inputs) -> tuple[Tensor, list[tuple[int, int, int]]]:
        side, source = self.pixels_per_token(), inputs["source"]
        shape = (1, self.source_size.height // side, self.source_size.width // side)
        return source, [shape] * (source.shape[1] // (shape[1] * shape[2]))


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    pipeline_class = QwenImageEditPlusPipeline
    sources = range(1, 4)

    def seen(self, picture: Image.Image) -> Image.Image:
        """Small."""
        size = calculate_dimensions(CONDITION_IMAGE_SIZE, picture.width / picture.height)
        return self.pipeline.image_processor.resize(picture, size[1], size[0])
