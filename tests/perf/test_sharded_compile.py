"""Blocks that FSDP2 shards are compiled without the hooks that gather their weights."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import Tensor, distributed, fx, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.perf import compile_utils
from flow_grpo.perf.optimize import compile_block
from flow_grpo.training.distributed import compile_obstacle, free_weights_after_forward
from flow_grpo.training.snapshot import Snapshot


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.enabled = nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) if self.enabled else x


def build_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def gradients(blocks: nn.Sequential, x: Tensor) -> list[Tensor]:
    blocks(x).sum().backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parts(blocks)]
    blocks.zero_grad()
    return grads


def parts(blocks: nn.Sequential) -> list[nn.Parameter]:
    return list(blocks.parameters())


def test_hooks_stay_outside_the_graph(monkeypatch):
    graphs = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    x = torch.linspace(-1, 1, 12).view(3, 4)
    expected = gradients(build_blocks(), x)
    sharded = build_blocks()
    for block in sharded:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(sharded)
    names = list(sharded.state_dict())
    torch._dynamo.reset()
    monkeypatch.setattr(compile_utils, "missing_compile_dependency", str)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for block in sharded:
        compile_block(block)
    for _ in range(2):  # weights are freed after a pass and gathered for the next one
        assert all(map(torch.equal, gradients(sharded, x), expected))
        assert all(isinstance(p, DTensor) for p in parts(sharded))
    assert len(graphs) == 2  # with and without a gradient of the input
    assert list(sharded.state_dict()) == names
    for block in sharded:  # a LoRA layer is disabled in the same way
        block.enabled = False
    assert torch.equal(sharded(x), x)


def test_blocks_that_cannot_be_compiled_run_in_eager_mode(caplog, monkeypatch):
    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        raise NotImplementedError("no kernel")

    x = torch.ones(1, 4)
    sharded = build_blocks()
    expected = sharded(x)
    for block in sharded:
        fully_shard(block)
    torch._dynamo.reset()
    monkeypatch.setattr(compile_utils, "missing_compile_dependency", str)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for block in sharded:
        compile_block(block)
    with caplog.at_level("WARNING"):
        assert torch.equal(sharded(x), expected)
    assert len(caplog.records) == 2


def test_sharded_blocks_are_found_and_may_be_compiled():
    adapter = SD3Adapter(build_tiny_sd3(layers=2), max_sequence_length=4)
    blocks = adapter.blocks()
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=2))
    fsdp = SimpleNamespace(distributed_type=DistributedType.FSDP, state=state)
    for block in blocks:
        fully_shard(block)
    fully_shard(adapter.transformer)
    assert list(map(id, adapter.blocks())) == list(map(id, blocks))
    assert compile_obstacle(fsdp, blocks) == ""
    assert compile_obstacle(SimpleNamespace(distributed_type=DistributedType.NO), blocks) == ""
    state.fsdp_plugin.fsdp_version = 1
    assert "fsdp_version" in compile_obstacle(fsdp, blocks)


def test_hooks_within_a_block_prevent_compilation():
    blocks = build_blocks()
    for block in blocks:
        fully_shard(block.layer)
    state = SimpleNamespace(
        fsdp_plugin=SimpleNamespace(fsdp_version=2), deepspeed_plugin=SimpleNamespace(zero_stage=3)
    )
    for kind, shown in (("FSDP", "fsdp_transformer_layer_cls_to_wrap"), ("DEEPSPEED", "ZeRO-3")):
        accelerator = SimpleNamespace(distributed_type=DistributedType(kind), state=state)
        assert shown in compile_obstacle(accelerator, blocks)
    state.deepspeed_plugin.zero_stage = 2
    assert compile_obstacle(accelerator, blocks) == ""


def test_swapped_weights_reach_the_root_module():
    """FSDP2 would compute with the weights that it gathered before the exchange."""
    blocks = nn.Sequential(Block(), nn.Linear(4, 4))
    fully_shard(blocks[0])
    fully_shard(blocks)
    free_weights_after_forward(blocks)
    zero = Snapshot(dict(blocks.named_parameters()), "zero")
    for copy in zero.copy:
        copy.zero_()
    x = torch.ones(1, 4)
    before = blocks(x).detach()
    with zero.applied():
        assert not blocks(x).any()
    assert torch.equal(blocks(x), before)
