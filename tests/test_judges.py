"""Rewards that compare the pictures of a group: they are called with whole groups, or the run is
refused; and training through one."""

import json
from collections import Counter

import judges
import numpy as np
import pytest
from ml_collections import ConfigDict
from openai_server import MODEL, OpenAiServer
from train import collect_rewards, sample_epoch, train

from flow_grpo.advantages import compute_advantages
from flow_grpo.data.prompts import epoch_draws
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.errors import UserError
from reward_server.__main__ import main as serve
from reward_server.isolated import build

OWN = {
    "reward_fn": ConfigDict({"judge": 1.0}),
    "eval_reward_fn": ConfigDict({"jpeg_compressibility": 1.0}),
    "custom_rewards": ConfigDict({"judge": "judges:Brighter"}),
}


def plan(**changed) -> BatchPlan:
    numbers = {
        "num_processes": 1,
        "sample_batch_size": 8,
        "batches_per_epoch": 4,
        "group_size": 4,
        "train_batch_size": 8,
        "accumulation_steps": 2,
        "inner_epochs": 1,
    }
    return BatchPlan(**{**numbers, **changed})


def holds_whole_groups(plan: BatchPlan) -> bool:
    for process in range(plan.num_processes):
        draws = epoch_draws(
            rows=plan.groups,
            groups=plan.groups,
            group_size=plan.group_size,
            batch_size=plan.sample_batch_size,
            updates=plan.updates_per_pass,
            process=process,
            num_processes=plan.num_processes,
            rng=np.random.default_rng(0),
        )
        if any(count != plan.group_size for d in draws for count in Counter(d.row).values()):
            return False
    return True


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("train_batch", [2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("group", [2, 4, 8, 16])
def test_a_plan_is_refused_just_where_a_batch_has_parts_of_a_group(
    processes, train_batch, accumulation, group
):
    one = plan(
        num_processes=processes,
        train_batch_size=train_batch,
        accumulation_steps=accumulation,
        group_size=group,
    )
    try:
        one.check_judge("judge")
        refused = False
    except UserError:
        refused = True
    assert refused != holds_whole_groups(one)


def test_groups_that_are_split_over_batches_are_one_line():
    with pytest.raises(UserError) as caught:
        plan(group_size=16).check_judge("vlm_pairwise")
    assert str(caught.value) == (
        "reward 'vlm_pairwise' compares the pictures of a group, but sample.train_batch_size=8 "
        "does not hold whole groups of sample.num_image_per_prompt=16; make it a multiple"
    )


def test_groups_that_are_split_over_processes_are_one_line():
    with pytest.raises(UserError) as caught:
        plan(num_processes=2, train_batch_size=2, accumulation_steps=1).check_judge("vlm_pairwise")
    assert str(caught.value) == (
        "reward 'vlm_pairwise' compares the pictures of a group, but an update's 2 samples per "
        "process = train.batch_size=2 x train.gradient_accumulation_steps=1 do not hold whole "
        "groups of sample.num_image_per_prompt=4; make that a multiple"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {
                "sample.train_batch_size": 1,
                "train.batch_size": 1,
                "sample.num_batches_per_epoch": 4,
            },
            "reward 'judge' compares the pictures of a group, but sample.train_batch_size=1 does",
        ),
        (
            {"sample.num_image_per_prompt": 1, "train.advantage": "reinforce_pp"},
            "sample.num_image_per_prompt=1 must be at least 2 for",
        ),
        ({"train.advantage": "remax"}, "train.advantage='remax' does not go with reward 'judge'"),
        (
            {"eval_reward_fn": ConfigDict()},
            "reward 'judge' compares .* name another, e.g. --config",
        ),
    ],
)
def test_what_a_judge_cannot_do_is_told_before_the_model_loads(make_session, changed, message):
    missing = {"pretrained.model": "nowhere"}
    with pytest.raises(UserError, match=f"^{message}") as caught:
        make_session(**{**OWN, **changed, **missing})
    assert "\n" not in str(caught.value)


def test_a_reward_server_refuses_a_judge(capsys):
    """It puts requests together and takes them apart."""
    arguments = ["--rewards", "judge", "--custom", "judge=judges:Brighter", "--port", "0"]
    assert serve(arguments) == 2
    told = capsys.readouterr().err
    assert told == (
        "error: reward 'judge' compares the pictures of a group, which a reward server gets in "
        "parts; leave it to the trainer\n"
    )
    with pytest.raises(UserError) as isolated:
        build("judge", custom={"judge": "judges:Brighter"})
    assert f"error: {isolated.value}\n" == told


def test_a_judge_of_ones_own_is_called_with_whole_groups(make_session):
    session = make_session(**OWN, **{"train.advantage": "pairwise"})
    judges.CALLS.clear()
    samples = sample_epoch(session, 0)
    scored = collect_rewards(session, 0, samples)
    assert [Counter(prompts).most_common(1)[0][1] for prompts in judges.CALLS] == [2, 2]
    assert scored.judged == {"judge"}
    # its shares are 0 and 1/2; compared with each other they would be 0 and 1
    assert sorted(scored.rewards["judge"]) == [0, 0, 0.5, 0.5]
    as_they_are = compute_advantages(scored.rewards["judge"], scored.groups, scale="batch")
    np.testing.assert_array_equal(session.algorithm.credit(scored), as_they_are)


def test_training_through_a_vision_language_model(make_session):
    """The whole loop, with a judge over HTTP that likes bright pictures."""
    with OpenAiServer(judges.brighter) as server:
        options = {"vlm_pairwise": {"url": server.url, "model": MODEL}}
        session = make_session(
            **{**OWN, "reward_fn": ConfigDict({"vlm_pairwise": 1.0})},
            **{"reward_options": ConfigDict(options), "train.advantage": "pairwise"},
            **{"num_epochs": 1, "eval_prompts": 1, "sample.eval_num_steps": 1},
        )
        train(session)
        assert server.malformed == []
        # the check, and two groups of two in both orders
        assert [len(question.images) for question in server.asked] == [2] * (1 + 2 * 2)
    metrics = json.loads((session.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/vlm_pairwise"] == 0.5  # one of each pair won
    assert metrics["reward/vlm_pairwise/std"] == 0.5
    assert metrics["reward/vlm_pairwise/flipped"] == 0
    assert metrics["train/grad_norm"] > 0
