"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures as patches, positions of three axes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from flow_grpo.answer.models.base import Family, Seen

PIXELS, GRID = "pixel_values", "image_grid_thw"
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class QwenVL(Family):
    """A picture has `pixel_values` (patches, values) and `image_grid_thw` (1, 3): how many patches
    it has in time, height and width, of which a token merges a square.

    Not loaded with `AutoProcessor`: Qwen's needs torchvision for videos.
    """

    names = {  # noqa: RUF012
        "qwen2_vl": "Qwen2-VL",
        "qwen2_5_vl": "Qwen2.5-VL",
        "qwen3_vl": "Qwen3-VL",
        "qwen3_vl_moe": "Qwen3-VL",  # whose experts are no layers of LoRA's, and stay as they are
    }
    loader = AutoModelForImageTextToText
    image_loader = AutoImageProcessor
    axes = 3  # time, height and width, all alike for text
    # every linear layer, wherever the model keeps its layers
    layers = ".*language_model" + Family.layers
    tower_layers = r".*visual.*\.(qkv|(gate_|up_|down_)?proj|(linear_)?fc[12]|mlp\.[02])"
    vllm_scratch = "deepstack_input_embeds"  # Qwen3-VL's sums for its first layers

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tower = model.model.visual
        self.image_token = model.config.image_token_id
        # in an answer they would ask for a picture that is not there
        self.banned = [
            mark for name in MARKS if (mark := getattr(model.config, name, None)) is not None
        ]
        self.merged = model.config.vision_config.spatial_merge_size**2  # patches of a token

    def positions(self, ids: Tensor, pictures: Sequence[Seen]) -> Tensor:
        kinds = (ids == self.image_token).int()[None]
        grids = torch.cat([own[GRID] for own in pictures]) if pictures else None
        positions, _ = self.model.model.get_rope_index(
            ids[None], mm_token_type_ids=kinds, image_grid_thw=grids
        )
        return positions[:, 0]

    def count_tokens(self, processor: Any, height: int, width: int) -> int:
        return processor.get_number_of_image_patches(height, width, {}) // self.merged

    def see(self, processor: Any, pictures: Sequence[Image.Image]) -> list[Seen]:
        seen = processor(images=pictures, return_tensors="pt")
        pixels = seen[PIXELS].split(seen[GRID].prod(-1).tolist())
        return [{PIXELS: p, GRID: g} for p, g in zip(pixels, seen[GRID].split(1), strict=True)]

    def tokens_of(self, picture: Seen) -> int:
        return int(picture[GRID].prod()) // self.merged

    def size_of(self, processor: Any, picture: Seen) -> tuple[int, int]:
        _, height, width = picture[GRID][0].tolist()
        return width * processor.patch_size, height * processor.patch_size

    def blank(self) -> Seen:
        """As many patches as one token merges."""
        patch, side = self.tower.patch_embed, self.tower.spatial_merge_size
        width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
        return {PIXELS: torch.zeros(side * side, width), GRID: torch.tensor([[1, side, side]])}

    @contextmanager
    def looking(self, pictures: Seen, shown: Tensor | None) -> Iterator[Seen]:
        """The model counts the tokens of every place by its grid, and the tower gets the grids of
        distinct pictures only: what it sees in them is then repeated for their places."""
        if shown is None:
            yield {}
            return
        distinct = pictures[GRID]
        everywhere = {**pictures, GRID: distinct[shown]}
        if len(distinct) == len(shown):
            yield everywhere
            return
        places, counts = shown.tolist(), (distinct.prod(-1) // self.merged).tolist()

        def see_less(_: nn.Module, pixels: tuple[Tensor], settings: dict[str, Any]) -> tuple:
            return pixels, {**settings, "grid_thw": distinct}

        def show(_: nn.Module, __: tuple[Tensor], seen: Any) -> Any:
            def repeated(features: Tensor) -> Tensor:
                parts = features.split(counts)
                return torch.cat([parts[number] for number in places])

            seen.pooler_output = repeated(seen.pooler_output)
            if getattr(seen, "deepstack_features", None) is not None:  # Qwen3-VL's, of its layers
                seen.deepstack_features = [repeated(own) for own in seen.deepstack_features]
            return seen

        hooks = [
            self.tower.register_forward_pre_hook(see_less, with_kwargs=True),
            self.tower.register_forward_hook(show),
        ]
        try:
            yield everywhere
        finally:
            for hook in hooks:
                hook.remove()
