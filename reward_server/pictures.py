"""From base64 text to RGB pictures, held to limits before any pixel is decoded."""

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from reward_server.errors import ApiError

FORMATS = ("PNG", "WEBP", "JPEG")
ACCEPTED = "send PNG, WebP or JPEG"
# Named in the refusal. Pillow is not asked about them: the fewer of its parsers see what comes
# over the network, the better.
OTHER_FORMATS = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML",
}

# This process has a limit of its own, far below the size at which Pillow warns.
Image.MAX_IMAGE_PIXELS = None


def decode(
    texts: Sequence[str], *, max_pixels: int, claim: Callable[[int], None]
) -> list[Image.Image]:
    """All pictures of a request. `claim` is told their pixels, and may refuse, before any is
    decoded; messages name a picture by its JSON path."""
    opened = [_open(f"images[{i}]", text, max_pixels) for i, text in enumerate(texts)]
    claim(sum(picture.width * picture.height for picture in opened))
    return [_rgb(f"images[{i}]", picture) for i, picture in enumerate(opened)]


def _open(path: str, text: str, max_pixels: int) -> Image.Image:
    data = _bytes(path, text)
    _check_format(path, data)
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header only
    except Exception as error:
        raise _broken(path, error) from error
    width, height = picture.size
    if width * height > max_pixels:
        raise ApiError(
            "image_too_large",
            f"{path} has {width} x {height} pixels; at most {max_pixels} in all are allowed",
        )
    return picture


def _bytes(path: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ApiError(
            "invalid_base64",
            f"{path} is not base64 ({error}); send the file's bytes in standard base64, without "
            "line breaks and without a data: prefix",
        ) from error


def _check_format(path: str, data: bytes) -> None:
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if webp or data.startswith((b"\x89PNG", b"\xff\xd8\xff")):
        return
    if data[4:8] == b"ftyp":
        raise _unsupported(path, "an AVIF, HEIC or video file")
    for magic, name in OTHER_FORMATS.items():
        if data.startswith(magic):
            raise _unsupported(path, f"a {name} file")
    start = f"its {len(data)} bytes start with {data[:8]!r}" if data else "it is empty"
    raise ApiError("not_an_image", f"{path} is not an image: {start}; {ACCEPTED}")


def _rgb(path: str, picture: Image.Image) -> Image.Image:
    # Pillow decodes when pixels are first asked for, and each format has errors of its own.
    try:
        if picture.mode.startswith("I"):
            # 16-bit grey: Pillow's own conversion turns all above 255 white.
            high = (np.asarray(picture) >> 8).astype(np.uint8)
            return Image.fromarray(high).convert("RGB")
        return picture.convert("RGB")  # a copy that does not hold on to the file
    except Exception as error:
        raise _broken(path, error) from error


def _broken(path: str, error: Exception) -> ApiError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ApiError(
        "broken_image", f"{path} cannot be decoded ({reason[:200]}); is the file whole?"
    )


def _unsupported(path: str, what: str) -> ApiError:
    return ApiError("unsupported_format", f"{path} is {what}; {ACCEPTED}")
