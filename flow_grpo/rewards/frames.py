"""Which frames of a video a reward sees, and one score made of theirs.

A sample is a picture, or a clip: a list of pictures in their order. Many clips may also come as a
tensor (N, F, 3, H, W). A scorer keeps its rule as the attribute `frames`; pictures have none to
choose from.
"""

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from flow_grpo.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

Sample = Image.Image | list[Image.Image]

OPTION = "frames"
CLIP = "clip"  # all of them, as one sample
# Several: of a model that is paid for one frame, the others get worse.
DEFAULT = "mean of 4"


def frame_places(count: int, rule: str) -> list[int]:
    """Which of `count` frames the rule chooses; all, where it asks for more than there are."""
    if rule == CLIP:
        return list(range(count))
    if rule == "first":
        return [0]
    number = 1 if rule == "middle" else _number(rule)
    if number == 1:
        return [count // 2]
    gaps = number - 1
    nearest = ((2 * i * (count - 1) + gaps) // (2 * gaps) for i in range(number))
    return list(dict.fromkeys(nearest))


def choose_frames(
    samples: "torch.Tensor | list[Sample]", rule: str
) -> "torch.Tensor | list[Sample]":
    """The clips with the chosen frames only. Pictures stay as they are, unless whole clips are
    asked for: in a list, a picture is then a clip of one frame."""
    if not isinstance(samples, list):
        return _choose_in_tensor(samples, rule) if samples.ndim == 5 else samples
    if rule == CLIP:
        return [sample if is_clip(sample) else [sample] for sample in samples]
    if not any(map(is_clip, samples)):
        return samples
    return [
        [sample[i] for i in frame_places(len(sample), rule)] if is_clip(sample) else sample
        for sample in samples
    ]


def _choose_in_tensor(clips: "torch.Tensor", rule: str) -> "torch.Tensor":
    import torch  # not at the top: rewards that need no torch start without it

    if rule == CLIP:
        return clips
    # a list as index would wait for the device
    return torch.stack([clips[:, i] for i in frame_places(clips.shape[1], rule)], dim=1)


def is_clip(sample: Any) -> bool:
    return isinstance(sample, list | tuple)


def kind_of(samples: Sequence[Any]) -> str:
    """What is being scored, in a word."""
    return "answer" if samples and isinstance(samples[0], str) else "image"


def mean_of_frames(scores: Sequence[float], counts: Sequence[int]) -> list[float]:
    """One score per sample, of which `counts` says how many scores follow one another: the mean
    over the frames that got one, and a `Failed` or `NotAsked` where none did."""
    means, start = [], 0
    for count in counts:
        part = scores[start : start + count]
        scored = [score for score in part if math.isfinite(score)]
        means.append(sum(scored) / len(scored) if scored else part[-1])
        start += count
    return means


def split_rules(
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The rules among the options of rewards, and the other options."""
    for name, given in options.items():
        if not isinstance(given, Mapping):
            raise UserError(f"reward_options.{name}={given!r} must be a dict of options")
    rules = {
        name: checked_rule(given[OPTION], f"reward_options.{name}.{OPTION}")
        for name, given in options.items()
        if OPTION in given
    }
    rest = {n: {k: v for k, v in given.items() if k != OPTION} for n, given in options.items()}
    return rules, rest


def checked_rule(rule: Any, setting: str) -> str:
    if rule not in ("first", "middle", CLIP) and not (isinstance(rule, str) and _number(rule)):
        raise UserError(
            f"{setting}={rule!r} must be 'first', 'middle', 'mean of N' (N frames, 1 or more) or "
            f"'{CLIP}' (all of them at once)"
        )
    return rule


def rule_of(name: str, scorer: Any, asked: str | None, *, custom: bool) -> str:
    """The rule by which a scorer takes frames, if the user asked for another one than its own."""
    own = checked_rule(scorer.frames, f"reward {name!r}: its attribute {OPTION}")
    rule = agreed_rule(name, asked, own, custom=custom)
    if scorer.compares_groups and _number(rule) > 1:
        raise UserError(
            f"reward_options.{name}.{OPTION}={rule!r}: {name!r} compares samples with each other, "
            "one frame of each; choose 'first' or 'middle'"
        )
    return rule


def agreed_rule(name: str, asked: str | None, own: str, *, custom: bool = False) -> str:
    """The rule to take frames by: the user's, unless it conflicts with the reward's `own`, which
    says whether it takes clips. A custom reward that says nothing takes what the user says."""
    setting = f"reward_options.{name}.{OPTION}={asked!r}"
    if asked in (None, own):
        return own
    if own == CLIP:
        raise UserError(f"{setting} has no use: {name!r} takes whole clips; leave it out")
    if asked == CLIP and not custom:
        raise UserError(
            f"{setting}, but {name!r} scores pictures; choose 'first', 'middle' or 'mean of N'"
        )
    return asked


def _number(rule: str) -> int:
    """N of "mean of N"; 0 for what does not read like that."""
    match = re.fullmatch(r"mean of ([1-9][0-9]{0,5})", rule)
    return int(match[1]) if match else 0


def to_pil(images: "torch.Tensor") -> list[Sample]:
    """Pictures (N, 3, H, W) or clips (N, F, 3, H, W), in [0, 1] -> 8-bit images, or lists of them,
    rounded as diffusers rounds them."""
    return from_bytes(to_bytes(images))


def to_bytes(images: "torch.Tensor") -> "torch.Tensor":
    """(..., 3, H, W) in [0, 1] -> (..., H, W, 3), 8 bits."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(-3, -1)


def from_bytes(pixels: "torch.Tensor") -> list[Sample]:
    return [_sample(each) for each in pixels.cpu().numpy()]


def _sample(pixels: "np.ndarray") -> Sample:
    if pixels.ndim == 3:
        return Image.fromarray(pixels)
    return [Image.fromarray(frame) for frame in pixels]


def fetch_pictures(
    images: "torch.Tensor | list[Sample]", rule: str = DEFAULT
) -> Callable[[], list[Sample | None]]:
    """A function that gives the pictures, or of clips the frames that the rule chooses, to be
    called in another thread.

    None where pixels are not numbers, in any frame: as a black picture it might score well. From a
    GPU they are on their way when this returns, ahead of what the GPU is asked to do next.
    """
    if isinstance(images, list):
        return lambda: images
    from flow_grpo.speed.transfer import fetch

    pixels, whole = fetch(to_bytes(choose_frames(images, rule))), fetch(_whole(images))

    def pictures() -> list[Sample | None]:
        pairs = zip(from_bytes(pixels()), whole().tolist(), strict=True)
        return [picture if ok else None for picture, ok in pairs]

    return pictures


def _whole(images: "torch.Tensor") -> "torch.Tensor":
    return images.isfinite().flatten(1).all(1)


def png_base64(image: Image.Image) -> str:
    """As it travels: lossless, and quick rather than small."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
