"""Support for sharded weights, as far as it can be tested in one process."""

import pytest
import small_vlm
import torch
import vlm_runs
from torch import nn
from transformers import Qwen2Config
from user_errors import raises_user_error

from flow_grpo.training.distributed import Ranks, borrow_weights, copy_without_weights
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.decoding import DecodingStep
from flow_grpo.vlm.fields import get_config
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import PackedBatch, Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy, build_sampling_copy
from flow_grpo.vlm.sequence_parallel import SequenceShards, check_heads
from flow_grpo.vlm.session import build_session


@pytest.fixture(params=small_vlm.FAMILIES)
def network(request) -> PolicyModel:
    return PolicyModel(small_vlm.build(request.param).requires_grad_(False), with_value=True)


def batch_of(network: PolicyModel, folder, questions: slice) -> PackedBatch:
    encoder = small_vlm.encoder(network.model)
    selected = small_vlm.questions(folder)[questions]
    tokens = torch.tensor([40, 50, 60, small_vlm.EOS])
    responses = [Response(i, encoder.encode(q), tokens) for i, q in enumerate(selected)]
    return pack_responses([r for r in responses for _ in range(2)], small_vlm.PAD)


def tower_of(network: PolicyModel) -> nn.Module:
    own = network.model.model
    return own.vision_tower if hasattr(own, "vision_tower") else own.visual


def is_tied(model: nn.Module) -> bool:
    return model.lm_head.weight is model.get_input_embeddings().weight


def test_the_tower_runs_in_lockstep_without_changing_the_result(network, tmp_path, monkeypatch):
    batch = batch_of(network, tmp_path, slice(1))  # no images
    tower = tower_of(network)
    runs, forward = [], tower.forward
    monkeypatch.setattr(tower, "forward", lambda *a, **k: runs.append(a) or forward(*a, **k))
    before = network(batch)
    assert not runs
    network.runs_in_lockstep = True
    after = network(batch)
    assert len(runs) == 1
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-5)
    with torch.no_grad():  # without gradients, ranks do not wait
        network(batch)
    assert len(runs) == 1


def test_a_trained_tower_has_zero_gradients_without_images(network, tmp_path):
    network.requires_grad_(True)
    network(batch_of(network, tmp_path, slice(1)))["log_probs"].sum().backward()
    gradients = [p.grad for p in tower_of(network).parameters()]
    assert all(g is not None and not g.any() for g in gradients)
    assert network.model.model.language_model.norm.weight.grad.any()


def test_a_copy_without_weights_borrows_them(network, tmp_path):
    batch, sampling_copy = batch_of(network, tmp_path, slice(3)), copy_without_weights(network)
    assert not any(p.numel() for p in sampling_copy.parameters())
    with torch.no_grad():
        expected = network(batch)
        with borrow_weights(sampling_copy, network):
            assert is_tied(sampling_copy.model) == is_tied(network.model)
            for name, values in sampling_copy(batch).items():
                assert torch.equal(values, expected[name])
    assert not any(p.numel() for p in sampling_copy.parameters())


@pytest.mark.parametrize("use_lora", [True, False])
def test_half_precision_sampling_copy_computes_the_same(tmp_path, use_lora):
    model = small_vlm.build().bfloat16()
    network = VlmPolicy(
        model, processors=[], use_lora=use_lora, compute_dtype=torch.bfloat16
    ).network
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    batch, sampling_copy = batch_of(network, tmp_path, slice(3)), build_sampling_copy(network)
    with torch.no_grad(), borrow_weights(sampling_copy, network):
        assert torch.equal(sampling_copy(batch)["log_probs"], network(batch)["log_probs"])
        layer = sampling_copy.model.model.language_model.layers[0].mlp.up_proj
        assert (layer.base_layer if use_lora else layer).weight.dtype == torch.bfloat16
        # for decoding, LoRA is merged
        ours, theirs = (DecodingStep(each).weights for each in (sampling_copy, network))
        assert ours.keys() <= theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("size", "heads", "key_heads", "shown"),
    [(3, 4, 2, "the 4 attention heads"), (4, 12, 6, "the 6 key and value heads")],
)
def test_a_group_must_suit_the_attention_heads(size, heads, key_heads, shown):
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=key_heads)
    with raises_user_error(f"train.sequence_parallel={size}", shown):
        check_heads(size, config)
    for valid in (2, 6, 12):
        check_heads(valid, Qwen2Config(num_attention_heads=12, num_key_value_heads=6))


def test_recurrent_layers_and_unsupported_settings_reject_groups():
    shards = SequenceShards(Ranks(0, 1, 0, 2))
    with raises_user_error("train.sequence_parallel=2", "Qwen3_5ForConditionalGeneration"):
        VlmPolicy(small_vlm.build("qwen3_5"), processors=[]).split_columns(shards)
    for fields in ({"compile": True}, {"train.loss": "bradley_terry"}):
        config = vlm_runs.make_config(**{"train.sequence_parallel": 2, **fields})
        if "train.loss" in fields:
            config.reward_fn, config.sample.group_size = get_config().reward_fn, 8
        with raises_user_error("train.sequence_parallel=2"):
            check_config(config)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "fsdp_version='1'"),
        (
            {"FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "fsdp_activation_checkpointing=True",
        ),
        (
            {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "fsdp_cpu_ram_efficient_loading=True",
        ),
        ({"FSDP_VERSION": "2"}, "FSDP"),
    ],
)
def test_unsupported_sharding_is_rejected_before_loading(monkeypatch, settings, shown):
    for name, value in {"ACCELERATE_USE_FSDP": "true", **settings}.items():
        monkeypatch.setenv(name, value)
    config = vlm_runs.make_config(dataset="nowhere")
    with raises_user_error(shown):
        build_session(config)
