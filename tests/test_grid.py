"""Pictures side by side: what is written over and under them."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from flow_grpo.show import grid
from flow_grpo.show.grid import (
    GAP,
    LINE,
    fitted,
    paired_grid,
    picture_grid,
    score_text,
    source_columns,
    strip,
)

LONG = "a very long prompt about a sign that stands in front of a house by the sea"


@pytest.fixture
def pen():
    return ImageDraw.Draw(Image.new("RGB", (1, 1)))


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """The texts of a grid, in their order."""
    texts, draw = [], grid.fitted
    monkeypatch.setattr(
        grid, "fitted", lambda *args, **kwargs: texts.append(draw(*args, **kwargs)) or texts[-1]
    )
    return texts


@pytest.mark.parametrize("width", [60, 100, 192])
def test_a_long_prompt_is_cut_short_and_its_score_is_not(pen, width):
    text = fitted(pen, LONG, width, end="  0.93")
    assert text.endswith("…  0.93")
    assert LONG.startswith(text.removesuffix("…  0.93"))
    assert width / 2 < pen.textlength(text) <= width


@pytest.mark.parametrize("text", ["", "a", "ab", LONG])
def test_where_there_is_no_room_the_score_alone_is_left(pen, text):
    assert fitted(pen, text, 5, end="  0.93") == "  0.93"


def test_a_short_prompt_stays_as_it_is(pen):
    assert fitted(pen, "a sign", 192, end="  0.93") == "a sign  0.93"


def picture(shade: int) -> Image.Image:
    return Image.new("RGB", (24, 16), (shade, 0, 0))


def test_captions_have_the_scores_and_headings_are_repeated(written):
    images = [picture(10 * i) for i in range(8)]
    drawn = picture_grid(
        images,
        [LONG] * 8,
        [f"0.{i}5" for i in range(8)],
        headings=["before", "after"],
        columns=4,
    )
    assert written[:4] == ["before", "after", "before", "after"]
    assert [text[-6:] for text in written[4:]] == [f"  0.{i}5" for i in range(8)]
    assert drawn.size == (4 * (192 + GAP), LINE + 2 * (LINE + 128 + GAP))
    for i in range(8):
        x, y = i % 4 * (192 + GAP), LINE + i // 4 * (LINE + 128 + GAP) + LINE
        assert drawn.getpixel((x + 96, y + 64)) == (10 * i, 0, 0)


def test_a_pair_has_its_prompt_over_it_and_scores_under_each_picture(written):
    columns = {"base": [picture(0), picture(20)], "step-8": [picture(40), picture(60)]}
    scores = {name: [[f"{name} {row}", "sum"] for row in range(2)] for name in columns}
    drawn = paired_grid(columns, ["one", LONG], scores)
    assert written[0] == "one"
    assert len(written[1]) > 60  # it may be as wide as the row
    assert written[2:] == [
        *("base", "base 0", "sum", "base 1", "sum"),
        *("step-8", "step-8 0", "sum", "step-8 1", "sum"),
    ]
    row = LINE + 128 + 2 * LINE + GAP
    assert drawn.size == (2 * (192 + GAP), LINE + 2 * row)
    for column, images in enumerate(columns.values()):
        for i, image in enumerate(images):
            x, y = column * (192 + GAP), LINE + i * row + LINE
            assert drawn.getpixel((x, y)) == image.getpixel((0, 0))
            assert drawn.getpixel((x + 191, y + 127)) == image.getpixel((0, 0))
            under = np.asarray(drawn)[y + 128 : y + 128 + LINE, x : x + 192]
            assert under.min() < 100 < under.max()


def test_what_pictures_were_made_from_stands_before_them(written):
    sources = source_columns([[picture(80)], [picture(100), picture(120)]])
    assert source_columns([[], []]) == {}
    drawn = paired_grid(
        sources | {"base": [picture(0), picture(20)]}, ["one", "two"], {"base": [["0.5"], ["0.7"]]}
    )
    assert written[2:] == ["source", "source 2", "base", "0.5", "0.7"]
    row = LINE + 128 + LINE + GAP
    found = [
        [drawn.getpixel((x * (192 + GAP), LINE + y * row + LINE))[0] for x in range(3)]
        for y in range(2)
    ]
    assert found == [[80, 255, 0], [100, 120, 20]]  # white where there is none
    assert strip([picture(80), picture(0)]).size == (24 + GAP + 24, 16)


def test_a_score_that_failed_is_told():
    assert [score_text(score) for score in (None, 0.5, -6.528, -0.00421, 0.0)] == [
        "failed",
        "0.50",
        "-6.53",
        "-0.0042",
        "0.00",
    ]
