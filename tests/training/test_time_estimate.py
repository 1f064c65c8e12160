"""Time estimates of a dry run."""

from dataclasses import replace

import pytest

from flow_grpo.training.time_estimate import (
    MeasuredTimes,
    RemainingWork,
    count_evaluations,
    describe_times,
    epoch_seconds,
    estimate_reward_seconds,
    eval_seconds,
    run_seconds,
)

MEASURED = MeasuredTimes(
    sample=2.0, reward=0.5, train=3.0, first_eval=5.0, next_eval=4.0, warm_up=10.0
)
WORK = RemainingWork(batches=4, micro_batches=8, eval_batches=3, epochs=10, evaluations=6)


def simulate(sample: float, reward: float, batches: int) -> float:
    """Return the seconds until the last batch is scored, each while the next one is sampled."""
    sampled = scored = 0.0
    for _ in range(batches):
        sampled += sample
        scored = max(scored, sampled) + reward
    return scored


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0, 1.7, 20.0])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_the_wait_for_rewards_equals_a_simulated_schedule(reward, batches):
    waiting = simulate(1.0, reward, batches) - batches
    assert estimate_reward_seconds(1.0 * batches, waiting, batches) == pytest.approx(reward)
    for more in (1, 3, 40):
        epoch = epoch_seconds(
            replace(MEASURED, sample=1.0, reward=reward), replace(WORK, batches=more)
        )
        whole = epoch["sampling"] + epoch["waiting for rewards"]
        assert whole == pytest.approx(simulate(1.0, reward, more))


def test_an_epoch_that_is_sampled_ahead_hides_the_rewards():
    ahead = replace(WORK, ahead=True)
    assert epoch_seconds(MEASURED, ahead)["waiting for rewards"] == 0
    slow = replace(MEASURED, reward=10.0)
    assert epoch_seconds(slow, WORK)["waiting for rewards"] == 10 + 3 * 8
    assert epoch_seconds(slow, ahead)["waiting for rewards"] == 10 + 3 * 8 - 4 * 2


def test_the_run_is_its_epochs_and_evaluations():
    assert sum(epoch_seconds(MEASURED, WORK).values()) == 4 * 2 + 0.5 + 8 * 3
    assert eval_seconds(MEASURED, WORK) == 5 + 2 * 4
    assert run_seconds(MEASURED, WORK) == 10 + 10 * 32.5 + 6 * 13
    assert describe_times(MEASURED, WORK).splitlines() == [
        "time per epoch        32 s = sampling 8.0 s + waiting for rewards 0.5 s + training 24 s",
        "time per evaluation   13 s",
        "time of the run       6 min 53 s: 10 epochs and 6 evaluations, 19% of the time; without "
        "checkpoints",
    ]


@pytest.mark.parametrize(
    ("done", "last", "every", "count"),
    [(-1, 10, 2, 6), (-1, 10, 3, 5), (-1, 10, 0, 2), (4, 10, 2, 3), (10, 10, 2, 0), (0, 1, 0, 1)],
)
def test_remaining_evaluations_are_counted(done, last, every, count):
    assert count_evaluations(done, last, every) == count
    assert count_evaluations(done, last, every, before=False) == count - (done < 0)
