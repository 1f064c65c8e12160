"""scripts/train_vlm.py --dry_run: measurements, output, and that it writes nothing."""

import os
import re

import environments
import pytest
import vlm_runs
from runner import list_repo_files, run_script
from train_vlm import (
    assign_advantages,
    compute_old_log_probs,
    compute_rollout_log_probs,
    run_evaluation,
    sample_epoch,
    train_epoch,
)

from flow_grpo.errors import RewardOutage
from flow_grpo.vlm.dry_run import VlmDryRun, smallest_valid_plan
from flow_grpo.vlm.plan import VlmBatchPlan
from flow_grpo.vlm.session import build_session

LOOP = VlmDryRun(
    sample_epoch,
    compute_rollout_log_probs,
    assign_advantages,
    compute_old_log_probs,
    train_epoch,
    run_evaluation,
)
LONG = {  # an epoch of 8 groups of 4, in 8 batches of 4, and 4 updates of two passes
    "sample.questions_per_epoch": 8,
    "sample.batch_size": 4,
    "sample.refills": 2,
    "train.updates_per_epoch": 4,
    "train.num_inner_epochs": 2,
    "eval_questions": 4,
    "num_epochs": 7,
    "eval_freq": 3,
}


@pytest.fixture
def make_session(model_and_data, tmp_path):
    made = []

    def make(**fields):
        fields = {**model_and_data, "logdir": str(tmp_path / "logs"), **fields}
        made.append(build_session(vlm_runs.make_config(**fields)))
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.mark.parametrize("reward", ["early_letters", "constant_reward"])
def test_a_few_batches_are_measured(make_session, tmp_path, reward):
    """Each round has an update, even if all rewards are equal: optimizer state takes memory."""
    fields = {} if reward == "constant_reward" else {"train.advantage": "gae", "sample.refills": 0}
    session = make_session(**{**LONG, **fields, "reward": reward})
    before = session.plan
    measured, work, peak = LOOP.measure(session, tmp_path / "out")
    assert session.plan == before
    assert session.progress.step == 2 * 2  # two rounds of an update, two passes each
    assert session.optimizer.optimizer.state
    assert min(measured.sample, measured.train, measured.first_eval, peak) > 0
    assert (work.batches, work.eval_batches, work.epochs) == (8, 1, 7)
    assert work.evaluations == 1 + 3  # after epochs 3, 6 and 7
    assert work.micro_batches == 32  # responses
    assert LOOP.shrink(session, tmp_path).plan.samples == 8


def test_maximum_episode_length_includes_all_turns(make_session, tmp_path):
    fields = {"environment": f"{environments.__file__}:CropEnvironment"}
    fields |= {"sample.max_turns": 2, "sample.max_observation_tokens": 60}
    small = LOOP.shrink(make_session(**fields), tmp_path)
    _, remark = LOOP.run_epoch(small, 0).remark
    assert "of at most 20; " in remark


def test_a_failing_reward_ends_the_dry_run(make_session, tmp_path):
    session = make_session(**LONG, reward_retries=0, reward="failing_reward")
    with pytest.raises(RewardOutage, match=r"^dry run: reward 'mine' gave no score for 8 of 8"):
        LOOP.measure(session, tmp_path / "out")


@pytest.mark.parametrize(
    ("plan", "num_processes", "questions", "batch"),
    [
        # the epoch has a single batch
        (VlmBatchPlan(1, 16, 8, 2, 1, max_batch_size=128), 1, 16, 128),
        (VlmBatchPlan(1, 64, 8, 2, 1, max_batch_size=128), 1, 32, 128),
        # 5 batches contain whole groups
        (VlmBatchPlan(8, 512, 5, 4, 1, max_batch_size=64), 8, 512, 64),
        (VlmBatchPlan(8, 1024, 5, 4, 1, max_batch_size=64), 8, 512, 64),
        # measured on 1 of 8 processes
        (VlmBatchPlan(8, 64, 5, 4, 1, max_batch_size=64), 1, 16, 40),
    ],
)
def test_smallest_plan_has_whole_groups_and_full_batches(plan, num_processes, questions, batch):
    small = smallest_valid_plan(plan, num_processes)
    assert small.num_processes == num_processes
    assert (small.questions, small.batch_size, small.group_size) == (
        questions,
        batch,
        plan.group_size,
    )
    assert plan.batch_size == batch


def test_a_dry_run_prints_the_plan_and_writes_nothing(model_and_data, tmp_path):
    """Even with a tracker; invalid settings are reported as usual. Planned for two processes."""
    fields = {**vlm_runs.FIELDS, **LONG, **model_and_data, "logdir": tmp_path / "logs"}
    fields |= {"log_with": "tensorboard", "reward_fn": {"mine": 1.0}}
    fields |= {"custom_rewards": {"mine": "small_vlm:early_letters"}}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    files = list_repo_files()
    script = ("scripts/train_vlm.py", "--config=config/vlm.py", "--dry_run", "--world_size=2")
    done = run_script(*script, *arguments)
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"(?m)^(\S+(?: \S+)*)  +(.*)$", done.stdout))
    run = tmp_path / "logs" / "run"
    assert lines["dry run"] == f"{run} would be a new run; nothing is written now"
    assert lines["samples per epoch"] == "32 = 8 questions x 4 responses"
    assert lines["sampled together"] == "4 on each of 2 processes"
    assert lines["planned for"].startswith("2 processes, measured on 1: ")
    assert lines["evaluation"] == "4 questions, every 3 epochs"
    assert lines["measured"].startswith("2 of 4 batches sampled, scored and trained, 1 of 1 of an")
    assert re.match(r"\d+ tokens on average, of at most 10; longer", lines["responses"])
    assert re.match(r"\d+\.\d GiB at the peak, on each of 2 processes, of", lines["memory"])
    assert re.match(r".* s = sampling .* \+ training .* s$", lines["time per epoch"])
    assert ": 7 epochs and 4 evaluations, " in lines["time of the run"]
    wrong = run_script(*script, *arguments, "--config.reward_fn={'beauty': 1.0}")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: unknown reward 'beauty'; ")
    assert not os.listdir(tmp_path)
    assert list_repo_files() == files
