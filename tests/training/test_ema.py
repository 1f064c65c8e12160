import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flow_grpo.training.snapshot import Ema


def train(ema: Ema, weight: nn.Parameter, steps: range) -> None:
    for step in steps:
        weight.data.fill_(float(step))
        ema.update(step)


def closed_form(steps: int, decay: float, every: int) -> float:
    """With decay d_n = min((1 + n) / (10 + n), decay) at optimizer step n, weights w_n = n and a
    start of 0: the sum of (1 - d_n) w_n times all later decays."""
    seen = [n for n in range(1, steps + 1) if n % every == 0]
    decays = [min((1 + n) / (10 + n), decay) for n in seen]
    return sum(
        (1 - decays[i]) * n * torch.tensor(decays[i + 1 :], dtype=torch.float64).prod().item()
        for i, n in enumerate(seen)
    )


@pytest.mark.parametrize(("decay", "every"), [(0.9, 8), (0.9, 1), (0.3, 2), (0.0, 3)])
def test_the_average_has_its_closed_form_and_is_swapped_back(decay, every):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    ema = Ema({"w": weight}, decay, every)
    train(ema, weight, range(1, 101))
    with ema.applied():
        inside = weight.tolist()
    assert inside == pytest.approx([closed_form(100, decay, every)] * 2, rel=1e-12)
    assert weight.tolist() == [100.0, 100.0]


def test_the_decay_is_reached_after_80_steps_for_any_interval():
    weight = nn.Parameter(torch.zeros(1))
    ema = Ema({"w": weight}, decay=0.9, every=8)
    ema.copy[0].fill_(1.0)
    ema.update(80)  # (1 + 80) / (10 + 80) = .9
    assert ema.copy[0].item() == pytest.approx(0.9)
    ema.copy[0].fill_(1.0)
    ema.update(72)
    assert ema.copy[0].item() == pytest.approx(73 / 82)


def test_a_saved_average_continues_with_other_settings(tmp_path):
    weight = nn.Parameter(torch.zeros(3))
    ema = Ema({"w": weight}, decay=0.9, every=8)
    train(ema, weight, range(1, 17))
    ema.save(tmp_path)
    assert load_file(tmp_path / "ema.safetensors").keys() == {"w"}
    other = Ema({"w": weight}, decay=0.5, every=1)
    other.load(tmp_path)
    assert torch.equal(other.copy[0], ema.copy[0])
    before = other.copy[0].clone()
    train(other, weight, range(17, 18))
    assert torch.allclose(other.copy[0], (before + 17) / 2)


SHARDED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from flow_grpo.training.snapshot import Ema

folder = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
weight = nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)]))
ema = Ema({"w": weight}, decay=0.5, every=1)
weight.data.mul_(3)
ema.update(100)
with ema.applied():
    assert torch.equal(weight.full_tensor(), 2 * torch.arange(8.0).reshape(4, 2))
ema.save(folder)
other = Ema({"w": weight}, decay=0.5, every=1)
other.load(folder)
assert torch.equal(other.copy[0].full_tensor(), 2 * torch.arange(8.0).reshape(4, 2))
print("done")
"""


def test_weights_that_fsdp2_has_sharded_are_averaged_too(tmp_path):
    """In a separate process, because it creates a process group."""
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "done", done.stderr
