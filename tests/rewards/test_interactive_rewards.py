"""Rewards that wait for people: no test calls, no time limit of the trainer's, stopped at once."""

import math
import threading

from ml_collections import ConfigDict
from PIL import Image
from sessions import short_config
from train import collect_rewards, run_evaluation, sample_current_epoch, train_epoch
from user_errors import raises_user_error

from flow_grpo.diffusion.config_checks import check_interactive_rewards
from flow_grpo.diffusion.dry_run import DiffusionDryRun
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.rewards import WeightedReward, build_reward, guard_scorers
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.protocol import Scorer
from flow_grpo.vlm.builders import check_reward_inputs

IMAGES = [Image.new("RGB", (8, 8))] * 2


class Patient(Scorer):
    """Returns scores when `arrived` has as many batches as `wanted`."""

    interactive = True

    def __init__(self, wanted: int) -> None:
        self.arrived = threading.Barrier(wanted)

    def __call__(self, images, prompts, metadata):
        self.arrived.wait()
        return [1.0] * len(images)


def weighted(scorer: Scorer) -> WeightedReward:
    guarded = guard_scorers({"people": scorer}, FailurePolicy(retries=0, timeout=1e-6))
    return WeightedReward(guarded, {"people": 1.0})


def test_batches_wait_at_the_same_time_without_the_limit_of_other_rewards():
    reward = weighted(Patient(wanted=3))
    pending = [reward.submit(IMAGES, ["p"] * 2) for _ in range(3)]
    assert [each.result()["people"].tolist() for each in pending] == [[1, 1]] * 3


def test_a_stop_of_the_run_ends_the_waiting():
    reward = weighted(Patient(wanted=2))
    stopped = threading.Event()
    reward.stop_waiting_if(stopped.is_set)
    pending = reward.submit(IMAGES, ["p"] * 2)
    stopped.set()
    assert all(map(math.isnan, pending.result()["people"]))


def test_nobody_is_asked_by_test_calls_and_dry_runs():
    reward = weighted(Patient(wanted=2))
    reward.smoke_test(["p"], [{}], 8, 8, 1)
    reward.exclude_interactive()
    assert reward(IMAGES, ["p"] * 2)["people"].tolist() == [0.5, 0.5]


def asked(images, prompts, metadata):
    raise AssertionError("a dry run asked people")


asked.interactive = asked.compares_groups = True
CUSTOM = {
    "reward_fn": ConfigDict({"asked": 1.0}),
    "eval_reward_fn": ConfigDict({"jpeg_compressibility": 1.0}),
    "custom_rewards": ConfigDict({"asked": f"{__name__}:asked"}),
}


def test_a_dry_run_of_training_asks_nobody(tmp_path, caplog):
    fields = {"sample.num_steps": 2, "sample.eval_num_steps": 1, "eval_prompts": 1}
    loop = DiffusionDryRun(sample_current_epoch, collect_rewards, train_epoch, run_evaluation)
    caplog.set_level("INFO")
    session = loop.dry_run(short_config(tmp_path, "dry", **CUSTOM, **fields))
    assert session.reward.last_errors == {}
    assert any("asked" in record.getMessage() for record in caplog.records)


def test_an_evaluation_by_people_is_rejected_before_the_model_loads(make_session):
    with raises_user_error("eval_reward_fn", "'asked'"):
        fields = {**CUSTOM, "eval_reward_fn": ConfigDict()}
        make_session(**fields, **{"pretrained.model": "nowhere"})


def plan(processes: int) -> BatchPlan:
    return BatchPlan(
        num_processes=processes,
        sample_batch_size=4,
        batches_per_epoch=2,
        group_size=4,
        train_batch_size=4,
        accumulation_steps=2,
        inner_epochs=1,
    )


def test_a_time_out_beyond_that_of_processes_is_rejected(tmp_path):
    config = short_config(tmp_path, "run", distributed_timeout=100)
    people = Patient(wanted=1)
    people.timeout = 99.0
    check_interactive_rewards(config, {"people": people}, plan(2), frames=1)
    people.timeout = 100.0
    check_interactive_rewards(config, {"people": people}, plan(1), frames=1)
    field = {"field": "reward_options.people.timeout", "value": 100.0}
    with raises_user_error("distributed_timeout=100", **field):
        check_interactive_rewards(config, {"people": people}, plan(2), frames=1)


def test_videos_are_rejected(tmp_path):
    config = short_config(tmp_path, "run")
    with raises_user_error("9", field="reward 'people'"):
        check_interactive_rewards(config, {"people": Patient(1)}, plan(1), frames=9)


def test_responses_are_rejected():
    reward = build_reward({"human": 1.0}, servers={"human": "http://nowhere.invalid"})
    with raises_user_error(field="reward 'human'"):
        check_reward_inputs(reward, [], 8)
