"""The detector of things, on a small random Mask2Former and a small random CLIP."""

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

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.scorers.geneval import GenEval
from flow_grpo.rewards.scorers.geneval.mask2former import cut_out
from flow_grpo.rewards.scorers.geneval.rules import COLOURS, NAMES, Detection, parse_task

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
        threshold=0.0,  # it is sure of nothing
        batch_size=2,
    )


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(48, 80), (64, 64), (80, 48)]
    return [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in sizes]


TASK = parse_task({"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]})


def test_boxes_are_those_of_masks_and_the_asked_class_has_colours(reward, images):
    found = reward.finder(images, [TASK] * 3)
    assert all(found)
    for image, things in zip(images, found, strict=True):
        for thing in things:
            assert 0 < thing.score <= 1
            assert thing.mask.shape == (image.height, image.width)
            rows, columns = np.nonzero(thing.mask)
            edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            assert thing.box == edges
            assert (thing.colour in COLOURS) == (thing.name == "dog")
    assert {thing.name for things in found for thing in things} <= {
        *("airplane", "computer mouse", "dog"),  # by GenEval's names
    }


def test_a_batch_is_what_each_picture_is_alone(reward, images):
    together = reward.finder(images, [TASK] * 3)
    for image, expected in zip(images, together, strict=True):
        [alone] = reward.finder([image], [TASK])
        assert [t.name for t in alone] == [t.name for t in expected]
        assert [t.box for t in alone] == [t.box for t in expected]
        assert [t.score for t in alone] == pytest.approx([t.score for t in expected], abs=1e-5)


def test_doubtful_things_are_not_counted(reward, images):
    counting = parse_task({"tag": "counting", "include": [{"class": "dog", "count": 3}]})
    assert reward.finder(images, [counting] * 3) == [[], [], []]


def test_scores_and_tags(reward, images):
    metadata = [
        {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]},
        {"tag": "single_object", "include": [{"class": "kite", "count": 1}]},
        {"prompt": "asks for nothing"},
    ]
    scores, extras = reward(images, ["p"] * 3, metadata)
    assert 0 <= scores[0] <= 1
    assert scores[1] == 0
    assert isinstance(scores[2], NotAsked)
    assert extras["single_object"][1] == extras["strict"][1] == 0
    assert isinstance(extras["single_object"][0], NotAsked)
    assert np.isneginf(extras["counting"]).all()


def test_a_thing_is_cut_out_on_grey():
    image = Image.new("RGB", (6, 4), (10, 20, 30))
    mask = np.zeros((4, 6), dtype=bool)
    mask[1:3, 2:5] = True
    mask[1, 2] = False
    alone = np.asarray(cut_out(image, Detection("dog", 1.0, (2, 1, 5, 3), mask=mask)))
    assert alone.shape == (2, 3, 3)
    assert alone[0, 0].tolist() == [0x99] * 3
    assert alone[1, 2].tolist() == [10, 20, 30]


def test_cocos_names():
    assert len(set(NAMES)) == 80


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"class": "unicorn"}, "unicorn"),
        ({"class": "dog", "color": "crimson"}, "crimson"),
    ],
)
def test_what_is_never_found_is_told(reward, request_, told):
    with pytest.raises(UserError, match=told):
        reward.finder.check(parse_task({"include": [request_]}))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"detector": "mmdet"}, "detector='mmdet' must be one of"),
        ({"score": "half"}, "score='half'"),
        ({"keep": 1.5}, "keep=1.5 must be a number from 0 to 1"),
        ({"keep": "half"}, "keep='half' must be a number"),
    ],
)
def test_unknown_options_are_told(options, told):
    with pytest.raises(UserError, match=told):
        GenEval(**options)
