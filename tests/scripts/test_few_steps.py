"""scripts/few_steps.py: distillation of a few-step model and comparison of samplers."""

import json
from dataclasses import replace

import few_steps
import pytest
import torch
from algorithm_fixtures import small_adapter
from few_steps import SAMPLERS, SIZE, measure, refine_schedule, sharpness

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import Schedule, load_adapter


def test_a_refined_schedule_contains_the_original_levels():
    fine = refine_schedule(Schedule((1.0, 0.6, 0.0), (1000.0, 600.0)), 2)
    assert fine.sigmas == pytest.approx((1.0, 0.8, 0.6, 0.3, 0.0))
    assert fine.timesteps == pytest.approx((1000, 800, 600, 300))


def test_blur_reduces_sharpness():
    stripes = torch.arange(16).remainder(2).float().expand(2, 3, 8, 16)
    blurred = torch.nn.functional.avg_pool2d(stripes, 3, stride=1)
    assert sharpness(stripes) == pytest.approx(0.5)  # two of four neighbours differ by 1
    assert sharpness(blurred) < 0.2
    assert sharpness(torch.full((1, 3, 8, 8), 0.7)) == pytest.approx(0, abs=1e-6)


def test_each_sampler_generates_different_images():
    adapter, seen = small_adapter(), []

    def score(images: torch.Tensor, prompts: list[str]) -> float:
        assert prompts == ["a", "b"]
        seen.append(images)
        return 0.5

    prompts, schedule = [Prompt("a"), Prompt("b")], adapter.schedule(3, *SIZE)
    for dynamics, *_ in [*SAMPLERS.values(), SAMPLERS["cps 1"]]:
        assert measure(adapter, replace(dynamics, schedule=schedule), prompts, score)[0] == 0.5
    cps, flow, ode, again = seen
    assert torch.equal(cps, again)
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in ((cps, flow), (cps, ode)))


def test_a_model_is_distilled_at_toy_length(tmp_path):
    out = tmp_path / "few"
    few_steps.main(["distil", "--toy", "--out", str(out)])
    assert "few_steps.py distil --toy" in json.loads((out / "training.json").read_text())["command"]
    student, teacher = load_adapter(str(out)), load_adapter(few_steps.MODEL)
    a, b = (each.transformer.state_dict() for each in (student, teacher))
    assert any(not torch.equal(a[name], b[name]) for name in a)
    c, d = (each.vae.state_dict() for each in (student, teacher))
    assert all(torch.equal(c[name], d[name]) for name in c)
