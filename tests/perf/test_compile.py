"""Compiled blocks compute the same, and the on-policy ratio is still exactly 1."""

import numpy as np
import pytest
import torch
from torch import distributed
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.data.seeding import sample_generators
from flow_grpo.diffusion.algorithms import Batch, Setup
from flow_grpo.diffusion.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.diffusion.algorithms.trajectory import PreparedBatch
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, initial_noise
from flow_grpo.perf.compile_utils import compile_once


def step(*, compiled: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of sampling, ratios of training and the gradient, in bfloat16."""
    adapter = SD3Adapter(build_tiny_sd3(layers=1), dtype=torch.bfloat16, max_sequence_length=4)
    dynamics = Dynamics(adapter.schedule(3, 32, 32), "flow", 0.7, 4.5)
    policy = Policy(adapter, dynamics, rank=4, alpha=8)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter.transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    adapter.apply_optimizations(fold=False, compiled=compiled, graphs=False)
    generators = sample_generators(0, 0, [0, 1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        trajectory = policy.denoiser.sample(
            initial_noise(generators, adapter.latent_shape(32, 32), "cpu"),
            adapter.encode(["a", "b", "c"], ["", "", ""]),
            steps=range(2),
            generators=generators,
        )
        assert not trajectory.latents.requires_grad
        advantages = torch.tensor([1.0, -1.0, 0.5])
        batch = Batch(trajectory, advantages, np.arange(3), np.zeros(3, int))
        loss = Grpo(GrpoSettings(beta=0.0), Setup()).loss(policy, batch, PreparedBatch(None), 1)
    loss.per_sample.mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return trajectory.log_probs, loss.columns["ratio"], gradient


@pytest.mark.slow
def test_compiled_sampling_and_training_match_eager_mode():
    log_probs, ratio, gradient = step(compiled=False)
    assert torch.equal(ratio, torch.ones(3))
    torch._dynamo.reset()
    # compiling C++ takes most of the time: one file per graph, without vector instructions
    fast = {"cpp_wrapper": True, "cpp.vec_isa_ok": False}
    with torch._inductor.config.patch(fast):
        compiled = step(compiled=True)
    assert torch.equal(compiled[1], torch.ones(3))
    torch.testing.assert_close(compiled[0], log_probs, rtol=1e-3, atol=1e-3)
    assert (compiled[2] - gradient).norm() < 0.1 * gradient.norm()


def test_ddp_does_not_synchronise_for_velocities_without_a_gradient():
    """Otherwise it would synchronise the next backward pass, which other ranks may not have."""
    adapter = SD3Adapter(build_tiny_sd3(layers=1), max_sequence_length=4)
    adapter.compiled = True  # uses the kernels of training
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        module = DistributedDataParallel(adapter.transformer.requires_grad_(True))
        shared = []
        module.register_forward_pre_hook(
            lambda *_: shared.append((module.require_backward_grad_sync, torch.is_grad_enabled()))
        )
        denoiser = Denoiser(adapter, module, Dynamics(adapter.schedule(2, 16, 16)))
        latents = torch.zeros(1, *adapter.latent_shape(16, 16))
        velocity = denoiser.velocity_with_training_kernels(
            latents, 500.0, adapter.encode(["a"], None)
        )
        assert shared == [(False, True)]
        assert not velocity.requires_grad
    finally:
        distributed.destroy_process_group()


def test_a_function_that_cannot_be_compiled_runs_eagerly(monkeypatch, caplog):
    def twice(x: torch.Tensor, *, more: float = 0.0) -> torch.Tensor:
        return 2 * x + more

    def fail(*_: object) -> None:
        raise BackendCompilerFailed("inductor", ValueError("no kernel"), None)

    x = torch.arange(3.0)
    monkeypatch.setattr("flow_grpo.perf.compile_utils.missing_compile_dependency", lambda: "Triton")
    assert compile_once(twice) is twice
    compile_once.cache_clear()
    monkeypatch.setattr("flow_grpo.perf.compile_utils.missing_compile_dependency", lambda: "")
    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
    with caplog.at_level("WARNING"):
        assert torch.equal(compile_once(twice)(x), twice(x))
        assert torch.equal(compile_once(twice)(x, more=1.0), twice(x, more=1.0))
    assert len(caplog.records) == 1
    assert "twice" in caplog.text
    compile_once.cache_clear()
