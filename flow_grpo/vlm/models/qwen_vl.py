"""Qwen2-VL and Qwen2.5-VL, with three-dimensional rotary position ids (M-RoPE)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from flow_grpo.data.videos import FrameSelection
from flow_grpo.vlm.models.base import Family, VisionInputs, concat_vision_inputs

PIXELS, GRID, SECONDS_PER_GRID = "pixel_values", "image_grid_thw", "seconds_per_grid"
VISION_TOKEN_FIELDS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


class QwenVL(Family):
    """Qwen2-VL and Qwen2.5-VL.

    An image has `pixel_values` (patches, values) and `image_grid_thw` (1, 3), the number of patches
    in time, height and width. A token merges a square of patches. A video is an image with several
    temporal patches of two frames each; `seconds_per_grid` (1,) is the duration of one patch, 0 for
    an image. The tower treats both the same way, so videos use image tokens in prompts as well.

    `AutoProcessor` is not used, because Qwen's needs torchvision for videos.
    """

    names = {  # noqa: RUF012
        "qwen2_vl": "Qwen2-VL",
        "qwen2_5_vl": "Qwen2.5-VL",
    }
    loader = AutoModelForImageTextToText
    vision_processor_class = AutoImageProcessor
    axes = 3  # time, height and width; equal for text
    layers = ".*language_model" + Family.layers
    vision_lora_layers = r".*visual.*\.(qkv|(gate_|up_|down_)?proj|(linear_)?fc[12]|mlp\.[02])"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tower = model.model.visual
        self.image_token = model.config.image_token_id
        self.video_token = model.config.video_token_id
        # never sampled: in a response they would refer to an image that does not exist
        tokens = (getattr(model.config, name, None) for name in VISION_TOKEN_FIELDS)
        self.banned_token_ids = [token for token in tokens if token is not None]
        self.patches_per_token = model.config.vision_config.spatial_merge_size**2

    def compute_positions(self, ids: Tensor, images: Sequence[VisionInputs]) -> Tensor:
        """Return position ids; a video's temporal axis is in seconds if the model supports it."""
        kinds = (ids == self.image_token).int()
        seen = concat_vision_inputs(images)
        counts = torch.tensor([self.num_image_tokens(image) for image in images])
        videos = seen[SECONDS_PER_GRID] > 0 if images else torch.zeros(0, dtype=torch.bool)
        kinds[kinds == 1] = (1 + videos.int()).repeat_interleave(counts.long())
        grids = {"image_grid_thw": ~videos, "video_grid_thw": videos}
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=kinds[None],
            second_per_grid_ts=seen[SECONDS_PER_GRID][videos] if videos.any() else None,
            **{name: seen[GRID][chosen] for name, chosen in grids.items() if chosen.any()},
        )
        return positions[:, 0]

    def count_image_tokens(self, processor: Any, height: int, width: int) -> int:
        return processor.get_number_of_image_patches(height, width, {}) // self.patches_per_token

    def preprocess_images(
        self, processor: Any, images: Sequence[Image.Image]
    ) -> list[VisionInputs]:
        """Return the patches and the grid of each image."""
        inputs = processor(images=images, return_tensors="pt")
        pixels = inputs[PIXELS].split(inputs[GRID].prod(-1).tolist())
        grids = inputs[GRID].split(1)
        return [
            {PIXELS: p, GRID: g, SECONDS_PER_GRID: torch.zeros(1)}
            for p, g in zip(pixels, grids, strict=True)
        ]

    def preprocess_video(
        self, processor: Any, frames: Sequence[Image.Image], clip: FrameSelection, pixels: int
    ) -> VisionInputs:
        """Return the patches of a video; the last frame is repeated to fill a temporal patch.

        Args:
            processor: The image processor.
            frames: Decoded frames of `clip`.
            clip: Which frames these are.
            pixels: Maximum number of pixels per frame.
        """
        depth = processor.temporal_patch_size
        frames = [*frames, *[frames[-1]] * (-len(frames) % depth)]
        size = _pixel_limits(processor, pixels)
        inputs = processor(images=frames, return_tensors="pt", size=size)
        _, height, width = inputs[GRID][0].tolist()
        # The processor repeats an image `depth` times in each patch. Take one copy of each frame
        # and put `depth` consecutive frames into a patch instead.
        values = inputs[PIXELS].view(-1, depth, height * width, 3, depth, processor.patch_size**2)
        patches = values[..., 0, :].permute(0, 2, 3, 1, 4)
        return {
            PIXELS: patches.flatten(2).flatten(0, 1),
            GRID: torch.tensor([[len(patches), height, width]]),
            SECONDS_PER_GRID: torch.tensor([depth * clip.spacing]),
        }

    def count_video_tokens(self, processor: Any, clip: FrameSelection, pixels: int) -> list[int]:
        """Return the number of tokens of each placeholder of a video.

        Args:
            processor: The image processor.
            clip: The selected frames.
            pixels: Maximum number of pixels per frame.
        """
        size = _pixel_limits(processor, pixels)
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        patches = processor.get_number_of_image_patches(clip.height, clip.width, limits)
        temporal_patches = -(-len(clip.indices) // processor.temporal_patch_size)
        return self.tokens_per_placeholder(temporal_patches, patches // self.patches_per_token)

    def tokens_per_placeholder(self, temporal_patches: int, tokens: int) -> list[int]:
        """Return the tokens of each placeholder of a video with `tokens` per temporal patch."""
        return [temporal_patches * tokens]

    def num_image_tokens(self, image: VisionInputs) -> int:
        return int(image[GRID].prod()) // self.patches_per_token

    def num_video_tokens(self, video: VisionInputs) -> list[int]:
        depth, height, width = video[GRID][0].tolist()
        return self.tokens_per_placeholder(depth, height * width // self.patches_per_token)

    def resized_size(self, processor: Any, image: VisionInputs) -> tuple[int, int]:
        _, height, width = image[GRID][0].tolist()
        return width * processor.patch_size, height * processor.patch_size

    def blank_image(self) -> VisionInputs:
        """Return a blank image of one token."""
        patch, side = self.tower.patch_embed, self.tower.spatial_merge_size
        width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
        return {
            PIXELS: torch.zeros(side * side, width),
            GRID: torch.tensor([[1, side, side]]),
            SECONDS_PER_GRID: torch.zeros(1),
        }

    @contextmanager
    def vision_arguments(
        self, images: VisionInputs, image_indices: Tensor | None
    ) -> Iterator[VisionInputs]:
        """Run the tower on distinct images and repeat their features for each occurrence.

        The model counts the tokens of every occurrence by its grid, so it gets all grids, but the
        tower gets those of distinct images only.
        """
        if image_indices is None:
            yield {}
            return
        distinct = images[GRID]
        arguments = {PIXELS: images[PIXELS], GRID: distinct[image_indices]}
        if len(distinct) == len(image_indices):
            yield arguments
            return
        indices = image_indices.tolist()
        counts = (distinct.prod(-1) // self.patches_per_token).tolist()

        def use_distinct_grids(
            _: nn.Module, pixels: tuple[Tensor], settings: dict[str, Any]
        ) -> tuple:
            return pixels, {**settings, "grid_thw": distinct}

        def repeat_features(_: nn.Module, __: tuple[Tensor], output: Any) -> Any:
            """Forward hook of the tower: repeat the features for each occurrence."""

            def repeated(features: Tensor) -> Tensor:
                parts = features.split(counts)
                return torch.cat([parts[index] for index in indices])

            output.pooler_output = repeated(output.pooler_output)
            if getattr(output, "deepstack_features", None) is not None:  # Qwen3-VL
                output.deepstack_features = [repeated(level) for level in output.deepstack_features]
            return output

        hooks = [
            self.tower.register_forward_pre_hook(use_distinct_grids, with_kwargs=True),
            self.tower.register_forward_hook(repeat_features),
        ]
        try:
            yield arguments
        finally:
            for hook in hooks:
                hook.remove()


def _pixel_limits(processor: Any, pixels: int) -> dict[str, int]:
    """Return the limits of a frame's pixels: those of an image, but at most `pixels`."""
    names = ("shortest_edge", "longest_edge")
    return {name: min(processor.size[name], pixels) for name in names}
