"""Images of data rows: paths relative to the data file, data URLs or bytes.

Errors carry the row (`where`: file and line) as their `field`.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote

from flow_grpo.atomic_io import write_bytes_atomic
from flow_grpo.data.columns import is_base64_image, is_empty, parse_json_or_none
from flow_grpo.errors import UserError, did_you_mean_file, join_hints
from flow_grpo.images import ImageSource, read_image

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
IMAGE_COLUMNS = ("images", "image")  # default columns, in order of precedence


class RowWithImages(Protocol):
    """A row of a dataset with images, such as a `Prompt` or a `Question`."""

    images: tuple[ImageSource, ...]
    where: str  # file and line


def listed_images(
    row: dict[str, Any], where: str, columns: Sequence[str] = IMAGE_COLUMNS
) -> list[Any]:
    """Return the unresolved images of a row, from the first of `columns` that is not empty.

    Raises:
        UserError: If its value is not a path, bytes, a dict or a list of these.
    """
    name = first_nonempty_column(row, columns)
    given = row[name] if name else []
    if isinstance(given, str) and given.lstrip().startswith("["):  # a list in CSV
        listed = parse_json_or_none(given)
        given = listed if isinstance(listed, list) else given
    given = given if isinstance(given, list) else [given]
    if any(not isinstance(each, str | bytes | dict) for each in given):
        raise UserError(
            f'needs a list of paths or bytes in column "{name}", got {given!r:.80}', field=where
        )
    return given


def first_nonempty_column(row: dict[str, Any], columns: Sequence[str]) -> str | None:
    """Return the first of `columns` that has a value in this row."""
    return next((name for name in columns if not is_empty(row.get(name))), None)


def find_image(source: Any, folder: Path, where: str, kind: str = "image") -> ImageSource:
    """Resolve an image, mask or video of a row to an existing file or to bytes.

    Args:
        source: Path, `file:` or `data:` URL, base64 text, bytes, or a dict with "bytes" or "path".
        folder: Directory that relative paths start from.
        where: File and row, the `field` of errors.
        kind: What the source is, for error messages.
    """
    given = source
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str):
        source = _from_text(source, folder, where)
    if not isinstance(source, Path | bytes):
        raise UserError(f"needs a path or bytes for each {kind}, got {given!r:.80}", field=where)
    if isinstance(source, Path) and not os.path.isfile(source):
        raise UserError(
            f"names a missing {kind} {source!s:.500}",
            field=where,
            hint=join_hints(f"paths are relative to {folder}", did_you_mean_file(source)),
        )
    return source


def _from_text(source: str, folder: Path, where: str) -> ImageSource:
    """Resolve a path, a URL that needs no network access, or base64 text."""
    scheme, _, rest = source.partition(":")
    if scheme in ("http", "https"):
        raise UserError(
            f"has the URL {source[:80]}, which is not downloaded",
            field=where,
            hint="save the file and pass its path",
        )
    if scheme == "file":
        return folder / unquote(source.removeprefix("file://"))
    encoded = source if is_base64_image(source) else rest.partition(",")[2]
    if scheme == "data" or encoded is source:
        try:
            decoded = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise UserError(f"has an image that is not base64 ({error})", field=where) from error
        if not decoded:
            raise UserError(
                f"has the data URL {source[:80]} without data",
                field=where,
                hint="pass a path or the image",
            )
        return decoded
    return folder / source


def cache_images(images: Sequence[ImageSource], folder: str) -> tuple[ImageSource, ...]:
    """Write images that are bytes to files in `folder`, named by their digest; return their paths.

    Several processes and runs may share the folder. Without one, images are returned unchanged.
    """
    if not folder:
        return tuple(images)
    return tuple(
        _cached(each, Path(folder)) if isinstance(each, bytes) else each for each in images
    )


def _cached(image: bytes, folder: Path) -> Path:
    path = folder / _digest(image)
    if not path.is_file() or path.stat().st_size != len(image):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(path, image)
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror}", field="image_cache", value=str(folder)
            ) from error
    return path


def check_images(
    rows: Iterable[RowWithImages],
    accelerator: "Accelerator",
    bar: Callable[[Iterable, str, int], Iterable] = lambda items, name, total: items,
) -> dict[ImageSource, tuple[int, int]]:
    """Decode every distinct image once, so that a damaged file fails now and not in mid-run.

    Images are divided among the processes, so only one of them may raise.

    Args:
        rows: Rows with `images`.
        accelerator: Gives rank and world size.
        bar: Wraps an iterable in a progress bar, given its label and length.

    Returns:
        (width, height) of each image that this process decoded.
    """
    local = distinct_on_rank(((i, row.where) for row in rows for i in row.images), accelerator)
    with decoding_pool() as pool:
        decoded = pool.imap(lambda item: read_image(*item).size, local)
        sizes = list(bar(decoded, "checking images", len(local)))
    return {source: size for (source, _), size in zip(local, sizes, strict=True)}


def distinct_on_rank(
    sources: Iterable[tuple[T, str]], accelerator: "Accelerator"
) -> list[tuple[T, str]]:
    """Return this process's part of the distinct images or videos.

    Args:
        sources: (image or video, file and row); the first row of each is kept.
        accelerator: Gives rank and world size.
    """
    first_rows: dict[T, str] = {}
    for source, where in sources:
        first_rows.setdefault(source, where)
    return list(first_rows.items())[accelerator.process_index :: accelerator.num_processes]


def check_masks(masked: Iterable[tuple[ImageSource, ImageSource, str]]) -> None:
    """Decode each mask and reject one whose size differs from its image.

    Args:
        masked: (mask, image, file and row) of each masked row.
    """

    def check(item: tuple[ImageSource, ImageSource, str]) -> None:
        """Raise a UserError if the mask cannot be read or has another size than its image."""
        mask, image, where = item
        width, height = read_image(mask, where).size
        image_width, image_height = read_image(image, where).size
        if (width, height) != (image_width, image_height):
            raise UserError(
                f"has a mask of {width} x {height} pixels for an image of {image_width} x "
                f"{image_height}",
                field=where,
                hint="make both the same size",
            )

    with decoding_pool() as pool:
        pool.map(check, masked)


def decoding_pool() -> ThreadPool:
    """Return a thread pool: Pillow releases the GIL while it decodes."""
    return ThreadPool(min(8, os.cpu_count() or 1))


def row_identity(text: str, images: Iterable[ImageSource]) -> tuple[str, ...]:
    """Return a key that two rows share if their text and images are the same."""
    return (text, *(_digest(i) if isinstance(i, bytes) else str(i) for i in images))


def image_digest(image: ImageSource) -> str:
    """Return the SHA-256 digest of an image's encoded bytes, whatever its path."""
    try:
        return _digest(image if isinstance(image, bytes) else image.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", field=image, hint="was the file moved?"
        ) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
