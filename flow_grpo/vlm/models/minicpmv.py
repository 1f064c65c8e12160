"""MiniCPM-V 4.6 and 4.7, which cut an image into slices separated by text in the prompt.

The prompt contains a thumbnail, followed by rows of slices if the image is larger than a slice:

    <image_id>0</image_id><image>...</image><slice>...</slice><slice>...</slice>
    <slice>...</slice><slice>...</slice>

`<image_id>` contains the index of the image in the conversation. The language model is that of
Qwen3.5.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
)

from flow_grpo.errors import UserError
from flow_grpo.vlm.models.base import ImageLayout, VisionInputs
from flow_grpo.vlm.models.qwen3_5 import Qwen35Decoder

PIXELS, SIZES, GRID = "pixel_values", "target_sizes", "grid"
MARKERS = {  # by the name of their id in the config
    "image_start_id": "<image>",
    "image_end_id": "</image>",
    "slice_start_id": "<slice>",
    "slice_end_id": "</slice>",
    "image_id_start_id": "<image_id>",
    "image_id_end_id": "</image_id>",
}
VISION_TOKEN_FIELDS = (  # the markers are in the config of 4.7 only
    *("image_token_id", "video_token_id"),
    *MARKERS,
)


class MiniCPMV(Qwen35Decoder):
    """MiniCPM-V 4.6, with one-dimensional positions.

    The inputs of an image are `pixel_values` (patches, 3, height, width); `target_sizes`
    (slices, 2), the height and width of the thumbnail and of each slice in patches; and `grid`
    (1, 2), the numbers of rows and columns of slices, which are 0 without slices.
    """

    names = {"minicpmv4_6": "MiniCPM-V 4.6"}  # noqa: RUF012
    loader = AutoModelForImageTextToText
    vision_processor_class = AutoImageProcessor
    vision_lora_layers = (
        r".*(vision_tower.*\.([qkv]_proj|out_proj|fc[12]|patch_embedding|linear_[12])"
        r"|merger\.mlp\.\d+\.linear_[12])"
    )
    vllm = False  # vLLM would slice images itself

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config = model.config
        self.merger = model.model.merger
        self.tower = nn.ModuleList([model.model.vision_tower, self.merger])
        self.image_token = config.image_token_id
        tokens = (getattr(config, name, None) for name in VISION_TOKEN_FIELDS)
        self.banned_token_ids = [token for token in tokens if token is not None]
        self.mode = config.downsample_mode
        self.side = 4  # a token merges a square of patches
        if self.mode == "4x":
            self.side, self.unused = 2, model.model.vision_tower.vit_merger

    @classmethod
    def load_vision_processor(
        cls, source: str, revision: str, *, min_pixels: int, max_pixels: int
    ) -> Any:
        """Load the image processor; `max_pixels` is rounded down to whole slices."""
        if min_pixels:
            raise UserError(
                f"has no effect on MiniCPM-V (pretrained.model={source!r}), which enlarges small "
                "images to the size of a slice",
                field="min_pixels",
                value=min_pixels,
                hint="set min_pixels=0",
            )
        processor = super().load_vision_processor(source, revision, min_pixels=0, max_pixels=0)
        if max_pixels:
            processor.max_slice_nums = max(1, max_pixels // processor.scale_resolution**2)
        return processor

    def lora_targets(self, with_tower: bool) -> str:
        targets = super().lora_targets(with_tower)
        return targets if self.unused is None else rf"(?!.*\.vit_merger\.){targets}"

    def compute_positions(self, ids: Tensor, images: Sequence[VisionInputs]) -> Tensor:
        return torch.arange(len(ids)).expand(self.axes, -1)

    def marker_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        found = []
        for field, marker in MARKERS.items():
            ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
            expected = getattr(self.model.config, field, None)
            if tokenizer.convert_ids_to_tokens(ids) != [marker] or expected not in (None, *ids):
                token = "a token" if expected is None else f"the token {expected} ({field})"
                raise UserError(
                    f"must encode {marker} as {token}, not as {ids}",
                    field=f"tokenizer of {tokenizer.name_or_path}",
                    hint="use the model's own tokenizer",
                )
            found += ids
        return found

    def predict_layout(self, processor: Any, height: int, width: int) -> ImageLayout:
        size, slice_side, patch = (height, width), processor.scale_resolution, processor.patch_size
        grid = None
        if processor.slice_mode:
            grid = processor.get_sliced_grid(size, processor.max_slice_nums, slice_side)
        options = {"scale_resolution": slice_side, "patch_size": patch}
        options["downsample_mode"] = self.mode
        area = (patch * self.side) ** 2
        rows, columns = grid or (0, 0)
        thumbnail = processor.find_best_resize(size, allow_upscale=grid is None, **options)
        layout = [[thumbnail[0] * thumbnail[1] // area]]
        if grid is not None:
            height, width = processor.get_refine_size(size, grid, allow_upscale=True, **options)
            layout += [[height * width // (rows * columns * area)] * columns] * rows
        return layout

    def image_ids(
        self, processor: Any, layout: ImageLayout, number: int, encode: Callable[[str], list[int]]
    ) -> list[int]:
        ids = encode(f"<image_id>{number}</image_id>") if processor.use_image_id else []
        newline, marks = encode("\n"), [encode("<slice>"), encode("</slice>")]
        for row, tokens in enumerate(layout):
            first, last = marks if row else (encode("<image>"), encode("</image>"))
            if row > 1:
                ids += newline
            for count in tokens:
                ids += [*first, *[self.image_token] * count, *last]
        return ids

    def preprocess_images(
        self, processor: Any, images: Sequence[Image.Image]
    ) -> list[VisionInputs]:
        """Return the patches of each image, the size of each slice and the grid of slices."""
        inputs = processor(images=images, return_tensors="pt", downsample_mode=self.mode)
        patches = inputs[PIXELS][0].unflatten(-1, (-1, processor.patch_size)).permute(2, 0, 1, 3)
        sizes = inputs[SIZES].long().split(inputs["num_patches_per_image"])
        pixels = patches.split([int(own.prod(-1).sum()) for own in sizes])
        return [
            {PIXELS: own, SIZES: size, GRID: torch.tensor([grid])}
            for own, size, grid in zip(pixels, sizes, inputs["grids"], strict=True)
        ]

    def num_image_tokens(self, image: VisionInputs) -> int:
        return sum(map(sum, self.image_layout(image)))

    def image_layout(self, image: VisionInputs) -> ImageLayout:
        _, columns = image[GRID][0].tolist()
        thumbnail, *counts = (image[SIZES].prod(-1) // self.side**2).tolist()
        rows = (counts[start : start + columns] for start in range(0, len(counts), columns or 1))
        return [[thumbnail], *rows]

    def blank_image(self) -> VisionInputs:
        """Return a blank image of one token."""
        patch = self.model.config.vision_config.patch_size
        return {
            PIXELS: torch.zeros(self.side**2, 3, patch, patch),
            SIZES: torch.full((1, 2), self.side),
            GRID: torch.zeros(1, 2, dtype=torch.long),
        }

    @contextmanager
    def vision_arguments(
        self, images: VisionInputs, image_indices: Tensor | None
    ) -> Iterator[VisionInputs]:
        """Run the tower on distinct images and repeat their features for each occurrence."""
        if image_indices is None:
            yield {}
            return
        counts = (1 + images[GRID].prod(-1)).tolist()
        ends = torch.tensor(counts).cumsum(0).tolist()
        indices = image_indices.tolist()

        def repeat_features(_: nn.Module, __: Any, slices: list[Tensor]) -> list[Tensor]:
            return [part for i in indices for part in slices[ends[i] - counts[i] : ends[i]]]

        hook = self.merger.register_forward_hook(repeat_features)
        try:
            row = images[PIXELS].permute(1, 2, 0, 3).flatten(2)  # of patches side by side
            yield {PIXELS: row[None], SIZES: images[SIZES]}
        finally:
            hook.remove()


class MiniCPMV47(MiniCPMV):
    """MiniCPM-V 4.7, with the positions of Qwen3-VL, in which slices tile their thumbnail."""

    names = {"minicpmv4_7": "MiniCPM-V 4.7"}  # noqa: RUF012

    def compute_positions(self, ids: Tensor, images: Sequence[VisionInputs]) -> Tensor:
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=(ids == self.image_token).int()[None],
            target_sizes=torch.cat([image[SIZES] for image in images]) if images else None,
        )
        return positions[:, 0]
