"""Pictures as people save them: turned, transparent, tiny, thin."""

import pytest
import small_vlm
from PIL import Image
from small_vlm import saved

from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.pictures import read_picture

ORIENTATION, TURNED_RIGHT = 0x0112, 6


def asked(source: bytes) -> Question:
    return Question("?", (source,), "1", {}, "data.jsonl:3")


@pytest.fixture(scope="module")
def encoder():
    return small_vlm.encoder(small_vlm.build())


def test_a_photo_is_seen_as_its_camera_was_held(encoder):
    exif = Image.Exif()
    exif[ORIENTATION] = TURNED_RIGHT
    photo = saved(small_vlm.picture(0, 32, 48), "JPEG", exif=exif)
    assert read_picture(photo, "").size == (32, 48)
    assert encoder.length(asked(photo)) == len(encoder.encode(asked(photo)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white_as_a_browser_shows_it(mode):
    drawing = Image.new("RGBA", (32, 32))  # of black that is not seen
    drawing.paste("black", (0, 0, 16, 32))
    drawing = drawing.quantize(4) if mode == "P" else drawing.convert(mode)
    seen = read_picture(saved(drawing), "")
    assert seen.mode == "RGB"
    assert [seen.getpixel((x, 5)) for x in (5, 25)] == [(0, 0, 0), (255, 255, 255)]


def test_grey_of_16_bits_keeps_its_shades():
    scan = Image.new("I;16", (256, 1))
    for x in range(256):
        scan.putpixel((x, 0), 257 * x)
    seen = read_picture(saved(scan), "")
    assert [seen.getpixel((x, 0)) for x in range(256)] == [(x, x, x) for x in range(256)]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16"])
def test_every_kind_and_a_single_pixel_is_read(encoder, mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    for size in ((1, 1), (37, 61)):
        question = asked(saved(Image.new(mode, size), kind))
        assert encoder.length(question) == len(encoder.encode(question))


def test_a_picture_that_is_too_thin_for_the_model_is_named(encoder):
    with pytest.raises(UserError, match=r"data.jsonl:3: .*10000 x 10 pixels.* 200"):
        encoder.check_lengths([asked(saved(Image.new("RGB", (10000, 10))))], most=100)
