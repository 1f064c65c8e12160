"""Whole runs of model families: what SD3 promises of processes and of resuming, another keeps."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, save_prompts, save_small
from runner import WARM
from safetensors.torch import load_file
from test_bad_input import assert_told
from test_exact import Runs, assert_equal
from test_methods import STATE, curve
from test_resume import assert_same_metrics, assert_same_state, latest

# It masks texts of different lengths, and a part of its last block gets no gradient.
[FAMILY] = [family for family in FAMILIES if family.name == "qwen_image"]
QWEN = {"family": FAMILY.name, "resolution": 32, "max_sequence_length": 48}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return save_prompts(tmp_path_factory.mktemp("families") / "dataset")


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory) -> Runs:
    """One that nothing disturbs."""
    runs = Runs(tmp_path_factory.mktemp("families"), dataset)
    runs("1 x 6", name="whole", epochs=2, **QWEN)
    return runs


@pytest.mark.slow
def test_two_processes_train_what_one_does(runs):
    runs("2 x 12", name="two", epochs=2, **QWEN)
    assert_equal(runs.state("two"), runs.state("whole"))


@pytest.mark.slow
def test_stopped_and_resumed_is_never_stopped(runs):
    for epochs in (1, 2):
        runs("1 x 6", name="resumed", epochs=epochs, resume="auto", **QWEN)
    folders = [runs.logdir / name for name in ("whole", "resumed")]
    for name in ("trained.safetensors", "ema.safetensors"):
        whole, resumed = (load_file(folder / STATE / name) for folder in folders)
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[k], resumed[k]) for k in whole), name
    assert curve(folders[0]) == curve(folders[1])


@pytest.mark.slow
def test_a_kill_costs_only_time(dataset, train, tmp_path):
    model = save_small(FAMILY, tmp_path / "model")
    settings = {"pretrained__model": model, "dataset": dataset, "max_sequence_length": 48}
    settings |= {"num_epochs": 3, "eval_freq": 0, "train__ema_update_interval": 1}
    whole = train(run_name="whole", **settings)
    assert whole.returncode == 0, whole.stderr
    process = train.start(run_name="killed", launcher=WARM, **settings)
    for line in process.stdout:
        if line.startswith("epoch 1/"):
            break
    process.kill()
    process.communicate()
    assert len(train.metrics("killed")) < 4
    rest = train(run_name="killed", resume="auto", **settings)
    assert rest.returncode == 0, rest.stderr
    assert "Warning" not in rest.stderr
    assert_same_state(latest(train, "whole"), latest(train, "killed"))
    assert_same_metrics(train.metrics("whole"), train.metrics("killed"))


def test_what_a_model_cannot_do_is_told_in_one_line(train, dataset, tmp_path):
    model = save_small(FAMILY, tmp_path / "model")
    for weights in model.rglob("*.safetensors"):
        weights.unlink()
    done = train(pretrained__model=model, dataset=dataset, frames=5)
    assert_told(train, done, "error: frames=5 must be 1: this model draws pictures")
