"""VLMs of published sizes, and the benchmark script that uses them."""

import json

import pytest
import torch
from runner import run_script
from untrained import vlm as shapes

BILLIONS = {
    "qwen2.5-vl-3b": 3.75,
    "qwen2.5-vl-7b": 8.29,
    "qwen3-vl-4b": 4.44,
    "qwen3-vl-8b": 8.77,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_random_models_have_as_many_parameters_as_the_published_ones(name):
    model = shapes.build(name, torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(
        BILLIONS[name], abs=0.01
    )


def test_the_benchmark_prints_its_measurements():
    sizes = ("--answers=4", "--group=2", "--text_tokens=8", "--side=56", "--new_tokens=6")
    done = run_script("scripts/benchmark_vlm.py", "--shape=small", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["prompt_tokens"] == 4 + 2 + 8
    assert found["sampling_s_per_answer"] > 0
    assert found["training_s_per_answer"] > 0
