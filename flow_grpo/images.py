"""Open image files safely: a few formats and a limited number of pixels. No other module does."""

import io
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from flow_grpo.errors import UserError, first_line

# Other formats of Pillow may start programs (EPS runs Ghostscript), whatever the file name says.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**26  # 8192 x 8192; a file of a few KB may decode to more than the memory
ImageSource = Path | bytes  # a file or its content
# Images that Pillow warns about are rejected here; it raises an error for twice as many pixels.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class InvalidImage(UserError):
    """An image file is damaged or not an image.

    Attributes:
        problem: The message without the name of the file.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.problem = problem


class TooManyPixels(InvalidImage):
    """An image is larger than allowed."""


def open_image(
    source: ImageSource,
    where: str = "",
    *,
    formats: tuple[str, ...] = FORMATS,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Open an image without decoding its pixels.

    Args:
        source: File or its content.
        where: Row that names it, for messages.
        formats: Accepted formats of Pillow.
        max_pixels: Maximum width times height.
    """
    name = _describe_source(source, where)
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        image = Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        known = f"{', '.join(formats[:-1])} or {formats[-1]}"
        problem = f"cannot be decoded (not a complete {known} file); save it as one of these"
        raise InvalidImage(name, problem) from error
    except Image.DecompressionBombError as error:
        raise TooManyPixels(name, f"is too large ({first_line(error)}); resize it") from error
    except Exception as error:  # every format raises different errors
        raise _invalid_image(name, error) from error
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        problem = f"has {width} x {height} pixels; at most {max_pixels} are allowed, resize it"
        raise TooManyPixels(name, problem)
    return image


def read_image(source: ImageSource, where: str = "") -> Image.Image:
    """Read an image as upright 8-bit RGB; see `open_image`."""
    with open_image(source, where) as opened:
        try:
            return normalize_image(opened)
        except Exception as error:  # truncated files are only noticed here
            raise _invalid_image(_describe_source(source, where), error) from error


def normalize_image(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, composite transparency on white and convert to 8-bit RGB."""
    image = to_8_bit(ImageOps.exif_transpose(image))
    if image.has_transparency_data:  # plain conversion would turn transparent pixels black
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def resize_and_crop(source: ImageSource, width: int, height: int) -> Image.Image:
    """Read an image, resize it to cover the target size, and crop the center."""
    return fit_image(read_image(source), width, height)


def fit_image(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resize an image to cover the target size and crop the center."""
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def to_8_bit(image: Image.Image) -> Image.Image:
    """Convert 16-bit grayscale to 8 bits; Pillow's conversion would clip values above 255."""
    if image.mode.startswith("I"):
        return image.point(lambda value: value / 256).convert("L")
    return image


def _describe_source(source: ImageSource, where: str) -> str:
    name = f"an image of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    return f"{where}: {name}" if where else name


def _invalid_image(name: str, error: Exception) -> InvalidImage:
    return InvalidImage(
        name, f"cannot be decoded ({first_line(error)[:200]}); is the file complete?"
    )
