"""A scorer that fails is tried again for a while, then missing; it never holds up the run."""

import logging
import math
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from accelerate import Accelerator
from PIL import Image
from serving import wait_until

from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.rewards import WeightedReward, close_scorers, failure
from flow_grpo.rewards.calling.guard import GuardedScorer
from flow_grpo.rewards.calling.pool import CannotStart
from flow_grpo.rewards.failure import Failed, FailurePolicy
from flow_grpo.run.session import describe_outage

PICTURE = Image.new("RGB", (8, 8))


class Script:
    """A scorer that does one thing after another: raises what is an exception, else returns it."""

    def __init__(self, *steps) -> None:
        self.steps = list(steps)
        self.calls = 0

    def __call__(self, images, prompts, metadata):
        self.calls += 1
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(failure, "FIRST_DELAY", 0.01)


def guarded(scorer, retries=2, timeout=20.0) -> GuardedScorer:
    return GuardedScorer("mine", scorer, FailurePolicy(retries, timeout))


def score(guard: GuardedScorer, count: int = 2) -> list[float]:
    pictures: Future = Future()
    pictures.set_result([PICTURE] * count)
    return guard.submit(pictures, ["p"] * count, [{}] * count).result(timeout=30).values


def test_an_outage_that_passes_loses_nothing():
    script = Script(ConnectionError("refused"), RuntimeError("busy"), [1.0, 2.0])
    assert score(guarded(script)) == [1.0, 2.0]
    assert script.calls == 3


def test_an_outage_that_stays_gives_no_score_and_is_remembered():
    script = Script(*[ConnectionError(f"refused {i}") for i in range(3)])
    guard = guarded(script)
    values = score(guard)
    assert all(math.isnan(value) for value in values)
    assert {value.reason for value in values} == {"ConnectionError: refused 2"}
    assert guard.last_error == "ConnectionError: refused 2"
    assert script.calls == 3


def test_what_was_being_scored_when_the_run_ended_fails_without_a_word(caplog):
    script = Script(RuntimeError("the worker pool is closed"))
    reward = WeightedReward({"mine": guarded(script)}, {"mine": 1.0})
    close_scorers(reward)
    with caplog.at_level("WARNING"):
        scores = reward([PICTURE], ["p"])
    assert math.isnan(scores["mine"][0])
    assert script.calls == 1
    assert not caplog.text


@pytest.mark.parametrize(("sample", "kind"), [("Two.", "answer"), (PICTURE, "image")])
def test_what_got_no_score_is_called_what_it_is(caplog, monkeypatch, sample, kind):
    monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)
    reward = WeightedReward({"mine": guarded(Script([1.0, math.nan], [1.0]))}, {"mine": 1.0})
    with caplog.at_level("WARNING"):
        scores = reward([sample] * 2, ["p"] * 2)
        reward([sample] * 2, ["p"] * 2)
    assert f"'mine': 1 of 2 {kind}s got no score, the last because: it returned nan" in caplog.text
    assert f"for 2 {kind}s; it must return one number per {kind} (NaN" in caplog.text
    told = describe_outage(Accelerator(cpu=True), reward, scores, 0.2)
    assert told.startswith(f"reward 'mine' gave no score for 1 of 2 {kind}s (max_failed")


def test_while_it_is_down_each_batch_costs_one_attempt():
    script = Script(*[OSError("down")] * 4, [1.0, 2.0], OSError("blip"), [3.0, 4.0])
    guard = guarded(script)
    score(guard)
    score(guard)
    assert script.calls == 4
    assert score(guard) == [1.0, 2.0]
    assert score(guard) == [3.0, 4.0]  # up again: retried again


@pytest.mark.parametrize("error", [UserError("no such prompt"), TypeError("bug"), NameError("x")])
def test_a_mistake_is_not_retried(error):
    script = Script(error)
    assert all(math.isnan(value) for value in score(guarded(script)))
    assert script.calls == 1


def test_workers_that_cannot_start_for_now_are_waited_for():
    script = Script(CannotStart("no memory"), CannotStart("no memory"), [1.0, 2.0])
    assert score(guarded(script)) == [1.0, 2.0]
    assert script.calls == 3


def test_attempts_end_with_the_deadline(monkeypatch):
    monkeypatch.setattr(failure, "FIRST_DELAY", 0.2)
    start = time.monotonic()
    score(guarded(Script(*[OSError("down")] * 100), retries=100, timeout=1.0))
    assert time.monotonic() - start < 10


def test_a_scorer_that_hangs_is_left_alone():
    wake = threading.Event()

    def hangs(images, prompts, metadata):
        wake.wait(30)
        return [1.0, 2.0]

    guard = guarded(hangs, timeout=0.3)
    start = time.monotonic()
    assert score(guard)[0].reason == "TimeoutError: no answer within 0.3 s"
    assert score(guard)[0].reason == "TimeoutError: it still hangs in an earlier batch"
    assert time.monotonic() - start < 10
    wake.set()
    wait_until(lambda: score(guard) == [1.0, 2.0])


def test_parts_that_fail_do_not_touch_the_rest():
    guard = guarded(Script([Failed("unreadable"), 2.0]))
    values = score(guard)
    assert values[1] == 2.0
    assert guard.last_error == "unreadable"


def test_a_scorer_with_a_policy_of_its_own_is_called_once():
    script = Script(ConnectionError("refused"))
    script.has_policy = True
    assert math.isnan(score(guarded(script))[0])
    assert script.calls == 1


def test_an_exit_in_a_scorer_does_not_end_the_run():
    def leaves(images, prompts, metadata):
        sys.exit(0)

    assert score(guarded(leaves))[0].reason == "SystemExit: 0"


def test_a_slow_batch_does_not_take_the_next_ones_with_it():
    slow = iter([1.2, 0.0, 0.0])

    def slow_once(images, prompts, metadata):
        time.sleep(next(slow))
        return [1.0, 2.0]

    guard = guarded(slow_once, timeout=1.0)
    assert math.isnan(score(guard)[0])
    time.sleep(0.15)  # what the next batch waits for it at least makes up the rest
    assert score(guard) == [1.0, 2.0]


def test_an_image_of_nan_has_no_score_and_the_others_do():
    pictures: Future = Future()
    pictures.set_result([None, Image.new("RGB", (8, 8))])
    scores = guarded(Script([2.0])).submit(pictures, ["p", "q"], [{}, {}]).result(timeout=30)
    assert scores.values[0].reason == "its pixels are not numbers (NaN)"
    assert scores.values[1] == 2.0


def test_delays_double_up_to_a_limit_and_differ_between_processes(monkeypatch):
    monkeypatch.setattr(failure, "FIRST_DELAY", 0.5)
    delays = list(FailurePolicy(retries=10).delays())
    for i, delay in enumerate(delays):
        whole = min(30.0, 0.5 * 2**i)
        assert 0.75 * whole <= delay <= 1.25 * whole
    assert delays != list(FailurePolicy(retries=10).delays())


def weighted(guard: GuardedScorer) -> WeightedReward:
    return WeightedReward({"mine": guard}, {"mine": 1.0})


def test_a_reward_that_fails_on_every_batch_ends_the_run():
    guard = guarded(Script(IndexError("no such picture"), KeyError("size"), [1.0, 1.0]))
    reward = weighted(guard)
    score(guard)
    reward.end_if_broken()  # one batch says little
    score(guard)
    with pytest.raises(RewardOutage, match=r"'mine' fails on every batch: KeyError: 'size'"):
        reward.end_if_broken()


@pytest.mark.parametrize(
    "first", [[1.0, 1.0], ConnectionError("refused"), CannotStart("no memory")]
)
def test_a_reward_that_worked_or_may_come_back_does_not_end_the_run(first):
    guard = guarded(Script(first, *[ValueError()] * 2), retries=0)
    for _ in range(2):
        score(guard)
    weighted(guard).end_if_broken()


SIGNATURE = (
    r"; write it as mine\(images, prompts, metadata\), which returns a list with one .*image$"
)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ([1.0], rf"returned scores of shape \(1,\) for 2 images; .*{SIGNATURE}"),
        (["good", 1.0], f"returned 'good' among its scores, not a number{SIGNATURE}"),
        (TypeError("it takes 2 arguments"), r"TypeError: it takes 2 arguments \(test_guard.*\)$"),
        (lambda images: [0.0], rf"takes 1 positional argument but 3 were given .*{SIGNATURE}"),
        (CannotStart("3 worker processes died"), "3 worker processes died$"),
        ([1.0, 1e308], r"returned 1e\+308, beyond .*scale the reward"),
    ],
)
def test_a_mistake_is_told_when_a_reward_is_tried(step, told):
    with pytest.raises(UserError, match=f"'mine' fails when it is tried: .*{told}"):
        weighted(guarded(step if callable(step) else Script(step))).rehearse(["p"], [{}], 16, 8, 1)


@pytest.mark.parametrize("step", [[0.5] * 2, [math.nan] * 2, [None] * 2, OSError("later, perhaps")])
def test_what_may_work_later_is_not_told_when_a_reward_is_tried(step):
    weighted(guarded(Script(step))).rehearse(["p"], [{}], 16, 8, 1)


def test_a_reward_is_tried_on_what_it_will_see():
    seen = []

    def scorer(images, prompts, metadata):
        seen.append((images, prompts, metadata))
        return [1.0] * len(images)

    weighted(guarded(scorer)).rehearse(["a cat"], [{"tag": 1}], 16, 8, 1)
    scorer.compares_groups = True
    weighted(guarded(scorer)).rehearse(["a cat"], [{}], 16, 8, 5)
    assert [image.size for image in seen[0][0]] == [(16, 8)] * 2
    assert seen[0][1:] == (["a cat"] * 2, [{"tag": 1}] * 2)
    assert len(seen[1][0]) == 2  # a judge sees one frame of a clip


def test_a_reward_that_hangs_is_told():
    release = threading.Event()
    guard = guarded(lambda *batch: release.wait(30), timeout=0.2)
    with pytest.raises(UserError, match=r"'mine' hangs: no score for two images in \S+=0.2 s"):
        weighted(guard).rehearse(["p"], [{}], 8, 8, 1)
    release.set()
