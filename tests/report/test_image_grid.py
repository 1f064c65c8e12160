"""Image grids: captions, headings and scores."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from flow_grpo.report import grid
from flow_grpo.report.grid import (
    CELL_GAP,
    LINE_HEIGHT,
    comparison_grid,
    concatenate_images,
    format_score,
    image_grid,
    source_image_columns,
    truncate_to_width,
)

LONG = "a very long prompt about a sign that stands in front of a house by the sea"


@pytest.fixture
def pen():
    return ImageDraw.Draw(Image.new("RGB", (1, 1)))


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """The texts of a grid, in their order."""
    texts, draw = [], grid.truncate_to_width
    monkeypatch.setattr(
        grid,
        "truncate_to_width",
        lambda *args, **kwargs: texts.append(draw(*args, **kwargs)) or texts[-1],
    )
    return texts


@pytest.mark.parametrize("width", [60, 100, 192])
def test_a_long_prompt_is_truncated_and_its_score_is_not(pen, width):
    text = truncate_to_width(pen, LONG, width, end="  0.93")
    assert text.endswith("…  0.93")
    assert LONG.startswith(text.removesuffix("…  0.93"))
    assert width / 2 < pen.textlength(text) <= width


@pytest.mark.parametrize("text", ["", "a", "ab", LONG])
def test_without_space_only_the_score_remains(pen, text):
    assert truncate_to_width(pen, text, 5, end="  0.93") == "  0.93"


def test_a_short_prompt_is_unchanged(pen):
    assert truncate_to_width(pen, "a sign", 192, end="  0.93") == "a sign  0.93"


def shaded(shade: int) -> Image.Image:
    return Image.new("RGB", (24, 16), (shade, 0, 0))


def test_captions_include_scores_and_headings_are_repeated(written):
    images = [shaded(10 * i) for i in range(8)]
    drawn = image_grid(
        images,
        [LONG] * 8,
        [f"0.{i}5" for i in range(8)],
        headings=["before", "after"],
        columns=4,
    )
    assert written[:4] == ["before", "after", "before", "after"]
    assert [text[-6:] for text in written[4:]] == [f"  0.{i}5" for i in range(8)]
    assert drawn.size == (4 * (192 + CELL_GAP), LINE_HEIGHT + 2 * (LINE_HEIGHT + 128 + CELL_GAP))
    for i in range(8):
        x, y = (
            i % 4 * (192 + CELL_GAP),
            LINE_HEIGHT + i // 4 * (LINE_HEIGHT + 128 + CELL_GAP) + LINE_HEIGHT,
        )
        assert drawn.getpixel((x + 96, y + 64)) == (10 * i, 0, 0)


def test_a_pair_has_its_prompt_above_and_scores_below_each_image(written):
    columns = {
        "base": [shaded(0), shaded(20)],
        "step-8": [shaded(40), shaded(60)],
    }
    scores = {name: [[f"{name} {row}", "sum"] for row in range(2)] for name in columns}
    drawn = comparison_grid(columns, ["one", LONG], scores)
    assert written[0] == "one"
    assert len(written[1]) > 60  # it may be as wide as the row
    assert written[2:] == [
        *("base", "base 0", "sum", "base 1", "sum"),
        *("step-8", "step-8 0", "sum", "step-8 1", "sum"),
    ]
    row = LINE_HEIGHT + 128 + 2 * LINE_HEIGHT + CELL_GAP
    assert drawn.size == (2 * (192 + CELL_GAP), LINE_HEIGHT + 2 * row)
    for column, images in enumerate(columns.values()):
        for i, image in enumerate(images):
            x, y = column * (192 + CELL_GAP), LINE_HEIGHT + i * row + LINE_HEIGHT
            assert drawn.getpixel((x, y)) == image.getpixel((0, 0))
            assert drawn.getpixel((x + 191, y + 127)) == image.getpixel((0, 0))
            under = np.asarray(drawn)[y + 128 : y + 128 + LINE_HEIGHT, x : x + 192]
            assert under.min() < 100 < under.max()


def test_source_images_are_in_the_first_columns(written):
    sources = source_image_columns([[shaded(80)], [shaded(100), shaded(120)]])
    assert source_image_columns([[], []]) == {}
    drawn = comparison_grid(
        sources | {"base": [shaded(0), shaded(20)]},
        ["one", "two"],
        {"base": [["0.5"], ["0.7"]]},
    )
    assert written[2:] == ["source", "source 2", "base", "0.5", "0.7"]
    row = LINE_HEIGHT + 128 + LINE_HEIGHT + CELL_GAP
    found = [
        [
            drawn.getpixel((x * (192 + CELL_GAP), LINE_HEIGHT + y * row + LINE_HEIGHT))[0]
            for x in range(3)
        ]
        for y in range(2)
    ]
    assert found == [[80, 255, 0], [100, 120, 20]]  # white where there is none
    assert concatenate_images([shaded(80), shaded(0)]).size == (24 + CELL_GAP + 24, 16)


def test_a_failed_score_is_shown_as_failed():
    assert [format_score(score) for score in (None, 0.5, -6.528, -0.00421, 0.0)] == [
        "failed",
        "0.50",
        "-6.53",
        "-0.0042",
        "0.00",
    ]
