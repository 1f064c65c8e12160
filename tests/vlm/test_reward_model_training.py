"""Reward models: their loss, their packing, and the directories they are saved in."""

import json
import math

import numpy as np
import pytest
import small_vlm
import torch
import vlm_runs
from torch.autograd import gradcheck
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from user_errors import raises_user_error

from flow_grpo.data.responses import GivenResponse
from flow_grpo.rewards.text.reward_model import RewardModel
from flow_grpo.training.state_copies import StateCopies
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.fields import get_config
from flow_grpo.vlm.packing import Response, micro_batches, pack_responses
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.reward_models.classifier import SCORE_FILE, classifier_class, read_statistics
from flow_grpo.vlm.reward_models.loss import bradley_terry_loss
from flow_grpo.vlm.reward_models.pairs import as_responses
from flow_grpo.vlm.reward_models.policy import RewardModelPolicy
from flow_grpo.vlm.reward_models.training import score_statistics

IMAGES = [small_vlm.random_image(seed, *size) for seed, size in enumerate([(32, 48), (16, 32)])]
FILES = tuple(map(small_vlm.encode_image, IMAGES))
PAIRS = [
    GivenResponse("How many?", FILES[:1], response="Four red ones", rejected="Four"),
    GivenResponse("What is 1+2?", response="3", rejected="It is 4, or 5."),
    GivenResponse("<image> or <image>?", FILES, response="the first", rejected="the second"),
]


def build_policy(
    family: str = "qwen3_vl", dtype: torch.dtype = torch.float32, **settings
) -> tuple[RewardModelPolicy, PromptEncoder]:
    """Return a reward model with random weights, also of its head, and its encoder."""
    model = small_vlm.build(family).to(dtype)
    encoder = small_vlm.encoder(model)
    policy = RewardModelPolicy(
        model,
        pad_token_id=small_vlm.PAD,
        processors=[encoder.tokenizer, encoder.image_processor],
        **settings,
    )
    policy.network.value.weight.data *= 100  # so that scores differ clearly
    return policy, encoder


def pack(policy: RewardModelPolicy, encoder: PromptEncoder) -> list[list[Response]]:
    """Return the responses of each of `PAIRS`."""
    shares_prompt = policy.network.family.shares_prompt
    conversations = [encoder.encode_conversations(pair, pair.responses) for pair in PAIRS]
    return [
        as_responses(i, both, shares_prompt=shares_prompt) for i, both in enumerate(conversations)
    ]


def packed_scores(policy: RewardModelPolicy, encoder: PromptEncoder) -> torch.Tensor:
    """Return the scores of both responses of each of `PAIRS`, packed into one batch."""
    responses = [response for pair in pack(policy, encoder) for response in pair]
    return policy.scores(pack_responses(responses, pad=0))


def test_the_loss_has_the_values_of_the_formula():
    """-log sigmoid(1) = log(1 + 1/e); at the margin it is log 2; 0.1 (1 + 0)^2 is added."""
    chosen, rejected = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])
    margin = torch.tensor([0.0, 1.0])
    expected = torch.tensor([math.log(1 + math.exp(-1)), math.log(2)])
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, margin), expected)
    centered = bradley_terry_loss(chosen, rejected, margin, center=0.1)
    torch.testing.assert_close(centered, expected + 0.1)


def test_the_gradient_is_the_probability_of_the_wrong_order():
    """d/dr_c -log sigmoid(r_c - r_r - m) = -sigmoid(r_r + m - r_c), and the opposite for r_r."""
    scores = torch.tensor([[0.3, -40.0], [1.2, 60.0]], dtype=torch.float64, requires_grad=True)
    margin = torch.tensor([0.5, 0.0], dtype=torch.float64)
    bradley_terry_loss(*scores, margin, center=0.0).sum().backward()
    wrong = torch.tensor([1 / (1 + math.exp(-1.4)), 1.0], dtype=torch.float64)
    torch.testing.assert_close(scores.grad, torch.stack([-wrong, wrong]))
    small = scores.detach()[:, :1].requires_grad_()
    assert gradcheck(lambda s: bradley_terry_loss(s[0], s[1], 0.5, center=0.1), small)


def test_gradients_of_packed_pairs_equal_finite_differences():
    policy, encoder = build_policy(dtype=torch.float64, use_lora=False)
    parameters = policy.parameters()

    def loss() -> torch.Tensor:
        chosen, rejected = packed_scores(policy, encoder).view(-1, 2).unbind(1)
        return bradley_terry_loss(chosen, rejected, 0.2, center=0.1).sum()

    with vlm_runs.in_float64():
        loss().backward()
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True))
    step, values = 1e-6, []
    for sign in (1, -2):
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data += sign * step * direction
        with vlm_runs.in_float64():
            values.append(loss().detach())
    torch.testing.assert_close((values[0] - values[1]) / (2 * step), slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_a_saved_model_has_the_scores_of_the_trained_one(family, tmp_path):
    """Also without packing, and for each batch size."""
    policy, encoder = build_policy(family, use_lora=False)
    policy.save(tmp_path)
    # transformers loads Qwen3.5's tokenizer with another pre-tokenizer than that of its file
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encoder = PromptEncoder(tokenizer, encoder.image_processor, policy.model)
    expected = packed_scores(policy, encoder).tolist()
    assert min(abs(a - b) for a, b in zip(expected[::2], expected[1::2], strict=True)) > 0.01
    reward = RewardModel(model=str(tmp_path / "model"), batch_size=4)
    assert reward.reads_images
    rows = [(pair, text) for pair in PAIRS for text in pair.responses]
    images = {pair.where + pair.text: IMAGES[: len(pair.images)] for pair in PAIRS}
    metadata = [{"source": images[pair.text]} for pair, _ in rows]
    scores = reward([text for _, text in rows], [pair.text for pair, _ in rows], metadata)
    assert scores == pytest.approx(expected, abs=1e-5)
    config = json.loads((tmp_path / "model/config.json").read_text("utf-8"))
    assert config["architectures"] == [classifier_class(policy.model.config).__name__]


def test_the_forward_pass_of_transformers_has_the_same_scores(tmp_path):
    """Its classifier computes positions itself, and gets one padded text per row."""
    policy, encoder = build_policy(use_lora=False)
    expected = packed_scores(policy, encoder)
    policy.save(tmp_path)
    kind = classifier_class(policy.model.config)
    AutoModelForSequenceClassification.register(type(policy.model.config), kind, exist_ok=True)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    whole = [text for p in PAIRS for text in encoder.encode_conversations(p, p.responses)]
    ids = torch.nn.utils.rnn.pad_sequence([w.ids for w in whole], batch_first=True)
    images = [image for each in whole for image in each.vision_inputs]
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=(ids != small_vlm.PAD).int(),
            mm_token_type_ids=(ids == small_vlm.IMAGE).int(),
            pixel_values=torch.cat([image["pixel_values"] for image in images]),
            image_grid_thw=torch.cat([image["image_grid_thw"] for image in images]),
        ).logits
    torch.testing.assert_close(logits[:, 0], expected.detach(), rtol=0, atol=1e-5)


def test_statistics_are_those_of_the_written_weights(tmp_path):
    """An update clears them, but not in a copy that is written later."""
    policy, _ = build_policy()
    policy.score_statistics = {"": (1.0, 2.0)}
    writes = [policy.copy_exported(tmp_path, StateCopies(), prefix) for prefix in ("", "ema_")]
    policy.on_weights_updated()
    writes += [policy.copy_exported(tmp_path / "later", StateCopies())]
    for write in writes:
        write()
    assert read_statistics(tmp_path / "lora" / SCORE_FILE) == (1, 2)
    assert read_statistics(tmp_path / "ema_lora" / SCORE_FILE) is None
    assert read_statistics(tmp_path / "later/lora" / SCORE_FILE) is None


def test_a_model_without_an_evaluation_has_no_statistics(tmp_path):
    """Not even those of the model that training started from."""
    policy, _ = build_policy(use_lora=False)
    policy.model.config.mean, policy.model.config.std = 1.0, 2.0
    policy.score_statistics = {"": (3.0, 4.0)}
    policy.save(tmp_path)
    policy.save(tmp_path, "ema_")
    config = json.loads((tmp_path / "model/config.json").read_text("utf-8"))
    assert (config["mean"], config["std"]) == (3, 4)
    with raises_user_error("evaluated", "[None, None]", field="normalize", value=True):
        RewardModel(model=str(tmp_path / "ema_model"), normalize=True)
    assert score_statistics(np.array([1.0, 3.0]), "ema_") == {"ema_": (2.0, 1.0)}
    assert score_statistics(np.array([1.0, math.inf]), "") == {}


def test_pairs_share_a_row_and_are_never_split():
    policy, encoder = build_policy(use_lora=False)
    pairs = pack(policy, encoder)
    assert all(first.question == second.question for first, second in pairs)
    longest = max(len(a.prompt) + a.length + b.length for a, b in pairs)
    responses = [response for pair in pairs for response in pair]
    for budget, expected in ((1, [2, 2, 2]), (2 * longest, [4, 2]), (3 * longest, [6])):
        parts = list(micro_batches(responses, budget, together=2))
        assert [part.stop - part.start for part in parts] == expected


def test_settings_without_effect_are_rejected():
    config = get_config()
    config.train.loss = "bradley_terry"
    config.train.beta = 0.1
    with raises_user_error("train.loss='bradley_terry'", field="train.beta", value=0.1):
        check_config(config)
    config.train.beta = get_config().train.beta
    assert check_config(check_config(config)).train.loss == "bradley_terry"
    config.train.loss, config.train.center_scores = "clip", 0.01
    with raises_user_error(field="train.center_scores", value=0.01):
        check_config(config)
