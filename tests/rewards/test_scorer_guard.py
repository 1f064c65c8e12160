"""A scorer that fails is retried, then its scores are missing; it never blocks the run."""

import logging
import math
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
from accelerate import Accelerator
from PIL import Image
from server_process import wait_until
from user_errors import raises_user_error

from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.rewards import WeightedReward, close_scorers, failure
from flow_grpo.rewards.failure import Failed, FailurePolicy
from flow_grpo.rewards.turns import TURNS, device_turn
from flow_grpo.rewards.workers import guard as guard_module
from flow_grpo.rewards.workers.guard import NON_FINITE_IMAGE, GuardedScorer
from flow_grpo.rewards.workers.pool import WorkerStartError
from flow_grpo.training.session import find_outage

IMAGE = Image.new("RGB", (8, 8))


class Script:
    """A scorer that returns its steps one after the other, or raises those that are exceptions."""

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
    images: Future = Future()
    images.set_result([IMAGE] * count)
    return guard.submit(images, ["p"] * count, [{}] * count).result(timeout=30).values


def test_a_temporary_outage_loses_no_score():
    script = Script(ConnectionError("refused"), RuntimeError("busy"), [1.0, 2.0])
    assert score(guarded(script)) == [1.0, 2.0]
    assert script.calls == 3


def test_a_permanent_outage_gives_no_score_and_is_remembered():
    script = Script(*[ConnectionError(f"refused {i}") for i in range(3)])
    guard = guarded(script)
    values = score(guard)
    assert all(math.isnan(value) for value in values)
    assert {value.reason for value in values} == {"ConnectionError: refused 2"}
    assert guard.last_error == "ConnectionError: refused 2"
    assert script.calls == 3


def test_failures_after_closing_are_not_logged(caplog):
    script = Script(RuntimeError("the worker pool is closed"))
    reward = WeightedReward({"mine": guarded(script)}, {"mine": 1.0})
    close_scorers(reward)
    with caplog.at_level("WARNING"):
        scores = reward([IMAGE], ["p"])
    assert math.isnan(scores["mine"][0])
    assert script.calls == 1
    assert not caplog.text


@pytest.mark.parametrize(("sample", "kind"), [("Two.", "answer"), (IMAGE, "image")])
def test_messages_name_the_kind_of_sample(caplog, monkeypatch, sample, kind):
    monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)
    reward = WeightedReward({"mine": guarded(Script([1.0, math.nan], [1.0]))}, {"mine": 1.0})
    with caplog.at_level("WARNING"):
        scores = reward([sample] * 2, ["p"] * 2)
        reward([sample] * 2, ["p"] * 2)
    assert f"reward 'mine': 1 of 2 {kind}s" in caplog.text
    assert "it returned nan" in caplog.text
    assert f"for 2 {kind}s; it must return one number per {kind}" in caplog.text
    message = find_outage(Accelerator(cpu=True), reward, scores, 0.2)
    assert "'mine'" in message
    assert f"1 of 2 {kind}s" in message
    assert "max_failed" in message


def test_while_a_scorer_is_down_each_batch_costs_one_attempt():
    script = Script(*[OSError("down")] * 4, [1.0, 2.0], OSError("blip"), [3.0, 4.0])
    guard = guarded(script)
    score(guard)
    score(guard)
    assert script.calls == 4
    assert score(guard) == [1.0, 2.0]
    assert score(guard) == [3.0, 4.0]  # up again: retried again


@pytest.mark.parametrize("error", [UserError("no such prompt"), TypeError("bug"), NameError("x")])
def test_a_permanent_error_is_not_retried(error):
    script = Script(error)
    assert all(math.isnan(value) for value in score(guarded(script)))
    assert script.calls == 1


def test_a_failed_start_of_workers_is_retried():
    script = Script(WorkerStartError("no memory"), WorkerStartError("no memory"), [1.0, 2.0])
    assert score(guarded(script)) == [1.0, 2.0]
    assert script.calls == 3


def test_attempts_end_with_the_deadline(monkeypatch):
    monkeypatch.setattr(failure, "FIRST_DELAY", 0.2)
    script = Script(*[OSError("down")] * 100)
    score(guarded(script, retries=100, timeout=1.0))
    assert 1 <= script.calls <= 4  # the pauses are 0.2, 0.4 and 0.8 s, plus or minus a quarter


def test_a_hanging_scorer_does_not_block_the_run():
    wake = threading.Event()

    def hangs(images, prompts, metadata):
        wake.wait(60)
        return [1.0, 2.0]

    guard = guarded(hangs, timeout=0.3)
    assert "TimeoutError" in (reason := score(guard)[0].reason)
    assert "0.3 s" in reason
    assert "earlier batch" in score(guard)[0].reason
    wake.set()
    wait_until(lambda: score(guard) == [1.0, 2.0])


class ByTurns(Script):
    """A scorer that shares its device."""

    offload = TURNS

    def release_memory(self) -> None:
        pass


def test_waiting_for_a_turn_does_not_count_as_scoring(monkeypatch):
    """Another reward is on the device for longer than this one's timeout, then for ever."""
    ends, other, passed = threading.Event(), ByTurns(), [0.0]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])

    def hold(taken):
        with device_turn(other):
            taken.set()
            assert ends.wait(60)

    monkeypatch.setattr(guard_module, "TURN_TIMEOUT_FACTOR", 600.0)
    with ThreadPoolExecutor(2) as threads:
        taken = threading.Event()
        threads.submit(hold, taken)
        assert taken.wait(60)
        guard = guarded(ByTurns(OSError("blip"), [1.0, 2.0]), timeout=20.0)
        scores = threads.submit(score, guard)
        wait_until(lambda: guard._running is not None)
        passed[0] = 1000.0
        ends.set()
        assert scores.result() == [1.0, 2.0]
        ends.clear()
        taken.clear()
        threads.submit(hold, taken)
        assert taken.wait(60)
        monkeypatch.setattr(guard_module, "TURN_TIMEOUT_FACTOR", 2.0)
        script = ByTurns()
        try:
            [value] = score(guarded(script, timeout=0.2), 1)
        finally:
            ends.set()
    assert value.reason == "TimeoutError: another reward with offload='turns' took more than 0.4 s"
    assert script.calls == 0


def test_a_failed_sample_does_not_affect_the_others():
    guard = guarded(Script([Failed("unreadable"), 2.0]))
    values = score(guard)
    assert values[1] == 2.0
    assert guard.last_error == "unreadable"


def test_a_scorer_that_handles_retries_is_called_once():
    script = Script(ConnectionError("refused"))
    script.handles_retries = True
    assert math.isnan(score(guarded(script))[0])
    assert script.calls == 1


def test_an_exit_in_a_scorer_does_not_end_the_run():
    def exits(images, prompts, metadata):
        sys.exit(0)

    assert score(guarded(exits))[0].reason == "SystemExit: 0"


def test_a_slow_batch_does_not_fail_the_next_ones():
    go = threading.Event()

    def slow_once(images, prompts, metadata):
        assert go.wait(60)
        return [1.0, 2.0]

    guard = guarded(slow_once, timeout=0.3)
    assert math.isnan(score(guard)[0])
    guard._policy = FailurePolicy(retries=0, timeout=600.0)  # a tenth of it to wait for the first
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(score, guard)
        assert not wait([second], 0.2).done
        go.set()
        assert second.result() == [1.0, 2.0]


def test_a_non_finite_image_has_no_score_and_the_others_do():
    images: Future = Future()
    images.set_result([None, IMAGE])
    scores = guarded(Script([2.0])).submit(images, ["p", "q"], [{}, {}]).result(timeout=30)
    assert scores.values[0] is NON_FINITE_IMAGE
    assert scores.values[1] == 2.0


def test_delays_double_up_to_a_limit_and_differ_between_processes(monkeypatch):
    monkeypatch.setattr(failure, "FIRST_DELAY", 0.5)
    delays = list(FailurePolicy(retries=10).delays())
    for i, delay in enumerate(delays):
        nominal = min(30.0, 0.5 * 2**i)
        assert 0.75 * nominal <= delay <= 1.25 * nominal
    assert delays != list(FailurePolicy(retries=10).delays())


def weighted(guard: GuardedScorer) -> WeightedReward:
    return WeightedReward({"mine": guard}, {"mine": 1.0})


def test_a_reward_that_fails_on_every_batch_ends_the_run():
    guard = guarded(Script(IndexError("no such image"), KeyError("size"), [1.0, 1.0]))
    reward = weighted(guard)
    score(guard)
    reward.raise_if_failing()  # one failed batch is not enough
    score(guard)
    with raises_user_error("KeyError: 'size'", field="reward 'mine'", kind=RewardOutage):
        reward.raise_if_failing()


@pytest.mark.parametrize(
    "first", [[1.0, 1.0], ConnectionError("refused"), WorkerStartError("no memory")]
)
def test_a_reward_that_worked_or_may_come_back_does_not_end_the_run(first):
    guard = guarded(Script(first, *[ValueError()] * 2), retries=0)
    for _ in range(2):
        score(guard)
    weighted(guard).raise_if_failing()


SIGNATURE = "mine(images, prompts, metadata)"


@pytest.mark.parametrize(
    ("step", "shown", "hint"),
    [
        ([1.0], "scores of shape (1,) for 2 images", SIGNATURE),
        (["good", 1.0], "'good'", SIGNATURE),
        (TypeError("it takes 2 arguments"), "2 arguments (test_scorer_guard.py, line ", ""),
        (lambda images: [0.0], "takes 1 positional argument but 3 were given", SIGNATURE),
        (WorkerStartError("3 worker processes died"), "3 worker processes died", ""),
        ([1.0, 1e308], "1e+308", ""),
    ],
)
def test_the_smoke_test_reports_errors_of_the_scorer(step, shown, hint):
    reward = weighted(guarded(step if callable(step) else Script(step)))
    with raises_user_error(shown, field="reward 'mine'") as caught:
        reward.smoke_test(["p"], [{}], 16, 8, 1)
    assert hint in caught.value.hint
    assert bool(hint) == bool(caught.value.hint)


@pytest.mark.parametrize("step", [[0.5] * 2, [math.nan] * 2, [None] * 2, OSError("later, perhaps")])
def test_the_smoke_test_ignores_errors_that_may_pass(step):
    weighted(guarded(Script(step))).smoke_test(["p"], [{}], 16, 8, 1)


def test_the_smoke_test_passes_samples_of_the_right_size():
    seen = []

    def scorer(images, prompts, metadata):
        seen.append((images, prompts, metadata))
        return [1.0] * len(images)

    weighted(guarded(scorer)).smoke_test(["a cat"], [{"tag": 1}], 16, 8, 1)
    scorer.compares_groups = True
    weighted(guarded(scorer)).smoke_test(["a cat"], [{}], 16, 8, 5)
    assert [image.size for image in seen[0][0]] == [(16, 8)] * 2
    assert seen[0][1:] == (["a cat"] * 2, [{"tag": 1}] * 2)
    assert len(seen[1][0]) == 2  # a judge sees one frame of a video


def test_the_minimum_number_of_frames_of_a_custom_reward_is_checked():
    def scorer(images, prompts, metadata):
        return [1.0] * len(images)

    scorer.min_frames = 3
    weighted(guarded(scorer)).smoke_test(["p"], [{}], 16, 8, 3)
    with raises_user_error("at least 3 frames, not 2", field="reward 'mine'"):
        weighted(guarded(scorer)).smoke_test(["p"], [{}], 16, 8, 2)
    scorer.min_frames = "3"
    with raises_user_error("must be an integer", field="min_frames of reward 'mine'", value="3"):
        weighted(guarded(scorer)).smoke_test(["p"], [{}], 16, 8, 3)


def test_the_smoke_test_reports_a_scorer_that_hangs():
    release = threading.Event()
    guard = guarded(lambda *batch: release.wait(30), timeout=0.2)
    with raises_user_error("hangs", "reward_timeout=0.2", field="reward 'mine'"):
        weighted(guard).smoke_test(["p"], [{}], 8, 8, 1)
    release.set()
