"""Forward and backward passes as CUDA graphs give what the plain ones give.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from flow_grpo.algorithms import Batch, Setup
from flow_grpo.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.models.sd3 import SD3Adapter
from flow_grpo.models.small.sd3 import build as build_tiny_sd3
from flow_grpo.sampling.rollout import (
    Dynamics,
    Trajectory,
    initial_noise,
    sample_generators,
)
from flow_grpo.speed.lora import MergedLora
from flow_grpo.training.policy import Policy

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPTS = ["one", "two", "three", "four"]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 2.0])


class Run:
    def __init__(
        self,
        precision: str = "no",
        *,
        compiled: bool = False,
        replay: bool,
        layers: int = 2,
        handlers: list | None = None,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # it keeps its first precision
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
        self.adapter = SD3Adapter(
            build_tiny_sd3(width=64, layers=layers),
            device="cuda",
            dtype=DTYPES[precision],
            max_sequence_length=4,
        )
        dynamics = Dynamics(self.adapter.schedule(4, 32, 32), "flow", 0.7, 4.5)
        self.policy = Policy(self.adapter, dynamics, rank=4, alpha=8)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.adapter.transformer.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.policy.prepare(accelerator, torch.optim.AdamW(self.policy.parameters()))
        if compiled:
            self.adapter.compile()
        if replay:
            self.adapter.replay()

    def sample(self, first: int = 0) -> Trajectory:
        generators = sample_generators(0, 0, list(range(first, first + len(PROMPTS))))
        return self.policy.denoiser.sample(
            initial_noise(generators, self.adapter.latent_shape(32, 32), "cuda"),
            self.adapter.encode(PROMPTS, [""] * len(PROMPTS)),
            steps=range(1, 3),
            generators=generators,
        )

    def train(self, trajectory: Trajectory, steps: list[int], *, add: bool = False) -> torch.Tensor:
        """Gradients of these steps together."""
        algorithm, rows = Grpo(GrpoSettings(), Setup()), np.arange(len(trajectory))
        batch = Batch(trajectory, ADVANTAGES.cuda(), rows, rows)
        references = algorithm.prepare(self.policy, batch)
        if not add:
            self.policy.transformer.zero_grad(set_to_none=True)
        for j in steps:
            loss = algorithm.loss(self.policy, batch, references, j)
            self.ratio = loss.columns["ratio"]
            loss.per_sample.mean().backward()
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()])


def test_gradients_are_averaged_over_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("replay_in_parallel.py"))
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert said.splitlines()[-1] == "equal"


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("precision", "off"), [("no", 1e-4), ("bf16", 1e-2), ("fp16", 1e-2)])
def test_replayed_steps_equal_plain_ones(precision, off):
    plain, replayed = Run(precision, replay=False), Run(precision, replay=True)
    expected = plain.sample()
    for _ in range(2):  # recorded, then replayed
        found = replayed.sample()
        assert relative(found.latents, expected.latents) < off
    gradients = [run.train(expected, [0]) for run in (plain, replayed)]
    assert relative(*gradients) < off
    # gradients of several steps add up, and weights changed in place are seen
    for run in (plain, replayed):
        for parameter in run.policy.parameters():
            parameter.data.mul_(1.5)
    before, gradients = gradients[0], [run.train(expected, [0, 1, 0]) for run in (plain, replayed)]
    assert relative(*gradients) < off
    assert relative(gradients[0], 2 * before) > 10 * off
    assert replayed.policy.parameters()[0].requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_ratio_is_exactly_1(precision, compiled):
    run = Run(precision, compiled=compiled, replay=True, layers=1)  # one kind of block to compile
    trajectory = run.sample()
    for j in (0, 1):
        assert run.train(trajectory, [j]).isfinite().all()
        assert torch.equal(run.ratio, torch.ones_like(run.ratio))


def test_a_forward_whose_activations_are_gone_cannot_be_taken_back():
    run = Run(replay=True)
    latents = torch.randn(4, *run.adapter.latent_shape(32, 32), device="cuda")
    texts = run.adapter.encode(PROMPTS, None)
    first = run.adapter.velocity(run.policy.module, latents, 500.0, texts, 1.0)
    run.adapter.velocity(run.policy.module, latents, 400.0, texts, 1.0)
    with pytest.raises(RuntimeError, match="activations are gone"):
        first.sum().backward()
    second = run.adapter.velocity(run.policy.module, latents, 400.0, texts, 1.0)
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="activations are gone"):
        second.sum().backward()


def test_merged_lora_is_sampled_and_taken_away_again():
    plain = Run(replay=False, layers=1)
    merged = Run(compiled=True, replay=True, layers=1)
    expected = plain.sample()
    before = merged.sample()
    sums = MergedLora(merged.policy.lora_layers)
    sums.renew(seed=0)
    with sums.applied():
        found = merged.sample()
    assert relative(found.latents, expected.latents) < 1e-4
    assert torch.equal(merged.sample().latents, before.latents)


def test_texts_do_not_wait_for_pictures():
    adapter = Run(replay=False).adapter
    expected = adapter.encode_one("two")
    adapter.encode(["one"], None)
    torch.cuda._sleep(2**32)  # cycles, about two seconds
    pictures = torch.cuda.Event()
    pictures.record()
    found = adapter._known(["two"])["two"]
    assert not pictures.query()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor[0].cpu())
