"""What sharded weights need of a model that answers, as far as one process can show it."""

import answer_runs
import pytest
import small_vlm
import torch
from torch import nn

from flow_grpo.answer.batches import Answer, PackedBatch, packed
from flow_grpo.answer.decoding import DecodingStep
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.policy import AnswerPolicy, sampler
from flow_grpo.answer.session import build_session
from flow_grpo.errors import UserError
from flow_grpo.run.distributed import filled, hollow_copy


@pytest.fixture(params=small_vlm.FAMILIES)
def network(request) -> AnswerModel:
    return AnswerModel(small_vlm.build(request.param).requires_grad_(False), with_value=True)


def batch_of(network: AnswerModel, folder, questions: slice) -> PackedBatch:
    encoder = small_vlm.encoder(network.model)
    asked = small_vlm.questions(folder)[questions]
    tokens = torch.tensor([40, 50, 60, small_vlm.EOS])
    answers = [Answer(i, encoder.encode(q), tokens) for i, q in enumerate(asked)]
    return packed([a for a in answers for _ in range(2)], small_vlm.PAD)


def tower_of(network: AnswerModel) -> nn.Module:
    own = network.model.model
    return own.vision_tower if hasattr(own, "vision_tower") else own.visual


def is_tied(model: nn.Module) -> bool:
    return model.lm_head.weight is model.get_input_embeddings().weight


def test_a_tower_that_others_wait_for_runs_and_changes_nothing(network, tmp_path, monkeypatch):
    batch = batch_of(network, tmp_path, slice(1))  # no picture
    tower = tower_of(network)
    runs, forward = [], tower.forward
    monkeypatch.setattr(tower, "forward", lambda *a, **k: runs.append(a) or forward(*a, **k))
    before = network(batch)
    assert not runs
    network.in_step = True
    after = network(batch)
    assert len(runs) == 1
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-5)
    with torch.no_grad():  # nobody waits
        network(batch)
    assert len(runs) == 1


def test_every_weight_of_a_trained_tower_has_a_gradient_without_pictures(network, tmp_path):
    network.requires_grad_(True)
    network(batch_of(network, tmp_path, slice(1)))["log_probs"].sum().backward()
    gradients = [p.grad for p in tower_of(network).parameters()]
    assert all(g is not None and not g.any() for g in gradients)
    assert network.model.model.language_model.norm.weight.grad.any()


def test_a_hollow_copy_has_weights_while_it_is_filled(network, tmp_path):
    batch, hollow = batch_of(network, tmp_path, slice(3)), hollow_copy(network)
    assert not any(p.numel() for p in hollow.parameters())
    with torch.no_grad():
        expected = network(batch)
        with filled(hollow, network):
            assert is_tied(hollow.model) == is_tied(network.model)
            for name, values in hollow(batch).items():
                assert torch.equal(values, expected[name])
    assert not any(p.numel() for p in hollow.parameters())


@pytest.mark.parametrize("use_lora", [True, False])
def test_half_precision_samples_from_half_the_bytes_and_the_same_numbers(tmp_path, use_lora):
    model = small_vlm.build().bfloat16()
    network = AnswerPolicy(model, parts=[], use_lora=use_lora, compute_dtype=torch.bfloat16).network
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    batch, hollow = batch_of(network, tmp_path, slice(3)), sampler(network)
    with torch.no_grad(), filled(hollow, network):
        assert torch.equal(hollow(batch)["log_probs"], network(batch)["log_probs"])
        layer = hollow.model.model.language_model.layers[0].mlp.up_proj
        assert (layer.base_layer if use_lora else layer).weight.dtype == torch.bfloat16
        # LoRA merged, to sample with
        ours, theirs = (DecodingStep(each).weights for each in (hollow, network))
        assert ours.keys() <= theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "fsdp_version: 1 in the accelerate config must be 2"),
        ({"FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "gradient_checkpointing"),
        ({"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "every process loads"),
        ({"FSDP_VERSION": "2"}, "FSDP needs GPUs"),
    ],
)
def test_what_cannot_be_sharded_is_told_before_anything_loads(monkeypatch, settings, told):
    for name, value in {"ACCELERATE_USE_FSDP": "true", **settings}.items():
        monkeypatch.setenv(name, value)
    config = answer_runs.config_of(dataset="nowhere")
    with pytest.raises(UserError, match=told) as error:
        build_session(config)
    assert "\n" not in str(error.value)
