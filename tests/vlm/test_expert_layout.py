"""Conversion of fused experts of transformers 5 to the published layout, which vLLM loads.

tests/gpu/test_vllm_engine.py runs vLLM's own loader, where it is installed.
"""

from pathlib import Path

import pytest
import small_vlm
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from user_errors import raises_user_error

from flow_grpo.training.export import ExportSource
from flow_grpo.vlm import expert_layout
from flow_grpo.vlm.expert_layout import (
    check_expert_files,
    check_experts_convertible,
    published_layout,
    published_weights,
)
from flow_grpo.vlm.export import export
from flow_grpo.vlm.models import build_meta_model, load_model
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.vllm_engine import check_vllm_support, iter_merged_weights

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER = 4, 32, 48
HALF = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return small_vlm.build("qwen3_vl_moe")


def loaded_by_vllm(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return w13 (E, 2I, H) and w2 (E, H, I) of layer 0 as vLLM 0.32.0 loads Qwen3-VL-MoE.

    It swaps the last two dimensions of each fused tensor, then splits dimension 1 into gate and up
    (vllm/model_executor/layers/fused_moe/routed_experts.py, lines 1041 to 1048).
    """
    gate, up = weights[f"{LAYER}.gate_up_proj"].transpose(-1, -2).chunk(2, dim=1)
    down = weights[f"{LAYER}.down_proj"].transpose(-1, -2)
    for half in (gate, up):
        assert half.shape == (EXPERTS, INNER, HIDDEN)
    assert down.shape == (EXPERTS, HIDDEN, INNER)
    return torch.cat([gate, up], dim=1), down


def assert_loadable(weights: dict[str, Tensor], model: torch.nn.Module) -> None:
    own = model.state_dict()
    w13, w2 = loaded_by_vllm(weights)
    assert torch.equal(w13, own[f"{LAYER}.gate_up_proj"])
    assert torch.equal(w2, own[f"{LAYER}.down_proj"])


def test_weights_are_converted_to_the_layout_of_vllm(model):
    assert_loadable(sent := dict(published_weights(model, iter_merged_weights(model))), model)
    assert sent.keys() == {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        if ".experts." not in name:
            assert torch.equal(sent[name], weight)
    assert not hasattr(model, "_weight_conversions")  # set by from_pretrained only


def test_merged_lora_weights_are_converted():
    policy = VlmPolicy(small_vlm.build("qwen3_vl_moe"), processors=[], rank=2)
    sent = dict(published_weights(policy.model, iter_merged_weights(policy.model)))
    assert_loadable(sent, policy.model)
    assert not any("lora" in name or "base_layer" in name for name in sent)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Save a model in transformers' layout."""
    folder = small_vlm.save(tmp_path_factory.mktemp("model"), "qwen3_vl_moe")
    small_vlm.build("qwen3_vl_moe").save_pretrained(folder)
    return folder


def test_exports_and_checkpoints_load_in_vllm_and_transformers(saved, model, tmp_path):
    assert load_file(saved / "model.safetensors")[f"{LAYER}.down_proj"].shape[1:] == (HIDDEN, INNER)
    export(ExportSource(saved), str(saved), tmp_path / "exported")
    whole = load_model(str(saved), CPU, torch.float32)
    VlmPolicy(whole, processors=[], use_lora=False).save(tmp_path)
    for folder in (tmp_path / "exported", tmp_path / "model"):
        assert_loadable(load_file(folder / "model.safetensors"), model)
        check_expert_files(build_meta_model(str(folder)), str(folder))
        again = load_model(str(folder), CPU, torch.float32).state_dict()
        for name, weight in model.state_dict().items():
            assert torch.equal(again[name], weight), name


def test_files_in_transformers_layout_are_rejected_for_vllm(saved):
    with raises_user_error(".mlp.experts.", field="pretrained.model", value=str(saved)):
        check_vllm_support(str(saved), "main")


def test_square_experts_are_saved_in_transformers_layout(tmp_path, caplog):
    """transformers distinguishes the layouts by shape."""
    config = small_vlm.config_fields("qwen3_vl_moe")
    config["text_config"]["moe_intermediate_size"] = HIDDEN
    kind, network = small_vlm.FAMILIES["qwen3_vl_moe"]
    model = network(kind(**config))
    with published_layout(model, model.state_dict()):
        model.save_pretrained(tmp_path)
    assert "square" in caplog.text
    again = network.from_pretrained(tmp_path).state_dict()
    assert torch.equal(again[f"{LAYER}.down_proj"], model.state_dict()[f"{LAYER}.down_proj"])


@pytest.mark.parametrize(
    ("config", "prefix", "names"),
    [
        (
            Qwen3MoeConfig(**small_vlm.TEXT, **HALF),
            "model.layers.0.mlp",
            ("gate_proj", "up_proj", "down_proj"),
        ),
        (
            MixtralConfig(
                **{**small_vlm.TEXT, "intermediate_size": INNER}, num_local_experts=EXPERTS
            ),
            "model.layers.0.block_sparse_moe",
            ("w1", "w3", "w2"),
        ),
    ],
    ids=["qwen3_moe", "mixtral"],
)
def test_experts_published_as_separate_matrices_are_split(config, prefix, names):
    model = AutoModelForCausalLM.from_config(config)
    check_experts_convertible(model, "source")
    sent, own = dict(published_weights(model, iter_merged_weights(model))), model.state_dict()
    fused = own["model.layers.0.mlp.experts.gate_up_proj"]
    down = own["model.layers.0.mlp.experts.down_proj"]
    assert f"{prefix}.gate.weight" in sent
    for i in range(EXPERTS):
        gate, up, last = (sent[f"{prefix}.experts.{i}.{name}.weight"] for name in names)
        assert torch.equal(torch.cat([gate, up]), fused[i])
        assert torch.equal(last, down[i])


def test_weights_without_experts_are_passed_through(monkeypatch):
    monkeypatch.setattr(expert_layout, "get_model_conversion_mapping", None)
    model = small_vlm.build("qwen2_5_vl")
    check_experts_convertible(model, "source")
    weights = list(iter_merged_weights(model))
    for (name, weight), (sent, value) in zip(
        weights, published_weights(model, weights), strict=True
    ):
        assert name == sent
        assert weight is value


def test_experts_are_rejected_or_warned_about_without_a_conversion_table(
    model, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(expert_layout, "get_model_conversion_mapping", None)
    with raises_user_error("'source'", field="sample.engine", value="vllm"):
        check_experts_convertible(model, "source")
    with published_layout(model, model.state_dict()):
        model.save_pretrained(tmp_path)
    assert "vLLM" in caplog.text


def test_a_conversion_that_joins_weights_is_rejected(model, monkeypatch):
    conversion = expert_layout.WeightConverter(
        source_patterns="qkv_proj.weight",
        target_patterns=["q_proj.weight", "k_proj.weight"],
        operations=[expert_layout.Transpose()],
    )
    monkeypatch.setattr(expert_layout, "_published_conversions", lambda _: [conversion])
    with raises_user_error("q_proj.weight", "k_proj.weight", field="sample.engine"):
        check_experts_convertible(model, "source")
