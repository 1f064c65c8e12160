"""Settings of VLM judges, errors in them, and the check of their servers."""

import math

import pytest
from openai_server import MODEL, OpenAiServer, error
from sign_images import prompt
from user_errors import raises_user_error
from vlm_judges import (
    ANY_RESPONSE,
    JUDGES,
    clear_environment,  # noqa: F401 (a fixture)
    connect,
    every_judge,
    score,
    short_delays,  # noqa: F401 (a fixture)
)

from flow_grpo.rewards import REWARDS
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.judges.edit_score import EditScore
from flow_grpo.rewards.judges.qwen_vl import QwenVl, QwenVlOcr
from flow_grpo.rewards.judges.unified_reward import UnifiedReward
from flow_grpo.rewards.judges.unified_reward_pair import UnifiedRewardPair
from flow_grpo.rewards.judges.vie_score import VieScore


def test_the_judges_are_registered():
    for name, judge, _, _ in JUDGES:
        assert REWARDS.paths[judge.name] == f"{judge.__module__}:{name}"


@every_judge
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_server_and_model_come_from_the_environment(judge, url_env, model_env, suffix, monkeypatch):
    with OpenAiServer(lambda question: ANY_RESPONSE) as server:
        monkeypatch.setenv(url_env, server.url + suffix)
        monkeypatch.setenv(model_env, MODEL)
        [value], _ = score(judge(policy=FailurePolicy(retries=0)))
        assert len(server.requests) == (2 if judge in (VieScore, EditScore) else 1)
        assert server.malformed == []
    assert not math.isnan(value)


@every_judge
def test_options_override_the_environment(judge, url_env, model_env, monkeypatch):
    monkeypatch.setenv(url_env, "http://nowhere.invalid")
    monkeypatch.setenv(model_env, "another")
    with OpenAiServer(lambda question: ANY_RESPONSE) as server:
        [value], _ = score(connect(judge, server))
    assert not math.isnan(value)


@every_judge
def test_a_missing_setting_names_the_option_and_the_variable(judge, url_env, model_env):
    with raises_user_error(url_env, field=f"reward_options.{judge.name}.url"):
        judge(model="m")
    with raises_user_error(model_env, field=f"reward_options.{judge.name}.model"):
        judge(url="http://host")


def test_an_invalid_url_is_reported_with_its_source(monkeypatch):
    with raises_user_error(field="reward_options.qwenvl.url", value="host:8000"):
        QwenVl(url="host:8000", model="m")
    monkeypatch.setenv("QWEN_VL_VLLM_URL", "host:8000")
    with raises_user_error(field="QWEN_VL_VLLM_URL", value="host:8000"):
        QwenVl(model="m")


@pytest.mark.parametrize(
    ("judge", "options", "rule"),
    [
        (QwenVl, {"question": "How good is it?"}, "contains {prompt}"),
        (QwenVl, {"question": "{promt}"}, "contains {prompt}"),
        (QwenVl, {"question": ""}, "contains {prompt}"),
        (QwenVl, {"question": 3}, "contains {prompt}"),
        (QwenVlOcr, {"question": "Find {prompt}"}, "without {prompt}"),
        (QwenVlOcr, {"question": " "}, "string"),
        (QwenVl, {"concurrency": 0}, "integer"),
        (QwenVl, {"max_tokens": 0.5}, "integer"),
        (QwenVl, {"url": ["http://a"]}, "string"),
        (QwenVl, {"wording": "best"}, "published, alternative"),
        (UnifiedReward, {"form": "axes", "wording": "flow_grpo"}, "published, word_scores"),
        (VieScore, {"wording": "published"}, "alternative"),
        (QwenVl, {"unparsed": "zero"}, "fail, published"),
        (QwenVl, {"wording": "alternative", "unparsed": "published"}, "no published code"),
        (UnifiedRewardPair, {"form": "best"}, "final, axes, think, flex"),
        (EditScore, {"backbone": "llava"}, "qwen25vl, qwen3vl"),
        (EditScore, {"passes": 0}, "integer"),
        (UnifiedReward, {"form": "best"}, "final, axes"),
        (UnifiedReward, {"weights": {"style": 1}}, "form='axes'"),
        (UnifiedReward, {"form": "axes", "weights": {"beauty": 1}}, "alignment, coherence"),
        (UnifiedReward, {"form": "axes", "weights": {"style": -1}}, ">= 0"),
        (UnifiedReward, {"form": "axes", "weights": {"style": 0}}, "above 0"),
        (UnifiedReward, {"form": "axes", "weights": {"style": "1"}}, ">= 0"),
        (UnifiedReward, {"form": "axes", "weights": {"style": math.inf}}, ">= 0"),
        (UnifiedReward, {"form": "axes", "weights": 1}, "dict"),
    ],
)
def test_invalid_options_are_rejected(judge, options, rule):
    option, value = list(options.items())[-1]
    with raises_user_error(rule, field=f"reward_options.{judge.name}.{option}", value=value):
        judge(**{"url": "http://host", "model": "m", **options})


def test_qwenvl_ocr_does_not_apply_to_prompts_without_quotes():
    judge = QwenVlOcr(url="http://host", model="m")
    assert judge.skip_reason(prompt("CAT"), {}) is None
    assert "double quotes" in judge.skip_reason("a cat", {})


def test_servers_are_checked_before_training():
    with OpenAiServer() as one, OpenAiServer() as two:
        judge = connect(QwenVl, one, two)
        judge.check_servers()
        assert [server.requests[0].max_tokens for server in (one, two)] == [1, 1]
        two.always = error(404, "no such model")
        with raises_user_error(two.url, "404 no such model", field="reward 'qwenvl'"):
            judge.check_servers()
    with raises_user_error(one.url, "3 attempts", field="reward 'qwenvl'"):
        connect(QwenVl, one).check_servers()
