"""The pictures of data rows: paths beside their file, or bytes. Every mistake names the row."""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from flow_grpo.data.columns import is_base64_image, is_empty
from flow_grpo.errors import UserError, with_nearest_file
from flow_grpo.pictures import Picture, read_picture

if TYPE_CHECKING:
    from accelerate import Accelerator

COLUMNS = ("images", "image")  # of pictures, where no other is named


class Row(Protocol):
    images: tuple[Picture, ...]
    where: str  # file and line


def listed(row: dict[str, Any], where: str, columns: Sequence[str] = COLUMNS) -> list[Any]:
    """What the first of its `columns` that has something names."""
    name = source_column(row, columns)
    given = row[name] if name else []
    given = _json_list(given) if isinstance(given, str) else given  # of a CSV, which has no lists
    given = given if isinstance(given, list) else [given]
    if any(not isinstance(each, str | bytes | dict) for each in given):
        raise UserError(f'{where}: "{name}" must be a list of paths or of bytes, got {given!r:.80}')
    return given


def source_column(row: dict[str, Any], columns: Sequence[str]) -> str | None:
    """The first of `columns` that has a value."""
    return next((name for name in columns if not is_empty(row.get(name))), None)


def _json_list(text: str) -> str | list[Any]:
    """A list that was written as JSON; any other text as it is."""
    with suppress(ValueError, RecursionError):
        if text.lstrip().startswith("[") and isinstance(found := json.loads(text), list):
            return found
    return text


def find_picture(source: Any, folder: Path, where: str, kind: str = "picture") -> Picture:
    """A file that is there, or bytes. `folder`: where paths start."""
    given = source
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str):
        source = _from_text(source, folder, where)
    if not isinstance(source, Path | bytes):
        raise UserError(f"{where}: a {kind} must have bytes or a path, got {given!r:.80}")
    if isinstance(source, Path) and not os.path.isfile(source):
        shown = f"{source!s:.500}"
        message = f"{where}: there is no {kind} {shown}; paths start at {folder}"
        raise UserError(with_nearest_file(message, source))
    return source


def _from_text(source: str, folder: Path, where: str) -> Picture:
    """A path, or one of the two kinds of URL that need no network."""
    scheme, _, rest = source.partition(":")
    if scheme in ("http", "https"):
        raise UserError(f"{where}: {source[:80]} is not fetched; save it, and give its path")
    if scheme == "file":
        return folder / unquote(source.removeprefix("file://"))
    encoded = source if is_base64_image(source) else rest.partition(",")[2]
    if scheme == "data" or encoded is source:
        try:
            decoded = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise UserError(f"{where}: a picture is not base64 ({error})") from error
        if not decoded:
            raise UserError(f"{where}: {source[:80]} has no data; give a path or the image")
        return decoded
    return folder / source


def check_pictures(
    rows: Iterable[Row],
    accelerator: "Accelerator",
    bar: Callable[[Iterable, str, int], Iterable] = lambda items, name, total: items,
) -> dict[Picture, tuple[int, int]]:
    """Decode every picture once: what is cut off would end the run when it is drawn. Each process
    has its share, so that a mistake may be seen by one of them alone. `bar` shows the progress.

    Returns (width, height) of those of this process.
    """
    places: dict[Picture, str] = {}
    for row in rows:
        for source in row.images:
            places.setdefault(source, row.where)
    share = list(places.items())[accelerator.process_index :: accelerator.num_processes]
    with _threads() as pool:
        decoded = pool.imap(lambda item: read_picture(*item).size, share)
        sizes = list(bar(decoded, "checking pictures", len(share)))
    return {source: size for (source, _), size in zip(share, sizes, strict=True)}


def check_masks(masked: Iterable[tuple[Picture, Picture, str]]) -> None:
    """Decode each mask: it must be as large as its picture, which is cut where the mask is. Each
    comes with that picture and with file and line."""

    def check(item: tuple[Picture, Picture, str]) -> None:
        mask, picture, where = item
        (width, height), size = (read_picture(each, where).size for each in (mask, picture))
        if (width, height) != size:
            raise UserError(
                f"{where}: its mask has {width} x {height} pixels and its picture {size[0]} x "
                f"{size[1]}; make both the same"
            )

    with _threads() as pool:
        pool.map(check, masked)


def _threads() -> ThreadPool:
    """Pillow decodes without Python's lock; no more pictures than threads are in memory."""
    return ThreadPool(min(8, os.cpu_count() or 1))


def contents(text: str, images: Iterable[Picture]) -> tuple[str, ...]:
    """By which two rows are the same: the text, and which pictures."""
    return (text, *(_digest(i) if isinstance(i, bytes) else str(i) for i in images))


def digest(picture: Picture) -> str:
    """The same for the same file under another name, or as bytes."""
    try:
        return _digest(picture if isinstance(picture, bytes) else picture.read_bytes())
    except OSError as error:
        raise UserError(f"{picture} cannot be read: {error.strerror}; was it moved?") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
