"""Advantages, KL penalties and losses of an update, compared with explicit loops.

Runs have two epochs: in the second, the policy differs from the reference, and the value head is no
longer zero.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import small_vlm
import torch
import train_vlm
import vlm_runs
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.vlm.advantages import (
    ResponseTensors,
    compute_response_advantages,
    compute_token_advantages,
    engine_deviation,
    set_old_log_probs,
)
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import pack_responses
from flow_grpo.vlm.plan import VlmBatchPlan
from flow_grpo.vlm.rollout import EpisodeRecord, Rollout, Sample

COMMON = {"num_epochs": 2, "train.updates_per_epoch": 1, "train.learning_rate": 0.01}
BETA = 0.5


def one_group(**scores: list[float]) -> Rollout:
    own = {name: np.array(values) for name, values in scores.items()}
    return Rollout(VlmBatchPlan(1, 1, 3, 1, 1, 3), np.zeros(1, int), scores=own)


def test_engine_deviation_and_importance_weights_by_hand():
    """Deviations are log 2, 0 and log 4; the weight of 2 is capped at 1.5."""
    rollout = one_group()
    sampled = [torch.tensor(p).log() for p in ([0.25, 0.3], [0.4])]
    rollout.samples = {i: Sample(0, p, p, True, "") for i, p in zip((4, 7), sampled, strict=True)}
    tensors = {i: ResponseTensors(None) for i in (4, 7, 9)}  # no update contains 9
    set_old_log_probs(tensors[4], torch.tensor([0.5, 0.3]).log(), sampled[0], 1.5)
    set_old_log_probs(tensors[7], torch.tensor([0.1]).log(), sampled[1], 1.5)
    assert engine_deviation(Accelerator(cpu=True), rollout, tensors) == {
        "answer/engine_dev": pytest.approx(math.log(2)),
        "answer/engine_dev_max": pytest.approx(math.log(4)),
    }
    assert tensors[4].importance.tolist() == pytest.approx([1.5, 1])
    assert tensors[7].importance.tolist() == pytest.approx([0.25])


def test_pairwise_rewards_are_not_converted_to_win_rates_again():
    """Win rates of the scores are .5, 0, 1: 2 * (.9, .5, .1) + (.5, 0, 1), less their mean 1.5."""
    rollout = one_group(judge=[0.9, 0.5, 0.1], score=[7.0, 3.0, 90.0], none=[1.0, 0.0, 0.0])
    weights = {"judge": 2.0, "score": 1.0}
    accelerator = Accelerator(cpu=True)
    found = compute_response_advantages(
        accelerator, rollout, weights, {"judge"}, "pairwise", "none", {}
    )
    np.testing.assert_allclose(found, [0.8, -0.5, -0.3], atol=1e-12)


def test_large_rewards_are_whitened_without_rounding():
    """Float32 cannot represent their squares; the standard deviation is 1."""
    rollout = one_group(avg=[100001.0, 100003.0, math.nan])
    tensors = {i: ResponseTensors(torch.zeros(1), values=torch.zeros(1)) for i in range(3)}
    compute_token_advantages(Accelerator(cpu=True), rollout, tensors, {}, discount=1.0, decay=1.0)
    advantages = torch.cat([own.advantages for own in tensors.values()])
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-1, 1, 0])


def test_rewards_of_steps_are_placed_at_their_turns():
    """Turns have 2, 1 and 2 tokens; the environment's weight is 2, and another reward gives 0.7.

    Token rewards are 0, 1, -0.5, 0, 2 + 0.7. The last step of the second episode failed.
    """
    rollout = one_group(avg=[3.2, 0.5, math.nan])
    records = [
        EpisodeRecord(["", "", ""], ["", ""], [0.5, -0.25, 1.0], [2, 1, 2], ""),
        EpisodeRecord(["", ""], [""], [0.25], [1, 1], ""),
        EpisodeRecord([""], [], [], [1], "broken"),
    ]
    tensors = {}
    for index, record in enumerate(records):
        zeros = torch.zeros(sum(record.lengths))
        rollout.samples[index] = Sample(0, zeros, zeros, True, "", None, record)
        tensors[index] = ResponseTensors(zeros, values=zeros)
    settings = {"discount": 1.0, "decay": 1.0, "environment_weight": 2.0}
    compute_token_advantages(Accelerator(cpu=True), rollout, tensors, {}, **settings)
    assert tensors[0].returns.tolist() == pytest.approx([3.2, 3.2, 2.2, 2.7, 2.7])
    assert tensors[1].returns.tolist() == pytest.approx([0.5, 0.0])
    assert tensors[2].advantages.tolist() == [0]


@dataclass
class Epoch:
    rollout: Rollout
    tensors: dict[int, ResponseTensors]
    greedy: dict[int, float]  # reward of the greedy response to each question
    metrics: dict[str, float]

    def mean(self, values: dict[int, Tensor]) -> float:
        """Return the mean over the tokens of all responses."""
        assert values.keys() == self.rollout.samples.keys()
        return torch.cat(list(values.values())).double().mean().item()

    def advantages(self) -> dict[int, Tensor]:
        return {i: own.advantages for i, own in self.tensors.items()}

    def references(self) -> dict[int, Tensor]:
        """Return the log-probabilities of the initial model."""
        network, own = PolicyModel(small_vlm.build()), {}
        for i in self.rollout.samples:
            with torch.no_grad():
                batch = pack_responses([self.rollout.response(i)], small_vlm.PAD)
                own[i] = network(batch)["log_probs"][0]
        return own


@pytest.fixture
def second_epoch(model_and_data, tmp_path, monkeypatch):
    epochs, train_epoch = [], train_vlm.train_epoch

    def watched(session, epoch, rollout, tensors):
        rows = list(rollout.prompts)
        with session.rollout_engine.generation_mode():
            responses = session.rollout_engine.generate(rollout.prompts, rows)
        rewards = small_vlm.early_letters([r.text for r in responses], [], [])
        metrics = train_epoch(session, epoch, rollout, tensors)
        epochs.append(Epoch(rollout, tensors, dict(zip(rows, rewards, strict=True)), metrics))
        return metrics

    def run(**fields) -> Epoch:
        monkeypatch.setattr(train_vlm, "train_epoch", watched)
        vlm_runs.run(**{**model_and_data, **COMMON, **fields}, logdir=str(tmp_path))
        assert len(epochs) == 2
        assert all(own.old_log_probs.abs().sum() > 0 for own in epochs[1].tensors.values())
        return epochs[1]

    return run


def test_kl_in_the_loss(second_epoch):
    epoch = second_epoch(**{"train.beta": BETA, "train.kl": "k3", "train.kl_in": "loss"})
    references, kl = epoch.references(), {}
    for i, own in epoch.tensors.items():
        log_ratio = references[i] - own.old_log_probs
        kl[i] = log_ratio.exp() - log_ratio - 1
    mean_advantage = epoch.mean(epoch.advantages())
    assert epoch.metrics["train/kl"] == pytest.approx(epoch.mean(kl), rel=1e-3)
    assert epoch.metrics["train/kl"] > 1e-4
    assert epoch.metrics["train/policy_loss"] == pytest.approx(-mean_advantage, abs=1e-5)
    loss = -mean_advantage + BETA * epoch.mean(kl)
    assert epoch.metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    entropy = {i: -own.old_log_probs for i, own in epoch.tensors.items()}
    assert epoch.metrics["train/entropy"] == pytest.approx(epoch.mean(entropy))


def test_kl_in_the_reward(second_epoch):
    """The penalty of a response is the sum over its tokens; the loss has no KL."""
    settings = {"train.beta": BETA, "train.kl": "k1", "train.kl_in": "reward"}
    epoch = second_epoch(**settings, **{"train.advantage": "dr_grpo"})
    references, rewards = epoch.references(), epoch.rollout.scores["avg"]
    penalties = {
        i: BETA * (own.old_log_probs - references[i]).sum().item()
        for i, own in epoch.tensors.items()
    }
    assert max(map(abs, penalties.values())) > 1e-2
    for i, own in epoch.tensors.items():
        group = [j for j in epoch.tensors if j // 4 == i // 4]
        penalized = [rewards[j] - penalties[j] for j in group]
        expected = rewards[i] - penalties[i] - sum(penalized) / 4
        assert own.advantages.tolist() == pytest.approx(
            [expected] * len(own.old_log_probs), abs=1e-4
        )
    mean_advantage = epoch.mean(epoch.advantages())
    assert epoch.metrics["train/loss"] == pytest.approx(-mean_advantage, abs=1e-5)
    assert epoch.metrics["train/kl"] != 0


def test_remax_baseline_is_the_greedy_response(second_epoch):
    epoch = second_epoch(**{"train.advantage": "remax"})
    assert len(set(epoch.greedy.values())) > 1
    for i, own in epoch.tensors.items():
        baseline = epoch.greedy[epoch.rollout.row_of(i)]
        expected = epoch.rollout.scores["avg"][i] - baseline
        assert own.advantages.tolist() == pytest.approx([expected] * len(own.old_log_probs))


def test_ppo_with_missing_rewards(second_epoch):
    """With discount 0.9, decay 0.8 and a KL penalty in the reward."""
    settings = {"train.beta": BETA, "train.kl": "k1", "train.kl_in": "reward"}
    settings |= {"train.advantage": "gae", "train.discount": 0.9, "train.gae_decay": 0.8}
    settings |= {"train.value_weight": 0.7, "sample.questions_per_epoch": 8}
    epoch = second_epoch(**settings, reward="early_letters_or_nan", max_failed_fraction=0.5)
    references, rewards = epoch.references(), epoch.rollout.scores["avg"]
    raw, without = {}, []
    for i, own in epoch.tensors.items():
        values = own.values.tolist()
        penalties = (BETA * (own.old_log_probs - references[i])).tolist()
        assert any(values)
        if math.isnan(rewards[i]):
            without.append(i)
            assert not own.advantages.any()
            assert torch.equal(own.returns, own.values)
            continue
        raw[i], later = [0.0] * len(values), 0.0
        for t in reversed(range(len(values))):
            last = t == len(values) - 1
            reward = (rewards[i] if last else 0.0) - penalties[t]
            following = 0.0 if last else values[t + 1]
            later = reward + 0.9 * following - values[t] + 0.9 * 0.8 * later
            raw[i][t] = later
        expected = [a + v for a, v in zip(raw[i], values, strict=True)]
        assert own.returns.tolist() == pytest.approx(expected, abs=1e-4)
    assert len(without) == 4
    every = [a for own in raw.values() for a in own]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
    for i, own in raw.items():
        expected = [(a - mean) / deviation for a in own]
        assert epoch.tensors[i].advantages.tolist() == pytest.approx(expected, abs=1e-3)
    errors = {i: 0.5 * (own.values - own.returns) ** 2 for i, own in epoch.tensors.items()}
    loss = -epoch.mean(epoch.advantages()) + 0.7 * epoch.mean(errors)
    assert epoch.metrics["train/value_loss"] == pytest.approx(epoch.mean(errors), rel=1e-4)
    assert epoch.metrics["train/loss"] == pytest.approx(loss, abs=1e-4)
