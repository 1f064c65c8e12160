"""`train.lora_target_modules` and the rank of LoRA for every model family of the VLM trainer."""

import json
import shutil

import pytest
import small_vlm
import torch
import vlm_runs
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from user_errors import raises_user_error

from flow_grpo.training.lora_targets import FIELD
from flow_grpo.vlm.lora import attach_lora, select_lora_layers
from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.packing import Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.session import build_session


@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_all_linear_layers_are_trained_saved_and_loaded(family, tmp_path):
    model = small_vlm.build(family)
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    policy = VlmPolicy(
        model, processors=[], rank=2, alpha=5, target_modules="all-linear", freeze_vision=False
    )
    layers = lora_layers(policy.model)
    assert layers.keys() == linear - {"lm_head"}
    assert {(*m.r.values(), *m.lora_alpha.values()) for m in layers.values()} == {(2, 5)}
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    encoder = small_vlm.encoder(policy.model)
    prompts = [encoder.encode(q) for q in small_vlm.questions(tmp_path / "data")]
    tokens = torch.tensor([20, 21])
    batch = pack_responses([Response(i, p, tokens) for i, p in enumerate(prompts)], small_vlm.PAD)
    policy.forward_tokens(batch)["log_probs"].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())  # DDP waits
    policy.save(tmp_path)
    saved = json.loads((tmp_path / "lora/adapter_config.json").read_text())["target_modules"]
    assert saved == sorted(saved)
    loaded = small_vlm.build(family)
    attach_lora(loaded, tmp_path / "lora")
    weights = dict(loaded.named_parameters())
    for name, parameter in policy.trained_parameters().items():
        assert torch.equal(weights[name.removeprefix("model.")], parameter), name


@pytest.mark.parametrize(
    "settings", [{"use_lora": False}, {}, {"target_modules": "all-linear"}], ids=str
)
def test_layers_that_minicpmv_skips_are_not_trained(settings, tmp_path):
    model = small_vlm.build("minicpmv4_7")
    model.config.downsample_mode = "4x"
    policy = VlmPolicy(model, processors=[], freeze_vision=False, **settings)
    assert any("vision_tower.encoder" in name for name in policy.trained_parameters())
    prompt = small_vlm.encoder(model).encode(small_vlm.questions(tmp_path)[1])
    batch = pack_responses([Response(0, prompt, torch.tensor([20, 21]))], small_vlm.PAD)
    policy.forward_tokens(batch)["log_probs"].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())  # DDP waits
    with raises_user_error("forward pass skips them", field=FIELD):
        select_lora_layers(get_family(model), "vit_merger.linear_1", freeze_vision=False)


@pytest.mark.parametrize(
    ("family", "layer", "reason"),
    [
        ("minicpmv4_7", "vit_merger.linear_1", "forward pass skips them"),
        ("qwen2_vl", "lm_head", "not called as a layer"),
    ],
)
def test_a_lora_on_layers_without_effect_is_rejected(family, layer, reason, tmp_path):
    model = small_vlm.build(family)
    model.add_adapter(LoraConfig(target_modules=[layer, "down_proj"]))
    model.save_pretrained(tmp_path)
    other = small_vlm.build(family)
    other.config.downsample_mode = "4x"
    with raises_user_error(reason, layer, field="train.lora_path", value=str(tmp_path)):
        VlmPolicy(other, processors=[], lora_path=str(tmp_path))


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}


@pytest.mark.parametrize("name", ["q_proj", "all-linear"])
def test_a_frozen_tower_gets_no_lora(name):
    """InternVL's tower has layers of the same names as its language model."""
    policy = VlmPolicy(small_vlm.build("internvl"), processors=[], target_modules=name)
    family = get_family(policy.model)
    assert lora_layers(policy.model)
    assert not lora_layers(family.tower)


@pytest.mark.parametrize("name", ["qkv", "lm_head", "q_projection"])
def test_a_name_that_selects_nothing_is_rejected_before_weights_are_read(
    model_and_data, tmp_path, name
):
    """`qkv` is in the frozen tower, and log-probabilities do not call the head."""
    model = shutil.copytree(model_and_data["pretrained.model"], tmp_path / "model")
    (model / "model.safetensors").unlink()
    fields = {**model_and_data, "pretrained.model": str(model), "logdir": str(tmp_path / "logs")}
    with raises_user_error("q_proj", "all-linear", field=FIELD, value=name):
        build_session(vlm_runs.make_config(**fields, **{FIELD: name}))
    assert not (tmp_path / "logs").exists()
