"""The shape detector, on rendered scenes like those of the tiny models."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from tiny.images import CLEAN, Painter, encode_scene
from tiny.prompts import Scene, scenes_by_kind

from flow_grpo.rewards.frames import to_pil
from flow_grpo.rewards.scorers.geneval.shapes import UNKNOWN_SHAPE, detect


@pytest.fixture(scope="module")
def rendered() -> list[tuple[Scene, Image.Image]]:
    rng = random.Random(0)
    single, placed, joined = scenes_by_kind()
    scenes = [*single, *rng.sample(placed, 164), *rng.sample(joined, 264)]
    numbers = torch.tensor([encode_scene(scene) for scene in scenes])
    rendered = Painter().scenes(numbers, CLEAN, torch.Generator().manual_seed(0))
    return list(zip(scenes, to_pil(rendered.images), strict=True))


def expected_shapes(scene: Scene) -> list[tuple[str, str]]:
    groups = scene.left_to_right
    return [(group.colour, group.shape) for group in groups for _ in range(group.count)]


def detected_shapes(image: Image.Image) -> list[tuple[str, str]]:
    left_to_right = sorted(detect(image), key=lambda d: d.box[0])
    return [(d.colour, d.name) for d in left_to_right]


def test_clean_scenes_are_detected(rendered):
    assert len(rendered) == 500
    correct = [detected_shapes(image) == expected_shapes(scene) for scene, image in rendered]
    assert np.mean(correct) >= 0.99


def test_boxes_enclose_shapes_at_any_image_size(rendered):
    scene, image = rendered[0]
    assert scene.first.count == 1
    for scale in (1, 4):
        [shape] = detect(image.resize((96 * scale, 32 * scale)))
        left, top, right, bottom = shape.box
        assert (right - left) / (bottom - top) == pytest.approx(1, abs=0.2)
        assert (left + right) / 2 == pytest.approx(48 * scale, abs=2 * scale)


@pytest.mark.parametrize("noise", [0.05, 0.2, 1.0])
def test_noise_only_lowers_the_accuracy(rendered, noise):
    rng = np.random.default_rng(0)
    correct = []
    for scene, image in rendered[::5]:
        pixels = np.asarray(image) / 255 + noise * rng.standard_normal((32, 96, 3))
        noisy = Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))
        correct.append(detected_shapes(noisy) == expected_shapes(scene))
    assert {0.05: 0.9, 0.2: 0.0, 1.0: 0.0}[noise] <= np.mean(correct) <= {1.0: 0.05}.get(noise, 1)


def test_another_shape_is_a_smudge():
    pixels = np.full((32, 96, 3), 240, dtype=np.uint8)
    pixels[4:28, 10:15] = pixels[12:20, 10:40] = (200, 30, 30)
    assert [(d.colour, d.name) for d in detect(Image.fromarray(pixels))] == [("red", UNKNOWN_SHAPE)]
    assert detect(Image.new("RGB", (96, 32), "grey")) == []
    assert detect(Image.new("L", (3, 2))) == []
