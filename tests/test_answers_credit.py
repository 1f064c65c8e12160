"""What an update of answers is made of: by hand, and written out with loops, in whole runs of two
epochs: in the second, the weights have left the reference and the value head its zeros."""

import math
from dataclasses import dataclass

import answer_runs
import numpy as np
import pytest
import small_vlm
import torch
import train_vlm
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.answer.batches import packed
from flow_grpo.answer.credit import Fixed, answer_advantages, reweigh, token_advantages
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.rollout import Rollout, Sample

COMMON = {"num_epochs": 2, "train.updates_per_epoch": 1, "train.learning_rate": 0.01}
BETA = 0.5


def one_group(**scores: list[float]) -> Rollout:
    own = {name: np.array(values) for name, values in scores.items()}
    return Rollout(AnswerPlan(1, 1, 3, 1, 1, 3), np.zeros(1, int), scores=own)


def test_how_far_an_engine_is_off_by_hand():
    """By log 2, 0 and log 4: log 2 on average; a weight of 2 is held at 1.5."""
    rollout = one_group()
    sampled = [torch.tensor(p).log() for p in ([0.25, 0.3], [0.4])]
    rollout.samples = {i: Sample(0, p, p, True, "") for i, p in zip((4, 7), sampled, strict=True)}
    fixed = {4: Fixed(torch.tensor([0.5, 0.3]).log()), 7: Fixed(torch.tensor([0.1]).log())}
    assert reweigh(Accelerator(cpu=True), rollout, fixed, 1.5) == {
        "answer/engine_dev": pytest.approx(math.log(2)),
        "answer/engine_dev_max": pytest.approx(math.log(4)),
    }
    assert fixed[4].importance.tolist() == pytest.approx([1.5, 1])
    assert fixed[7].importance.tolist() == pytest.approx([0.25])


def test_the_shares_of_a_judge_are_counted_as_they_are():
    """Shares of the scores are .5, 0, 1: 2 * (.9, .5, .1) + (.5, 0, 1), less their mean 1.5."""
    rollout = one_group(judge=[0.9, 0.5, 0.1], score=[7.0, 3.0, 90.0], none=[1.0, 0.0, 0.0])
    weights = {"judge": 2.0, "score": 1.0}
    accelerator = Accelerator(cpu=True)
    found = answer_advantages(accelerator, rollout, weights, {"judge"}, "pairwise", "none", {})
    np.testing.assert_allclose(found, [0.8, -0.5, -0.3], atol=1e-12)


def test_large_rewards_are_whitened_without_rounding():
    """Their squares have more digits than float32; the deviation is 1."""
    rollout = one_group(avg=[100001.0, 100003.0, math.nan])
    fixed = {i: Fixed(torch.zeros(1), values=torch.zeros(1)) for i in range(3)}
    token_advantages(Accelerator(cpu=True), rollout, fixed, {}, discount=1.0, decay=1.0)
    advantages = torch.cat([own.advantages for own in fixed.values()])
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-1, 1, 0])


@dataclass
class Epoch:
    rollout: Rollout
    fixed: dict[int, Fixed]
    greedy: dict[int, float]  # reward of the likeliest answer to each question
    metrics: dict[str, float]

    def mean(self, values: dict[int, Tensor]) -> float:
        """Over the tokens of all answers."""
        assert values.keys() == self.rollout.samples.keys()
        return torch.cat(list(values.values())).double().mean().item()

    def credit(self) -> dict[int, Tensor]:
        return {i: own.advantages for i, own in self.fixed.items()}

    def references(self) -> dict[int, Tensor]:
        """Of a model that no training has touched."""
        network, own = AnswerModel(small_vlm.build()), {}
        for i in self.rollout.samples:
            with torch.no_grad():
                batch = packed([self.rollout.answer(i)], small_vlm.PAD)
                own[i] = network(batch)["log_probs"][0]
        return own


@pytest.fixture
def second_epoch(tmp_path, monkeypatch):
    folder = small_vlm.save(tmp_path / "model")
    places = {"pretrained.model": str(folder), "logdir": str(tmp_path / "logs")}
    places["dataset"] = str(small_vlm.small_data(tmp_path / "data"))
    epochs, train_epoch = [], train_vlm.train_epoch

    def watched(session, epoch, rollout, fixed):
        rows = list(rollout.prompts)
        with session.answerer.awake():
            answers = session.answerer.answer(rollout.prompts, rows)
        rewards = small_vlm.early_letters([a.text for a in answers], [], [])
        metrics = train_epoch(session, epoch, rollout, fixed)
        epochs.append(Epoch(rollout, fixed, dict(zip(rows, rewards, strict=True)), metrics))
        return metrics

    def run(**fields) -> Epoch:
        monkeypatch.setattr(train_vlm, "train_epoch", watched)
        answer_runs.run(**places, **{**COMMON, **fields})
        assert len(epochs) == 2
        assert all(own.old.abs().sum() > 0 for own in epochs[1].fixed.values())
        return epochs[1]

    return run


def test_the_kl_in_the_loss(second_epoch):
    epoch = second_epoch(**{"train.beta": BETA, "train.kl": "k3", "train.kl_in": "loss"})
    references, kl = epoch.references(), {}
    for i, own in epoch.fixed.items():
        away = references[i] - own.old
        kl[i] = away.exp() - away - 1
    gain = epoch.mean(epoch.credit())
    assert epoch.metrics["train/kl"] == pytest.approx(epoch.mean(kl), rel=1e-3)
    assert epoch.metrics["train/kl"] > 1e-4
    assert epoch.metrics["train/policy_loss"] == pytest.approx(-gain, abs=1e-5)
    loss = -gain + BETA * epoch.mean(kl)
    assert epoch.metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    surprise = {i: -own.old for i, own in epoch.fixed.items()}
    assert epoch.metrics["train/entropy"] == pytest.approx(epoch.mean(surprise))


def test_the_kl_in_the_reward(second_epoch):
    """What an answer loses is summed over its tokens; the loss has no KL then."""
    settings = {"train.beta": BETA, "train.kl": "k1", "train.kl_in": "reward"}
    epoch = second_epoch(**settings, **{"train.advantage": "dr_grpo"})
    references, rewards = epoch.references(), epoch.rollout.scores["avg"]
    lost = {i: BETA * (own.old - references[i]).sum().item() for i, own in epoch.fixed.items()}
    assert max(map(abs, lost.values())) > 1e-2
    for i, own in epoch.fixed.items():
        group = [j for j in epoch.fixed if j // 4 == i // 4]
        left = [rewards[j] - lost[j] for j in group]
        expected = rewards[i] - lost[i] - sum(left) / 4
        assert own.advantages.tolist() == pytest.approx([expected] * len(own.old), abs=1e-4)
    gain = epoch.mean(epoch.credit())
    assert epoch.metrics["train/loss"] == pytest.approx(-gain, abs=1e-5)
    assert epoch.metrics["train/kl"] != 0


def test_remax_compares_with_the_greedy_answer(second_epoch):
    epoch = second_epoch(**{"train.advantage": "remax"})
    assert len(set(epoch.greedy.values())) > 1
    for i, own in epoch.fixed.items():
        baseline = epoch.greedy[epoch.rollout.row_of(i)]
        expected = epoch.rollout.scores["avg"][i] - baseline
        assert own.advantages.tolist() == pytest.approx([expected] * len(own.old))


def test_ppo_with_rewards_that_are_missing(second_epoch):
    """Discount .9, decay .8, a KL in the reward, values and their loss."""
    settings = {"train.beta": BETA, "train.kl": "k1", "train.kl_in": "reward"}
    settings |= {"train.advantage": "gae", "train.discount": 0.9, "train.gae_decay": 0.8}
    settings |= {"train.value_weight": 0.7, "sample.questions_per_epoch": 8}
    epoch = second_epoch(**settings, reward="letters_or_nothing", max_failed_fraction=0.5)
    references, rewards = epoch.references(), epoch.rollout.scores["avg"]
    raw, without = {}, []
    for i, own in epoch.fixed.items():
        values, left = own.values.tolist(), (BETA * (own.old - references[i])).tolist()
        assert any(values)
        if math.isnan(rewards[i]):
            without.append(i)
            assert not own.advantages.any()
            assert torch.equal(own.returns, own.values)
            continue
        raw[i], later = [0.0] * len(values), 0.0
        for t in reversed(range(len(values))):
            last = t == len(values) - 1
            reward = (rewards[i] if last else 0.0) - left[t]
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
        assert epoch.fixed[i].advantages.tolist() == pytest.approx(expected, abs=1e-3)
    errors = {i: 0.5 * (own.values - own.returns) ** 2 for i, own in epoch.fixed.items()}
    loss = -epoch.mean(epoch.credit()) + 0.7 * epoch.mean(errors)
    assert epoch.metrics["train/value_loss"] == pytest.approx(epoch.mean(errors), rel=1e-4)
    assert epoch.metrics["train/loss"] == pytest.approx(loss, abs=1e-4)
