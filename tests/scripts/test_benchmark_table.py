"""The table that scripts/benchmark.py prints with its JSON line."""

import pytest
import torch
from benchmark_utils import report, spread
from untrained.full import build

RESULT = {
    "device": "a GPU",
    "settings": {
        "model": "sd3.5-medium",
        "size": "512x512",
        "steps": 10,
        "algorithm": "grpo",
        "weights": "LoRA r 32",
        "batch": 8,
        "precision": "bf16",
    },
    "sampling_s_per_image": spread([0.5, 0.25, 1.0]),
    "trained_step_s_per_sample": spread([0.125]),
    "full_s_per_sample": spread([2.0, 1.5]),
    "peak_gib": 30.5,
    "warm_up_s": 60.1,
    "epoch_s": 12.34,
    "matmul_tflops": 700.0,
    "sampling_tflops": 350.0,
    "sampling_tflops_share": 0.5,
    "training_tflops": 70.0,
    "training_tflops_share": 0.1,
}


def test_the_table_shows_the_fields_of_the_json_line():
    assert report(RESULT).splitlines() == [
        "sd3.5-medium, 512x512, 10 steps, grpo, LoRA r 32, batch 8, bf16 on a GPU",
        "|                                     | median |   min |   max |",
        "|-------------------------------------|-------:|------:|------:|",
        "| sampling, s per image               |    0.5 |  0.25 |     1 |",
        "| training step, s per sample         |  0.125 | 0.125 | 0.125 |",
        "| sampling and training, s per sample |   1.75 |   1.5 |     2 |",
        "peak memory 30.5 GiB, warm-up 60.1 s, epoch 12.34 s",
        "TFLOP/s (percentage of a large matmul's 700): sampling 350 (50 %), training 70 (10 %)",
    ]


def test_no_mixed_precision_is_float32():
    float32 = {**RESULT, "settings": {**RESULT["settings"], "precision": "no"}}
    assert report(float32).splitlines()[0].endswith("batch 8, float32 on a GPU")


def test_flow_grpo_is_shown_with_the_speedup():
    times = ("sampling_s_per_image", "trained_step_s_per_sample", "full_s_per_sample")
    theirs = {name: spread([1.0]) for name in times}
    _, head, _, sampling, step, full, *_ = report({**RESULT, "flow_grpo": theirs}).splitlines()
    assert head.endswith("| Flow-GRPO | speedup |")
    for line, factor in ((sampling, 2.0), (step, 8.0), (full, 0.57)):
        assert float(line.split("|")[-2]) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("sd3.5-medium", (0.124, 0.695, 4.762)),
        ("flux.2-4b-klein", (4.022,)),
        ("wan2.1-14b", (5.681,)),
    ],
)
def test_full_encoders_have_as_many_parameters_as_the_published_ones(model, billions):
    pipeline = build(model, torch.device("meta"), torch.bfloat16, whole_encoders=True)
    names = sorted(name for name in pipeline.components if name.startswith("text_encoder"))
    parameters = [list(getattr(pipeline, name).parameters()) for name in names]
    counts = [sum(p.numel() for p in each) / 1e9 for each in parameters]
    assert counts == pytest.approx(billions, rel=3e-3)
    assert {p.dtype for each in parameters for p in each} == {torch.bfloat16}


@pytest.mark.parametrize(("model", "billions"), [("wan2.1-1.3b", 1.419), ("ltx-2.3", 18.99)])
def test_full_transformers_have_as_many_parameters_as_the_published_ones(model, billions):
    transformer = build(model, torch.device("meta"), torch.bfloat16).transformer
    count = sum(p.numel() for p in transformer.parameters()) / 1e9
    assert count == pytest.approx(billions, rel=1e-3)
