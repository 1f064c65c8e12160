"""Source images of prompts: check them against the model, and pass them to the rewards."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from flow_grpo.data.images import check_images, check_masks
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import ModelAdapter, Size
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards.protocol import MASK, SOURCE
from flow_grpo.training.distributed import raise_on_all_ranks

logger = logging.getLogger("flow_grpo")


def check_source_images(
    prompts: Sequence[Prompt],
    model: str,
    family: type[ModelAdapter] | None,
    size: Size,
    accelerator: Accelerator,
) -> None:
    """Reject unsupported numbers of images and invalid files; log how many are cropped.

    Args:
        prompts: Training and test prompts.
        model: Name of the model, for messages.
        family: Model family; None accepts any number of images.
        size: Size that images are resized and cropped to.
        accelerator: Divides the images among the processes.
    """
    for prompt in prompts if family else ():
        if family.source_is_video and len(prompt.images) != size.frames:
            raise UserError(
                f"has {len(prompt.images)} images, but {model} needs the {size.frames} frames of a "
                "source video",
                field=prompt.where,
                hint='list the files of its frames as "images", as many as frames',
            )
        check_image_count(prompt, model, family.num_source_images)
        if not family.masks_source_images and len(prompt.images) != len(prompts[0].images):
            raise UserError(
                f"has {len(prompt.images)} images and {prompts[0].where} has "
                f"{len(prompts[0].images)}, but {model} needs the same number for all prompts",
                field=prompt.where,
            )
    if not any(prompt.images for prompt in prompts):
        return
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    sizes = raise_on_all_ranks(accelerator, lambda: check_images(prompts, accelerator, bar))
    masked = [(p.mask, p.images[0], p.where) for p in prompts if p.mask]
    rank_masks = masked[accelerator.process_index :: accelerator.num_processes]
    raise_on_all_ranks(accelerator, lambda: check_masks(rank_masks))
    cropped = {source for source, shape in sizes.items() if needs_crop(*shape, size)}
    distinct = list({id(prompt): prompt for prompt in prompts}.values())  # some are in both sets
    rows = [i for i, prompt in enumerate(distinct) if cropped.intersection(prompt.images)]
    if count := len(set(gather_object(rows))):
        what = f"{count} of {len(distinct)} prompts to the shape {size.width} x {size.height}"
        logger.info("cropping the source images of %s", what)


def check_image_count(prompt: Prompt, model: str, allowed: range) -> None:
    """Raise a UserError if the prompt's number of source images is not in `allowed`."""
    count, most = len(prompt.images), allowed[-1]
    if count in allowed:
        return
    if not most:
        rule, hint = "takes none", "leave images out with --config.image_column=none"
    elif count > most:
        rule, hint = f"takes at most {most}", "leave some out"
    else:
        rule = "needs one"
        hint = 'add its path as "image", or name its column: --config.image_column=NAME'
    images = "1 image" if count == 1 else f"{count} images"
    raise UserError(f"has {images}, but {model} {rule}", field=prompt.where, hint=hint)


def needs_crop(width: int, height: int, size: Size) -> bool:
    """Return whether the aspect ratio differs from that of `size` by a pixel or more."""
    scale = min(width / size.width, height / size.height)
    return (round(scale * size.width), round(scale * size.height)) != (width, height)


def reward_metadata(prompts: Sequence[Prompt], adapter: ModelAdapter) -> list[dict[str, Any]]:
    """Return the metadata that rewards get of each prompt, with images as the model sees them."""
    loaded = _load_images(prompts, adapter)
    return [metadata_with_images(prompt, loaded.__getitem__) for prompt in prompts]


def load_source_images(prompts: Sequence[Prompt], adapter: ModelAdapter) -> list[list[Image.Image]]:
    """Load the source images of each prompt as the model sees them."""
    loaded = _load_images(prompts, adapter)
    return [[loaded[image] for image in prompt.images] for prompt in prompts]


def _load_images(
    prompts: Sequence[Prompt], adapter: ModelAdapter
) -> dict[ImageSource, Image.Image]:
    """Load each image once; masks are cropped like their images."""
    named = (image for prompt in prompts for image in (*prompt.images, prompt.mask) if image)
    return {image: adapter.load_source_image(image) for image in dict.fromkeys(named)}


def metadata_with_images(
    prompt: Prompt, open_image: Callable[[ImageSource], Image.Image]
) -> dict[str, Any]:
    """Return the metadata of a prompt with its image, or list of images, and its mask."""
    if not prompt.images:
        return prompt.metadata
    images = [open_image(image) for image in prompt.images]
    masks = {MASK: open_image(prompt.mask).convert("L")} if prompt.mask else {}
    return {**prompt.metadata, SOURCE: images if images[1:] else images[0], **masks}
