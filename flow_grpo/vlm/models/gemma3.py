"""Gemma 3: bidirectional attention among the tokens of an image, and sliding-window layers.

There are two kinds of layers. A query at position p attends to a key at position q if

    full_attention       q <= p, or both tokens belong to the same image
    sliding_attention    the same condition holds, and q > p - sliding_window

Training rows, prefill and decoding use these masks, so that ratios are exact. In a packed row,
distances are measured by position ids, because several responses continue from one prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from flow_grpo.data.videos import FrameSelection
from flow_grpo.errors import UserError
from flow_grpo.vlm.models.base import Family, VisionInputs
from flow_grpo.vlm.models.text import TextModel
from flow_grpo.vlm.packing import ModelInputs

PIXELS = "pixel_values"
# The chat template writes START_TOKEN for an image; the model reads IMAGE_TOKEN.
START_TOKEN, IMAGE_TOKEN, END_TOKEN = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


def attention_by_layer(attention: Tensor, positions: Tensor, window: int) -> dict[str, Tensor]:
    """Return the masks for full and for sliding attention.

    Args:
        attention: Visible pairs of tokens in layers with full attention, (B, 1, S, S) bool.
        positions: Position ids, (B, S).
        window: Number of positions that a token attends to, including its own.
    """
    near = positions[:, None, :] > positions[:, :, None] - window
    return {"full_attention": attention, "sliding_attention": attention & near[:, None]}


def decoding_mask_by_layer(mask: Tensor, column: Tensor, window: int) -> dict[str, Tensor]:
    """Return the masks for full and for sliding attention of one new token per row.

    Args:
        mask: Additive mask, (rows, 1, 1, columns).
        column: Column of the new token, (rows,).
        window: Number of columns that a token attends to, including its own.
    """
    columns = torch.arange(mask.shape[-1], device=mask.device)
    far = columns <= column[:, None] - window
    return {
        "full_attention": mask,
        "sliding_attention": mask.masked_fill(far[:, None, None], -torch.inf),
    }


def same_image(is_image: Tensor) -> Tensor:
    """Return which pairs of tokens belong to the same image, (B, 1, S, S) bool.

    Args:
        is_image: Which tokens are image tokens, (B, S) bool; text separates images.
    """
    starts = is_image.clone()
    starts[:, 1:] &= ~is_image[:, :-1]
    number = torch.where(is_image, starts.cumsum(1), 0)  # 0 for text
    return ((number[:, :, None] == number[:, None]) & is_image[:, :, None])[:, None]


class Gemma3Text(TextModel):
    """Gemma 3 without a vision tower (270M and 1B)."""

    names = {"gemma3_text": "Gemma 3"}  # noqa: RUF012
    sliding_window = True
    flex_attention = False

    def attention_mask(self, attention: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        window = self.model.config.sliding_window
        return attention_by_layer(attention, inputs.position_ids[0], window)

    def decoding_mask(self, mask: Tensor, column: Tensor) -> dict[str, Tensor]:
        return decoding_mask_by_layer(mask, column, self.model.config.sliding_window)


class Gemma3(Family):
    """Gemma 3 with a SigLIP tower (4B, 12B and 27B).

    An image has `pixel_values` (1, 3, height, width) of a fixed size. Pan and scan, which adds
    crops of oblong images, is disabled, which is the default of Gemma's own processor.
    """

    names = {"gemma3": "Gemma 3"}  # noqa: RUF012
    loader = AutoModelForImageTextToText
    vision_processor_class = AutoImageProcessor
    layers = ".*language_model" + Family.layers
    vision_lora_layers = r".*vision_tower.*\.([qkv]_proj|out_proj|fc[12]|patch_embedding)"
    flex_attention = False
    vllm = False  # it expects other names in the vision tower; docs/vlm/generation.md

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config = model.config
        self.projector = model.model.multi_modal_projector
        self.tower = nn.ModuleList([model.model.vision_tower, self.projector])
        self.image_token = config.image_token_id
        self.banned_token_ids = [config.image_token_id, config.boi_token_id, config.eoi_token_id]
        self.tokens_per_image = config.mm_tokens_per_image
        self.window = config.text_config.sliding_window

    @classmethod
    def load_vision_processor(
        cls, source: str, revision: str, *, min_pixels: int, max_pixels: int
    ) -> Any:
        """Load the image processor; reject pixel limits, because all images get the same size."""
        for name, pixels in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
            if pixels:
                raise UserError(
                    f"has no effect on Gemma 3 (pretrained.model={source!r}), which resizes every "
                    "image to the same size",
                    field=name,
                    value=pixels,
                    hint=f"set {name}=0",
                )
        return super().load_vision_processor(source, revision, min_pixels=0, max_pixels=0)

    def attention_mask(self, attention: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        attention = attention | same_image(inputs.input_ids == self.image_token)
        return attention_by_layer(attention, inputs.position_ids[0], self.window)

    def decoding_mask(self, mask: Tensor, column: Tensor) -> dict[str, Tensor]:
        return decoding_mask_by_layer(mask, column, self.window)

    def complete_chat(self, chat: str, clips: Sequence[FrameSelection]) -> str:
        return chat.replace(START_TOKEN, f"\n\n{START_TOKEN}{IMAGE_TOKEN}{END_TOKEN}\n\n")

    def count_image_tokens(self, processor: Any, height: int, width: int) -> int:
        return self.tokens_per_image

    def preprocess_images(
        self, processor: Any, images: Sequence[Image.Image]
    ) -> list[VisionInputs]:
        """Return the pixels of each image."""
        inputs = processor(images=images, return_tensors="pt", do_pan_and_scan=False)
        return [{PIXELS: pixels} for pixels in inputs[PIXELS].split(1)]

    def num_image_tokens(self, image: VisionInputs) -> int:
        return self.tokens_per_image

    def blank_image(self) -> VisionInputs:
        side = self.model.config.vision_config.image_size
        return {PIXELS: torch.zeros(1, 3, side, side)}

    @contextmanager
    def vision_arguments(
        self, images: VisionInputs, image_indices: Tensor | None
    ) -> Iterator[VisionInputs]:
        """Run the tower on distinct images and repeat their features for each occurrence."""
        if image_indices is None:
            yield {}
            return

        def repeat_features(_: nn.Module, __: tuple[Tensor], features: Tensor) -> Tensor:
            return features[image_indices]

        hook = self.projector.register_forward_hook(repeat_features)
        try:
            yield images
        finally:
            hook.remove()
