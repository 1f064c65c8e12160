"""Runs of scripts/train_vlm.py that train a reward model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_vlm
import torch
import vlm_runs
from safetensors.torch import load_file
from user_errors import raises_user_error

from flow_grpo.images import read_image
from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.training.export import ExportSource
from flow_grpo.vlm.export import export
from flow_grpo.vlm.reward_models.classifier import SCORE_FILE, read_statistics
from flow_grpo.vlm.reward_models.session import RewardModelSession

FIELDS = {
    "train.loss": "bradley_terry",
    "sample.questions_per_epoch": 8,
    "train.learning_rate": 1e-2,
    "eval_freq": 1,
    "eval_questions": 0,
    "log_images": 8,
    "num_epochs": 2,
}
Train = Callable[..., RewardModelSession]


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Train:
    """Return a function that trains a small model on a few pairs with images."""
    folder = tmp_path_factory.mktemp("reward_model")
    small_vlm.save(folder / "model")
    small_vlm.write_pairs(folder / "pairs")
    data = {"pretrained.model": str(folder / "model"), "dataset": str(folder / "pairs")}

    def run(**fields: Any) -> RewardModelSession:
        return vlm_runs.run(**{**FIELDS, **data, "logdir": str(folder), **fields})

    return run


@pytest.fixture(scope="module")
def lora_run(train) -> RewardModelSession:
    return train(**{"run_name": "lora", "num_epochs": 6, "use_lora": True, "train.ema": False})


def test_training_learns_the_pairs(lora_run):
    metrics = vlm_runs.read_metrics(lora_run)
    assert metrics[-1]["train/accuracy"] == 1
    assert metrics[-1]["eval/accuracy"] == metrics[-1]["eval/avg"] == 1
    assert metrics[-1]["eval/loss"] < 0.5 * metrics[0]["eval/loss"]
    difference = metrics[-1]["eval/chosen_score"] - metrics[-1]["eval/rejected_score"]
    assert metrics[-1]["eval/margin"] == pytest.approx(difference)


def test_an_exported_lora_has_the_logged_scores(lora_run, tmp_path):
    """Also through a reward with images in the metadata, as in GRPO on it."""
    source = ExportSource.find(lora_run.folder)
    export(source, *source.trained_model()[:1], tmp_path / "merged")
    [file] = lora_run.folder.glob("samples/eval-00006/samples.jsonl")
    rows = list(map(json.loads, file.read_text("utf-8").splitlines()))
    images = {pair.text: [read_image(each) for each in pair.images] for pair in lora_run.test_pairs}
    options = {"model": str(tmp_path / "merged"), "normalize": True}
    reward = build_reward({"reward_model": 1.0}, options={"reward_model": options})
    scores = reward(
        [row["answer"] for row in rows],
        [row["prompt"] for row in rows],
        [{"source": images[row["prompt"]]} for row in rows],
    )
    close_scorers(reward)
    logged = np.array([row["avg"] for row in rows])  # of all test pairs
    assert len(logged) == 2 * len(lora_run.test_pairs)
    expected = (logged - logged.mean()) / logged.std()
    assert scores["avg"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(train):
    """In float64, bit for bit, with full weights and their average."""
    full = {"use_lora": False, "exact": True, "train.ema": True, "eval_freq": 0}
    whole = train(run_name="whole", num_epochs=3, **full)
    train(run_name="parts", num_epochs=1, **full)
    parts = train(run_name="parts", num_epochs=3, resume="auto", **full)
    for name in ("trained", "ema"):
        path = f"checkpoints/latest/state/{name}.safetensors"
        one, two = load_file(whole.folder / path), load_file(parts.folder / path)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert "value.weight" in load_file(
        whole.folder / "checkpoints/latest/state/trained.safetensors"
    )


def test_only_evaluated_weights_have_statistics(train):
    """EMA weights before training, and after epochs 2 and 3."""
    fields = {"use_lora": True, "train.ema": True, "eval_freq": 2, "save_freq": 1}
    session = train(run_name="statistics", num_epochs=3, **fields)
    metrics = vlm_runs.read_metrics(session)
    assert "eval/avg" in metrics[0]
    for epoch, row in enumerate(metrics[1:], 1):
        folder = session.folder / f"checkpoints/checkpoint-{row['step']}"
        assert read_statistics(folder / "lora" / SCORE_FILE) is None
        found = read_statistics(folder / "ema_lora" / SCORE_FILE)
        if epoch == 1:
            assert found is None
        else:
            mean = (row["eval/chosen_score"] + row["eval/rejected_score"]) / 2
            assert found[0] == pytest.approx(mean)


def write_row(folder: Path, **changed: Any) -> str:
    """Write pairs of which the first one is changed; return the dataset."""
    folder.mkdir()
    row = {"prompt": "What?", "chosen": "this", "rejected": "that", **changed}
    rows = [row, *({**row, "prompt": f"Q{i}", **{"chosen": f"{i}"}} for i in range(9))]
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"margin": "large"}, "large"),
        ({"rejected": "this"}, "this"),
        ({"rejected": None}, "rejected"),
        ({"chosen": "x" * 300}, "max_prompt_length=256"),
        ({"images": ["missing.png"]}, "missing.png"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_unusable_pair_is_rejected_by_its_row(train, tmp_path, row, shown):
    data = write_row(tmp_path / "data", **row)
    with raises_user_error("train.jsonl", shown):
        train(run_name=str(tmp_path.name), dataset=data, **{"sample.questions_per_epoch": 2})
