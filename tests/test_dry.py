"""What a dry run measures, in this process; tests/e2e/test_dry_run.py has the command."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train import collect_rewards, run_evaluation, sample_behind, train_epoch

from flow_grpo.draw.dry import Loop, smallest_epoch
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.errors import RewardOutage, UserError

LOOP = Loop(sample_behind, collect_rewards, train_epoch, run_evaluation)
LONG = {  # an epoch of 6 groups of 4, in 12 batches of 2, and 3 updates
    "sample.num_image_per_prompt": 4,
    "sample.num_batches_per_epoch": 12,
    "train.gradient_accumulation_steps": 4,
    "eval_prompts": 5,
    "sample.test_batch_size": 2,
    "sample.eval_num_steps": 2,
    "num_epochs": 7,
    "eval_freq": 3,
}


@pytest.mark.parametrize(
    ("name", "fields", "trained"),
    [
        ("grpo", {"sample.async_depth": 1}, 12),
        # a pair of each group, or its best; their batches are their own
        ("dpo", {"dpo.times": 2}, 6),
        ("sft", {"sft.times": 2, "train.num_inner_epochs": 2}, 6),
        # all of its update is prepared first
        ("dgpo", {"dgpo.times": 2}, 12),
    ],
)
def test_a_few_batches_are_measured(make_session, tmp_path, name, fields, trained):
    """Whole groups, and an update in each round: the optimizer's state counts as memory."""
    session = make_session(algorithm=name, **LONG, **fields)
    before = session.plan
    measured, work, peak = LOOP.measure(session, tmp_path / "out")
    assert session.plan == before
    assert session.progress.step == 2
    assert session.optimizer.optimizer.state
    assert min(measured.sample, measured.train, measured.first_eval) > 0
    assert peak > 0
    assert (work.batches, work.eval_batches, work.epochs) == (12, 3, 7)
    assert work.evaluations == 1 + 3  # after epochs 3, 6 and 7
    assert work.micro_batches == trained
    assert work.ahead == (name == "grpo")
    assert LOOP.shrink(session, tmp_path).plan.samples == 4


def test_what_is_left_of_a_resumed_run(make_session):
    session = make_session(**LONG)
    session.progress.epoch = 5
    work = LOOP.count_work(session)
    assert (work.epochs, work.evaluations) == (2, 2)


def broken(images, prompts, metadata):
    if len(images) > 1:  # it was tried on one
        raise OSError("no such weights")
    return [0.0]


def test_a_reward_that_fails_ends_it(make_session, tmp_path):
    fields = {"reward_fn": {"broken": 1.0}, "custom_rewards": {"broken": "test_dry:broken"}}
    session = make_session(**LONG, **fields, reward_retries=0)
    with pytest.raises(RewardOutage, match=r"^dry run: reward 'broken' gave no score for 4 of 4"):
        LOOP.measure(session, tmp_path / "out")


def plans() -> st.SearchStrategy[BatchPlan | None]:
    def build(processes, per, slices, batches, group, accumulation, inner):
        with suppress(UserError):
            return BatchPlan(processes, per * slices, batches, group, per, accumulation, inner, 3)

    few = st.integers(1, 4)
    sizes = st.integers(1, 8)
    return st.builds(build, few, few, few, st.integers(1, 12), sizes, sizes, few)


@given(plans().filter(bool), st.booleans())
def test_the_smallest_epoch_has_the_batches_of_the_run_and_whole_groups(plan, whole):
    def check(small: BatchPlan) -> None:
        if whole:
            small.check_whole_groups("dpo")

    if whole and plan.train_batch_size * plan.accumulation_steps % plan.group_size:
        return  # no run of that kind
    small = smallest_epoch(plan, check)
    check(small)
    for name in ("num_processes", "sample_batch_size", "train_batch_size", "group_size"):
        assert getattr(small, name) == getattr(plan, name)
    assert small.batches_per_epoch <= plan.batches_per_epoch
    assert small.accumulation_steps <= plan.accumulation_steps
    assert small.inner_epochs == 1
