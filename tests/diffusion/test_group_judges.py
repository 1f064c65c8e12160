"""Rewards that compare the images of a group get whole groups, or the run is rejected."""

import json
from collections import Counter

import brightness_judges
import numpy as np
import pytest
from ml_collections import ConfigDict
from openai_server import MODEL, OpenAiServer
from train import collect_rewards, sample_epoch, train
from user_errors import raises_user_error

from flow_grpo.advantages import compute_advantages
from flow_grpo.data.epoch_batches import build_epoch_batches
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.errors import UserError
from reward_server.__main__ import main as serve
from reward_server.isolated import build_worker

CUSTOM_JUDGE = {
    "reward_fn": ConfigDict({"judge": 1.0}),
    "eval_reward_fn": ConfigDict({"jpeg_compressibility": 1.0}),
    "custom_rewards": ConfigDict({"judge": "brightness_judges:Brighter"}),
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
        batches = build_epoch_batches(
            rows=plan.groups,
            groups=plan.groups,
            group_size=plan.group_size,
            batch_size=plan.sample_batch_size,
            updates=plan.updates_per_pass,
            process=process,
            num_processes=plan.num_processes,
            rng=np.random.default_rng(0),
        )
        if any(count != plan.group_size for ids in batches for count in Counter(ids.row).values()):
            return False
    return True


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("train_batch", [2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("group", [2, 4, 8, 16])
def test_a_plan_is_rejected_exactly_if_a_batch_has_partial_groups(
    processes, train_batch, accumulation, group
):
    one = plan(
        num_processes=processes,
        train_batch_size=train_batch,
        accumulation_steps=accumulation,
        group_size=group,
    )
    try:
        one.check_groupwise_reward("judge")
        rejected = False
    except UserError:
        rejected = True
    assert rejected != holds_whole_groups(one)


def test_groups_split_over_batches_are_rejected():
    field = {"field": "sample.train_batch_size", "value": 8}
    with raises_user_error("'vlm_pairwise'", "sample.num_image_per_prompt=16", **field):
        plan(group_size=16).check_groupwise_reward("vlm_pairwise")


def test_groups_split_over_processes_are_rejected():
    split = plan(num_processes=2, train_batch_size=2, accumulation_steps=1)
    update = "2 samples per process = train.batch_size=2 x train.gradient_accumulation_steps=1"
    with raises_user_error("'vlm_pairwise'", update, "sample.num_image_per_prompt=4"):
        split.check_groupwise_reward("vlm_pairwise")


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (
            {
                "sample.train_batch_size": 1,
                "train.batch_size": 1,
                "sample.num_batches_per_epoch": 4,
            },
            "sample.train_batch_size=1 ",
        ),
        (
            {"sample.num_image_per_prompt": 1, "train.advantage": "reinforce_pp"},
            "sample.num_image_per_prompt=1 must be at least 2",
        ),
        ({"train.advantage": "remax"}, "train.advantage='remax'"),
        ({"eval_reward_fn": ConfigDict()}, "--config.eval_reward_fn="),
    ],
)
def test_unsupported_uses_of_a_judge_are_rejected_before_the_model_loads(
    make_session, changed, shown
):
    missing = {"pretrained.model": "nowhere"}
    with raises_user_error("reward 'judge'", shown):
        make_session(**{**CUSTOM_JUDGE, **changed, **missing})


def test_a_reward_server_rejects_a_judge(capsys):
    """It batches and splits requests, so groups would not stay together."""
    arguments = ["--rewards", "judge", "--port", "0"]
    assert serve([*arguments, "--custom", "judge=brightness_judges:Brighter"]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    with raises_user_error("judge") as isolated:
        build_worker("judge", custom={"judge": "brightness_judges:Brighter"})
    assert output == f"error: {isolated.value}\n"


def test_a_custom_judge_is_called_with_whole_groups(make_session):
    session = make_session(**CUSTOM_JUDGE, **{"train.advantage": "pairwise"})
    brightness_judges.CALLS.clear()
    samples = sample_epoch(session, 0)
    scored = collect_rewards(session, 0, samples)
    assert [Counter(prompts).most_common(1)[0][1] for prompts in brightness_judges.CALLS] == [2, 2]
    assert scored.judged == {"judge"}
    # its win rates are 0 and 1/2, and are used as they are: compared again they would be 0 and 1
    assert sorted(scored.rewards["judge"]) == [0, 0, 0.5, 0.5]
    expected = compute_advantages(scored.rewards["judge"], scored.groups, scale="batch")
    np.testing.assert_array_equal(session.algorithm.credit(scored), expected)


def test_training_with_a_vlm_judge(make_session):
    """The whole loop, with a judge over HTTP that prefers bright images."""
    with OpenAiServer(brightness_judges.prefer_brighter) as server:
        options = {"vlm_pairwise": {"url": server.url, "model": MODEL}}
        session = make_session(
            **{**CUSTOM_JUDGE, "reward_fn": ConfigDict({"vlm_pairwise": 1.0})},
            **{"reward_options": ConfigDict(options), "train.advantage": "pairwise"},
            **{"num_epochs": 1, "eval_prompts": 1, "sample.eval_num_steps": 1},
        )
        train(session)
        assert server.malformed == []
        # the smoke test, and two groups of two in both orders
        assert [len(question.images) for question in server.requests] == [2] * (1 + 2 * 2)
    metrics = json.loads((session.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/vlm_pairwise"] == 0.5  # one of each pair won
    assert metrics["reward/vlm_pairwise/std"] == 0.5
    assert metrics["reward/vlm_pairwise/flipped"] == 0
    assert metrics["train/grad_norm"] > 0
