"""The reference is the policy at the start of the run, computed by the same arithmetic."""

import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, load, run_fields, save_prompts, save_small_pipeline
from peft import LoraConfig, inject_adapter_in_model
from reference_distances import METHODS, distances
from safetensors.torch import load_file
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.data.seeding import sample_generators
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Dynamics, initial_noise
from flow_grpo.perf.lora import disable_lora
from flow_grpo.training.checkpoint import find_weights
from flow_grpo.training.snapshot import Snapshot

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train import train

SIZE = 16, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_policy_and_reference_are_identical_at_the_start(method, use_lora, dtype):
    algorithm, guidance = METHODS[method], 4.5 if method == "grpo" else 1.0
    adapter = SD3Adapter(build_tiny_sd3(), dtype=dtype, max_sequence_length=4)
    dynamics = Dynamics(adapter.schedule(3, *SIZE), "flow", 0.7, guidance)
    policy = Policy(adapter, dynamics, use_lora=use_lora, rank=4, alpha=8)
    policy.reference = Snapshot(policy.trained_parameters(), "reference")
    policy.old = Snapshot(policy.trained_parameters(), "old")
    generators = sample_generators(0, 0, range(4))
    trajectory = policy.denoiser.sample(
        initial_noise(generators, adapter.latent_shape(*SIZE), "cpu"),
        adapter.encode(["a", "a", "b", "b"], [""] * 4 if guidance > 1 else None),
        steps=range(2),
        generators=generators,
    )
    start = distances(algorithm, policy, trajectory)
    assert "kl" in start
    assert len(start) > 1
    assert set(start.values()) == {0}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01
    policy.on_weights_updated()
    assert 0 not in distances(algorithm, policy, trajectory).values()


@pytest.fixture
def lora_on_all_layers(tmp_path) -> dict:
    """Fields of a run that starts from a LoRA with tensors that do not affect the output."""
    [family] = [f for f in FAMILIES if f.name == "qwen_image"]
    model = save_small_pipeline(family, tmp_path / "model")
    other = load(model)
    other.transformer.add_adapter(LoraConfig(r=2, target_modules=other.lora_targets))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in other.transformer.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    other.save_lora(tmp_path / "lora", other.transformer, other.transformer.state_dict())
    fields = run_fields(family, model, save_prompts(tmp_path / "dataset"))
    return {**fields, "train.lora_path": str(tmp_path / "lora"), "sample.num_steps": 2}


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_frozen_lora_tensors_stay_frozen_and_are_saved(make_session, lora_on_all_layers, beta):
    fields = {**lora_on_all_layers, "train.beta": beta}
    session = make_session(**fields)
    trained = session.policy.trained_parameters().keys()
    train(session)
    assert session.policy.trained_parameters().keys() == trained
    folder = find_weights(session.folder)
    start, saved = (
        load_file(Path(path) / "pytorch_lora_weights.safetensors")
        for path in (fields["train.lora_path"], folder)
    )
    assert saved.keys() == start.keys()
    unchanged = [name for name in saved if torch.equal(saved[name], start[name])]
    assert len(unchanged) == len(saved) - len(trained) == 6
    session.close()
    again = {**fields, "resume": str(session.folder), "num_epochs": 2}
    resumed = make_session(**again)
    assert resumed.progress.epoch == 1
    assert resumed.policy.trained_parameters().keys() == trained
    make_session(**{**fields, "train.lora_path": str(folder)})


def test_disable_lora_keeps_requires_grad():
    layer = torch.nn.Linear(4, 4)
    model = inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["0"]), torch.nn.Sequential(layer)
    )
    a = model[0].lora_A["default"].weight
    a.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with disable_lora([model[0]]):
        assert model[0].disable_adapters
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
