"""The pairwise judge: win rates, position bias and failures."""

import itertools
import math

import pytest
from brightness_judges import mean_brightness, prefer_brighter
from openai_server import ChatRequest, OpenAiServer, completion, error
from PIL import Image
from user_errors import raises_user_error
from vlm_judges import (
    clear_environment,  # noqa: F401 (a fixture)
    connect,
    score,
    short_delays,  # noqa: F401 (a fixture)
)

from flow_grpo.rewards import REWARDS, build_reward
from flow_grpo.rewards.failure import Failed, FailurePolicy
from flow_grpo.rewards.judges.pairwise import VlmPairwise
from flow_grpo.rewards.judges.templates import JudgeReply, NoScoreError, parse_labelled_winner


def grey(level: int) -> Image.Image:
    return Image.new("RGB", (16, 16), (level,) * 3)


def levels(question: ChatRequest) -> list[float]:
    return [mean_brightness(image) for image in question.images]


def judged(answer, *groups: list[int], **options):
    """Judge grey images of several prompts with a server that replies with `answer`."""
    with OpenAiServer(answer) as server:
        images = [grey(level) for group in groups for level in group]
        prompts = [f"a grey {g}" for g, group in enumerate(groups) for _ in group]
        scores, extras = score(connect(VlmPairwise, server, **options), images, prompts)
        assert server.malformed == []
    return scores, extras, server.requests


def test_a_score_is_the_win_rate_within_the_group():
    """30 beats 10 and 10 and loses to 90: 2/3; the 10s tie with each other: 0.5/3; 90: 3/3. In the
    other group 5 loses to 7, regardless of the first group."""
    scores, extras, _ = judged(prefer_brighter, [30, 10, 10, 90], [5, 7])
    assert scores == pytest.approx([2 / 3, 1 / 6, 1 / 6, 1, 0, 1])
    assert extras == {"flipped": [0] * 6, "unjudged": [0] * 6}


def test_groups_may_be_interleaved():
    with OpenAiServer(prefer_brighter) as server:
        judge = connect(VlmPairwise, server)
        scores, _ = score(judge, map(grey, [1, 9, 2, 8]), ["a", "b", "a", "b"])
    assert scores == [0, 1, 1, 0]


def test_each_pair_is_shown_in_both_orders_with_its_prompt():
    _, _, asked = judged(prefer_brighter, [1, 2, 3], [7, 8], max_tokens=77)
    seen = sorted((question.text.splitlines()[2], *levels(question)) for question in asked)
    pairs = [("a grey 0", *p) for p in itertools.permutations([1, 2, 3], 2)]
    assert seen == [*pairs, ("a grey 1", 7, 8), ("a grey 1", 8, 7)]
    assert {question.max_tokens for question in asked} == {77}
    assert asked[0].text.endswith("\nBetter: X")


@pytest.mark.parametrize("position", ["1", "2"])
def test_a_judge_that_always_prefers_one_position_gives_ties(position):
    scores, extras, _ = judged(lambda question: f"Better: {position}", [1, 2, 3])
    assert scores == [0.5] * 3
    assert extras["flipped"] == [1.0] * 3


def test_a_position_bias_does_not_affect_clear_cases():
    """The judge prefers the first unless the second is brighter by 50. 100 beats 10 and 20; 10 and
    20 are a tie, because the orders disagree: 0.5/2 each."""

    def answer(question):
        one, two = levels(question)
        return f"Better: {2 if two - one > 50 else 1}"

    scores, extras, _ = judged(answer, [10, 100, 20])
    assert scores == [0.25, 1, 0.25]
    assert extras["flipped"] == [0.5, 0, 0.5]


def test_a_tie_in_one_order_only_is_a_tie():
    scores, _, _ = judged(lambda q: "Better: tie" if levels(q) == [1, 2] else "Better: 1", [1, 2])
    assert scores == [0.5, 0.5]


@pytest.mark.parametrize("broken", [[1, 2], [2, 1]], ids=["first order", "second order"])
def test_a_pair_without_a_verdict_counts_for_neither(broken):
    """1 and 2 are not compared: 1 loses to 3, 2 loses to 3, 3 beats both."""

    def answer(question):
        return "I cannot tell." if levels(question) == broken else prefer_brighter(question)

    scores, extras, _ = judged(answer, [1, 2, 3])
    assert scores == [0, 0, 1]
    assert extras["unjudged"] == [0.5, 0.5, 0]


def test_an_image_without_any_verdict_has_no_score_and_a_reason():
    def answer(question):
        return (
            completion("no", refusal="no") if 2 in levels(question) else prefer_brighter(question)
        )

    scores, extras, _ = judged(answer, [1, 2, 3])
    assert [scores[0], scores[2]] == [0, 1]
    assert isinstance(scores[1], Failed)
    assert "refused: 'no'" in scores[1].reason
    assert math.isnan(extras["flipped"][1])
    assert extras["unjudged"] == [0.5, 1, 0.5]


def test_a_group_of_one_sends_no_request():
    scores, extras, asked = judged(prefer_brighter, [1], [2, 3])
    assert isinstance(scores[0], Failed)
    assert "no other image" in scores[0].reason
    assert scores[1:] == [0, 1]
    assert len(asked) == 2
    assert all(math.isnan(values[0]) for values in extras.values())


def test_an_unreadable_image_does_not_affect_the_others(tmp_path):
    path = tmp_path / "truncated.png"
    grey(1).save(path)
    path.write_bytes(path.read_bytes()[:60])
    with OpenAiServer(prefer_brighter) as server:
        images = [grey(1), Image.open(path), grey(3)]
        scores, _ = score(connect(VlmPairwise, server), images)
        assert len(server.requests) == 2
    assert [scores[0], scores[2]] == [0, 1]
    assert "cannot be read" in scores[1].reason


def test_a_temporary_failure_costs_no_verdict():
    with OpenAiServer(prefer_brighter, script=[error(500, "out of memory")] * 2) as server:
        scores, _ = score(connect(VlmPairwise, server, retries=2), map(grey, [1, 2, 3]))
    assert scores == [0, 0.5, 1]


def test_a_permanent_failure_is_reported():
    with OpenAiServer(always=error(500, "out of memory")) as server:
        scores, _ = score(connect(VlmPairwise, server, retries=0), map(grey, [1, 2]))
        assert len(server.requests) == 1  # the other order is useless without the first
    assert all("500 out of memory" in value.reason for value in scores)


def test_servers_are_checked_with_two_images():
    """By default some servers accept only one per request, and would reject every question."""
    with OpenAiServer() as server:
        connect(VlmPairwise, server).check_servers()
    [question] = server.requests
    assert len(question.images) == 2
    assert question.max_tokens == 1


def test_the_judge_is_registered(monkeypatch):
    assert REWARDS.paths["vlm_pairwise"] == "flow_grpo.rewards.judges.pairwise:VlmPairwise"
    with OpenAiServer(prefer_brighter) as server:
        monkeypatch.setenv("VLM_PAIRWISE_URL", f"{server.url}/v1")
        monkeypatch.setenv("VLM_PAIRWISE_MODEL", "judge-7b")
        policy = FailurePolicy(retries=0, timeout=5)
        reward = build_reward({"vlm_pairwise": 1.0, "jpeg_compressibility": 1.0}, policy=policy)
        result = reward([grey(1), grey(2)], ["a", "a"])
    assert result["vlm_pairwise"].tolist() == [0, 1]
    assert result["vlm_pairwise/flipped"].tolist() == [0, 0]
    assert reward.pairwise_rewards == {"vlm_pairwise"}


def test_invalid_settings_are_rejected():
    with raises_user_error("VLM_PAIRWISE_URL", field="reward_options.vlm_pairwise.url"):
        VlmPairwise(model="m")
    field = "reward_options.vlm_pairwise.question"
    with raises_user_error("{prompt}", field=field, value="Which?"):
        VlmPairwise(url="http://host", model="m", question="Which?")


@pytest.mark.parametrize(
    ("text", "wins"),
    [
        ("Better: 1", 1.0),
        ("Picture 2 has a cat.\nBetter: 2", 0.0),
        ("Better: tie", 0.5),
        ("**Better:** 1", 1.0),
        ("**Better: Tie.**", 0.5),
        ("- better = [2]", 0.0),
        ("Better: Picture 2.", 0.0),
        ("Better: image 1", 1.0),
        ("Better: 1\nNo, wait.\nBetter: 2\n", 0.0),
        ("Better: 1\r\n", 1.0),
    ],
)
def test_a_winner_is_parsed(text, wins):
    assert parse_labelled_winner(JudgeReply(text), "Better") == wins


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "2 is better: 1 has no cat",
        "Better: 1 or 2",
        "Better: 1/2",
        "Better: 12",
        "Better: 1.5",
        "Better: 3",
        "Better: ties",
        "Better: X",
        "Better:\n1. The cat",
        "The better: 1",
    ],
)
def test_a_reply_without_a_winner_is_rejected(text):
    with pytest.raises(NoScoreError, match=r'no winner .*"Better"'):
        parse_labelled_winner(JudgeReply(text), "Better")


def test_a_truncated_reply_has_no_winner():
    with pytest.raises(NoScoreError, match="max_tokens"):
        parse_labelled_winner(JudgeReply("Better: 1", cut_off=True), "Better")
    assert parse_labelled_winner(JudgeReply("Better: 1\nSince", cut_off=True), "Better") == 1.0
