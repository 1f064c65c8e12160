"""A reward that does not apply to a prompt is ignored there, and is not a failure."""

import copy
import json
import pickle

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.base import ScoredSamples, Setup
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.failure import Failed, FailurePolicy, NotApplicable
from flow_grpo.rewards.protocol import BatchScores
from flow_grpo.rewards.workers.guard import GuardedScorer
from flow_grpo.rewards.workers.remote import _parse_response
from flow_grpo.training.metrics import score_metrics
from flow_grpo.training.session import find_outage
from reward_server.app import _response_body

NAN = float("nan")


def both(images, prompts, metadata):
    return [2.0, 4.0, NotApplicable(), 6.0]


def words(images, prompts, metadata):
    return [1.0, NotApplicable(), NotApplicable(), Failed("it broke")]


@pytest.fixture
def reward():
    scorers = {
        name: GuardedScorer(name, scorer, FailurePolicy(retries=0))
        for name, scorer in {"both": both, "words": words}.items()
    }
    weighted = WeightedReward(scorers, {"both": 1.0, "words": 0.5})
    yield weighted
    close_scorers(weighted)


def test_the_total_sums_the_applicable_rewards(reward):
    scores = reward([Image.new("RGB", (8, 8))] * 4, ["p"] * 4)
    np.testing.assert_array_equal(scores["both"], [2, 4, -np.inf, 6])
    np.testing.assert_array_equal(scores["words"], [1, -np.inf, -np.inf, NAN])
    np.testing.assert_array_equal(scores[TOTAL], [2.5, 4, NAN, NAN])
    assert reward.last_errors == {"words": "it broke"}
    metrics = score_metrics("eval", scores)
    assert metrics["eval/words"] == 1
    assert metrics["eval/words/failed"] == 1
    assert metrics["eval/both/failed"] == 0
    assert metrics["eval/failed"] == 2  # no reward applies to one of them


ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"]


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_without_a_reward_have_unchanged_advantages(estimator, scale):
    """A second reward, which is high and constant, applies to half of the groups."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(8), 8)
    a = rng.normal(size=64)
    second = np.where(groups < 4, 0.8, -np.inf)
    grpo = ALGORITHMS["grpo"]
    algorithm = grpo(grpo.Settings(), Setup(estimator=estimator, scale=scale))
    found = algorithm.credit(ScoredSamples({"a": a, "b": second}, groups, {"a": 1.0, "b": 1.0}))
    expected = algorithm.credit(ScoredSamples({"a": a}, groups, {"a": 1.0}))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "mix"])
def test_advantages_come_from_the_applicable_rewards(name):
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 4)
    a, b = rng.normal(size=(2, 8))
    method = ALGORITHMS[name]
    algorithm = method(method.Settings(), Setup(scale="group"))
    partial = np.where(groups == 0, b, -np.inf)
    found = algorithm.credit(ScoredSamples({"a": a, "b": partial}, groups, {"a": 1.0, "b": 1.0}))
    second = slice(4, 8)
    expected = algorithm.credit(ScoredSamples({"a": a[second]}, groups[second], {"a": 1.0}))
    np.testing.assert_allclose(found[second], expected, rtol=1e-9)


def test_a_baseline_is_unchanged():
    grpo = ALGORITHMS["grpo"]
    algorithm = grpo(grpo.Settings(), Setup(estimator="remax"))
    scored = ScoredSamples(
        {"a": np.array([1.0, 2.0]), "b": np.array([-np.inf, 5.0])},
        np.array([0, 1]),
        {"a": 1.0, "b": 1.0},
        baseline=np.array([0.5, 6.0]),
    )
    assert algorithm.credit(scored).tolist() == [0.5, 1.0]


def test_not_applicable_can_be_pickled():
    found = pickle.loads(pickle.dumps([NotApplicable(), 1.0]))
    assert isinstance(found[0], NotApplicable)
    assert isinstance(copy.deepcopy(NotApplicable()), NotApplicable)


def test_an_outage_names_the_reward_that_failed(reward):
    scores = reward([Image.new("RGB", (8, 8))] * 4, ["p"] * 4)
    message = find_outage(Accelerator(cpu=True), reward, scores, 0.2)
    assert all(part in message for part in ("'words'", "1 of 4", "it broke"))
    assert "'both'" not in message


def test_a_missing_score_of_an_older_server_is_a_failure():
    response = {"scores": [1.0, None], "extras": {}}
    assert "no score" in _parse_response(response, 2).values[1].reason


def test_a_server_reports_not_applicable():
    scores = BatchScores([1.0, NotApplicable(), Failed("it broke")])
    response = json.loads(json.dumps(_response_body("words", scores)))
    found = _parse_response(response, 3).values
    assert found[0] == 1
    assert isinstance(found[1], NotApplicable)
    assert found[2].reason == "it broke"
