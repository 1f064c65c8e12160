"""The one place where picture files are opened: few formats, and so many pixels at most."""

import io
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from flow_grpo.errors import UserError, first_line

# Others that Pillow can open start programs, as EPS does Ghostscript, whatever the file is called.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**26  # 8192 x 8192: a file of a few KB may hold more than there is memory for
Picture = Path | bytes  # a file, or what is in it
# Pillow warns of what is refused here in one line, and refuses twice as many pixels itself.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class BadPicture(UserError):
    """A file that is no picture, or a damaged one."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.problem = problem


class TooManyPixels(BadPicture):
    pass


def open_picture(
    source: Picture,
    where: str = "",
    *,
    formats: tuple[str, ...] = FORMATS,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Its size is known, its pixels are not yet read. `where`: the row that names it."""
    name = _named(source, where)
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        picture = Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        known = f"{', '.join(formats[:-1])} or {formats[-1]}"
        problem = f"cannot be decoded (it is no whole {known} file); save it as one of these"
        raise BadPicture(name, problem) from error
    except Image.DecompressionBombError as error:
        raise TooManyPixels(name, f"is too large ({first_line(error)}); shrink it") from error
    except Exception as error:  # each format has errors of its own
        raise _broken(name, error) from error
    width, height = picture.size
    if width * height > max_pixels:
        picture.close()
        problem = f"has {width} x {height} pixels; at most {max_pixels} are allowed, shrink it"
        raise TooManyPixels(name, problem)
    return picture


def read_picture(source: Picture, where: str = "") -> Image.Image:
    with open_picture(source, where) as opened:
        try:
            return upright(opened)
        except Exception as error:  # only now a file that is cut off is noticed
            raise _broken(_named(source, where), error) from error


def upright(picture: Image.Image) -> Image.Image:
    """As its camera was held, on white where it is transparent, and in 8-bit RGB."""
    picture = in_8_bits(ImageOps.exif_transpose(picture))
    if picture.has_transparency_data:  # without which black on nothing is black on black
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def fit_picture(source: Picture, width: int, height: int) -> Image.Image:
    """Scaled, and where its shape is another, cut in the middle; never squeezed."""
    return ImageOps.fit(read_picture(source), (width, height), Image.Resampling.LANCZOS)


def in_8_bits(picture: Image.Image) -> Image.Image:
    """Pillow's own conversion of 16-bit grey turns all above 255 white."""
    if picture.mode.startswith("I"):
        return picture.point(lambda value: value / 256).convert("L")
    return picture


def _named(source: Picture, where: str) -> str:
    name = f"a picture of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    return f"{where}: {name}" if where else name


def _broken(name: str, error: Exception) -> BadPicture:
    return BadPicture(name, f"cannot be decoded ({first_line(error)[:200]}); is the file whole?")
