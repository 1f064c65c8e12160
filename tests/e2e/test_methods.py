"""Every kind of algorithm keeps the trainer's promises, where they are exact: in float64."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import save_prompts
from runner import ROOT
from safetensors.torch import load_file
from test_exact import Runs, assert_equal

STATE = "checkpoints/latest/state"
ALONE, BY_TWO = (1, 6, 6, 2), (2, 6, 6, 1)
# prompts with a picture and without, in one batch or not, as an epoch is split
EDITS = {
    "family": "flux_kontext",
    "dataset": f"{ROOT}/dataset/edits:0.5,{ROOT}/dataset/scenes:0.5",
}
# it masks texts of different lengths, and a part of its last block gets no gradient
QWEN = {
    "family": "qwen_image",
    "dataset": "LOGS/lengths",
    "max_sequence_length": 48,
    "resolution": 32,
}
METHODS = {
    "nft": {"algorithm": "nft", "nft.times": 2},
    "awm": {"algorithm": "awm", "awm.times": 2},
    "dgpo": {"algorithm": "dgpo", "dgpo.times": 2},
    "dpo": {"algorithm": "dpo", "dpo.times": 2},
    "grpo_guard": {"algorithm": "grpo_guard", **QWEN},
    "kl_target": {"grpo.kl_target": 1e-9},
    "remax": {"train.advantage": "remax", **EDITS},
    "async": {"sample.async_depth": 1, "sample.same_latent": True, **EDITS},
    "anchors": {
        "anchors.norm_guard": 1.0,
        "anchors.diversity": True,
        "anchors.reset_epochs": 2,
        "anchors.data": str(ROOT / "dataset/edits"),
    },
    "keep": {
        **{"algorithm": "rwr", "rwr.times": 2, "sample.num_image_per_prompt": 12},
        **{"train.keep_best_worst": 3, "sample.explore_steps": 2},
    },
    "opd": {
        **{"algorithm": "opd", "dataset": "LOGS/one,LOGS/two"},
        # teachers are runs before it
        "opd.teachers": {
            "one": "LOGS/nft-whole/checkpoints/latest/lora",
            "two": "LOGS/awm-whole/checkpoints/latest/lora",
        },
    },
}


def fields(runs: Runs, method: str) -> dict[str, Any]:
    return json.loads(json.dumps(METHODS[method]).replace("LOGS", str(runs.logdir)))


@pytest.fixture(scope="module")
def runs(prompt_folder, tmp_path_factory) -> Runs:
    """Each method undisturbed, on one process and on two."""
    runs = Runs(tmp_path_factory.mktemp("methods"), prompt_folder)
    save_prompts(runs.logdir / "lengths")
    for name in ("one", "two"):
        shutil.copytree(prompt_folder, runs.logdir / name)
    for how, layout in (("whole", ALONE), ("two", BY_TWO)):
        every = {f"{m}-{how}": {**fields(runs, m), "save_freq": 1} for m in METHODS}
        runs.several(layout, every, epochs=2)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_goes_on_from_a_checkpoint_was_never_stopped(runs, method):
    whole, resumed = (runs.logdir / name for name in (f"{method}-whole", method))
    *_, first, _ = sorted((whole / "checkpoints").glob("checkpoint-*"))
    runs(ALONE, name=method, epochs=2, resume=str(first), **fields(runs, method))
    files = sorted(p.name for p in (whole / STATE).glob("*.safetensors"))
    assert ("old.safetensors" in files) == (method in ("nft", "awm", "dgpo"))
    assert ("stale.safetensors" in files) == (method == "async")
    for name in files:
        first, second = (load_file(folder / STATE / name) for folder in (whole, resumed))
        assert all(torch.equal(first[k], second[k]) for k in first), name
    assert curve(whole) == curve(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_what_one_does(runs, method):
    assert_equal(runs.state(f"{method}-two"), runs.state(f"{method}-whole"))


def curve(folder: Path) -> list[dict[str, float]]:
    """All that was logged, but for what depends on the clock and the memory, and evaluations, which
    are made after the last epoch."""
    other = ("time/", "eval/", "perf/images", "perf/peak")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in lines]
