"""Frozen weights in 8 and 4 bits."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.errors import UserError
from flow_grpo.run.building import check_base
from flow_grpo.speed import low_bits
from flow_grpo.speed.low_bits import LowBitLinear, at_full_precision, stored_as_before, to_low_bits

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train import run_evaluation, train

CPU = torch.device("cpu")
LOW = ["fp8", "nf4"]
# relative errors of one layer of normal weights; an e4m3 has 3 bits after the leading one
MOST = {"fp8": 0.05, "nf4": 0.12}


def layer_and_weight(precision, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = nn.Linear(128, 48, dtype=dtype).requires_grad_(False)
    weight = layer.weight.clone()
    to_low_bits([nn.Sequential(layer)], precision, CPU, **options)
    return layer, weight


def test_the_gradient_of_a_compiled_layer_is_its_own():
    layer, _ = layer_and_weight("fp8")
    x = torch.randn(4, 128, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", LOW)
def test_a_layer_is_close_to_what_it_was(precision, dtype):
    layer, weight = layer_and_weight(precision, dtype)
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    out = layer(x)
    gradient = torch.randn_like(out)
    (back,) = torch.autograd.grad(out, x, gradient)
    assert out.dtype == back.dtype == dtype
    pairs = [(out, nn.functional.linear(x, weight, layer.bias)), (back, gradient @ weight)]
    for got, wanted in pairs:
        assert (got - wanted).norm() < MOST[precision] * wanted.norm()
    held = sum(p.nbytes for p in layer.parameters()) - layer.bias.nbytes
    assert held < weight.numel() * {"fp8": 1.1, "nf4": 0.56}[precision]


@pytest.mark.parametrize("precision", LOW)
def test_a_layer_is_linear_and_its_gradient_that_of_its_weights(precision):
    """Numbers that 8 bits hold exactly: what is left is the rounding of weights."""
    layer, _ = layer_and_weight(precision)
    one_hot = torch.eye(128, requires_grad=True)
    weight = (layer(one_hot) - layer.bias).t()
    out = layer(one_hot)
    for row in (0, 7):
        (back,) = torch.autograd.grad(out[row, 3], one_hot, retain_graph=True)
        torch.testing.assert_close(back[row], weight[3], rtol=0.07, atol=1e-3)
        assert not back[row + 1].any()


def test_the_levels_are_those_of_nf4():
    levels = low_bits.normal_levels()
    published = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
    published += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
    torch.testing.assert_close(levels, torch.tensor(published), atol=1e-4, rtol=0)


def test_weights_on_the_levels_are_kept_exactly():
    layer = nn.Linear(64, 16, bias=False)
    levels = low_bits.normal_levels()
    with torch.no_grad():
        layer.weight.copy_(levels[torch.arange(16 * 64).view(16, 64) % 16] * 0.5)
    weight = layer.weight.detach().clone()
    to_low_bits([layer], "nf4", CPU)
    assert torch.equal(layer(torch.eye(64)).t(), weight)


@pytest.mark.parametrize("share", [0.88, 1.0])
def test_compiled_layers_of_four_bits_keep_no_weight_for_the_backward_pass(share):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
    to_low_bits([model.requires_grad_(False)], "nf4", CPU)
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


@pytest.mark.parametrize("precision", LOW)
def test_a_compiled_layer_under_autocast_may_have_a_bias_of_full_precision(precision):
    layer, _ = layer_and_weight(precision)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (call(torch.ones(3, 128)) for call in (compiled, layer))
    torch.testing.assert_close(found, expected)


def test_the_compiler_knows_what_a_product_of_four_bits_costs():
    layer, _ = layer_and_weight("nf4")
    with FlopCounterMode(display=False) as counted:
        layer(torch.ones(3, 128))
    assert counted.get_total_flops() == 2 * 3 * layer.out_features * 128


@pytest.mark.parametrize("sides", [(24, 32), (32, 24)])
def test_sides_that_do_not_fit_stay_as_they_are(sides):
    layer = nn.Linear(*sides)
    to_low_bits([layer], "fp8", CPU)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("precision", LOW)
def test_full_precision_comes_back_for_a_while(precision):
    layer, weight = layer_and_weight(precision, keep_full=True)
    x = torch.randn(3, 128)
    low, full = layer(x), nn.functional.linear(x, weight, layer.bias)
    with at_full_precision(layer):
        assert torch.equal(layer(x), full)
    assert torch.equal(layer(x), low)
    assert not torch.equal(low, full)


@pytest.mark.parametrize("precision", LOW)
def test_a_library_may_cast_the_whole_module(precision):
    layer, _ = layer_and_weight(precision)
    before = {
        name: p.clone() for name, p in layer.named_parameters() if name not in ("weight", "bias")
    }
    with stored_as_before(layer):
        layer.to(torch.bfloat16)
    for name, stored in before.items():
        assert getattr(layer, name).dtype == stored.dtype
        assert torch.equal(getattr(layer, name).view(torch.uint8), stored.view(torch.uint8))
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", LOW)
def test_sampling_and_training_are_one_policy(make_session, precision):
    fields = {"pretrained.base_precision": precision, "sample.eval_precision": "bf16"}
    short = {"num_epochs": 1, "eval_prompts": 2, "sample.eval_num_steps": 2}
    session = make_session(**fields, **short)
    kinds = [type(layer.base_layer) for layer in session.policy.lora_layers]
    assert all(issubclass(kind, LowBitLinear) for kind in kinds)
    plain = make_session(**short)
    before = [run_evaluation(each, epoch=0)["eval/avg"] for each in (session, plain)]
    assert before[0] == before[1]
    train(session)
    assert session.progress.record["train/first_update_ratio_dev"] <= 1e-5
    assert any(p.any() for n, p in session.policy.trained().items() if "lora_B" in n)


def test_encoders_have_a_precision_of_their_own(make_session):
    session = make_session(use_lora=False, **{"pretrained.encoder_precision": "nf4"})
    parts = session.adapter.pipeline.components
    low = {
        name: any(isinstance(m, LowBitLinear) for m in parts[name].modules())
        for name in ("text_encoder", "text_encoder_3", "transformer")
    }
    assert low == {"text_encoder": True, "text_encoder_3": True, "transformer": False}


def test_what_cannot_be_is_refused(make_session, monkeypatch):
    low = {"pretrained.base_precision": "fp8"}
    with pytest.raises(UserError, match="needs use_lora=True"):
        make_session(**low, use_lora=False)
    with pytest.raises(UserError, match="merge_lora=True does not go with"):
        make_session(**low, **{"sample.merge_lora": True})
    with pytest.raises(UserError, match="has no effect with pretrained"):
        make_session(**{"sample.eval_precision": "bf16"})
    session = make_session(**low)
    monkeypatch.setattr("flow_grpo.run.building.is_sharded", lambda _: True)
    with pytest.raises(UserError, match="does not go with ZeRO-3 or FSDP"):
        check_base(session.config, session.accelerator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UserError, match=r"this one has 8\.0; use 'nf4'"):
        low_bits.check_precision("pretrained.base_precision", "fp8", torch.device("cuda"))
