"""Picture files as somebody may leave them in a data set or a run folder."""

import os
from pathlib import Path
from types import SimpleNamespace

import plot
import pytest
from PIL import EpsImagePlugin, Image
from planted import png_header
from report_runs import make_run
from small_vlm import picture, process, saved

from flow_grpo.data.images import check_pictures
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.questions import read_questions
from flow_grpo.draw.sources import reward_metadata
from flow_grpo.errors import UserError
from flow_grpo.pictures import (
    FORMATS,
    BadPicture,
    TooManyPixels,
    fit_picture,
    open_picture,
    read_picture,
)
from flow_grpo.show.thumbnails import fit


@pytest.fixture
def trace(tmp_path, monkeypatch) -> Path:
    """A file that is there once Ghostscript was started."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for once
    return tmp_path / "started"


def ask(path: Path) -> None:
    rows = path.with_name("rows.jsonl")
    rows.write_text(f'{{"question": "?", "images": ["{path.name}"], "answer": "1"}}\n')
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{path.name} .* no whole PNG, JPEG"):
        check_pictures(read_questions(rows), process())


def report(path: Path) -> None:
    assert fit({0: [path]}, budget=10**6, epochs_at_most=1) == {0: [None]}


def plotted(path: Path) -> None:
    with pytest.raises(UserError, match=rf"{path.name} cannot be decoded .it is no whole PNG"):
        plot.plot_pictures([path.parent], 1, path.with_name("out.png"))


@pytest.mark.parametrize("reader", [ask, report, plotted])
def test_no_picture_starts_another_program(tmp_path, trace, reader):
    folder = make_run(tmp_path / "run", epochs=1, prompts=1) / "samples/eval-00000"
    planted = folder / "0000.png"
    planted.write_bytes(saved(Image.new("RGB", (8, 8)), "EPS"))
    reader(planted)
    assert not trace.exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_these_formats_are_read_whatever_their_names(tmp_path, kind):
    path = tmp_path / "picture.dat"
    whole = saved(picture(0, 48, 64), kind)
    path.write_bytes(whole)
    assert read_picture(path).size == (64, 48)
    path.write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(BadPicture, match=r"^data:3: .*picture.dat cannot be decoded .* whole\?$"):
        read_picture(path, "data:3")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("width", [8193, 13_000, 2**30])
def test_a_picture_of_too_many_pixels_is_refused_before_they_are_decoded(width):
    assert open_picture(png_header(8192, 8192)).size == (8192, 8192)
    with pytest.raises(TooManyPixels, match=r"^x.jsonl:3: a picture of 45 bytes .* shrink it$"):
        read_picture(png_header(width, width), "x.jsonl:3")


def test_rewards_get_a_mask_that_is_cut_as_its_picture_is(tmp_path):
    """Of a wide picture the middle is left, of both alike."""
    picture = Image.new("RGB", (32, 16), "red")
    mask = Image.new("1", (32, 16))
    mask.paste(1, (16, 0, 32, 16))
    for name, each in (("a.png", picture), ("b.png", mask)):
        each.save(tmp_path / name)
    named = Prompt("a", "", {"n": 1}, (tmp_path / "a.png",), tmp_path / "b.png")
    plain = Prompt("a", "", {"mask": "a text"})
    adapter = SimpleNamespace(source=lambda file: fit_picture(file, 8, 8))
    told, untold = reward_metadata([named, plain], adapter)
    assert untold == plain.metadata
    assert told.keys() == {"n", "source", "mask"}
    assert told["mask"].mode == "L"
    shades = [told["mask"].getpixel((x, 4)) for x in (0, 2, 5, 7)]
    assert shades == [0, 0, 255, 255]
