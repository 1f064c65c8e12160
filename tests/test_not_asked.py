"""A reward that a prompt does not ask for: it does not count, and is no failure."""

import copy
import json
import pickle

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from flow_grpo.draw.algorithms.base import ALGORITHMS, Scored, Setup
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.calling.guard import GuardedScorer
from flow_grpo.rewards.calling.remote import _parse
from flow_grpo.rewards.failure import Failed, FailurePolicy, NotAsked
from flow_grpo.rewards.protocol import BatchScores
from flow_grpo.run.metrics import score_metrics
from flow_grpo.run.session import describe_outage
from reward_server.app import _answer

NAN = float("nan")


def both(images, prompts, metadata):
    return [2.0, 4.0, NotAsked(), 6.0]


def words(images, prompts, metadata):
    return [1.0, NotAsked(), NotAsked(), Failed("it broke")]


@pytest.fixture
def reward():
    scorers = {
        name: GuardedScorer(name, scorer, FailurePolicy(retries=0))
        for name, scorer in {"both": both, "words": words}.items()
    }
    weighted = WeightedReward(scorers, {"both": 1.0, "words": 0.5})
    yield weighted
    close_scorers(weighted)


def test_the_total_is_of_what_was_asked(reward):
    scores = reward([Image.new("RGB", (8, 8))] * 4, ["p"] * 4)
    np.testing.assert_array_equal(scores["both"], [2, 4, -np.inf, 6])
    np.testing.assert_array_equal(scores["words"], [1, -np.inf, -np.inf, NAN])
    np.testing.assert_array_equal(scores[TOTAL], [2.5, 4, NAN, NAN])
    assert reward.last_errors == {"words": "it broke"}
    metrics = score_metrics("eval", scores)
    assert metrics["eval/words"] == 1
    assert metrics["eval/words/failed"] == 1
    assert metrics["eval/both/failed"] == 0
    assert metrics["eval/failed"] == 2  # one asked for nothing at all


ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"]


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_prompts_that_do_not_ask_are_neither_better_nor_worse(estimator, scale):
    """Half of the groups ask for a second reward, which is high and never differs."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(8), 8)
    a = rng.normal(size=64)
    second = np.where(groups < 4, 0.8, -np.inf)
    grpo = ALGORITHMS["grpo"]
    algorithm = grpo(grpo.Settings(), Setup(estimator=estimator, scale=scale))
    found = algorithm.credit(Scored({"a": a, "b": second}, groups, {"a": 1.0, "b": 1.0}))
    alone = algorithm.credit(Scored({"a": a}, groups, {"a": 1.0}))
    np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "mix"])
def test_credit_of_a_prompt_that_does_not_ask_is_that_of_the_other_rewards(name):
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 4)
    a, b = rng.normal(size=(2, 8))
    method = ALGORITHMS[name]
    algorithm = method(method.Settings(), Setup(scale="group"))
    asked = np.where(groups == 0, b, -np.inf)
    found = algorithm.credit(Scored({"a": a, "b": asked}, groups, {"a": 1.0, "b": 1.0}))
    own = slice(4, 8)
    alone = algorithm.credit(Scored({"a": a[own]}, groups[own], {"a": 1.0}))
    np.testing.assert_allclose(found[own], alone, rtol=1e-9)


def test_a_baseline_is_not_moved():
    remax = ALGORITHMS["grpo"]
    algorithm = remax(remax.Settings(), Setup(estimator="remax"))
    scored = Scored(
        {"a": np.array([1.0, 2.0]), "b": np.array([-np.inf, 5.0])},
        np.array([0, 1]),
        {"a": 1.0, "b": 1.0},
        baseline=np.array([0.5, 6.0]),
    )
    assert algorithm.credit(scored).tolist() == [0.5, 1.0]


def test_it_crosses_processes():
    found = pickle.loads(pickle.dumps([NotAsked(), 1.0]))
    assert isinstance(found[0], NotAsked)
    assert isinstance(copy.deepcopy(NotAsked()), NotAsked)


def test_the_reward_that_failed_is_the_one_that_is_told(reward):
    scores = reward([Image.new("RGB", (8, 8))] * 4, ["p"] * 4)
    told = describe_outage(Accelerator(cpu=True), reward, scores, 0.2)
    assert "reward 'words' gave no score for 1 of 4" in told
    assert "it broke" in told


def test_a_server_that_does_not_know_of_it_has_failed():
    answer = {"scores": [1.0, None], "extras": {}}
    assert _parse(answer, 2).values[1].reason == "the server gave no score"


def test_a_server_says_it_too():
    scores = BatchScores([1.0, NotAsked(), Failed("it broke")])
    answer = json.loads(json.dumps(_answer("words", scores)))
    found = _parse(answer, 3).values
    assert found[0] == 1
    assert isinstance(found[1], NotAsked)
    assert found[2].reason == "it broke"
