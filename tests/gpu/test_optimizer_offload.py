"""Adam's moments are offloaded to the CPU between updates.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import torch

from flow_grpo.training.optimizer import offload_optimizer_state


@pytest.mark.parametrize("fused", [True, False])
def test_moments_are_on_the_gpu_only_during_a_step(fused):
    weights = []
    for offload in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
        if offload:
            offload_optimizer_state(optimizer)
        for _ in range(3):
            layer(torch.randn(4, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            devices = {s[n].device.type for s in optimizer.state.values() for n in ("exp_avg",)}
            assert devices == {"cpu" if offload else "cuda"}
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[layer.weight]["exp_avg_sq"].is_cuda is not offload
        weights.append(layer.weight.detach().clone())
    assert torch.equal(*weights)
