"""Measurements of a dry run, in process; tests/e2e/test_dry_run_command.py tests the command."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import short_config
from train import collect_rewards, run_evaluation, sample_current_epoch, train_epoch
from user_errors import raises_user_error

from flow_grpo.diffusion.dry_run import DiffusionDryRun, smallest_valid_plan
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.errors import RewardOutage, UserError

LOOP = DiffusionDryRun(sample_current_epoch, collect_rewards, train_epoch, run_evaluation)
LONG = {  # 6 groups of 4 per epoch, in 12 batches of 2 and 3 updates
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
        # trains a pair or the best of each group, in different batches
        ("dpo", {"dpo.times": 2}, 6),
        ("sft", {"sft.times": 2, "train.num_inner_epochs": 2}, 6),
        # prepares its whole update first
        ("dgpo", {"dgpo.times": 2}, 12),
    ],
)
def test_a_few_batches_are_measured(make_session, tmp_path, name, fields, trained):
    """Whole groups, and an update per epoch, so that memory includes the optimizer state."""
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


def test_a_dry_run_plans_for_another_world_size(tmp_path, caplog):
    """4 groups of 6 over 4 processes: each has 6 samples in 3 batches of 2."""
    fields = {"sample.num_image_per_prompt": 6, "sample.num_batches_per_epoch": 3}
    fields |= {"train.gradient_accumulation_steps": 3, "eval_prompts": 5}
    fields |= {"height": 32, "width": 32, "sample.num_steps": 2, "sample.eval_num_steps": 1}
    config = short_config(tmp_path, "planned", **{**LONG, **fields})
    evaluated = []

    def evaluate(session, epoch):
        evaluated.append(len(session.test_prompts))
        return run_evaluation(session, epoch)

    loop = replace(LOOP, evaluate=evaluate)
    caplog.set_level("INFO")
    session = loop.dry_run(config, world_size=4)
    work = loop.count_work(session)
    assert (work.batches, work.micro_batches, work.eval_batches) == (3, 3, 1)
    assert evaluated == [2, 2]  # one batch, of the first process's two prompts
    assert "24 = 2 per batch x 3 batches x 4 processes" in caplog.text
    assert "4 processes, measured on 1" in caplog.text
    bad = short_config(tmp_path, "bad", **{**LONG, "sample.num_batches_per_epoch": 3})
    with raises_user_error("x 3 processes", "sample.num_image_per_prompt=4"):
        loop.dry_run(bad, 3)


def test_remaining_work_of_a_resumed_run(make_session):
    session = make_session(**LONG)
    session.progress.epoch = 5
    work = LOOP.count_work(session)
    assert (work.epochs, work.evaluations) == (2, 2)


def broken(images, prompts, metadata):
    if len(images) > 1:  # the smoke test uses a single image
        raise OSError("no such weights")
    return [0.0]


def test_a_reward_that_fails_ends_it(make_session, tmp_path):
    fields = {"reward_fn": {"broken": 1.0}, "custom_rewards": {"broken": "test_dry_run:broken"}}
    session = make_session(**LONG, **fields, reward_retries=0)
    with raises_user_error("dry run", "'broken'", "4 of 4", kind=RewardOutage):
        LOOP.measure(session, tmp_path / "out")


def plans() -> st.SearchStrategy[BatchPlan | None]:
    def build(processes, per, slices, batches, group, accumulation, inner):
        with suppress(UserError):
            return BatchPlan(processes, per * slices, batches, group, per, accumulation, inner, 3)

    few = st.integers(1, 4)
    sizes = st.integers(1, 8)
    return st.builds(build, few, few, few, st.integers(1, 12), sizes, sizes, few)


@given(plans().filter(bool), st.booleans(), st.integers(0, 3))
def test_the_smallest_epoch_has_the_batches_of_the_run_and_whole_groups(plan, whole, here):
    """On the planned number of processes, or another, which may need more batches."""

    def check(small: BatchPlan) -> None:
        if whole:
            small.check_whole_groups("dpo")

    if whole and plan.train_batch_size * plan.accumulation_steps % plan.group_size:
        return  # an invalid plan of the run itself
    here = here or plan.num_processes
    small = smallest_valid_plan(plan, check, here)
    check(small)
    assert small.num_processes == here
    for name in ("sample_batch_size", "train_batch_size", "group_size"):
        assert getattr(small, name) == getattr(plan, name)
    assert small.batches_per_epoch <= plan.batches_per_epoch or here != plan.num_processes
    assert small.accumulation_steps <= plan.accumulation_steps
    assert small.inner_epochs == 1
