"""Decode the images of a preference set before anything expensive starts.

Images are resized to cover the training size and center-cropped, like source images and
`anchors.data`. Two images of different sizes would be cropped or blurred differently, and the model
would learn this difference instead of the preference. Such pairs are therefore rejected, unless
`preferences.unlike_sizes` is set.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flow_grpo.data.images import check_masks, decoding_pool
from flow_grpo.data.preferences import ComparedImages, PreferenceSet
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource, read_image

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Pixels:
    """Size of a decoded image and the digest of its pixels."""

    width: int
    height: int
    digest: bytes


def check_preferences(
    found: PreferenceSet,
    accelerator: "Accelerator",
    *,
    allow_unlike_sizes: bool = False,
    bar: Callable[[Iterable, str, int], Iterable] = lambda items, name, total: items,
) -> None:
    """Decode every image once, and compare the two images of each pair.

    Rows are divided among the processes, so only one of them may raise.

    Args:
        found: The set.
        accelerator: Gives rank and world size.
        allow_unlike_sizes: Accept pairs of images with different sizes.
        bar: Wraps an iterable in a progress bar, given its label and length.

    Raises:
        UserError: If an image cannot be read, or a pair has equal images or unlike sizes.
    """
    part = slice(accelerator.process_index, None, accelerator.num_processes)
    pairs, images = found.pairs[part], found.images[part]
    first_rows: dict[ImageSource, str] = {}
    for row in (*pairs, *images):
        targets = (row.chosen, row.rejected) if isinstance(row, ComparedImages) else (row.image,)
        for source in (*targets, *row.prompt.images):
            first_rows.setdefault(source, row.prompt.where)
    with decoding_pool() as pool:
        decoded = pool.imap(lambda item: _read_pixels(*item), first_rows.items())
        pixels = list(bar(decoded, "checking preferences", len(first_rows)))
    by_source = dict(zip(first_rows, pixels, strict=True))
    for pair in pairs:
        _check_pair(by_source[pair.chosen], by_source[pair.rejected], pair, allow_unlike_sizes)
    prompts = [row.prompt for row in (*pairs, *images)]
    check_masks([(p.mask, p.images[0], p.where) for p in prompts if p.mask])


def _read_pixels(image: ImageSource, where: str) -> Pixels:
    """Decode an image; return its size and a digest of its pixels."""
    decoded = read_image(image, where)
    return Pixels(*decoded.size, hashlib.sha256(decoded.tobytes()).digest())


def _check_pair(
    chosen: Pixels, rejected: Pixels, pair: ComparedImages, allow_unlike_sizes: bool
) -> None:
    """Raise a UserError for two images with the same pixels, or of unlike sizes."""
    if chosen == rejected:
        raise UserError(
            "has two images with the same pixels", field=pair.prompt.where, hint="remove the row"
        )
    sizes = [f"{each.width} x {each.height}" for each in (chosen, rejected)]
    if sizes[0] != sizes[1] and not allow_unlike_sizes:
        raise UserError(
            f"has a chosen image of {sizes[0]} pixels and a rejected one of {sizes[1]}",
            field=pair.prompt.where,
            hint="make both the same size, or set --config.preferences.unlike_sizes=True to resize "
            "and crop both to the training size",
        )
