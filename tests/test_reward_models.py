"""Reward models that read answers: each score is the network's own, whatever else is in the
batch."""

import math

import numpy as np
import pytest
import small_judge
import small_vlm
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.rewards.answers.reward_model import RewardModel

QUESTIONS = ["How many circles?", "What is 1+2?", "Who?", "What is 3+4, and what is 4+3?"]
ANSWERS = ["3", "<think>1+2</think><answer>3</answer>", "no idea", "<|im_end|>"]
CLASS = "flow_grpo.rewards.answers.reward_model:RewardModel"


def stock(folder, question: str, answer: str) -> torch.Tensor:
    """Logits by transformers alone, of one text without padding."""
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
def test_a_score_is_that_of_transformers_whatever_the_batch(tmp_path, kind):
    folder = small_judge.save(tmp_path, **kind)
    wanted = [float(stock(folder, *pair)[0]) for pair in zip(QUESTIONS, ANSWERS, strict=True)]
    assert np.ptp(wanted) > 0.1
    for batch_size in (1, 3, 16):
        reward = RewardModel(model=str(folder), batch_size=batch_size)
        assert reward(ANSWERS, QUESTIONS, [{}] * 4) == pytest.approx(wanted, abs=1e-5)


def test_of_several_labels_one_is_named(tmp_path):
    labels = {"id2label": {0: "bad", 1: "fine", 2: "good"}, "num_labels": 3}
    folder = str(small_judge.save(tmp_path, **labels))
    wanted = float(stock(folder, QUESTIONS[0], ANSWERS[0]).softmax(-1)[2])
    [score] = RewardModel(model=folder, label="good")(ANSWERS[:1], QUESTIONS[:1], [{}])
    assert score == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(UserError, match="label='' must be one of bad, fine, good"):
        RewardModel(model=folder)


def test_what_is_too_long_has_no_score_and_the_others_have_theirs(tmp_path):
    reward = RewardModel(model=str(small_judge.save(tmp_path)), max_length=60)
    long, short = reward(["x" * 60, "3"], QUESTIONS[:2], [{}] * 2)
    assert "more than max_length=60" in long.reason
    assert math.isfinite(short)
    with pytest.raises(UserError, match=r"max_length=9999 must be from 1 to 256, or 0 for that"):
        RewardModel(model=reward.model, max_length=9999)


def test_a_model_that_gives_no_score_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a qwen3_vl, and must be a sequence-classification"):
        RewardModel(model=str(small_vlm.save(tmp_path / "vlm")))
    with pytest.raises(UserError, match=r"give --config.reward_options=.*model.*PATH"):
        build_reward({"reward_model": 1.0})


def test_several_are_weighted(tmp_path):
    folders = {name: str(small_judge.save(tmp_path / name, seed)) for seed, name in enumerate("ab")}
    reward = build_reward(
        {"a": 0.25, "b": 0.75},
        custom=dict.fromkeys(folders, CLASS),
        options={name: {"model": folder} for name, folder in folders.items()},
    )
    scores = reward(ANSWERS, QUESTIONS)
    close_scorers(reward)
    assert np.abs(scores["a"] - scores["b"]).max() > 0.1
    np.testing.assert_allclose(scores["avg"], 0.25 * scores["a"] + 0.75 * scores["b"])
