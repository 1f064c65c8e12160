import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from flow_grpo.diffusion.algorithms import Loss
from flow_grpo.training import distributed
from flow_grpo.training import metrics as run_metrics
from flow_grpo.training.distributed import gather_rows, gather_scores
from flow_grpo.training.metrics import (
    Timer,
    TrainingStats,
    peak_memory_gb,
    reward_metrics,
    score_metrics,
    synchronized_time,
)


@pytest.mark.filterwarnings("error")
def test_the_spread_is_that_of_scored_samples_within_groups():
    total = np.array([1.0, 3.0, 5.0, 5.0, np.nan, 2.0, 8.0])
    rewards = {
        "a": total,
        "a/colour": 2 * total,
        "b": np.array([*[-np.inf] * 6, np.nan]),
        "avg": total,
    }
    metrics = reward_metrics(rewards, np.array([0, 0, 1, 1, 1, 2, 2]))
    assert {name: value for name, value in metrics.items() if not math.isnan(value)} == {
        "reward/a": 4.0,
        "reward/a/std": pytest.approx(math.sqrt(16 / 3)),  # 9 + 1 + 1 + 1 + 4 + 16 over 6
        "reward/a/failed": 1,
        "reward/a/colour": 8.0,
        "reward/b/failed": 1,  # not requested of the others
        "reward/avg": 4.0,
        "reward/failed": 1,
        "reward/samples": 7,
        "reward/std_within_group": pytest.approx(4 / 3),  # 1, 0 and 3
        "reward/zero_std_ratio": pytest.approx(1 / 3),
    }
    assert math.isnan(metrics["reward/b"])
    assert math.isnan(metrics["reward/b/std"])


@pytest.mark.filterwarnings("error")
def test_each_prompt_set_has_its_own_means():
    """Also where a set and a reward have one name, and where a reward does not score a set."""
    a, b = np.array([1.0, 2.0, 4.0]), np.array([np.nan, 6.0, np.nan])
    scores = {"a": a, "a/colour": a, "b": b, "avg": a}
    plain = score_metrics("eval", scores)
    metrics = score_metrics("eval", scores, ["a", "b", "a"])
    added = {name: value for name, value in metrics.items() if name not in plain}
    assert math.isnan(added.pop("eval/a/b"))
    means = {"eval/a/a": 2.5, "eval/a/avg": 2.5, "eval/b/a": 2.0, "eval/b/b": 6.0}
    assert added == {**means, "eval/b/avg": 2.0}
    assert {name: metrics[name] for name in plain} == plain


@pytest.mark.filterwarnings("error")
def test_without_scores_every_mean_is_nan():
    metrics = reward_metrics({"avg": np.full(2, np.nan)}, np.zeros(2, int))
    assert math.isnan(metrics["reward/avg"])
    assert math.isnan(metrics["reward/zero_std_ratio"])
    assert metrics["reward/failed"] == 2


def step_loss(ratio: list[float], policy_loss: list[float], kl: list[float]) -> Loss:
    ratio, policy_loss, kl = map(torch.tensor, (ratio, policy_loss, kl))
    columns = {
        "policy_loss": policy_loss,
        "kl": kl,
        "approx_kl": 4 * (ratio - 1) ** 2,
        "ratio": ratio,
        "clip_low": ratio < 0.9,
        "clip_high": ratio > 1.4,
    }
    return Loss(policy_loss + 0.5 * kl, columns)


def test_metrics_are_averaged_over_all_updates_of_an_epoch():
    """Skipped samples count as a loss of 0; ratios and KL average over computed samples: without a
    KL weight dpo skips pairs with equal rewards, whose KL is no smaller."""
    stats = TrainingStats()
    stats.add(step_loss([1.0, 1.5], [-1.0, 3.0], [0.0, 2.0]), on_policy=True)
    stats.count_zero_losses(6)
    stats.add(step_loss([0.75, 1.25], [2.0, 4.0], [1.0, 1.0]), on_policy=True)
    stats.count_zero_losses(4)
    stats.add(step_loss([0.25, 1.25], [0.0, 0.0], [0.0, 0.0]), on_policy=False)
    stats.end_update(2.0, 1.5, applied=True)
    stats.end_update(4.0, 1.5, applied=True)
    for norm in (math.inf, math.nan):
        stats.count_zero_losses(1)
        stats.add(step_loss([math.nan], [math.inf], [0.0]), on_policy=True)
        stats.end_update(norm, 1.5, applied=False)
    assert stats.metrics(Accelerator(cpu=True)) == {
        "train/loss": 10 / 16,
        "train/policy_loss": 8 / 16,
        "train/kl": pytest.approx(4 / 6),
        "train/approx_kl": pytest.approx(4 * (0.25 + 0.0625 + 0.0625 + 0.5625 + 0.0625) / 6),
        "train/clip_low": pytest.approx(2 / 6),
        "train/clip_high": pytest.approx(1 / 6),
        "train/ratio_mean": 1.0,
        "train/ratio_min": 0.25,
        "train/ratio_max": 1.5,
        "train/first_update_ratio_dev": 0.5,
        "train/grad_norm": 3.0,
        "train/max_grad_norm": 1.5,
        "train/skipped_updates": 2,
    }


def test_an_epoch_of_skipped_updates_has_no_loss():
    stats = TrainingStats()
    stats.add(step_loss([math.nan], [math.nan], [0.0]), on_policy=True)
    stats.end_update(math.nan, 1.0, applied=False, loss_scale=512.0)
    metrics = stats.metrics(Accelerator(cpu=True))
    assert (metrics["train/skipped_updates"], metrics["train/loss_scale"]) == (1, 512.0)
    assert math.isnan(metrics["train/loss"])
    assert math.isnan(metrics["train/grad_norm"])


def test_a_loss_without_ratios_logs_only_its_columns():
    stats = TrainingStats()
    stats.add(Loss(torch.tensor([1.0, 3.0]), {"margin": torch.tensor([0.5, 1.5])}), on_policy=True)
    stats.count_zero_losses(2)
    stats.end_update(2.0, 1.0, applied=True)
    assert stats.metrics(Accelerator(cpu=True)) == {
        "train/loss": 1.0,
        "train/margin": 1.0,
        "train/grad_norm": 2.0,
        "train/max_grad_norm": 1.0,
        "train/skipped_updates": 0,
    }


def test_a_process_without_samples_leaves_the_extremes_to_others():
    stats = TrainingStats()
    stats.add(step_loss([], [], []), on_policy=True)
    stats.end_update(2.0, 1.0, applied=True)
    found = stats.metrics(Accelerator(cpu=True))
    assert (found["train/ratio_min"], found["train/ratio_max"]) == (math.inf, -math.inf)


def test_times_of_one_name_add_up_even_after_an_error(monkeypatch):
    clock = iter([1.0, 1.5, 10.0, 12.0, 20.0, 20.25])
    monkeypatch.setattr(run_metrics.time, "perf_counter", lambda: next(clock))
    timer = Timer()
    with timer("a"):
        pass
    with pytest.raises(KeyError), timer("a"):
        raise KeyError
    with timer("b"):
        pass
    assert timer.metrics() == {"time/a": 2.5, "time/b": 0.25}


def test_memory_and_time_of_a_gpu_are_measured_on_it(monkeypatch):
    """With a mock; tests/gpu uses a real one."""
    asked, gpu, cpu = [], torch.device("cuda:1"), torch.device("cpu")
    monkeypatch.setattr(
        torch.cuda, "max_memory_reserved", lambda device: asked.append(device) or 3 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(run_metrics.time, "perf_counter", lambda: 7.0)
    assert (peak_memory_gb(gpu), synchronized_time(gpu)) == (3.0, 7.0)
    assert asked == [gpu, gpu]
    usage = type("Usage", (), {"ru_maxrss": 2 * 2**20})
    monkeypatch.setattr(
        run_metrics.resource, "getrusage", {run_metrics.resource.RUSAGE_SELF: usage}.get
    )
    assert (peak_memory_gb(cpu), synchronized_time(cpu)) == (2.0, 7.0)
    assert asked == [gpu, gpu]


@pytest.mark.parametrize("own", [range(0), range(1)])
def test_the_index_of_a_process_without_rows_is_gathered_as_that_of_others(own):
    """torch.tensor(range(0)) is float32, which processes with rows do not send."""
    sent = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.dtype)
        return tensor

    accelerator = SimpleNamespace(
        device="cpu",
        process_index=0,
        num_processes=1,
        pad_across_processes=lambda tensor, dim, pad_index: tensor,
        gather=gather,
    )
    rows = {"margin": torch.zeros(len(own))}
    index, columns = gather_rows(accelerator, torch.tensor(own), rows)
    assert sent == [torch.int64, torch.float32]
    assert len(index) == len(columns["margin"]) == len(own)


def test_processes_exchange_each_score_name_once(monkeypatch):
    """Their number does not grow with the batches of an epoch."""
    sent, gather = [], distributed.gather_object
    monkeypatch.setattr(distributed, "gather_object", lambda x: sent.append(x) or gather(x))
    batches = [{"a": np.ones(2), **({"b": np.zeros(2)} if i else {})} for i in range(5)]
    scores = gather_scores(Accelerator(cpu=True), np.arange(10), batches)
    assert sent == [["a", "b"]]
    np.testing.assert_array_equal(scores["b"], [np.nan, np.nan, *[0.0] * 8])
