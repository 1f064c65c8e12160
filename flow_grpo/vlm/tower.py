"""A picture that stands in several places of a batch is seen once by the vision tower."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def each_once(tower: nn.Module, grids: Tensor | None, shown: Tensor | None) -> Iterator[None]:
    """While the model runs on the pixels of distinct pictures only.

    `grids` (places, 3) are those of every place, as the model counts their tokens, and `shown`
    (places,) says which picture is there. Pictures are numbered as they first occur.
    """
    if shown is None or int(shown.max()) + 1 == len(shown):
        yield
        return
    places = shown.tolist()
    first = torch.tensor([places.index(number) for number in range(max(places) + 1)])
    distinct = grids[first.to(grids.device)]
    counts = (distinct.prod(-1) // tower.spatial_merge_size**2).tolist()

    def see_less(_: nn.Module, pixels: tuple[Tensor], settings: dict[str, Any]) -> tuple:
        return pixels, {**settings, "grid_thw": distinct}

    def show(_: nn.Module, __: tuple[Tensor], seen: Any) -> Any:
        def everywhere(features: Tensor) -> Tensor:
            parts = features.split(counts)
            return torch.cat([parts[number] for number in places])

        seen.pooler_output = everywhere(seen.pooler_output)
        if getattr(seen, "deepstack_features", None) is not None:  # Qwen3-VL's, of its layers
            seen.deepstack_features = [everywhere(own) for own in seen.deepstack_features]
        return seen

    hooks = [
        tower.register_forward_pre_hook(see_less, with_kwargs=True),
        tower.register_forward_hook(show),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
