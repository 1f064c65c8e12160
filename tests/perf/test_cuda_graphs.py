"""The function that CUDA graphs capture, run eagerly: the model on copies of its LoRA weights."""

import pytest
import torch
from peft import LoraConfig
from torch import nn
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.errors import UserError
from flow_grpo.perf.cuda_graphs import _graph_key, _Model


def build(dtype: torch.dtype, **lora) -> tuple[SD3Adapter, dict]:
    """Return a model and inputs; in half precision as in training: LoRA in float32, autocast."""
    adapter = SD3Adapter(build_tiny_sd3(layers=2), dtype=dtype, max_sequence_length=4)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=adapter.lora_targets, **lora)
    adapter.transformer.add_adapter(config)
    torch.manual_seed(0)
    for name, parameter in adapter.transformer.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    if dtype != torch.float32:
        forward = adapter.transformer.forward
        adapter.transformer.forward = torch.autocast("cpu", dtype)(forward)
    texts = adapter.encode(["a", "b"], None)
    return adapter, {
        "hidden_states": torch.randn(2, *adapter.latent_shape(32, 32)).to(dtype),
        "timestep": torch.tensor([900.0, 300.0]),
        "encoder_hidden_states": texts.select(texts.positive)["embeds"],
        "pooled_projections": texts.select(texts.positive)["pooled"],
        "return_dict": False,
    }


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_lora_compute_the_same_before_and_after_an_update(dtype, use_dora):
    adapter, inputs = build(dtype, use_dora=use_dora)
    transformer, model = adapter.transformer, _Model(adapter.transformer)
    outputs = []
    for _ in range(2):
        expected = transformer(**inputs)[0]
        found = model.run(inputs, with_lora=True)
        assert torch.equal(found, expected)
        gradients = torch.autograd.grad(expected.float().square().sum(), model.trained)
        others = torch.autograd.grad(found.float().square().sum(), model.compute_params)
        assert all(torch.equal(a, b.float()) for a, b in zip(gradients, others, strict=True))
        outputs.append(found)
        with torch.no_grad():
            for parameter in model.trained:
                parameter.mul_(1.001)  # usually below the resolution of bfloat16
    assert not torch.equal(*outputs)
    transformer.disable_adapters()
    with torch.no_grad():
        assert torch.equal(model.run(inputs, with_lora=False), transformer(**inputs)[0])


def test_graphs_are_keyed_by_all_inputs_and_not_only_by_tensors():
    """Otherwise another value would be replayed as the captured one."""
    tensor = torch.zeros(2, 3)
    same = _graph_key({"x": tensor, "scale": 1.0, "name": None})
    assert _graph_key({"x": torch.ones(2, 3), "scale": 1.0, "name": None}) == same
    others = [
        {"x": tensor, "scale": 2.0, "name": None},
        {"x": tensor, "scale": 1.0, "name": "a"},
        {"x": tensor, "scale": True, "name": None},
        {"x": tensor.half(), "scale": 1.0, "name": None},
        {"x": tensor[:1], "scale": 1.0, "name": None},
        {"x": tensor, "scale": 1.0},
    ]
    assert all(_graph_key(inputs) != same for inputs in others)
    with pytest.raises(UserError, match="shapes") as caught:
        _graph_key({"x": tensor, "shapes": [(1, 2)]})
    assert "--config.cuda_graphs=False" in caught.value.hint
