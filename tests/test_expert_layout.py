"""Fused experts of transformers 5 in the layout that published checkpoints have and vLLM loads.

tests/gpu/test_vllm_engine.py runs vLLM's own loader, where it is installed.
"""

from pathlib import Path

import pytest
import small_vlm
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from flow_grpo.answer import expert_layout
from flow_grpo.answer.expert_layout import (
    check_convertible,
    check_files,
    published_layout,
    published_weights,
)
from flow_grpo.answer.export import export
from flow_grpo.answer.models import empty_model, load_model
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.vllm_engine import check_family, named_weights
from flow_grpo.errors import UserError
from flow_grpo.run.export import Source

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER = 4, 32, 48
HALF = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return small_vlm.build("qwen3_vl_moe")


def loaded_by_vllm(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """w13 (E, 2I, H) and w2 (E, H, I) of layer 0, by the rule of vLLM 0.32.0 for Qwen3-VL-MoE
    (vllm/model_executor/layers/fused_moe/routed_experts.py, lines 1041 to 1048): swap the last two
    dimensions of each fused tensor, then take gate and up as the halves of dimension 1."""
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


def test_weights_are_sent_in_the_layout_that_vllm_loads(model):
    assert_loadable(sent := dict(published_weights(model, named_weights(model))), model)
    assert sent.keys() == {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        if ".experts." not in name:
            assert torch.equal(sent[name], weight)
    assert not hasattr(model, "_weight_conversions")  # as it was built here, not loaded


def test_with_lora_too():
    policy = AnswerPolicy(small_vlm.build("qwen3_vl_moe"), parts=[], rank=2)
    sent = dict(published_weights(policy.model, named_weights(policy.model)))
    assert_loadable(sent, policy.model)
    assert not any("lora" in name or "base_layer" in name for name in sent)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """As transformers saves it, in its own layout."""
    folder = small_vlm.save(tmp_path_factory.mktemp("model"), "qwen3_vl_moe")
    small_vlm.build("qwen3_vl_moe").save_pretrained(folder)
    return folder


def test_exports_and_checkpoints_load_in_vllm_and_in_transformers(saved, model, tmp_path):
    assert load_file(saved / "model.safetensors")[f"{LAYER}.down_proj"].shape[1:] == (HIDDEN, INNER)
    export(Source(saved), str(saved), tmp_path / "exported")
    whole = load_model(str(saved), CPU, torch.float32)
    AnswerPolicy(whole, parts=[], use_lora=False).save(tmp_path)
    for folder in (tmp_path / "exported", tmp_path / "model"):
        assert_loadable(load_file(folder / "model.safetensors"), model)
        check_files(empty_model(str(folder)), str(folder))
        again = load_model(str(folder), CPU, torch.float32).state_dict()
        for name, weight in model.state_dict().items():
            assert torch.equal(again[name], weight), name


def test_vllm_is_not_given_files_in_transformers_own_layout(saved):
    with pytest.raises(UserError) as error:
        check_family(str(saved), "main")
    assert str(saved) in str(error.value)
    assert ".mlp.experts." in str(error.value)


def test_square_experts_are_saved_as_transformers_reads_them(tmp_path, caplog):
    """It tells the layouts apart by their shapes."""
    config = small_vlm.settings_of("qwen3_vl_moe")
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
def test_experts_that_are_published_one_by_one_are_sent_so(config, prefix, names):
    model = AutoModelForCausalLM.from_config(config)
    check_convertible(model, "source")
    sent, own = dict(published_weights(model, named_weights(model))), model.state_dict()
    fused = own["model.layers.0.mlp.experts.gate_up_proj"]
    down = own["model.layers.0.mlp.experts.down_proj"]
    assert f"{prefix}.gate.weight" in sent
    for i in range(EXPERTS):
        gate, up, last = (sent[f"{prefix}.experts.{i}.{name}.weight"] for name in names)
        assert torch.equal(torch.cat([gate, up]), fused[i])
        assert torch.equal(last, down[i])


def test_models_without_experts_are_left_alone(monkeypatch):
    monkeypatch.setattr(expert_layout, "get_model_conversion_mapping", None)
    model = small_vlm.build("qwen2_5_vl")
    check_convertible(model, "source")
    weights = list(named_weights(model))
    for (name, weight), (sent, value) in zip(
        weights, published_weights(model, weights), strict=True
    ):
        assert name == sent
        assert weight is value


def test_without_transformers_conversions_experts_are_rejected_or_warned_about(
    model, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(expert_layout, "get_model_conversion_mapping", None)
    with pytest.raises(UserError, match=r"sample.engine='vllm'.*'source'"):
        check_convertible(model, "source")
    with published_layout(model, model.state_dict()):
        model.save_pretrained(tmp_path)
    assert "vLLM cannot load" in caplog.text


def test_a_conversion_of_several_weights_at_once_is_rejected(model, monkeypatch):
    conversion = expert_layout.WeightConverter(
        source_patterns="qkv_proj.weight",
        target_patterns=["q_proj.weight", "k_proj.weight"],
        operations=[expert_layout.Transpose()],
    )
    monkeypatch.setattr(expert_layout, "_published", lambda _: [conversion])
    with pytest.raises(UserError, match=r"join q_proj\.weight and k_proj\.weight"):
        check_convertible(model, "source")
