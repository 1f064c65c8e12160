"""Decoding of base64 images to RGB, with limits that are checked before any pixel is decoded."""

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from PIL import Image, PngImagePlugin

from flow_grpo.images import InvalidImage, TooManyPixels, open_image, to_8_bit
from flow_grpo.rewards.frames import Sample
from reward_server.errors import ApiError

FORMATS = ("PNG", "WEBP", "JPEG")
ACCEPTED_FORMATS_HINT = "send PNG, WebP or JPEG"
# Formats that an error message names. Pillow's parsers for them never see network input.
UNSUPPORTED_MAGIC = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML",
}

# Measured bytes per pixel. Pillow stores three channels in four bytes. Besides the RGB copy,
# decoding takes: the image in the file's mode; the coefficients of a progressive JPEG; two canvases
# of a WebP, their copy and its working memory.
RGB_BYTES_PER_PIXEL = 4
DECODER_BYTES_PER_PIXEL = {"PNG": 4, "JPEG": 8, "WEBP": 16}
MAX_DECODER_BYTES_PER_PIXEL = max(DECODER_BYTES_PER_PIXEL.values())  # for JPEG variants such as MPO

# `max_pixels` of the server is far below the size at which Pillow warns.
Image.MAX_IMAGE_PIXELS = None
# Text chunks of a PNG may be compressed a thousandfold; they are not used.
PngImagePlugin.MAX_TEXT_MEMORY = 2**20

ReserveMemory = Callable[[int, int], AbstractContextManager[Callable[[], None]]]


def decode_images(
    samples: Sequence[str | list[str]],
    sources: Sequence[str | list[str] | None] = (),
    masks: Sequence[str | None] = (),
    *,
    max_pixels: int,
    reserve_memory: ReserveMemory,
) -> tuple[list[Sample], list[Sample | None], list[Image.Image | None]]:
    """Decode all images of a request one after the other; errors name an image by its JSON path.

    Args:
        samples: Base64 images, or lists of frames for videos.
        sources: Source image of each sample, a list of several, or None.
        masks: Mask of each sample, or None.
        max_pixels: Maximum pixels of one image.
        reserve_memory: Context manager that is called with all pixels and the extra bytes that
            decoding needs. It may wait or raise before anything is decoded, and yields a function
            that raises if the client has disconnected.

    Returns:
        Samples, sources and masks in the structure of the arguments.
    """
    columns = {"images": samples, "sources": sources, "masks": masks}
    named = [each for name, column in columns.items() for each in _with_json_paths(name, column)]
    pixels, decoder_bytes = 0, 0
    for path, text in named:
        with _open_image(path, text, max_pixels) as image:
            size = image.width * image.height
            per_pixel = DECODER_BYTES_PER_PIXEL.get(image.format, MAX_DECODER_BYTES_PER_PIXEL)
            pixels += size
            decoder_bytes = max(decoder_bytes, size * per_pixel)
    with reserve_memory(pixels, decoder_bytes) as check_connected:
        decoded = []
        for path, text in named:
            check_connected()
            with _open_image(path, text, max_pixels) as image:
                decoded.append(_to_rgb(path, image))
    remaining = iter(decoded)
    return tuple(_replace_texts(column, remaining) for column in columns.values())


def _with_json_paths(
    column: str, samples: Sequence[str | list[str] | None]
) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, base64 text) of each image."""
    for i, sample in enumerate(samples):
        if isinstance(sample, str):
            yield f"{column}[{i}]", sample
        else:
            yield from ((f"{column}[{i}][{j}]", text) for j, text in enumerate(sample or ()))


def _replace_texts(
    samples: Sequence[str | list[str] | None], images: Iterator[Image.Image]
) -> list[Any]:
    """Replace each text by the next image."""
    replaced: list[Any] = []
    for sample in samples:
        if isinstance(sample, str):
            replaced.append(next(images))
        else:
            replaced.append(sample and list(itertools.islice(images, len(sample))))
    return replaced


def _open_image(path: str, text: str, max_pixels: int) -> Image.Image:
    """Open a base64 image; raise the `ApiError` for its defect, with its JSON path."""
    data = _decode_base64(path, text)
    _check_format(path, data)
    try:
        return open_image(data, formats=FORMATS, max_pixels=max_pixels)
    except TooManyPixels as error:
        raise ApiError("image_too_large", f"{path} {error.problem}") from error
    except InvalidImage as error:
        raise ApiError("broken_image", f"{path} {error.problem}") from error


def _decode_base64(path: str, text: str) -> bytes:
    """Return the bytes of base64 text; raise `ApiError` for other text."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ApiError(
            "invalid_base64",
            f"{path} is not base64 ({error}); send the file in standard base64 without line breaks "
            "or a data: prefix",
        ) from error


def _check_format(path: str, data: bytes) -> None:
    """Raise `ApiError` unless the data start as PNG, JPEG or WebP; name other known formats."""
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if webp or data.startswith((b"\x89PNG", b"\xff\xd8\xff")):
        return
    kinds = [
        f"a {name} file" for magic, name in UNSUPPORTED_MAGIC.items() if data.startswith(magic)
    ]
    if data[4:8] == b"ftyp":
        kinds.append("an AVIF, HEIC or video file")
    if kinds:
        raise ApiError("unsupported_format", f"{path} is {kinds[0]}; {ACCEPTED_FORMATS_HINT}")
    start = f"its {len(data)} bytes start with {data[:8]!r}" if data else "it is empty"
    raise ApiError("not_an_image", f"{path} is not an image: {start}; {ACCEPTED_FORMATS_HINT}")


def _to_rgb(path: str, image: Image.Image) -> Image.Image:
    """Decode an image to 8-bit RGB without metadata; raise `ApiError` if that fails."""
    try:
        rgb = to_8_bit(image).convert("RGB")  # decodes; the copy does not reference the file
    except Exception as error:  # every format raises other types
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"{path} cannot be decoded ({reason[:200]}); is the file complete?"
        raise ApiError("broken_image", message) from error
    rgb.info.clear()  # color profiles and other metadata may be large
    return rgb
