"""Forward and backward passes as CUDA graphs give what the plain ones give.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_runs import PROMPTS, Run, relative

from flow_grpo.speed.lora import MergedLora


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


@pytest.mark.parametrize(("precision", "off"), [("no", 1e-4), ("bf16", 1e-2), ("fp16", 1e-2)])
def test_replayed_steps_equal_plain_ones(precision, off):
    plain, replayed = (Run(precision, replay=r, width=64) for r in (False, True))
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
    run = Run(precision, compiled=compiled, replay=True, width=64, layers=1)
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
    plain = Run(replay=False, width=64, layers=1)
    merged = Run(compiled=True, replay=True, width=64, layers=1)
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
