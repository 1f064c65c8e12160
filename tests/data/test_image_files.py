"""Damaged, malicious and oversized image files in data sets and run directories."""

import os
from pathlib import Path
from types import SimpleNamespace

import plot
import pytest
from malicious_files import png_header
from PIL import EpsImagePlugin, Image
from report_runs import make_run
from small_vlm import encode_image, process_info, random_image
from user_errors import raises_user_error

from flow_grpo.data.images import check_images
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.questions import QuestionLayout
from flow_grpo.data.rows import read_file
from flow_grpo.diffusion.source_images import reward_metadata
from flow_grpo.images import (
    FORMATS,
    InvalidImage,
    TooManyPixels,
    open_image,
    read_image,
    resize_and_crop,
)
from flow_grpo.report.thumbnails import encode_thumbnails


@pytest.fixture
def trace(tmp_path, monkeypatch) -> Path:
    """Return a file that exists only after Ghostscript was started."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow caches the lookup
    return tmp_path / "started"


def read_as_question(path: Path) -> None:
    rows = path.with_name("rows.jsonl")
    rows.write_text(f'{{"question": "?", "images": ["{path.name}"], "answer": "1"}}\n')
    with raises_user_error("rows.jsonl:1", path.name, "PNG, JPEG"):
        check_images(read_file(rows, QuestionLayout()), process_info())


def read_in_report(path: Path) -> None:
    assert encode_thumbnails({0: [path]}, budget=10**6, max_epochs=1) == {0: [None]}


def read_in_plot(path: Path) -> None:
    with raises_user_error(path.name, "PNG, JPEG"):
        plot.plot_images([path.parent], 1, path.with_name("out.png"))


@pytest.mark.parametrize("reader", [read_as_question, read_in_report, read_in_plot])
def test_no_image_starts_another_program(tmp_path, trace, reader):
    folder = make_run(tmp_path / "run", epochs=1, prompts=1) / "samples/eval-00000"
    planted = folder / "0000.png"
    planted.write_bytes(encode_image(Image.new("RGB", (8, 8)), "EPS"))
    reader(planted)
    assert not trace.exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_supported_formats_are_read_under_any_file_name(tmp_path, kind):
    path = tmp_path / "image.dat"
    whole = encode_image(random_image(0, 48, 64), kind)
    path.write_bytes(whole)
    assert read_image(path).size == (64, 48)
    path.write_bytes(whole[: len(whole) * 9 // 10])
    with raises_user_error("data:3", "image.dat", kind=InvalidImage):
        read_image(path, "data:3")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("width", [8193, 13_000, 2**30])
def test_an_image_with_too_many_pixels_is_rejected_before_it_is_decoded(width):
    assert open_image(png_header(8192, 8192)).size == (8192, 8192)
    with raises_user_error("x.jsonl:3", "45 bytes", kind=TooManyPixels):
        read_image(png_header(width, width), "x.jsonl:3")


def test_rewards_get_a_mask_that_is_cropped_like_its_image(tmp_path):
    """The centre of a wide image remains, and the same part of its mask."""
    mask = Image.new("1", (32, 16))
    mask.paste(1, (16, 0, 32, 16))
    Image.new("RGB", (32, 16), "red").save(tmp_path / "a.png")
    mask.save(tmp_path / "b.png")
    named = Prompt("a", "", {"n": 1}, (tmp_path / "a.png",), tmp_path / "b.png")
    plain = Prompt("a", "", {"mask": "a text"})
    adapter = SimpleNamespace(load_source_frames=lambda file: [resize_and_crop(file, 8, 8)])
    with_mask, without_mask = reward_metadata([named, plain], adapter)
    assert without_mask == plain.metadata
    assert with_mask.keys() == {"n", "source", "mask"}
    assert with_mask["mask"].mode == "L"
    assert [with_mask["mask"].getpixel((x, 4)) for x in (0, 2, 5, 7)] == [0, 0, 255, 255]
