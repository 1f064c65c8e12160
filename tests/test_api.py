"""The Python API for training and evaluation, as used in a notebook."""

import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from diffusers import StableDiffusion3Pipeline
from PIL import ExifTags, Image
from runner import ROOT
from server_process import wait_until
from user_errors import raises_user_error

import flow_grpo
from flow_grpo.data.preferences import load_preferences
from flow_grpo.data.prompts import PromptLayout, load_prompts
from flow_grpo.errors import UserError
from flow_grpo.images import read_image
from flow_grpo.rewards.custom import import_scorer
from flow_grpo.rewards.scorers.jpeg import jpeg_compressibility
from flow_grpo.rewards.workers import run_in_thread

SHORT = {
    "sample.num_steps": 3,
    "sample.sde_window_size": 0,
    "sample.num_image_per_prompt": 2,
    "sample.train_batch_size": 4,
    "sample.num_batches_per_epoch": 2,
    "train.batch_size": 4,
    "train.gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "device": "cpu",
}


def test_training_with_a_function_and_a_list_of_prompts(tmp_path, capsys):
    calls = []

    def bright(images, prompts, metadata):
        calls.append((list(prompts), list(metadata)))
        return [image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for image in images]

    words = ("CAT", "DOG", "SUN", "TEA", "MAP")
    prompts = [{"prompt": f'a sign that says "{w}"', "tag": w} for w in words]
    options = {**SHORT, "logdir": os.path.relpath(tmp_path), "train.learning_rate": 2e-4}
    threads = threading.enumerate()
    one, other = (
        flow_grpo.Trainer(
            "assets/tiny-sd3", rewards=[bright], prompts=prompts, seed=seed, **options
        )
        for seed in (1, 2)
    )
    # the same process trains twice, the second time not in its main thread
    first, second = one.train(), run_in_thread(other.train).result()
    wait_until(lambda: {*threading.enumerate()} <= {*threads})
    assert first.folder != second.folder
    assert first.folder.is_absolute()
    assert [row["epoch"] for row in first.metrics] == [0, 1]
    assert 0 < first.metrics[-1]["eval/bright"] < 1
    assert first.metrics[-1]["train/lr"] == 2e-4
    assert {m["tag"] for _, metadata in calls for m in metadata} == {*words}
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("epoch 1/1") for line in lines) == 2
    pipeline = StableDiffusion3Pipeline.from_pretrained("assets/tiny-sd3")
    pipeline.load_lora_weights(first.checkpoint / "ema_lora")

    means = flow_grpo.evaluate(
        "assets/tiny-sd3",
        checkpoints=["base", first.checkpoint],
        rewards={jpeg_compressibility: 1.0},
        prompts=prompts,
        out=tmp_path / "eval",
        **{"sample.eval_num_steps": 2, "device": "cpu", "logdir": str(tmp_path)},
    )
    assert next(iter(means)) == "base"
    assert len(means) == 2
    assert (tmp_path / "eval/results.json").is_file()


def test_a_run_that_cannot_start_closes_its_rewards(tmp_path):
    closed = []

    def bright(images, prompts, metadata):
        return [0.5] * len(images)

    bright.close = lambda: closed.append("bright")
    trainer = flow_grpo.Trainer(
        tmp_path / "nothing", rewards=[bright], prompts=[*"abcde"], **SHORT, logdir=str(tmp_path)
    )
    with pytest.raises(UserError, match="nothing"):
        trainer.train()
    assert closed == ["bright"]


@pytest.mark.parametrize(
    ("rewards", "weights", "custom"),
    [
        (["ocr"], {"ocr": 1.0}, {}),
        ([("ocr", 0.5), jpeg_compressibility], {"ocr": 0.5, "jpeg_compressibility": 1.0}, "ours"),
        ({"ocr": 2, "pickscore": 1}, {"ocr": 2.0, "pickscore": 1.0}, {}),
    ],
)
def test_rewards_are_names_or_functions_with_weights(rewards, weights, custom):
    config = flow_grpo.Trainer(rewards=rewards).config
    assert config.reward_fn.to_dict() == weights
    path = {"jpeg_compressibility": "flow_grpo.rewards.scorers.jpeg:jpeg_compressibility"}
    assert config.custom_rewards.to_dict() == (path if custom == "ours" else {})


def test_a_function_of_this_process_is_found_by_its_name():
    double = lambda images, prompts, metadata: [2.0] * len(images)  # noqa: E731
    config = flow_grpo.Trainer(rewards={double: 1.0}).config
    [path] = config.custom_rewards.values()
    assert import_scorer("double", path) is double


def test_prompts_are_saved_for_resuming(tmp_path):
    fields = {"prompts": ["a", "b"], "logdir": str(tmp_path)}
    first, second = (flow_grpo.Trainer(rewards=["ocr"], **fields).config.dataset for _ in range(2))
    assert first == second
    with open(f"{first}/train.jsonl") as file:
        assert [json.loads(line) for line in file] == [{"prompt": "a"}, {"prompt": "b"}]


def test_image_paths_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    rows = [{"prompt": "a", "image": "a.png"}, {"prompt": "b", "images": (Path("b.png"), "a.png")}]
    prompts = [*rows, {"prompt": "c", "image": "data:image/png;base64,AAAA"}]
    prompts += [{"prompt": "d", "image": b"\1"}]
    trainer = flow_grpo.Trainer("model", rewards=["ocr"], prompts=prompts, logdir="runs/mine")
    found = [p.images for p in load_prompts(trainer.config.dataset, "train")]
    paths = [(tmp_path / "a.png",), (tmp_path / "b.png", tmp_path / "a.png")]
    assert found == [*paths, (b"\0\0\0",), (b"\1",)]


def test_preferences_may_be_pil_images_bytes_and_paths(tmp_path):
    red, blue = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    red.save(tmp_path / "red.png")
    content = (tmp_path / "red.png").read_bytes()
    rows = [
        {"prompt": "a", "chosen": red, "rejected": [blue, tmp_path / "red.png"]},
        {"prompt": "b", "image": content, "source_image": blue, "style": "flat"},
    ]
    fields = {"logdir": str(tmp_path), "preset": "tiny_offline"}
    trainer = flow_grpo.Trainer(preferences=rows, **fields)
    found = load_preferences(trainer.config.preferences.data)
    colors = [Image.open(io.BytesIO(p.chosen)).getpixel((0, 0)) for p in found.pairs]
    assert colors == [(255, 0, 0)] * 2
    assert found.pairs[1].rejected == tmp_path / "red.png"
    [demonstration] = found.images
    assert demonstration.image == content
    assert len(demonstration.prompt.images) == 1
    for wrong in ({"prompt": "a"}, [], ["a"]):
        with raises_user_error(field="preferences"):
            flow_grpo.Trainer(preferences=wrong, **fields)


def test_images_of_prompts_may_be_pil_images_in_any_column(tmp_path):
    """The EXIF orientation of an image is applied, as for a file."""
    photo = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.effect_noise((8, 4), 50).convert("RGB").save(photo, exif=exif)
    clear = Image.new("LA", (5, 4), (0, 0))
    rows = [{"prompt": "a", "photo": Image.open(photo)}, {"prompt": "b", "photo": [clear] * 2}]
    rows[0]["mask"] = Image.new("L", (4, 8), "white")
    fields = {"prompts": rows, "image_column": "photo", "logdir": str(tmp_path)}
    dataset = flow_grpo.Trainer("model", rewards=["ocr"], **fields).config.dataset
    prompts = load_prompts(dataset, "train", PromptLayout(image="photo"))
    [upright], [white, _] = (p.images for p in prompts)
    assert read_image(prompts[0].mask).size == (4, 8)
    assert np.array_equal(read_image(upright), read_image(photo))
    assert np.asarray(read_image(white)).tolist() == [[[255] * 3] * 5] * 4


def test_bundled_model_and_prompts_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = flow_grpo.Trainer("assets/tiny-sd3", prompts="dataset/ocr").config
    assert config.pretrained.model == str(ROOT / "assets/tiny-sd3")
    assert config.dataset == str(ROOT / "dataset/ocr")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"train.learning_rat": 1e-4}, "did you mean train.learning_rate?"),
        ({"train.learning_rate": "fast"}, "train.learning_rate='fast'"),
        ({"preset": "tiny"}, "preset='tiny'"),
        ({"rewards": []}, "rewards"),
        ({"rewards": [len, ("len", 1.0)]}, "'len'"),
        ({"rewards": [3]}, "3 with weight 1.0"),
        ({"rewards": {"ocr": "1"}}, "'ocr' with weight '1'"),
        ({"rewards": [("ocr", 1.0, 2)]}, "('ocr', 1.0, 2) with weight 1.0"),
        ({"prompts": [], "rewards": ["ocr"]}, "train prompts"),
        ({"prompts": [1, 2]}, "train prompt 1 "),
        ({"prompts": ["a", None]}, "train prompt 2 "),
        ({"prompts": 5}, "train prompts must be a list, not 5"),
        (
            {"prompts": [{"prompt": "a", "photo": Image.new("L", (9, 9))}]},
            'train prompt 1 has a column "photo" that contains an image',
        ),
        ({"prompts": {"prompt": "a"}}, "train prompts must be a list, not {'prompt': 'a'}"),
        ({"prompts": ["a"], "test_prompts": "b"}, "test prompts must be a list, not 'b'"),
        ({"prompts": "dataset/ocr", "test_prompts": ["a"]}, "test_prompts needs a list of prompts"),
        ({"test_prompts": ["a"]}, "test_prompts needs a list of prompts"),
        ({"prompts": ["a"], "dataset": "b"}, "dataset='b' is set by the argument 'prompts' too"),
        ({"prompts": [{"prompt": "a", "f": len}]}, "train prompt 1 cannot be saved as JSON: Objec"),
        ({"prompts": ["a \ud800"]}, r"train prompt 1: '\ud800' is"),
        ({"prompts": ["a"], "logdir": "x" * 5000}, "logdir='xxx"),
        ({"prompts": ["a"], "logdir": "x\0"}, "logdir='x"),
        ({"preset": ["tiny_ocr"]}, "['tiny_ocr']"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, shown):
    with raises_user_error(shown):
        flow_grpo.Trainer(**arguments)
