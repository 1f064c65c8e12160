"""InternVL 3 and 3.5 as transformers have them ("-HF" on the hub): a picture is cut into tiles
of equally many tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from flow_grpo.answer.models.base import Family, Seen
from flow_grpo.answer.models.text import refuse_sliding
from flow_grpo.data.videos import Clip

PIXELS, TILES = "pixel_values", "tiles"
CONTEXT = "<IMG_CONTEXT>"  # the placeholder of a picture
CUT = {"crop_to_patches": True}  # what InternVL's processor tells its image processor


class InternVL(Family):
    """A picture has `pixel_values` (tiles, 3, height, width) and `tiles` (1,), how many there are.
    The last of several is all of the picture, small."""

    names = {"internvl": "InternVL"}  # noqa: RUF012
    loader = AutoModelForImageTextToText
    image_loader = AutoImageProcessor
    layers = ".*language_model" + Family.layers
    tower_layers = (
        r".*(vision_tower.*\.([qkv]_proj|projection_layer|projection|fc[12])"
        r"|multi_modal_projector\.linear_[12])"
    )
    vllm = False  # it would cut pictures by itself

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        refuse_sliding(model, model.config.text_config)
        self.projector = model.model.multi_modal_projector
        self.tower = nn.ModuleList([model.model.vision_tower, self.projector])
        self.image_token = model.config.image_token_id
        self.banned = [self.image_token]
        self.per_tile = model.config.image_seq_length  # tokens

    @classmethod
    def load_images(cls, source: str, revision: str, *, min_pixels: int, max_pixels: int) -> Any:
        """Limits are met in whole tiles, the small one of all of it not counted."""
        images = super().load_images(source, revision, min_pixels=0, max_pixels=0)
        tile = images.size["height"] * images.size["width"]
        if max_pixels:
            images.max_patches = max(1, max_pixels // tile)
            images.min_patches = min(images.min_patches, images.max_patches)
        if min_pixels:
            images.min_patches = min(-(-min_pixels // tile), images.max_patches)
        return images

    def written(self, chat: str, clips: Sequence[Clip]) -> str:
        return chat.replace(CONTEXT, f"<img>{CONTEXT}</img>")

    def count_tokens(self, processor: Any, height: int, width: int) -> int:
        return processor.get_number_of_image_patches(height, width, CUT) * self.per_tile

    def see(self, processor: Any, pictures: Sequence[Image.Image]) -> list[Seen]:
        seen = processor(images=pictures, return_tensors="pt", **CUT)
        counts = torch.as_tensor(seen["num_patches"])
        pixels = seen[PIXELS].split(counts.tolist())
        return [{PIXELS: p, TILES: n} for p, n in zip(pixels, counts.split(1), strict=True)]

    def tokens_of(self, picture: Seen) -> int:
        return int(picture[TILES]) * self.per_tile

    def blank(self) -> Seen:
        side = self.model.config.vision_config.image_size
        return {PIXELS: torch.zeros(1, 3, *side), TILES: torch.ones(1, dtype=torch.long)}

    @contextmanager
    def looking(self, pictures: Seen, shown: Tensor | None) -> Iterator[Seen]:
        """What the tower sees in the distinct pictures is repeated for their places."""
        if shown is None:
            yield {}
            return
        places, counts = shown.tolist(), pictures[TILES].tolist()

        def show(_: nn.Module, __: tuple[Tensor], features: Tensor) -> Tensor:
            tiles = features.split(counts)
            return torch.cat([tiles[number] for number in places])

        hook = self.projector.register_forward_hook(show)
        try:
            yield {PIXELS: pictures[PIXELS]}
        finally:
            hook.remove()
