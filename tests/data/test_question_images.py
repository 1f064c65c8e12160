"""Decoding of images with EXIF rotation, transparency, unusual modes and extreme sizes."""

import pytest
import small_vlm
from PIL import Image
from small_vlm import encode_image
from user_errors import raises_user_error

from flow_grpo.data.questions import Question
from flow_grpo.images import read_image

ORIENTATION, TURNED_RIGHT = 0x0112, 6


def make_question(source: bytes) -> Question:
    return Question("?", (source,), "1", {}, "data.jsonl:3")


@pytest.fixture(scope="module")
def encoder():
    return small_vlm.encoder(small_vlm.build())


def test_exif_orientation_is_applied(encoder):
    exif = Image.Exif()
    exif[ORIENTATION] = TURNED_RIGHT
    photo = encode_image(small_vlm.random_image(0, 32, 48), "JPEG", exif=exif)
    assert read_image(photo, "").size == (32, 48)
    assert encoder.prompt_length(make_question(photo)) == len(encoder.encode(make_question(photo)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    drawing = Image.new("RGBA", (32, 32))  # transparent black
    drawing.paste("black", (0, 0, 16, 32))
    drawing = drawing.quantize(4) if mode == "P" else drawing.convert(mode)
    seen = read_image(encode_image(drawing), "")
    assert seen.mode == "RGB"
    assert [seen.getpixel((x, 5)) for x in (5, 25)] == [(0, 0, 0), (255, 255, 255)]


def test_16_bit_grayscale_keeps_its_levels():
    scan = Image.new("I;16", (256, 1))
    for x in range(256):
        scan.putpixel((x, 0), 257 * x)
    seen = read_image(encode_image(scan), "")
    assert [seen.getpixel((x, 0)) for x in range(256)] == [(x, x, x) for x in range(256)]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16"])
def test_every_mode_and_a_single_pixel_are_read(encoder, mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    for size in ((1, 1), (37, 61)):
        question = make_question(encode_image(Image.new(mode, size), kind))
        assert encoder.prompt_length(question) == len(encoder.encode(question))


def test_an_image_with_an_extreme_aspect_ratio_is_rejected(encoder):
    with raises_user_error("data.jsonl:3", "10000 x 10", "200"):
        encoder.check_prompt_lengths(
            [make_question(encode_image(Image.new("RGB", (10000, 10))))], limit=100
        )
