"""Qwen2-VL and Qwen2.5-VL: pictures and videos as patches, positions of three axes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from flow_grpo.answer.models.base import Family, Seen, joined
from flow_grpo.data.videos import Clip

PIXELS, GRID, MOMENT = "pixel_values", "image_grid_thw", "moment"
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class QwenVL(Family):
    """A picture has `pixel_values` (patches, values) and `image_grid_thw` (1, 3): how many patches
    it has in time, height and width, of which a token merges a square. A video is a picture with
    more patches in time, each of two frames; `moment` (1,) are the seconds of one, 0 for a picture.
    The tower sees both in the same way, so that in prompts both have the tokens of pictures.

    Not loaded with `AutoProcessor`: Qwen's needs torchvision for videos.
    """

    names = {  # noqa: RUF012
        "qwen2_vl": "Qwen2-VL",
        "qwen2_5_vl": "Qwen2.5-VL",
    }
    loader = AutoModelForImageTextToText
    image_loader = AutoImageProcessor
    axes = 3  # time, height and width, all alike for text
    # every linear layer, wherever the model keeps its layers
    layers = ".*language_model" + Family.layers
    tower_layers = r".*visual.*\.(qkv|(gate_|up_|down_)?proj|(linear_)?fc[12]|mlp\.[02])"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tower = model.model.visual
        self.image_token = model.config.image_token_id
        self.video_token = model.config.video_token_id
        # in an answer they would ask for a picture that is not there
        self.banned = [
            mark for name in MARKS if (mark := getattr(model.config, name, None)) is not None
        ]
        self.merged = model.config.vision_config.spatial_merge_size**2  # patches of a token

    def positions(self, ids: Tensor, pictures: Sequence[Seen]) -> Tensor:
        """A video's on the axis of time by its seconds, where the model has such a scale."""
        kinds = (ids == self.image_token).int()
        seen, counts = joined(pictures), torch.tensor([self.tokens_of(own) for own in pictures])
        videos = seen[MOMENT] > 0 if pictures else torch.zeros(0, dtype=torch.bool)
        kinds[kinds == 1] = (1 + videos.int()).repeat_interleave(counts.long())
        grids = {"image_grid_thw": ~videos, "video_grid_thw": videos}
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=kinds[None],
            second_per_grid_ts=seen[MOMENT][videos] if videos.any() else None,
            **{name: seen[GRID][chosen] for name, chosen in grids.items() if chosen.any()},
        )
        return positions[:, 0]

    def count_tokens(self, processor: Any, height: int, width: int) -> int:
        return processor.get_number_of_image_patches(height, width, {}) // self.merged

    def see(self, processor: Any, pictures: Sequence[Image.Image]) -> list[Seen]:
        seen = processor(images=pictures, return_tensors="pt")
        pixels = seen[PIXELS].split(seen[GRID].prod(-1).tolist())
        still, grids = torch.zeros(1), seen[GRID].split(1)
        return [{PIXELS: p, GRID: g, MOMENT: still} for p, g in zip(pixels, grids, strict=True)]

    def watch(self, processor: Any, frames: Sequence[Image.Image], clip: Clip, pixels: int) -> Seen:
        merged = processor.temporal_patch_size
        frames = [*frames, *[frames[-1]] * (-len(frames) % merged)]
        seen = processor(images=frames, return_tensors="pt", size=_size(processor, pixels))
        _, height, width = seen[GRID][0].tolist()
        # a picture fills its patches with copies of itself: of each frame one, beside its neighbour
        values = seen[PIXELS].view(-1, merged, height * width, 3, merged, processor.patch_size**2)
        patches = values[..., 0, :].permute(0, 2, 3, 1, 4)
        return {
            PIXELS: patches.flatten(2).flatten(0, 1),
            GRID: torch.tensor([[len(patches), height, width]]),
            MOMENT: torch.tensor([merged * clip.spacing]),
        }

    def count_frames(self, processor: Any, clip: Clip, pixels: int) -> list[int]:
        size = _size(processor, pixels)
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        patches = processor.get_number_of_image_patches(clip.height, clip.width, limits)
        moments = -(-len(clip.places) // processor.temporal_patch_size)
        return self.placeholders(moments, patches // self.merged)

    def placeholders(self, moments: int, tokens: int) -> list[int]:
        """The tokens of each placeholder, of a video with so many tokens in a moment."""
        return [moments * tokens]

    def tokens_of(self, picture: Seen) -> int:
        return int(picture[GRID].prod()) // self.merged

    def tokens_of_video(self, video: Seen) -> list[int]:
        moments, height, width = video[GRID][0].tolist()
        return self.placeholders(moments, height * width // self.merged)

    def size_of(self, processor: Any, picture: Seen) -> tuple[int, int]:
        _, height, width = picture[GRID][0].tolist()
        return width * processor.patch_size, height * processor.patch_size

    def blank(self) -> Seen:
        """As many patches as one token merges."""
        patch, side = self.tower.patch_embed, self.tower.spatial_merge_size
        width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
        return {
            PIXELS: torch.zeros(side * side, width),
            GRID: torch.tensor([[1, side, side]]),
            MOMENT: torch.zeros(1),
        }

    @contextmanager
    def looking(self, pictures: Seen, shown: Tensor | None) -> Iterator[Seen]:
        """The model counts the tokens of every place by its grid, and the tower gets the grids of
        distinct pictures only: what it sees in them is then repeated for their places."""
        if shown is None:
            yield {}
            return
        distinct = pictures[GRID]
        everywhere = {PIXELS: pictures[PIXELS], GRID: distinct[shown]}
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


def _size(processor: Any, pixels: int) -> dict[str, int]:
    """Limits of a frame's pixels: those of a picture, and no more than so many."""
    names = ("shortest_edge", "longest_edge")
    return {name: min(processor.size[name], pixels) for name in names}
