"""Responses to valid requests."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from server_process import Server, body, encoded

from flow_grpo.host_memory import memory_limit
from flow_grpo.rewards.scorers.jpeg import jpeg_compressibility


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    custom = ("later=obedient:later", "pixels=obedient:pixels", "crowd=obedient:Crowd")
    arguments = [argument for path in custom for argument in ("--custom", path)]
    return start("jpeg_compressibility,obey,later,pixels,crowd", *arguments, *("--workers", "3"))


def noise(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((64, 8 * (seed + 1)))


def test_scores_are_those_of_the_scorer_in_this_process(server: Server) -> None:
    images = [noise(seed) for seed in range(6)]
    prompts = [f"prompt {i}" for i in range(6)]
    content = {
        "reward": "jpeg_compressibility",
        "images": [encoded(image, "PNG") for image in images[:3]]
        + [encoded(image, "WEBP", lossless=True) for image in images[3:]],
        "prompts": prompts,
        "metadata": [{"row": i} for i in range(6)],
    }
    here = jpeg_compressibility(images, prompts, [{}] * 6)
    assert len(set(here)) == 6
    assert server.score(content).json() == {
        "reward": "jpeg_compressibility",
        "scores": here,
        "asked": [True] * 6,
        "errors": [None] * 6,
        "extras": {},
    }


def test_a_missing_score_is_null_with_a_reason(server: Server) -> None:
    answer = server.score(body("obey", "nan", "four", "none", "infinite")).json()
    assert answer["scores"] == [None, 4.0, None, None]
    assert answer["errors"] == [
        "it returned nan",
        None,
        "it returned None",
        "it returned inf",
    ]
    assert answer["extras"] == {"images_in_call": [4.0] * 4}


def test_async_scorers_are_awaited(server: Server) -> None:
    assert server.score(body("later", "a", "b")).json()["scores"] == [0.25, 0.25]


def test_the_number_of_workers_is_passed_to_a_reward(server: Server) -> None:
    assert server.score(body("crowd", "a")).json()["scores"] == [3.0]


def grey_16_bit(value: int) -> Image.Image:
    return Image.fromarray(np.full((4, 4), value, np.uint16))


def palette() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    return image


@pytest.mark.parametrize(
    ("image", "kind", "first"),
    [
        (Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", (1, 2, 3)),
        (Image.new("RGBA", (4, 4), (9, 8, 7, 100)), "PNG", (9, 8, 7)),
        (Image.new("RGBA", (4, 4), (9, 8, 7, 255)), "WEBP", (9, 8, 7)),
        (palette(), "PNG", (10, 20, 30)),
        (Image.new("L", (4, 4), 77), "PNG", (77, 77, 77)),
        (Image.new("L", (4, 4), 77), "JPEG", (77, 77, 77)),
        (Image.new("LA", (4, 4), (77, 3)), "PNG", (77, 77, 77)),
        (Image.new("1", (4, 4), 1), "PNG", (255, 255, 255)),
        (grey_16_bit(256 * 40 + 3), "PNG", (40, 40, 40)),
        (Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG", (0, 0, 0)),
        (Image.new("L", (4, 4), 77), "MPO", (77, 77, 77)),  # two images in a file, as cameras write
    ],
)
def test_every_mode_becomes_rgb(
    server: Server, image: Image.Image, kind: str, first: tuple[int, int, int]
) -> None:
    two = {"save_all": True, "append_images": [image]}
    options = {"WEBP": {"lossless": True}, "MPO": two}.get(kind, {})
    answer = server.score(body("pixels", "x", image=encoded(image, kind, **options))).json()
    assert answer["scores"] == [1.0]
    assert tuple(answer["extras"][name][0] for name in "rgb") == first


def test_rewards_and_limits_are_listed(server: Server) -> None:
    answer = server.get("/v1/rewards").json()
    names = ["jpeg_compressibility", "obey", "later", "pixels", "crowd"]
    assert answer["rewards"] == [{"name": name, "ready": True} for name in names]
    assert answer["limits"] == {
        "max_images": 256,
        "max_pixels": 16_777_216,
        "max_body_bytes": 67_108_864,
        "max_queue": 1024,
        "max_queue_pixels": 1_073_741_824,
        "max_memory_bytes": memory_limit() // 2,
        "max_connections": 512,
    }


def test_metrics_count_requests_and_images(server: Server) -> None:
    def counts() -> dict[str, float]:
        return {
            "ok": server.metric("requests_total", reward="obey", status="200"),
            "failed request": server.metric("requests_total", reward="obey", status="500"),
            "unknown": server.metric("requests_total", reward="unknown", status="404"),
            "scored": server.metric("images_scored_total", reward="obey"),
            "failed": server.metric("images_failed_total", reward="obey"),
            "calls": server.metric("batch_images_count", reward="obey"),
            "in calls": server.metric("batch_images_sum", reward="obey"),
            "timed": server.metric("request_seconds_count", reward="obey"),
            "queue": server.metric("queue_images", reward="obey"),
        }

    before = counts()
    server.score(body("obey", "a", "nan", "b"))
    server.score(body("obey", "raise it"))
    server.score(body("nobody knows it", "a"))
    gained = {name: value - before[name] for name, value in counts().items()}
    assert gained == {
        "ok": 1,
        "failed request": 1,
        "unknown": 1,
        "scored": 2,
        "failed": 2,
        "calls": 2,
        "in calls": 4,
        "timed": 2,
        "queue": 0,
    }
