"""InternVL 3 and 3.5 in transformers' format ("-HF" on the hub), which split images into tiles."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from flow_grpo.data.videos import FrameSelection
from flow_grpo.vlm.models.base import Family, VisionInputs
from flow_grpo.vlm.models.text import reject_sliding_window

PIXELS, TILES = "pixel_values", "tiles"
IMAGE_CONTEXT_TOKEN = "<IMG_CONTEXT>"  # the placeholder of an image
TILING_OPTIONS = {"crop_to_patches": True}  # as passed by InternVL's own processor


class InternVL(Family):
    """InternVL.

    An image has `pixel_values` (tiles, 3, height, width) and `tiles` (1,), the number of tiles. If
    there are several, the last one is a thumbnail of the whole image.
    """

    names = {"internvl": "InternVL"}  # noqa: RUF012
    loader = AutoModelForImageTextToText
    vision_processor_class = AutoImageProcessor
    layers = ".*language_model" + Family.layers
    vision_lora_layers = (
        r".*(vision_tower.*\.([qkv]_proj|projection_layer|projection|fc[12])"
        r"|multi_modal_projector\.linear_[12])"
    )
    vllm = False  # vLLM would tile images itself

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        reject_sliding_window(model, model.config.text_config)
        self.projector = model.model.multi_modal_projector
        self.tower = nn.ModuleList([model.model.vision_tower, self.projector])
        self.image_token = model.config.image_token_id
        self.banned_token_ids = [self.image_token]
        self.tokens_per_tile = model.config.image_seq_length

    @classmethod
    def load_vision_processor(
        cls, source: str, revision: str, *, min_pixels: int, max_pixels: int
    ) -> Any:
        """Load the image processor; pixel limits are rounded to whole tiles without thumbnail."""
        processor = super().load_vision_processor(source, revision, min_pixels=0, max_pixels=0)
        tile = processor.size["height"] * processor.size["width"]
        if max_pixels:
            processor.max_patches = max(1, max_pixels // tile)
            processor.min_patches = min(processor.min_patches, processor.max_patches)
        if min_pixels:
            processor.min_patches = min(-(-min_pixels // tile), processor.max_patches)
        return processor

    def complete_chat(self, chat: str, clips: Sequence[FrameSelection]) -> str:
        return chat.replace(IMAGE_CONTEXT_TOKEN, f"<img>{IMAGE_CONTEXT_TOKEN}</img>")

    def count_image_tokens(self, processor: Any, height: int, width: int) -> int:
        tiles = processor.get_number_of_image_patches(height, width, TILING_OPTIONS)
        return tiles * self.tokens_per_tile

    def preprocess_images(
        self, processor: Any, images: Sequence[Image.Image]
    ) -> list[VisionInputs]:
        """Return the pixels and the number of tiles of each image."""
        inputs = processor(images=images, return_tensors="pt", **TILING_OPTIONS)
        counts = torch.as_tensor(inputs["num_patches"])
        pixels = inputs[PIXELS].split(counts.tolist())
        return [{PIXELS: p, TILES: n} for p, n in zip(pixels, counts.split(1), strict=True)]

    def num_image_tokens(self, image: VisionInputs) -> int:
        return int(image[TILES]) * self.tokens_per_tile

    def blank_image(self) -> VisionInputs:
        side = self.model.config.vision_config.image_size
        return {PIXELS: torch.zeros(1, 3, *side), TILES: torch.ones(1, dtype=torch.long)}

    @contextmanager
    def vision_arguments(
        self, images: VisionInputs, image_indices: Tensor | None
    ) -> Iterator[VisionInputs]:
        """Run the tower on distinct images and repeat their features for each occurrence."""
        if image_indices is None:
            yield {}
            return
        indices, counts = image_indices.tolist(), images[TILES].tolist()

        def repeat_features(_: nn.Module, __: tuple[Tensor], features: Tensor) -> Tensor:
            tiles = features.split(counts)
            return torch.cat([tiles[index] for index in indices])

        hook = self.projector.register_forward_hook(repeat_features)
        try:
            yield {PIXELS: images[PIXELS]}
        finally:
            hook.remove()
