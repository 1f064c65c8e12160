"""In float64, runs of every algorithm resume exactly and do not depend on the process count."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import save_prompts
from runner import ROOT
from safetensors.torch import load_file
from test_float64_equivalence import Runs, assert_equal

STATE = "checkpoints/latest/state"
ONE_PROCESS, TWO_PROCESSES = (1, 6, 6, 2), (2, 6, 6, 1)
# prompts with and without a source image, which share a batch or not depending on the layout
EDITS = {
    "family": "flux_kontext",
    "dataset": f"{ROOT}/dataset/edits:0.5,{ROOT}/dataset/scenes:0.5",
}
# masks texts of different lengths, and a part of the last block gets no gradient
QWEN = {
    "family": "qwen_image",
    "dataset": "LOGS/lengths",
    "max_sequence_length": 48,
    "resolution": 32,
}
METHODS = {
    "nft": {"algorithm": "nft", "nft.times": 2},
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
        # teachers are the two epochs of the first run of this dict
        "opd.teachers": {
            "one": "LOGS/nft-whole/checkpoints/checkpoint-2/lora",
            "two": "LOGS/nft-whole/checkpoints/checkpoint-4/lora",
        },
    },
}
# methods whose second epoch depends on more of the first than weights, moving average and moments
STATEFUL = ("nft", "kl_target", "async", "anchors")


def fields(runs: Runs, method: str) -> dict[str, Any]:
    return json.loads(json.dumps(METHODS[method]).replace("LOGS", str(runs.logdir)))


@pytest.fixture(scope="module")
def runs(prompt_folder, tmp_path_factory) -> Runs:
    """Uninterrupted runs of each method: two epochs in one process, and one or two in two."""
    runs = Runs(tmp_path_factory.mktemp("methods"), prompt_folder)
    save_prompts(runs.logdir / "lengths")
    for name in ("one", "two"):
        shutil.copytree(prompt_folder, runs.logdir / name)
    whole = {f"{m}-whole": {**fields(runs, m), "save_freq": 1} for m in METHODS}
    runs.run_sequence(ONE_PROCESS, whole, epochs=2)
    two = {f"{m}-two": {**fields(runs, m), "num_epochs": 1 + (m in STATEFUL)} for m in METHODS}
    runs.run_sequence(TWO_PROCESSES, two, epochs=2)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, method):
    uninterrupted, resumed = (runs.logdir / name for name in (f"{method}-whole", method))
    *_, first, _ = sorted((uninterrupted / "checkpoints").glob("checkpoint-*"))
    runs(ONE_PROCESS, name=method, epochs=2, resume=str(first), **fields(runs, method))
    files = sorted(p.name for p in (uninterrupted / STATE).glob("*.safetensors"))
    assert ("old.safetensors" in files) == (method in ("nft", "dgpo"))
    assert ("stale.safetensors" in files) == (method == "async")
    for name in files:
        first, second = (load_file(folder / STATE / name) for folder in (uninterrupted, resumed))
        assert all(torch.equal(first[k], second[k]) for k in first), name
    assert comparable_metrics(uninterrupted) == comparable_metrics(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_the_same_weights_as_one(runs, method):
    last = (runs.logdir / f"{method}-two/checkpoints/latest").resolve().name
    assert_equal(runs.state(f"{method}-two"), runs.state(f"{method}-whole", last))


def comparable_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics without those of time and memory, and without evaluations.

    A run is evaluated after its last epoch, so the runs differ in their evaluations.
    """
    excluded = ("time/", "eval/", "perf/images", "perf/peak", "perf/save")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if not k.startswith(excluded)} for line in lines]
