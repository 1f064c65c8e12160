"""Linear layers with frozen FP8 and NF4 weights."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.errors import UserError
from flow_grpo.perf import quantization
from flow_grpo.perf.quantization import (
    QuantizedLinear,
    at_full_precision,
    preserve_quantized_weights,
    quantize_linears,
)
from flow_grpo.training.builder import check_base_precision

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train import run_evaluation, train

CPU = torch.device("cpu")
PRECISIONS = ["fp8", "nf4"]
# relative errors of one layer with normal weights; e4m3 has 3 mantissa bits
MAX_ERROR = {"fp8": 0.05, "nf4": 0.12}


def layer_and_weight(precision, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = nn.Linear(128, 48, dtype=dtype).requires_grad_(False)
    weight = layer.weight.clone()
    quantize_linears([nn.Sequential(layer)], precision, CPU, **options)
    return layer, weight


def test_a_compiled_layer_has_the_gradient_of_the_eager_one():
    layer, _ = layer_and_weight("fp8")
    x = torch.randn(4, 128, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_quantized_layer_is_close_to_the_original(precision, dtype):
    layer, weight = layer_and_weight(precision, dtype)
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    out = layer(x)
    gradient = torch.randn_like(out)
    (back,) = torch.autograd.grad(out, x, gradient)
    assert out.dtype == back.dtype == dtype
    pairs = [(out, nn.functional.linear(x, weight, layer.bias)), (back, gradient @ weight)]
    for got, wanted in pairs:
        assert (got - wanted).norm() < MAX_ERROR[precision] * wanted.norm()
    stored = sum(p.nbytes for p in layer.parameters()) - layer.bias.nbytes
    assert stored < weight.numel() * {"fp8": 1.1, "nf4": 0.56}[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_gradient_is_that_of_the_quantized_weight(precision):
    """The inputs are exact in FP8, so only the weights are rounded."""
    layer, _ = layer_and_weight(precision)
    one_hot = torch.eye(128, requires_grad=True)
    weight = (layer(one_hot) - layer.bias).t()
    out = layer(one_hot)
    for row in (0, 7):
        (back,) = torch.autograd.grad(out[row, 3], one_hot, retain_graph=True)
        torch.testing.assert_close(back[row], weight[3], rtol=0.07, atol=1e-3)
        assert not back[row + 1].any()


def test_the_levels_are_the_published_ones():
    levels = quantization.nf4_levels()
    published = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
    published += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
    torch.testing.assert_close(levels, torch.tensor(published), atol=1e-4, rtol=0)


def test_weights_on_the_levels_are_exact():
    layer = nn.Linear(64, 16, bias=False)
    levels = quantization.nf4_levels()
    with torch.no_grad():
        layer.weight.copy_(levels[torch.arange(16 * 64).view(16, 64) % 16] * 0.5)
    weight = layer.weight.detach().clone()
    quantize_linears([layer], "nf4", CPU)
    assert torch.equal(layer(torch.eye(64)).t(), weight)


@pytest.mark.parametrize("share", [0.88, 1.0])
def test_compiled_nf4_layers_save_no_dense_weight_for_the_backward_pass(share):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
    quantize_linears([model.requires_grad_(False)], "nf4", CPU)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(4, 128, requires_grad=True)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with functorch_config.patch(activation_memory_budget=share), hooks:
        out = compiled(x)
    assert kept
    stored = {layer.low.data_ptr() for layer in (model[0], model[2])}
    assert all(t.data_ptr() in stored or t.numel() < 128 * 256 // 8 for t in kept)
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (out, model(x)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_compiled_layer_under_autocast_accepts_a_float32_bias(precision):
    layer, _ = layer_and_weight(precision)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (call(torch.ones(3, 128)) for call in (compiled, layer))
    torch.testing.assert_close(found, expected)


def test_the_flops_of_nf4_products_are_counted():
    layer, _ = layer_and_weight("nf4")
    with FlopCounterMode(display=False) as counted:
        layer(torch.ones(3, 128))
    assert counted.get_total_flops() == 2 * 3 * layer.out_features * 128


@pytest.mark.parametrize("sides", [(24, 32), (32, 24)])
def test_unsupported_shapes_are_not_quantized(sides):
    layer = nn.Linear(*sides)
    quantize_linears([layer], "fp8", CPU)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("precision", PRECISIONS)
def test_full_precision_applies_within_its_context(precision):
    layer, weight = layer_and_weight(precision, keep_full=True)
    x = torch.randn(3, 128)
    low, full = layer(x), nn.functional.linear(x, weight, layer.bias)
    with at_full_precision(layer):
        assert torch.equal(layer(x), full)
    assert torch.equal(layer(x), low)
    assert not torch.equal(low, full)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantized_weights_survive_a_cast_of_the_module(precision):
    layer, _ = layer_and_weight(precision)
    before = {
        name: p.clone() for name, p in layer.named_parameters() if name not in ("weight", "bias")
    }
    with preserve_quantized_weights(layer):
        layer.to(torch.bfloat16)
    for name, stored in before.items():
        assert getattr(layer, name).dtype == stored.dtype
        assert torch.equal(getattr(layer, name).view(torch.uint8), stored.view(torch.uint8))
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sampling_and_training_use_the_same_policy(make_session, precision):
    fields = {"pretrained.base_precision": precision, "sample.eval_precision": "bf16"}
    short = {"num_epochs": 1, "eval_prompts": 2, "sample.eval_num_steps": 2}
    session = make_session(**fields, **short)
    kinds = [type(layer.base_layer) for layer in session.policy.lora_layers]
    assert all(issubclass(kind, QuantizedLinear) for kind in kinds)
    plain = make_session(**short)
    before = [run_evaluation(each, epoch=0)["eval/avg"] for each in (session, plain)]
    assert before[0] == before[1]
    train(session)
    assert session.progress.record["train/first_update_ratio_dev"] <= 1e-5
    assert any(p.any() for n, p in session.policy.trained_parameters().items() if "lora_B" in n)


def test_encoders_are_quantized_separately(make_session):
    session = make_session(use_lora=False, **{"pretrained.encoder_precision": "nf4"})
    parts = session.adapter.pipeline.components
    low = {
        name: any(isinstance(m, QuantizedLinear) for m in parts[name].modules())
        for name in ("text_encoder", "text_encoder_3", "transformer")
    }
    assert low == {"text_encoder": True, "text_encoder_3": True, "transformer": False}


def test_unsupported_settings_are_rejected(make_session, monkeypatch):
    low = {"pretrained.base_precision": "fp8"}
    with pytest.raises(UserError, match="needs use_lora=True"):
        make_session(**low, use_lora=False)
    with pytest.raises(UserError, match="has no effect with pretrained"):
        make_session(**{"sample.eval_precision": "bf16"})
    session = make_session(**low)
    monkeypatch.setattr("flow_grpo.training.builder.is_sharded", lambda _: True)
    with pytest.raises(UserError, match="ZeRO-3"):
        check_base_precision(session.config, session.accelerator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UserError, match=r"this one has 8\.0; use 'nf4'"):
        quantization.check_precision("pretrained.base_precision", "fp8", torch.device("cuda"))
