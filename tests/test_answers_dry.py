"""scripts/train_vlm.py --dry_run: what it measures, what it tells, and that nothing is left."""

import os
import re
from pathlib import Path

import answer_runs
import pytest
import small_vlm
from runner import files_of_repo, run_script
from train_vlm import give_credit, prepare, run_evaluation, sample_epoch, train_epoch

from flow_grpo.answer.dry import AnswerLoop, smallest_epoch
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.session import build_session
from flow_grpo.errors import RewardOutage

LOOP = AnswerLoop(sample_epoch, prepare, give_credit, train_epoch, run_evaluation)
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


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("dry")
    model, data = small_vlm.save(folder / "model"), small_vlm.small_data(folder / "data")
    return {"pretrained.model": str(model), "dataset": str(data)}


@pytest.fixture
def make_session(places, tmp_path):
    made = []

    def make(**fields):
        fields = {**places, "logdir": str(tmp_path / "logs"), **fields}
        made.append(build_session(answer_runs.config_of(**fields)))
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.mark.parametrize("reward", ["early_letters", "same_for_all"])
def test_a_few_batches_are_measured(make_session, tmp_path, reward):
    """With an update in each round, also where all rewards are the same: the optimizer's state
    counts as memory."""
    fields = {} if reward == "same_for_all" else {"train.advantage": "gae", "sample.refills": 0}
    session = make_session(**{**LONG, **fields, "reward": reward})
    before = session.plan
    measured, work, peak = LOOP.measure(session, tmp_path / "out")
    assert session.plan == before
    assert session.progress.step == 2 * 2  # two rounds of an update, two passes each
    assert session.optimizer.optimizer.state
    assert min(measured.sample, measured.train, measured.first_eval, peak) > 0
    assert (work.batches, work.eval_batches, work.epochs) == (8, 1, 7)
    assert work.evaluations == 1 + 3  # after epochs 3, 6 and 7
    assert work.micro_batches == 32  # answers
    assert LOOP.shrink(session, tmp_path).plan.samples == 8


def test_the_longest_episode_has_all_its_answers(make_session, tmp_path):
    fields = {"environment": f"{Path(__file__).with_name('environments.py')}:Looker"}
    fields |= {"sample.max_turns": 2, "sample.max_observation_tokens": 60}
    small = LOOP.shrink(make_session(**fields), tmp_path)
    _, told = LOOP.run_epoch(small, 0).remark
    assert "of at most 20; " in told


def test_a_reward_that_fails_ends_it(make_session, tmp_path):
    session = make_session(**LONG, reward_retries=0, reward="outage")
    with pytest.raises(RewardOutage, match=r"^dry run: reward 'mine' gave no score for 8 of 8"):
        LOOP.measure(session, tmp_path / "out")


@pytest.mark.parametrize(
    ("plan", "here", "questions", "batch"),
    [
        (AnswerPlan(1, 16, 8, 2, 1, most_at_once=128), 1, 16, 128),  # one batch is all there is
        (AnswerPlan(1, 64, 8, 2, 1, most_at_once=128), 1, 32, 128),
        (AnswerPlan(8, 512, 5, 4, 1, most_at_once=64), 8, 512, 64),  # 5 batches make whole groups
        (AnswerPlan(8, 1024, 5, 4, 1, most_at_once=64), 8, 512, 64),
        (AnswerPlan(8, 64, 5, 4, 1, most_at_once=64), 1, 16, 40),  # one of 8, whose batch is 40
    ],
)
def test_the_smallest_epoch_has_the_batches_of_the_run_and_whole_groups(
    plan, here, questions, batch
):
    small = smallest_epoch(plan, here)
    assert small.num_processes == here
    assert (small.questions, small.batch_size, small.group_size) == (
        *(questions, batch, plan.group_size),
    )
    assert plan.batch_size == batch


def test_a_dry_run_tells_the_plan_and_writes_nothing(places, tmp_path):
    """Also where a tracker is asked for; a mistake is told as always. Planned for two processes,
    of which one is here."""
    fields = {**answer_runs.FIELDS, **LONG, **places, "logdir": tmp_path / "logs"}
    fields |= {"log_with": "tensorboard", "reward_fn": {"mine": 1.0}}
    fields |= {"custom_rewards": {"mine": "small_vlm:early_letters"}}
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    here = files_of_repo()
    script = ("scripts/train_vlm.py", "--config=config/vlm.py", "--dry_run", "--world_size=2")
    done = run_script(*script, *words)
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"(?m)^(\S+(?: \S+)*)  +(.*)$", done.stdout))
    run = tmp_path / "logs" / "run"
    assert lines["dry run"] == f"{run} would be a new run; nothing is written now"
    assert lines["samples per epoch"] == "32 = 8 questions x 4 answers"
    assert lines["sampled together"] == "4, on each of 2 processes"
    assert lines["planned for"].startswith("2 processes, measured on 1: ")
    assert lines["evaluation"] == "4 questions, every 3 epochs"
    assert lines["measured"].startswith("2 of 4 batches sampled, scored and trained, 1 of 1 of an")
    assert re.match(r"\d+ tokens on average, of at most 10; longer", lines["answers"])
    assert re.match(r"\d+\.\d GiB at the peak, on each of 2 processes, of", lines["memory"])
    assert re.match(r".* s = sampling .* \+ training .* s$", lines["time per epoch"])
    assert ": 7 epochs and 4 evaluations, " in lines["time of the run"]
    wrong = run_script(*script, *words, "--config.reward_fn={'beauty': 1.0}")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: unknown reward 'beauty'; ")
    assert not os.listdir(tmp_path)
    assert files_of_repo() == here
