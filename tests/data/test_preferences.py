"""Preference sets: pairs, labels, rated images and demonstrations, and the errors of their rows."""

import json
from pathlib import Path

import pytest
from PIL import Image

from flow_grpo.data.preferences import load_preferences
from tests.support.user_errors import raises_user_error

COLORS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200), "gray": (90, 90, 90)}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A directory with one image per color."""
    for name, color in COLORS.items():
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{name}.png")
    return tmp_path


def write(folder: Path, *rows: dict, name: str = "pairs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names(pairs) -> list[tuple[str, str, str]]:
    """Return prompt and file names of pairs."""
    return [(p.prompt.prompt, p.chosen.stem, p.rejected.stem) for p in pairs]


def test_pairs_with_several_rejected_and_probability(folder):
    path = write(
        folder,
        {"prompt": "a", "chosen": "red.png", "rejected": "blue.png"},
        {"caption": "b", "chosen": "red.png", "rejected": ["blue.png", "green.png"]},
        {"prompt": "c", "chosen": "red.png", "rejected": "blue.png", "probability": 0.25},
        {"prompt": "d", "chosen": "red.png", "rejected": "blue.png", "probability": 0.5},
    )
    found = load_preferences(path)
    assert names(found.pairs) == [
        ("a", "red", "blue"),
        ("b", "red", "blue"),
        ("b", "red", "green"),
        ("c", "blue", "red"),  # the other way round
    ]
    assert [pair.probability for pair in found.pairs] == [1, 1, 1, 0.75]
    assert found.left_out == {"ties": 1}
    assert [r.liked for r in found.rated()] == [True, False] * 4
    assert [d.image.stem for d in found.demonstrations()] == ["red", "red", "red", "blue"]
    assert found.pairs[0].prompt.where == f"{path}:1"


def test_pick_a_pic(folder):
    row = {
        "caption": "a",
        "jpg_0": "red.png",
        "jpg_1": "blue.png",
        "image_0_url": "https://x/0.png",
    }
    path = write(
        folder,
        row | {"label_0": 1.0, "label_1": 0.0},
        row | {"label_0": 0, "user_id": 3},
        row | {"label_0": 0.5},
        row | {"label_0": 1, "has_label": False},
    )
    found = load_preferences(path)
    assert names(found.pairs) == [("a", "red", "blue"), ("a", "blue", "red")]
    assert found.left_out == {"unlabelled": 1, "ties": 1}


def test_rated_images_and_demonstrations(folder):
    path = write(
        folder,
        {"prompt": "a", "image": "red.png", "liked": True},
        {"prompt": "a", "image": "blue.png", "label": 0},
        {"prompt": "b", "image": "green.png"},
    )
    found = load_preferences(path)
    rated = [(each.image.stem, each.liked) for each in found.rated()]
    assert rated == [("red", True), ("blue", False), ("green", True)]
    assert [each.image.stem for each in found.demonstrations()] == ["red", "green"]


def test_source_images_of_edits(folder):
    path = write(
        folder,
        {"prompt": "a", "image": "gray.png", "chosen": "red.png", "rejected": "blue.png"},
        {"prompt": "a", "source_image": "gray.png", "image": "red.png", "style": "flat"},
    )
    found = load_preferences(path)
    prompts = [found.pairs[0].prompt, found.images[0].prompt]
    assert [[image.stem for image in prompt.images] for prompt in prompts] == [["gray"]] * 2
    assert prompts[1].metadata == {"prompt": "a", "style": "flat"}


PAIR = {"prompt": "a", "chosen": "red.png", "rejected": "blue.png"}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"chosen": "red.png", "rejected": "blue.png"}, ["prompt"]),
        (PAIR | {"prompt": " "}, ["prompt"]),
        (PAIR | {"rejected": "missing.png"}, ["missing.png"]),
        (PAIR | {"rejected": []}, ["rejected"]),
        ({"prompt": "a", "chosen": "red.png"}, ["rejected"]),
        (PAIR | {"probability": 1.5}, ["1.5"]),
        (PAIR | {"probability": float("nan")}, ["nan"]),
        ({"prompt": "a", "jpg_0": "red.png", "jpg_1": "blue.png", "label_0": -1}, ["label_0"]),
        ({"prompt": "a", "jpg_0": "red.png", "jpg_1": "blue.png"}, ["label_0"]),
        ({"prompt": "a", "image": "red.png", "label": 0.4}, ["0.4"]),
        ({"prompt": "a", "winner": "red.png", "loser": "blue.png"}, ["winner"]),
        (PAIR | {"depth_image": "gray.png"}, ["depth_image"]),
    ],
)
def test_invalid_rows_are_named(folder, row, shown):
    path = write(folder, PAIR, row)
    with raises_user_error(*shown, field=f"{path}:2"):
        load_preferences(path)


def test_nothing_but_ties(folder):
    path = write(folder, PAIR | {"probability": 0.5}, PAIR | {"probability": 0.5})
    with raises_user_error("2 ties", field=str(path)):
        load_preferences(path)
