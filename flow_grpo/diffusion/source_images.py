"""Source images of prompts: check them against the model, and pass them to the rewards."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from flow_grpo.data.images import check_images, check_masks, distinct_on_rank
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.videos import is_video_source, read_source_video
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
    takes_video = family is not None and family.source_is_video
    for prompt in prompts:
        _check_source_video(prompt, model, size.frames if takes_video else None)
    for prompt in prompts if family and not takes_video else ():
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
    sizes = raise_on_all_ranks(
        accelerator, lambda: _decode_sources(prompts, size.frames, accelerator, bar)
    )
    masked = [(p.mask, p.images[0], p.where) for p in prompts if p.mask]
    rank_masks = masked[accelerator.process_index :: accelerator.num_processes]
    raise_on_all_ranks(accelerator, lambda: check_masks(rank_masks))
    cropped = {source for source, shape in sizes.items() if needs_crop(*shape, size)}
    distinct = list({id(prompt): prompt for prompt in prompts}.values())  # some are in both sets
    rows = [i for i, prompt in enumerate(distinct) if cropped.intersection(prompt.images)]
    if count := len(set(gather_object(rows))):
        what = f"{count} of {len(distinct)} prompts to the shape {size.width} x {size.height}"
        logger.info("cropping the source images of %s", what)


def _check_source_video(prompt: Prompt, model: str, frames: int | None) -> None:
    """Reject a video if the model takes images, and anything but a video if it takes one.

    Args:
        prompt: A row of the dataset.
        model: Name of the model, for messages.
        frames: Number of frames of the source video; None for a model that takes images.
    """
    video = next(filter(is_video_source, prompt.images), None)
    if frames is None and video is not None:
        name = "a video" if isinstance(video, bytes) else f"the video {video.name}"
        raise UserError(
            f"has {name}, but {model} takes no source video",
            field=prompt.where,
            hint="use a video-to-video model, or --config.image_column=none",
        )
    if frames is None or (video is not None and len(prompt.images) == 1 and not prompt.mask):
        return
    if video is not None:
        extra = "a mask" if len(prompt.images) == 1 else "other images"
        raise UserError(f"has a source video and {extra}", field=prompt.where, hint="remove these")
    if len(prompt.images) != frames:
        raise UserError(
            f"has {len(prompt.images)} images, but {model} needs the {frames} frames of a source "
            "video",
            field=prompt.where,
            hint='add its path as "video", or list the files of its frames as "images"',
        )


def _decode_sources(
    prompts: Sequence[Prompt],
    frames: int,
    accelerator: Accelerator,
    bar: Callable[[Iterable, str, int], Iterable],
) -> dict[ImageSource, tuple[int, int]]:
    """Decode every distinct source video and image once; see `check_images`.

    A video must have `frames` frames of the same size.
    """
    local = distinct_on_rank(
        ((i, p.where) for p in prompts for i in p.images if is_video_source(i)), accelerator
    )
    sizes = {}
    for video, where in bar(local, "checking videos", len(local)) if local else ():
        for frame in read_source_video(video, frames, where):
            sizes[video] = frame.size
    images = [replace(p, images=tuple(filterfalse(is_video_source, p.images))) for p in prompts]
    return sizes | check_images(images, accelerator, bar)


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
    """Load the source images of each prompt as the model sees them.

    For a source video, only the middle frame is returned.
    """
    loaded = _load_images(prompts, adapter)
    sources = [[frame for image in prompt.images for frame in loaded[image]] for prompt in prompts]
    return [[own[len(own) // 2]] for own in sources] if adapter.source_is_video else sources


def _load_images(
    prompts: Sequence[Prompt], adapter: ModelAdapter
) -> dict[ImageSource, list[Image.Image]]:
    """Load each image or video once; masks are cropped like their images."""
    named = (image for prompt in prompts for image in (*prompt.images, prompt.mask) if image)
    return {image: adapter.load_source_frames(image) for image in dict.fromkeys(named)}


def metadata_with_images(
    prompt: Prompt, load: Callable[[ImageSource], list[Image.Image]]
) -> dict[str, Any]:
    """Return the metadata of a prompt with its image or list of images, and its mask.

    Args:
        prompt: A row of the dataset.
        load: Function that returns an image (as a list of one), or the frames of a video.
    """
    if not prompt.images:
        return prompt.metadata
    images = [frame for image in prompt.images for frame in load(image)]
    masks = {MASK: load(prompt.mask)[0].convert("L")} if prompt.mask else {}
    return {**prompt.metadata, SOURCE: images if images[1:] else images[0], **masks}
