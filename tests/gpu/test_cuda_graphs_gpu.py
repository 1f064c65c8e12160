"""Replayed CUDA graphs of forward and backward passes equal eager execution.

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
from families import make_images
from gpu_runs import PROMPTS, Run, relative

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.algorithms import Batch, Setup
from flow_grpo.diffusion.algorithms.opd import Opd, OpdSettings
from flow_grpo.diffusion.data_anchor import DataAnchor
from flow_grpo.training.snapshot import Snapshot


def test_gradients_are_averaged_over_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("cuda_graphs_two_ranks.py"))
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
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
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert output.splitlines()[-1] == "equal"


@pytest.mark.parametrize(("precision", "off"), [("no", 1e-4), ("bf16", 1e-2), ("fp16", 1e-2)])
def test_replayed_steps_equal_eager_ones(precision, off):
    plain, replayed = (Run(precision, replay=r, width=64) for r in (False, True))
    expected = plain.sample()
    for _ in range(2):  # captured, then replayed
        found = replayed.sample()
        assert relative(found.latents, expected.latents) < off
    gradients = [run.train(expected, [0]) for run in (plain, replayed)]
    assert relative(*gradients) < off
    # gradients of several steps add up, and in-place changes of weights take effect
    for run in (plain, replayed):
        for parameter in run.policy.parameters():
            parameter.data.mul_(1.5)
    before, gradients = gradients[0], [run.train(expected, [0, 1, 0]) for run in (plain, replayed)]
    assert relative(*gradients) < off
    assert relative(gradients[0], 2 * before) > 10 * off
    assert replayed.policy.parameters()[0].requires_grad


def test_gradients_of_the_latents_equal_eager_ones():
    """leap uses them, with compiled code but without graphs."""
    plain, compiled = (Run("no", compiled=c, replay=False, width=64) for c in (False, True))
    trajectory = plain.sample()
    x = trajectory.latents[:, 0]
    at = x, torch.full((len(x),), 500.0, device="cuda"), trajectory.conditioning
    found = [run.policy.input_gradient(*at, torch.ones_like(x)) for run in (compiled, plain)]
    assert found[1].norm() > 0
    assert relative(*found) < 1e-4
    assert all(p.grad is None for p in compiled.policy.parameters())


def test_images_of_the_data_anchor_have_their_own_graph():
    """They are unguided, half the batch of the samples, and trained between their steps."""
    rows = [Prompt(text, images=make_images(text, 1)) for text in PROMPTS]
    gradients = []
    for run in (Run(replay=r, width=64) for r in (False, True)):
        trajectory, data = run.sample(), DataAnchor(rows, run.policy, 1.0)
        for _ in range(2):  # captured, then replayed
            run.train(trajectory, [0])
            [batch] = data.batches((0, 0), len(PROMPTS), 1, 0, 1)
            run.policy.transformer.zero_grad(set_to_none=True)
            data.loss(batch).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in run.policy.parameters()]))
    assert relative(*gradients) < 1e-4


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_ratio_is_exactly_1(precision, compiled):
    run = Run(precision, compiled=compiled, replay=True, width=64, layers=1)
    trajectory = run.sample()
    for j in (0, 1):
        assert run.train(trajectory, [j]).isfinite().all()
        assert torch.equal(run.ratio, torch.ones_like(run.ratio))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_teacher_with_equal_weights_has_distance_0(compiled):
    """Also after the weights of another teacher were swapped in and out."""
    run = Run("bf16", compiled=compiled, replay=True, width=64, layers=1)
    policy, teachers = run.policy, {"same": "same", "all": "other"}
    policy.loras = {path: Snapshot(policy.trained_parameters(), path) for path in teachers.values()}
    torch._foreach_mul_(policy.loras["other"].copy, 1.5)
    rows = np.arange(len(PROMPTS))
    tasks = np.array(["same", "same", "else", "else"])
    algorithm = Opd(OpdSettings(teachers=teachers, start="model"), Setup(num_steps=4))
    batch = Batch(run.sample(), torch.zeros(4).cuda(), rows, rows, tasks=tasks)
    loss = algorithm.loss(policy, batch, algorithm.prepare(policy, batch), 0)
    assert (loss.per_sample == 0).tolist() == [True, True, False, False]
    loss.per_sample.mean().backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


def test_a_backward_pass_whose_activations_were_overwritten_raises():
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


def test_encoding_does_not_wait_for_sampling():
    adapter = Run(replay=False).adapter
    expected = adapter.encode_single("two")
    adapter.encode(["one"], None)
    torch.cuda._sleep(2**32)  # cycles, about two seconds
    sampled = torch.cuda.Event()
    sampled.record()
    adapter.precompute_embeddings(["two"])
    assert not sampled.query()
    [found] = adapter._cache.find(["two"]).values()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor[0].cpu())
