"""Video-to-video models with source videos from files."""

import json
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from families import FAMILIES, at_size, load, make_images, run_fields, save_small_pipeline
from sessions import short_config
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import Size
from flow_grpo.diffusion.session import build_session
from flow_grpo.diffusion.source_images import load_source_images, reward_metadata

BY_NAME = {family.name: family for family in FAMILIES}
FAMILY = BY_NAME["wan_v2v"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_pipeline(FAMILY, tmp_path_factory.mktemp("models") / "wan_v2v")


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """Write videos of 4, 5 and 9 frames, the frames of the second, and invalid files."""
    root = tmp_path_factory.mktemp("videos")
    for count in (4, 5, 9):
        file = str(root / f"{count}.mp4")
        writer = cv2.VideoWriter(file, cv2.VideoWriter_fourcc(*"mp4v"), 16, (70, 50))
        for content in make_images("video", count):
            writer.write(cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR))
        writer.release()
    capture = cv2.VideoCapture(str(root / "5.mp4"))
    for index in range(5):
        cv2.imwrite(str(root / f"{index}.png"), capture.read()[1])
    whole = (root / "5.mp4").read_bytes()
    (root / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    start = whole.index(b"mdat") + 4
    damaged[start + 1000 : start + 3000] = bytes(2000)
    (root / "damaged.mp4").write_bytes(damaged)
    (root / "text.mp4").write_text("a text")
    return root


def test_a_source_video_file_is_the_same_as_its_frames(folder, videos):
    adapter = at_size(load(folder), Size(32, FAMILY.wide, 5))
    listed = tuple(videos / f"{i}.png" for i in range(5))
    prompts = [Prompt("a", images=images) for images in ((videos / "5.mp4",), listed)]
    encoded = adapter.encode(["a", "a"], None, [p.images for p in prompts]).inputs["source"]
    assert torch.equal(*encoded)
    assert encoded.std() > 0
    seen = reward_metadata(prompts, adapter)
    video, frames = [[np.asarray(frame) for frame in row["source"]] for row in seen]
    np.testing.assert_array_equal(video, frames)
    shown = [[np.asarray(image) for image in own] for own in load_source_images(prompts, adapter)]
    np.testing.assert_array_equal(shown, [[frames[2]]] * 2)


@pytest.fixture
def rejection(tmp_path, videos):
    """Return the message that rejects a run with such prompts and a model without weights."""

    def rejection(name: str, **row) -> str:
        model, family = tmp_path / "model", BY_NAME[name]
        save_small_pipeline(family, tmp_path / "whole")
        shutil.copytree(tmp_path / "whole", model, ignore=shutil.ignore_patterns("*.safetensors"))
        data = tmp_path / "data"
        shutil.copytree(videos, data)
        lines = [json.dumps({"prompt": f"a {number}", **row}) for number in range(4)]
        (data / "train.jsonl").write_text("\n".join(lines))
        fields = run_fields(family, model, data / "train.jsonl")
        with raises_user_error() as caught:
            build_session(short_config(tmp_path / "logs", "run", **fields))
        message = str(caught.value)
        assert "\n" not in message
        return message

    return rejection


@pytest.mark.parametrize(
    ("name", "row", "shown"),
    [
        ("wan_v2v", {"video": "4.mp4"}, ["4.mp4 has 4 frames, but 5", "longer video"]),
        ("wan_v2v", {"video": "9.mp4"}, ["9.mp4 has 9 frames, but 5", "-frames:v 5"]),
        ("wan_v2v", {"video": "cut.mp4"}, ["cut.mp4 cannot be decoded", "complete"]),
        ("wan_v2v", {"video": "damaged.mp4"}, ["damaged.mp4 cannot be decoded", "complete"]),
        ("wan_v2v", {"video": "text.mp4"}, ["text.mp4 is not a MP4 or MOV"]),
        ("wan_v2v", {"video": "no.mp4"}, ["missing image", "no.mp4"]),
        ("wan_v2v", {"video": "5.mp4", "mask": "0.png"}, ["a source video and a mask"]),
        ("wan_v2v", {"images": ["5.mp4", "0.png"]}, ["a source video and other images"]),
        ("wan_v2v", {}, ["has 0 images", '"video"']),
        ("wan_i2v", {"video": "5.mp4"}, ["video 5.mp4", "takes no source video"]),
        ("wan", {"video": "5.mp4"}, ["video 5.mp4", "--config.image_column=none"]),
    ],
)
def test_unusable_source_videos_are_rejected_before(rejection, name, row, shown):
    message = rejection(name, **row)
    assert all(part in message for part in shown), message
    assert "train.jsonl:1" in message


def test_source_videos_need_a_decoder(rejection, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    message = rejection("wan_v2v", video="5.mp4")
    assert "needs OpenCV; pip install opencv-python-headless" in message


def test_weights_are_read_after_the_source_video(rejection):
    assert "cannot be loaded" in rejection("wan_v2v", video="5.mp4")
