"""A reward that a prompt does not ask for: it does not count, and is no failure."""

import json

import numpy as np
import pytest
from PIL import Image

from flow_grpo.algorithms.base import ALGORITHMS, Scored, Setup
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.failure import Failed, FailurePolicy, NotAsked
from flow_grpo.rewards.guard import BatchScores, GuardedScorer
from flow_grpo.rewards.remote import _parse
from flow_grpo.training.metrics import score_metrics
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
    np.testing.assert_array_equal(scores["both"], [2, 4, NAN, 6])
    np.testing.assert_array_equal(scores["words"], [1, NAN, NAN, NAN])
    np.testing.assert_array_equal(scores[TOTAL], [2.5, 4, NAN, NAN])
    assert reward.last_errors == {"words": "it broke"}
    metrics = score_metrics("eval", scores)
    assert metrics["eval/words"] == 1
    assert metrics["eval/words/failed"] == 2  # asked for nothing at all is a failure too


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "dr_grpo"])
@pytest.mark.parametrize("name", ["grpo", "mix"])
def test_credit_is_that_of_the_other_rewards(name, estimator):
    """In groups of prompts that ask for one reward alone."""
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 4)
    a, b = rng.normal(size=(2, 8))
    alone = np.where(groups == 0, b, NAN)
    total = a + np.where(groups == 0, b, 0)
    method = ALGORITHMS[name]
    algorithm = method(method.Settings(), Setup(estimator=estimator, scale="group"))
    weights = {"a": 1.0, "b": 1.0}
    found = algorithm.credit(Scored({"a": a, "b": alone, TOTAL: total}, groups, weights))
    zeros = np.where(groups == 0, b, 0.0)
    expected = algorithm.credit(Scored({"a": a, "b": zeros, TOTAL: total}, groups, weights))
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).all()
    assert found[groups == 1].std() > 0


def test_a_server_says_it_too():
    scores = BatchScores([1.0, NotAsked(), Failed("it broke")])
    answer = json.loads(json.dumps(_answer("words", scores)))
    found = _parse(answer, 3).values
    assert found[0] == 1
    assert isinstance(found[1], NotAsked)
    assert found[2].reason == "it broke"
