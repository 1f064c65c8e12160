"""The worked example of docs/preferences.md, shortened: pairs of signs train the small model."""

import json

import make_sign_pairs
import numpy as np
import pytest
from PIL import Image
from runner import Runner

PAIRS, HELD_OUT = 48, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Runner:
    """Run the preset for one epoch of three updates on pairs of crisp and blurred signs."""
    folder = tmp_path_factory.mktemp("example")
    make_sign_pairs.write_pairs(folder / "pairs", PAIRS, HELD_OUT, flaw="blurred")
    run = Runner(folder / "logs", preferences__data=folder / "pairs", num_epochs=1)
    done = run(config="config/grpo.py:tiny_offline", eval_prompts=HELD_OUT, dpo__beta=100.0)
    assert done.returncode == 0, done.stderr
    return run


def test_held_out_pairs_are_told_apart(run):
    before, after = run.metrics()
    assert (before["pairs/accuracy"], before["pairs/margin"]) == (0.5, 0)
    assert after["pairs/margin"] > 0.05
    assert after["pairs/accuracy"] > 0.8
    assert after["step"] == PAIRS // 16
    assert after["train/margin"] > 0


def test_the_online_reward_is_evaluated_on_held_out_words(run):
    rows = run.metrics()
    assert all(0 <= row["eval/ocr"] <= 1 for row in rows)
    assert all("reward/ocr" not in row for row in rows)  # no rollout
    samples = run.logdir / "run" / "samples" / "eval-00001"
    prompts = [json.loads(line)["prompt"] for line in (samples / "samples.jsonl").open()]
    pairs = run.logdir.parent / "pairs"
    held_out = {json.loads(line)["prompt"] for line in (pairs / "test.jsonl").open()}
    trained = {json.loads(line)["prompt"] for line in (pairs / "train.jsonl").open()}
    assert not {*prompts, *held_out} & trained
    sizes = {np.asarray(Image.open(file)).shape for file in samples.glob("*.png")}
    assert sizes == {(32, 96, 3)}
