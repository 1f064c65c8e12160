"""PNG files of ballots, named by a hash of their pixels, and decoding of posted images."""

import base64
import hashlib
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from flow_grpo.atomic_io import fsync_path, make_directories
from flow_grpo.errors import UserError, first_line
from flow_grpo.images import InvalidImage, normalize_image, open_image

FOLDER = "images"
FILE_NAME = re.compile(r"[0-9a-f]{32}\.png")
MAX_POSTED_PIXELS = 4096 * 4096  # as the reward server
POSTED_FORMATS = ("PNG", "WEBP", "JPEG")


class ImageFiles:
    """Writes each image of a directory once, and finds images by name.

    Args:
        folder: Directory of the votes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        make_directories(self.folder)
        for partial in self.folder.glob(".*.png.*"):  # of a server that was killed
            partial.unlink(missing_ok=True)

    def add(self, image: Image.Image) -> str:
        """Write an image durably; return its file name relative to the directory of the votes.

        Images with the same pixels have the same name.
        """
        image = image.convert("RGB")
        size = f"{image.width} {image.height} ".encode()
        name = hashlib.sha256(size + image.tobytes()).hexdigest()[:32] + ".png"
        path = self.folder / name
        if not path.exists():
            partial = path.with_name(f".{name}.{uuid.uuid4().hex}")
            try:
                image.save(partial, format="PNG")
                fsync_path(partial)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            fsync_path(self.folder)
        return f"{FOLDER}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the PNG file with this name; None for other names, whatever exists there."""
        if not FILE_NAME.fullmatch(name):
            return None
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None


def decode_posted(text: object, where: str) -> Callable[[], Image.Image]:
    """Check the header of a posted base64 image; return a function that decodes its pixels.

    Both raise UserError; `where` is its JSON path.
    """
    if not isinstance(text, str):
        raise UserError("must be a base64 string", field=where)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError(f"is not base64 ({error})", field=where) from error

    def open_() -> Image.Image:
        return open_image(data, formats=POSTED_FORMATS, max_pixels=MAX_POSTED_PIXELS)

    def decode() -> Image.Image:
        """Return the image as upright RGB."""
        try:
            with open_() as image:
                return normalize_image(image)
        except Exception as error:  # every format raises other types
            reason = first_line(error)[:200]
            raise UserError(f"cannot be decoded ({reason})", field=where) from error

    try:
        open_().close()
    except InvalidImage as error:
        raise UserError(error.problem, field=where) from error
    return decode
