"""Select the frames of a video that a reward scores, and average their scores.

A sample is an image or a video, which is a list of frames. A batch of videos may also be a tensor
(N, F, 3, H, W). The attribute `frames` of a scorer is its rule: "first", "middle", "mean of N"
(N evenly spaced frames, whose scores are averaged) or "clip" (the whole video as one sample).
"""

import base64
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

DEFAULT_FPS = 16.0  # frames per second, as Wan generates


class Video(list[Image.Image]):
    """The frames of a video, with its frame rate and sound."""

    def __init__(
        self, frames: Iterable[Image.Image], *, fps: float = DEFAULT_FPS, audio: Audio | None = None
    ) -> None:
        super().__init__(frames)
        self.fps, self.audio = fps, audio


Sample = Image.Image | list[Image.Image]

FRAMES_OPTION = "frames"
WHOLE_VIDEO = "clip"
# Several frames, because a model that is rewarded for one frame degrades the others.
DEFAULT_FRAMES = "mean of 4"


def frame_indices(count: int, rule: str) -> list[int]:
    """Return the indices that a rule selects from `count` frames, all if it requests more.

    Args:
        count: Number of frames of a video.
        rule: Frame rule; see `check_frame_rule`.
    """
    if rule == WHOLE_VIDEO:
        return list(range(count))
    if rule == "first":
        return [0]
    number = 1 if rule == "middle" else _frames_to_average(rule)
    if number == 1:
        return [count // 2]
    gaps = number - 1
    nearest = ((2 * i * (count - 1) + gaps) // (2 * gaps) for i in range(number))
    return list(dict.fromkeys(nearest))


def select_frames(
    samples: "torch.Tensor | list[Sample]", rule: str
) -> "torch.Tensor | list[Sample]":
    """Return the samples with the selected frames of each video only.

    Images are unchanged, except that for whole videos an image in a list becomes a video of one
    frame.
    """
    if not isinstance(samples, list):
        return _select_in_tensor(samples, rule) if samples.ndim == 5 else samples
    if rule == WHOLE_VIDEO:
        return [sample if is_video(sample) else [sample] for sample in samples]
    if not any(map(is_video, samples)):
        return samples
    return [
        [sample[i] for i in frame_indices(len(sample), rule)] if is_video(sample) else sample
        for sample in samples
    ]


def _select_in_tensor(videos: "torch.Tensor", rule: str) -> "torch.Tensor":
    """Return the frames of `rule` of videos (N, F, 3, H, W), without a device sync."""
    import torch  # imported here because rewards without torch start faster

    if rule == WHOLE_VIDEO:
        return videos
    # indexing with a list would synchronize with the device
    return torch.stack([videos[:, i] for i in frame_indices(videos.shape[1], rule)], dim=1)


def is_video(sample: Any) -> bool:
    """Return whether a sample is a video, that is, a list of frames."""
    return isinstance(sample, list | tuple)


def sample_kind(samples: Sequence[Any]) -> str:
    """Return what the samples are: "answer" for response texts, else "image"."""
    return "answer" if samples and isinstance(samples[0], str) else "image"


def average_over_frames(scores: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Average the scores of consecutive frames into one score per sample.

    Args:
        scores: Scores of all frames, sample by sample.
        counts: Number of frames of each sample.

    Returns:
        For each sample the mean over its finite scores, or its last `Failed` or `NotApplicable` if
        no frame has one.
    """
    means, start = [], 0
    for count in counts:
        part = scores[start : start + count]
        scored = [score for score in part if math.isfinite(score)]
        means.append(sum(scored) / len(scored) if scored else part[-1])
        start += count
    return means


def split_frame_rules(
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Split the options of rewards into frame rules and other options, both by reward."""
    rules, others = {}, {}
    for name, reward_options in options.items():
        if not isinstance(reward_options, Mapping):
            raise UserError(
                "must be a dict of options", field=f"reward_options.{name}", value=reward_options
            )
        others[name] = {key: value for key, value in reward_options.items() if key != FRAMES_OPTION}
        if FRAMES_OPTION in reward_options:
            field = f"reward_options.{name}.{FRAMES_OPTION}"
            rules[name] = check_frame_rule(reward_options[FRAMES_OPTION], field)
    return rules, others


def check_frame_rule(rule: Any, field: str) -> str:
    """Return `rule` if it is valid, else raise a `UserError` that names `field`."""
    if rule not in ("first", "middle", WHOLE_VIDEO) and not (
        isinstance(rule, str) and _frames_to_average(rule)
    ):
        raise UserError(
            f"must be 'first', 'middle', 'mean of N' (N >= 1 frames) or '{WHOLE_VIDEO}' (the whole "
            "video as one sample)",
            field=field,
            value=rule,
        )
    return rule


def resolve_frame_rule(name: str, scorer: Any, requested: str | None, *, custom: bool) -> str:
    """Return the frame rule of reward `name`: the one the config requests, or the scorer's own.

    Raises:
        UserError: If the rule does not suit the scorer.
    """
    own = check_frame_rule(scorer.frames, f"attribute {FRAMES_OPTION} of reward {name!r}")
    rule = reconcile_frame_rules(name, requested, own, custom=custom)
    if scorer.compares_groups and _frames_to_average(rule) > 1:
        raise UserError(
            f"must select one frame, because {name!r} compares samples with each other",
            field=f"reward_options.{name}.{FRAMES_OPTION}",
            value=rule,
            hint="choose 'first' or 'middle'",
        )
    return rule


def reconcile_frame_rules(
    name: str, requested: str | None, own: str, *, custom: bool = False
) -> str:
    """Return the requested rule, or the scorer's `own` if none is requested.

    Raises:
        UserError: One of the rules is for whole videos and the other is not. Custom image rewards
            may request whole videos, since theirs may merely be the default.
    """
    field = f"reward_options.{name}.{FRAMES_OPTION}"
    if requested in (None, own):
        return own
    if own == WHOLE_VIDEO:
        raise UserError(
            f"is invalid, because {name!r} scores whole videos",
            field=field,
            value=requested,
            hint="leave it out",
        )
    if requested == WHOLE_VIDEO and not custom:
        raise UserError(
            f"is invalid, because {name!r} scores images",
            field=field,
            value=requested,
            hint="choose 'first', 'middle' or 'mean of N'",
        )
    return requested


def _frames_to_average(rule: str) -> int:
    """Return N of "mean of N", or 0 for another rule."""
    match = re.fullmatch(r"mean of ([1-9][0-9]{0,5})", rule)
    return int(match[1]) if match else 0


def to_pil(images: "torch.Tensor") -> list[Sample]:
    """Convert images (N, 3, H, W) or videos (N, F, 3, H, W) in [0, 1]; rounds like diffusers."""
    return uint8_to_pil(to_uint8(images))


def as_videos(
    samples: Sequence[Sample], fps: float, audio: Sequence[Audio] | None = None
) -> list[Sample]:
    """Add the frame rate and the sound of each sample to videos; images are unchanged."""
    sounds = audio or [None] * len(samples)
    return [
        Video(sample, fps=fps, audio=sound) if is_video(sample) else sample
        for sample, sound in zip(samples, sounds, strict=True)
    ]


def to_uint8(images: "torch.Tensor") -> "torch.Tensor":
    """Convert (..., 3, H, W) in [0, 1] to (..., H, W, 3) uint8."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(-3, -1)


def uint8_to_pil(pixels: "torch.Tensor") -> list[Sample]:
    """Convert images (N, H, W, 3) or videos (N, F, H, W, 3), uint8, to PIL."""
    return [_array_to_pil(each) for each in pixels.cpu().numpy()]


def _array_to_pil(pixels: "np.ndarray") -> Sample:
    if pixels.ndim == 3:
        return Image.fromarray(pixels)
    return [Image.fromarray(frame) for frame in pixels]


def fetch_images(
    images: "torch.Tensor | list[Sample]", rule: str = DEFAULT_FRAMES
) -> Callable[[], list[Sample | None]]:
    """Start copying images to the CPU; return a function, for another thread, that waits for them.

    The copy from a GPU is queued when this returns, ahead of the work that is launched next. A
    sample with a non-finite pixel in any frame becomes None: as a black image it might score well.

    Args:
        images: (N, 3, H, W) or (N, F, 3, H, W) in [0, 1], or a list, which is returned as it is.
        rule: Which frames of videos to return.
    """
    if isinstance(images, list):
        return lambda: images
    from flow_grpo.perf.transfer import start_copy_to_cpu

    pixels = start_copy_to_cpu(to_uint8(select_frames(images, rule)))
    finite = start_copy_to_cpu(images.isfinite().flatten(1).all(1))

    def wait_for_images() -> list[Sample | None]:
        pairs = zip(uint8_to_pil(pixels()), finite().tolist(), strict=True)
        return [image if is_finite else None for image, is_finite in pairs]

    return wait_for_images


def encode_png_base64(image: Image.Image) -> str:
    """Encode an image for a request as base64 PNG, with fast compression."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
