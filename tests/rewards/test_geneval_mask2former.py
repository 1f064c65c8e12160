"""The Mask2Former detector, with a small random Mask2Former and a small random CLIP."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_clip import clip_folder  # noqa: F401, a fixture
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    SwinConfig,
)
from user_errors import raises_user_error

from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.scorers.geneval import GenEval
from flow_grpo.rewards.scorers.geneval.mask2former import crop_object
from flow_grpo.rewards.scorers.geneval.rules import COCO_CLASSES, COLOURS, Detection, parse_task

LABELS = ["aeroplane", "mouse", "dog"]


def save_detector(folder: Path) -> Path:
    torch.manual_seed(0)
    swin = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=6,
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
    )
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reward(folder, tmp_path_factory) -> GenEval:
    return GenEval(
        model=str(save_detector(tmp_path_factory.mktemp("detector"))),
        clip=str(folder),
        threshold=0.0,  # random scores are low
        batch_size=2,
    )


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(48, 80), (64, 64), (80, 48)]
    return [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in sizes]


TASK = parse_task({"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]})


def test_boxes_enclose_masks_and_the_required_class_has_colors(reward, images):
    found = reward.object_detector(images, [TASK] * 3)
    assert all(found)
    for image, detections in zip(images, found, strict=True):
        for detection in detections:
            assert 0 < detection.score <= 1
            assert detection.mask.shape == (image.height, image.width)
            rows, columns = np.nonzero(detection.mask)
            edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            assert detection.box == edges
            assert (detection.colour in COLOURS) == (detection.name == "dog")
    names = {detection.name for detections in found for detection in detections}
    assert names <= {"airplane", "computer mouse", "dog"}  # GenEval's names


def test_batching_does_not_change_detections(reward, images):
    batched = reward.object_detector(images, [TASK] * 3)
    for image, expected in zip(images, batched, strict=True):
        [found] = reward.object_detector([image], [TASK])
        assert [d.name for d in found] == [d.name for d in expected]
        assert [d.box for d in found] == [d.box for d in expected]
        assert [d.score for d in found] == pytest.approx([d.score for d in expected], abs=1e-5)


def test_counting_ignores_uncertain_detections(reward, images):
    counting = parse_task({"tag": "counting", "include": [{"class": "dog", "count": 3}]})
    assert reward.object_detector(images, [counting] * 3) == [[], [], []]


def test_scores_and_tags(reward, images):
    metadata = [
        {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]},
        {"tag": "single_object", "include": [{"class": "kite", "count": 1}]},
        {"prompt": "asks for nothing"},
    ]
    scores, extras = reward(images, ["p"] * 3, metadata)
    assert 0 <= scores[0] <= 1
    assert scores[1] == 0
    assert isinstance(scores[2], NotApplicable)
    assert extras["single_object"][1] == extras["strict"][1] == 0
    assert isinstance(extras["single_object"][0], NotApplicable)
    assert np.isneginf(extras["counting"]).all()


def test_an_object_is_cropped_on_grey():
    image = Image.new("RGB", (6, 4), (10, 20, 30))
    mask = np.zeros((4, 6), dtype=bool)
    mask[1:3, 2:5] = True
    mask[1, 2] = False
    crop = np.asarray(crop_object(image, Detection("dog", 1.0, (2, 1, 5, 3), mask=mask)))
    assert crop.shape == (2, 3, 3)
    assert crop[0, 0].tolist() == [0x99] * 3
    assert crop[1, 2].tolist() == [10, 20, 30]


def test_coco_has_80_classes():
    assert len(set(COCO_CLASSES)) == 80


def test_classes_and_colors_that_are_never_detected_are_rejected(reward):
    with raises_user_error(field="class", value="unicorn"):
        reward.object_detector.check(parse_task({"include": [{"class": "unicorn"}]}))
    with raises_user_error("red", field="color", value="crimson"):
        task = parse_task({"include": [{"class": "dog", "color": "crimson"}]})
        reward.object_detector.check(task)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("detector", "mmdet", "mask2former, shapes"),
        ("score", "half", "graded, strict"),
        ("keep", 1.5, "from 0 to 1"),
        ("keep", "half", "from 0 to 1"),
    ],
)
def test_invalid_options_are_rejected(option, value, rule):
    with raises_user_error(rule, field=option, value=value):
        GenEval(**{option: value})
