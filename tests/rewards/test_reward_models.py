"""Reward models for responses: each score equals that of the network without batching."""

import math

import numpy as np
import pytest
import small_reward_model
import small_vlm
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.rewards.text.reward_model import RewardModel

QUESTIONS = ["How many circles?", "What is 1+2?", "Who?", "What is 3+4, and what is 4+3?"]
ANSWERS = ["3", "<think>1+2</think><answer>3</answer>", "no idea", "<|im_end|>"]
CLASS = "flow_grpo.rewards.text.reward_model:RewardModel"


def reference_logits(folder, question: str, answer: str) -> torch.Tensor:
    """Return the logits of plain transformers for one text without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(question, answer, return_tensors="pt")
    with torch.no_grad():
        return model(**ids).logits[0]


@pytest.mark.parametrize(
    "kind", [{}, {"pad_token_id": None}, {"pairs": True}], ids=["causal", "no pad", "pairs"]
)
def test_scores_equal_those_of_transformers_for_any_batch_size(tmp_path, kind):
    folder = small_reward_model.save(tmp_path, **kind)
    pairs = zip(QUESTIONS, ANSWERS, strict=True)
    expected = [float(reference_logits(folder, *pair)[0]) for pair in pairs]
    assert np.ptp(expected) > 0.1
    for batch_size in (1, 3, 16):
        reward = RewardModel(model=str(folder), batch_size=batch_size)
        assert reward(ANSWERS, QUESTIONS, [{}] * 4) == pytest.approx(expected, abs=1e-5)


def test_a_model_with_several_labels_needs_a_label(tmp_path):
    labels = {"id2label": {0: "bad", 1: "fine", 2: "good"}, "num_labels": 3}
    folder = str(small_reward_model.save(tmp_path, **labels))
    expected = float(reference_logits(folder, QUESTIONS[0], ANSWERS[0]).softmax(-1)[2])
    [score] = RewardModel(model=folder, label="good")(ANSWERS[:1], QUESTIONS[:1], [{}])
    assert score == pytest.approx(expected, abs=1e-6)
    with raises_user_error("label=''", "bad, fine, good"):
        RewardModel(model=folder)
    with raises_user_error("several outputs", field="normalize"):
        RewardModel(model=folder, label="good", normalize=True)


@pytest.mark.parametrize("kind", [{}, {"mean": 1.0}, {"mean": 1.0, "std": 0.0}])
def test_scores_are_normalized_by_statistics_of_the_config_only(tmp_path, kind):
    with raises_user_error("mean and std", field="normalize"):
        RewardModel(model=str(small_reward_model.save(tmp_path, **kind)), normalize=True)


def test_a_text_that_is_too_long_has_no_score_and_the_others_do(tmp_path):
    reward = RewardModel(model=str(small_reward_model.save(tmp_path)), max_length=60)
    long, short = reward(["x" * 60, "3"], QUESTIONS[:2], [{}] * 2)
    assert "max_length=60" in long.reason
    assert math.isfinite(short)
    with raises_user_error("max_length=9999", "256"):
        RewardModel(model=reward.model, max_length=9999)


def test_a_longrope_model_is_limited_to_its_original_context(tmp_path):
    """A longer text would change the scores of its batch."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = str(small_reward_model.save(tmp_path, rope_parameters=rope))
    assert RewardModel(model=folder).max_length == 64
    with raises_user_error("max_length=65", "64"):
        RewardModel(model=folder, max_length=65)


def test_a_model_without_a_score_is_rejected(tmp_path):
    folder = str(small_vlm.save(tmp_path / "vlm"))
    with raises_user_error(f"model={folder!r}", "qwen3_vl"):
        RewardModel(model=folder)
    with raises_user_error("--config.reward_options=", "PATH"):
        build_reward({"reward_model": 1.0})


def test_several_reward_models_are_weighted(tmp_path):
    folders = {
        name: str(small_reward_model.save(tmp_path / name, seed)) for seed, name in enumerate("ab")
    }
    reward = build_reward(
        {"a": 0.25, "b": 0.75},
        custom=dict.fromkeys(folders, CLASS),
        options={name: {"model": folder} for name, folder in folders.items()},
    )
    scores = reward(ANSWERS, QUESTIONS)
    close_scorers(reward)
    assert np.abs(scores["a"] - scores["b"]).max() > 0.1
    np.testing.assert_allclose(scores["avg"], 0.25 * scores["a"] + 0.75 * scores["b"])
