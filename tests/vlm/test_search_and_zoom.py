"""The search and zoom tools: results, limits, and errors that are observations."""

import json
import math

import pytest
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.vlm.environment import parse_step_result
from flow_grpo.vlm.environments.image_zoom import ImageZoom
from flow_grpo.vlm.environments.local_search import Bm25Index, Document, LocalSearch

TEXTS = ["the cat sat on the mat", "a cat and a dog", "birds fly"]


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def observe(environment, response: str) -> tuple[str, list[Image.Image]]:
    """Return text and images of an observation that the trainer accepts; the episode goes on."""
    returned = environment.step(response)
    assert not parse_step_result(returned).done
    (text, images), reward, _ = returned
    inner = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    assert reward == (-0.5 if inner.startswith("Error: ") else 0.0)
    return inner, images


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2])
    )
    (tmp_path / "b.txt").write_text("Birds fly.\n\n" + "Nothing, <image> " * 99)
    (tmp_path / "ignored.bin").write_bytes(b"\0cat")
    return str(tmp_path)


def test_bm25_scores_by_hand():
    index = Bm25Index([Document("", text) for text in TEXTS])
    mean = (6 + 5 + 2) / 3  # words per document
    cat = math.log(1 + 1.5 / 2.5)  # in two of three documents
    the = math.log(1 + 2.5 / 1.5)
    first = cat / (1 + 1.2 * (0.25 + 0.75 * 6 / mean))
    first += the * 2 / (2 + 1.2 * (0.25 + 0.75 * 6 / mean))
    second = cat / (1 + 1.2 * (0.25 + 0.75 * 5 / mean))
    assert index.scores("The CAT?").tolist() == pytest.approx([first, second, 0], abs=1e-12)


def test_search_returns_the_best_documents(corpus):
    environment = LocalSearch(corpus, results=2, max_characters=100, error_reward=-0.5)
    environment.reset({"images": []})
    assert observe(environment, call("search", query="dog cat")) == (
        "[1] a cat and a dog\n[2] the cat sat on the mat",
        [],
    )
    assert observe(environment, call("search", query="birds"))[0] == "[1] b\nBirds fly."
    long, _ = observe(environment, call("search", query="nothing"))
    assert "omitted" in long
    assert "<image>" not in long
    assert len(long) <= 100


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("qwxz 🙂 ~~", "No results."),
        ("", "No results."),
        ("\0", "No results."),
        ("cat " * 250, "[1]"),
        ("cat " * 251, "more than 1,000 characters"),
        ("x" * 2**20, "more than 100,000 characters"),
        (None, "must be a text"),
        (["cat"], "must be a text"),
    ],
)
def test_any_query_gets_an_observation(corpus, query, shown):
    environment = LocalSearch(corpus, error_reward=-0.5)
    assert shown in observe(environment, call("search", query=query))[0]


@pytest.mark.parametrize(
    ("content", "shown"),
    [(None, "does not exist"), ("", "no documents"), ('{"title": "x"}', "c.jsonl:1")],
)
def test_an_invalid_corpus_is_an_error(tmp_path, content, shown):
    if content is not None:
        (tmp_path / "c.jsonl").write_text(content)
    with raises_user_error(shown):
        LocalSearch(str(tmp_path / "c.jsonl"))


@pytest.fixture
def image() -> Image.Image:
    """Return an image whose pixels have different colours."""
    image = Image.new("RGB", (200, 100))
    image.putdata([(x, y, 0) for y in range(100) for x in range(200)])
    return image


@pytest.mark.parametrize(
    ("units", "box"),
    [
        ("pixels", [20, 10, 60, 30]),
        ("fraction", [0.1, 0.1, 0.3, 0.3]),
        ("thousandths", [100, 100, 300, 300]),
        ("pixels", [20.9, 10.5, 59.1, 29.5]),  # whole pixels that contain the box
    ],
)
def test_zoom_returns_the_crop(image, units, box):
    environment = ImageZoom(units, error_reward=-0.5)
    environment.reset({"images": [Image.new("RGB", (5, 5)), image]})
    text, [crop] = observe(environment, call("zoom", box=box, image=2))
    assert text == "<image>"
    assert crop == image.crop((20, 10, 60, 30))


def test_zoom_resizes_the_crop_and_finds_small_boxes(image):
    environment = ImageZoom("fraction", size=64, error_reward=-0.5)
    environment.reset({"images": [image]})
    _, [crop] = observe(environment, call("zoom", box=[0, 0, 0.5, 0.5]))
    assert crop.size == (64, 32)
    _, [pixel] = observe(environment, call("zoom", box=[0.9999, 0.9999, 1, 1]))
    assert pixel.size == (64, 64)
    assert pixel.getpixel((0, 0)) == (199, 99, 0)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"box": [0, 0, 201, 50]}, "inside the image, from 0 to 200"),
        ({"box": [-1, 0, 20, 50]}, "inside the image"),
        ({"box": [10**400, 0, 20, 50]}, "inside the image"),
        ({"box": [5, 5, 5, 9]}, "empty"),
        ({"box": [9, 5, 5, 9]}, "empty"),
        ({"box": [0, 0, float("nan"), 9]}, "inside the image"),
        ({"box": [0, 0, float("inf"), 9]}, "inside the image"),
        ({"box": [0, 0, 200, 1]}, "too narrow"),
        ({"box": [0, 0, 9]}, "four numbers"),
        ({"box": [0, 0, 9, True]}, "four numbers"),
        ({"box": "0, 0, 9, 9"}, "four numbers"),
        ({}, "four numbers"),
        ({"box": [0, 0, 9, 9], "image": 2}, "from 1 to 1"),
        ({"box": [0, 0, 9, 9], "image": 0}, "from 1 to 1"),
        ({"box": [0, 0, 9, 9], "image": "1"}, "from 1 to 1"),
    ],
)
def test_an_invalid_box_is_an_observation(image, arguments, shown):
    environment = ImageZoom(error_reward=-0.5)
    environment.reset({"images": [image]})
    text, images = observe(environment, call("zoom", **arguments))
    assert shown in text
    assert not images


def test_zoom_without_an_image_is_an_observation():
    environment = ImageZoom(error_reward=-0.5)
    environment.reset({"images": []})
    assert "no image" in observe(environment, call("zoom", box=[0, 0, 1, 1]))[0]
    with raises_user_error("pixels, fraction", field="environment_options.units"):
        ImageZoom("miles")


def test_options_are_not_rounded(tmp_path):
    (tmp_path / "corpus.txt").write_text("a document")
    for field, build in {
        "results": lambda: LocalSearch(str(tmp_path), results=1.5),
        "size": lambda: ImageZoom(size=0.5),
        "max_characters": lambda: LocalSearch(str(tmp_path), results=3, max_characters=149),
    }.items():
        with raises_user_error(field=f"environment_options.{field}"):
            build()
