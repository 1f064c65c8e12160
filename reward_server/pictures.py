"""From base64 text to RGB pictures, held to limits before any pixel is decoded."""

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from PIL import Image, PngImagePlugin

from flow_grpo.pictures import BadPicture, TooManyPixels, in_8_bits, open_picture
from flow_grpo.rewards.frames import Sample
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

# Bytes per pixel, measured. Pillow stores three channels in four bytes. Besides the RGB copy there
# are: the picture as it is in the file; of a progressive JPEG its coefficients; of a WebP two
# canvases, their copy and what the decoder works on.
RGB_BYTES = 4
DECODER_BYTES = {"PNG": 4, "JPEG": 8, "WEBP": 16}
MOST_DECODER_BYTES = max(DECODER_BYTES.values())  # for what else Pillow makes of a JPEG, as MPO

# This process has a limit of its own, far below the size at which Pillow warns.
Image.MAX_IMAGE_PIXELS = None
# Texts inside a PNG may be compressed a thousandfold; nobody reads them here.
PngImagePlugin.MAX_TEXT_MEMORY = 2**20

Claim = Callable[[int, int], AbstractContextManager[Callable[[], None]]]


def decode(
    samples: Sequence[str | list[str]],
    sources: Sequence[str | list[str] | None] = (),
    masks: Sequence[str | None] = (),
    *,
    max_pixels: int,
    claim: Claim,
) -> tuple[list[Sample], list[Sample | None], list[Image.Image | None]]:
    """All pictures of a request, one after the other: only one decoder is at work at a time. A clip
    becomes the list of its frames; so do several sources.

    `claim` is told their pixels and the bytes that decoding takes besides the result. It may
    wait or refuse before any is decoded, and gives a function to call before each, which raises
    when nobody wants them any more. Messages name a picture by its JSON path.
    """
    columns = {"images": samples, "sources": sources, "masks": masks}
    named = [each for name, column in columns.items() for each in _named(name, column)]
    paths, texts = [path for path, _ in named], [text for _, text in named]
    pixels, at_work = 0, 0
    for path, text in zip(paths, texts, strict=True):
        with _open(path, text, max_pixels) as picture:
            size = picture.width * picture.height
            pixels += size
            at_work = max(at_work, size * DECODER_BYTES.get(picture.format, MOST_DECODER_BYTES))
    with claim(pixels, at_work) as check_wanted:
        pictures = []
        for path, text in zip(paths, texts, strict=True):
            check_wanted()
            with _open(path, text, max_pixels) as picture:
                pictures.append(_rgb(path, picture))
    rest = iter(pictures)
    return tuple(_like(column, rest) for column in columns.values())


def _named(column: str, samples: Sequence[str | list[str] | None]) -> Iterator[tuple[str, str]]:
    """Each picture with its JSON path."""
    for i, sample in enumerate(samples):
        if isinstance(sample, str):
            yield f"{column}[{i}]", sample
        else:
            yield from ((f"{column}[{i}][{j}]", text) for j, text in enumerate(sample or ()))


def _like(samples: Sequence[str | list[str] | None], pictures: Iterator[Image.Image]) -> list[Any]:
    """In the place of each text the next picture."""
    return [
        next(pictures)
        if isinstance(sample, str)
        else sample and list(itertools.islice(pictures, len(sample)))
        for sample in samples
    ]


def _open(path: str, text: str, max_pixels: int) -> Image.Image:
    data = _bytes(path, text)
    _check_format(path, data)
    try:
        return open_picture(data, formats=FORMATS, max_pixels=max_pixels)
    except TooManyPixels as error:
        raise ApiError("image_too_large", f"{path} {error.problem}") from error
    except BadPicture as error:
        raise ApiError("broken_image", f"{path} {error.problem}") from error


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
        rgb = in_8_bits(picture).convert("RGB")  # a copy that does not hold on to the file
    except Exception as error:
        raise _broken(path, error) from error
    rgb.info.clear()  # colour profiles and the like, of any size
    return rgb


def _broken(path: str, error: Exception) -> ApiError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ApiError(
        "broken_image", f"{path} cannot be decoded ({reason[:200]}); is the file whole?"
    )


def _unsupported(path: str, what: str) -> ApiError:
    return ApiError("unsupported_format", f"{path} is {what}; {ACCEPTED}")
