"""Qwen-Image-Edit, and Edit-Plus (2509, 2511), which takes up to three source images."""

from types import MappingProxyType

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image
from torch import Tensor

from flow_grpo.diffusion.models.inputs import Inputs, pack_latents
from flow_grpo.diffusion.models.processors import passing_token_types
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.diffusion.models.qwen_image import QwenImageAdapter


class QwenImageEditAdapter(QwenImageAdapter):
    """Adapter of Qwen-Image-Edit, with one source image."""

    pipeline_class = QwenImageEditPipeline
    encoders = ("text_encoder", "vae")
    processors = MappingProxyType({"processor": "Qwen2VLProcessor"})
    num_source_images = range(1, 2)
    context_parallel = False

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode prompt and images together ("embeds"), and the images' tokens ("source")."""
        seen = [self.to_encoder_image(image) for image in images]
        with passing_token_types(self.pipeline.text_encoder):
            embeds, _ = self.pipeline.encode_prompt(prompt=[text], image=seen, device=self.device)
        tokens = [pack_latents(self.source_latents(image)) for image in images]
        return {"embeds": embeds, "source": torch.cat(tokens, 1)}

    def to_encoder_image(self, image: Image.Image) -> Image.Image:
        """Resize a source image for the text encoder."""
        return image

    def source_tokens(self, inputs: Inputs) -> tuple[Tensor, list[tuple[int, int, int]]]:
        side, source = self.pixels_per_token(), inputs["source"]
        shape = (1, self.source_size.height // side, self.source_size.width // side)
        return source, [shape] * (source.shape[1] // (shape[1] * shape[2]))


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """Adapter of Qwen-Image-Edit-Plus, with one to three source images."""

    pipeline_class = QwenImageEditPlusPipeline
    num_source_images = range(1, 4)

    def to_encoder_image(self, image: Image.Image) -> Image.Image:
        size = calculate_dimensions(CONDITION_IMAGE_SIZE, image.width / image.height)
        return self.pipeline.image_processor.resize(image, size[1], size[0])
