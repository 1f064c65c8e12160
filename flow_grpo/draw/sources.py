"""The pictures that prompts bring: held against what the model takes, and shown to the rewards."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from flow_grpo.data.images import check_masks, check_pictures
from flow_grpo.data.prompts import Prompt
from flow_grpo.draw.models import ModelAdapter, Size
from flow_grpo.errors import UserError
from flow_grpo.pictures import Picture
from flow_grpo.rewards.protocol import MASK, SOURCE
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.show.console import progress_bar

logger = logging.getLogger("flow_grpo")


def check_sources(
    prompts: Sequence[Prompt],
    model: str,
    family: type[ModelAdapter] | None,
    size: Size,
    accelerator: Accelerator,
) -> None:
    """Refuse prompts with more or fewer pictures than the model takes, and files that are none;
    tell how many lose their edges. Without a `family` any number will do."""
    for prompt in prompts if family else ():
        check_count(prompt, model, family.sources)
        if not family.masks_sources and len(prompt.images) != len(prompts[0].images):
            raise UserError(
                f"{prompt.where}: has {len(prompt.images)} pictures and {prompts[0].where} has "
                f"{len(prompts[0].images)}, and {model} takes equally many with all prompts"
            )
    if not any(prompt.images for prompt in prompts):
        return
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    sizes = on_all_or_none(accelerator, lambda: check_pictures(prompts, accelerator, bar))
    masked = [(p.mask, p.images[0], p.where) for p in prompts if p.mask]
    share = masked[accelerator.process_index :: accelerator.num_processes]
    on_all_or_none(accelerator, lambda: check_masks(share))
    cut = {source for source, own in sizes.items() if loses_edges(*own, size)}
    distinct = list({id(prompt): prompt for prompt in prompts}.values())  # some train and test
    rows = [i for i, prompt in enumerate(distinct) if cut.intersection(prompt.images)]
    if count := len(set(gather_object(rows))):
        logger.info(
            "%d of %d prompts have a picture of another shape than %d x %d: its edges are cut off",
            *(count, len(distinct), size.width, size.height),
        )


def check_count(prompt: Prompt, model: str, takes: range) -> None:
    count, most = len(prompt.images), takes[-1]
    if count in takes:
        return
    has = f"{prompt.where}: has {count or 'no'} picture{'s' if count > 1 else ''}, and {model}"
    if not most:
        raise UserError(f"{has} takes none; leave pictures out with --config.image_column=none")
    if count > most:
        raise UserError(f"{has} takes {most} at most; leave some out")
    raise UserError(
        f'{has} needs one; add its path as "image", or name its column: --config.image_column=NAME'
    )


def loses_edges(width: int, height: int, size: Size) -> bool:
    """Whether it is another shape, by a pixel or more."""
    scale = min(width / size.width, height / size.height)
    return (round(scale * size.width), round(scale * size.height)) != (width, height)


def reward_metadata(prompts: Sequence[Prompt], adapter: ModelAdapter) -> list[dict[str, Any]]:
    """What rewards are told of each, its pictures as the model sees them."""
    opened = _opened(prompts, adapter)
    return [with_sources(prompt, opened.__getitem__) for prompt in prompts]


def sources_of(prompts: Sequence[Prompt], adapter: ModelAdapter) -> list[list[Image.Image]]:
    """The pictures of each as the model sees them."""
    opened = _opened(prompts, adapter)
    return [[opened[picture] for picture in prompt.images] for prompt in prompts]


def _opened(prompts: Sequence[Prompt], adapter: ModelAdapter) -> dict[Picture, Image.Image]:
    """Each once, as the model sees it; masks are cut as their pictures are."""
    named = (picture for prompt in prompts for picture in (*prompt.images, prompt.mask) if picture)
    return {picture: adapter.source(picture) for picture in dict.fromkeys(named)}


def with_sources(prompt: Prompt, show: Callable[[Picture], Image.Image]) -> dict[str, Any]:
    """Its metadata with its picture, or a list of several, and its mask; `show` opens each."""
    if not prompt.images:
        return prompt.metadata
    pictures = [show(picture) for picture in prompt.images]
    masks = {MASK: show(prompt.mask).convert("L")} if prompt.mask else {}
    return {**prompt.metadata, SOURCE: pictures if pictures[1:] else pictures[0], **masks}
