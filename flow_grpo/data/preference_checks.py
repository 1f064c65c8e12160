"""Decode the images of a preference set before anything expensive starts.

Images are resized to cover the training size and cropped at the center, as source images and
`anchors.data` are. Two images of unlike sizes would lose different parts or be blurred differently,
which would be learned in place of what people preferred, so they are rejected unless the user
accepts them.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flow_grpo.data.images import decoding_pool
from flow_grpo.data.prompts import Prompt
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource, read_image

if TYPE_CHECKING:
    from accelerate import Accelerator


class RowWithTargets(Protocol):
    """A row of a preference set: a pair of images, or a single one."""

    prompt: Prompt
    images: tuple[ImageSource, ...]


@dataclass(frozen=True)
class Pixels:
    """Size of a decoded image and the digest of its pixels."""

    width: int
    height: int
    digest: bytes


def check_preferences(
    rows: Sequence[RowWithTargets],
    accelerator: "Accelerator",
    *,
    allow_unlike_sizes: bool = False,
    bar: Callable[[Iterable, str, int], Iterable] = lambda items, name, total: items,
) -> None:
    """Decode every image once, and compare the two of each pair.

    Rows are divided among the processes, so only one of them may raise.

    Args:
        rows: Pairs and single images.
        accelerator: Gives rank and world size.
        allow_unlike_sizes: Accept pairs of images with different sizes.
        bar: Wraps an iterable in a progress bar, given its label and length.

    Raises:
        UserError: If an image cannot be read, or a pair has equal images or unlike sizes.
    """
    rows = rows[accelerator.process_index :: accelerator.num_processes]
    first_rows: dict[ImageSource, str] = {}
    for row in rows:
        for image in row.images:
            first_rows.setdefault(image, row.prompt.where)
    with decoding_pool() as pool:
        decoded = pool.imap(lambda item: _read_pixels(*item), first_rows.items())
        pixels = list(bar(decoded, "checking preferences", len(first_rows)))
    by_source = dict(zip(first_rows, pixels, strict=True))
    for row in rows:
        if len(row.images) == 2:
            chosen, rejected = (by_source[image] for image in row.images)
            _check_pair(chosen, rejected, row.prompt.where, allow_unlike_sizes)


def _read_pixels(image: ImageSource, where: str) -> Pixels:
    """Decode an image."""
    decoded = read_image(image, where)
    return Pixels(*decoded.size, hashlib.sha256(decoded.tobytes()).digest())


def _check_pair(chosen: Pixels, rejected: Pixels, where: str, allow_unlike_sizes: bool) -> None:
    """Raise a UserError for two images with the same pixels, or of unlike sizes."""
    if chosen == rejected:
        raise UserError("has two images with the same pixels", field=where, hint="remove the row")
    sizes = [f"{each.width} x {each.height}" for each in (chosen, rejected)]
    if sizes[0] != sizes[1] and not allow_unlike_sizes:
        raise UserError(
            f"prefers an image of {sizes[0]} pixels to one of {sizes[1]}",
            field=where,
            hint="make both the same size, or set --config.preferences.unlike_sizes=True to resize "
            "and crop both to the training size",
        )
