"""The client of the trainer against server processes."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from server_process import Server
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import FailurePolicy

NAME = "jpeg_compressibility"


def noise(count: int, size: int = 32) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 255, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


def scores(urls: str, images: list[Image.Image], **options) -> np.ndarray:
    reward = build_reward({NAME: 1.0}, servers={NAME: urls}, **options)
    return reward(images, ["p"] * len(images))[NAME]


@pytest.fixture(scope="module")
def pair(start: Callable[..., Server]) -> list[Server]:
    return [start(NAME), start(NAME)]


def test_batches_are_distributed_and_scored_as_in_process(pair):
    images = noise(40)
    here = build_reward({NAME: 1.0})(images, ["p"] * 40)[NAME]
    urls = ",".join(server.url for server in pair)
    np.testing.assert_array_equal(scores(urls, images), here)
    reward = build_reward({NAME: 1.0}, servers={NAME: urls})
    for _ in range(4):  # also batches smaller than a request
        reward(images[:1], ["p"])
    done = [server.metric("images_scored_total", reward=NAME) for server in pair]
    assert done == [22, 22]


def test_another_server_takes_over_from_one_that_stopped(start, pair):
    gone = start(NAME)
    reward = build_reward({NAME: 1.0}, servers={NAME: f"{gone.url},{pair[0].url}"})
    gone.kill()
    assert not np.isnan(reward(noise(32), ["p"] * 32)[NAME]).any()


def test_requests_stay_below_the_limits_of_the_server(start):
    server = start(NAME, "--max-body-mb", "1")
    assert not np.isnan(scores(server.url, noise(8, 400))).any()  # 5 MB in total


def test_an_image_that_is_too_large_is_a_failure_with_a_reason(start):
    server = start(NAME, "--max-pixels", "5000")
    reward = build_reward({NAME: 1.0}, servers={NAME: server.url})
    assert math.isnan(reward(noise(1, 80), ["p"])[NAME][0])
    assert "6400 pixels" in reward.last_errors[NAME] or "80 x 80" in reward.last_errors[NAME]


def test_the_token_is_taken_from_the_environment(start, monkeypatch):
    server = start(NAME, "--token-env", "SECRET", SECRET="abc", wait=True)
    policy = FailurePolicy(retries=0, timeout=10)
    with raises_user_error("401"):
        scores(server.url, noise(1), policy=policy)
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "abc\n")
    assert not np.isnan(scores(server.url, noise(1), policy=policy)).any()


def test_a_server_without_the_reward_is_named(pair):
    with raises_user_error("'ocr'", NAME):
        build_reward({"ocr": 1.0}, servers={"ocr": pair[0].url})


def test_settings_without_effect_are_rejected(pair):
    with raises_user_error(f"reward_options.{NAME}"):
        scores(pair[0].url, noise(1), options={NAME: {"quality": 3}})
    with raises_user_error("'jpg'"):
        build_reward({NAME: 1.0}, servers={"jpg": pair[0].url})
