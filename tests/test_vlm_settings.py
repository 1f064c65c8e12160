"""Settings of the judges by a vision-language model, mistakes in them, and checks beforehand."""

import math

import pytest
from openai_server import MODEL, OpenAiServer, error
from signs import prompt
from vlm_judges import (
    ANY_ANSWER,
    JUDGES,
    bare_environment,  # noqa: F401 (a fixture)
    connect,
    every_judge,
    score,
    short_delays,  # noqa: F401 (a fixture)
)

from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.judges.qwen_vl import QwenVl, QwenVlOcr
from flow_grpo.rewards.judges.unified_reward import UnifiedReward
from flow_grpo.rewards.judges.vie_score import VieScore


def test_the_registry_has_them():
    for name, judge, _, _ in JUDGES:
        assert REWARDS[judge.name] == f"{judge.__module__}:{name}"


@every_judge
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_server_and_model_come_from_the_environment(judge, url_env, model_env, suffix, monkeypatch):
    with OpenAiServer(lambda question: ANY_ANSWER) as server:
        monkeypatch.setenv(url_env, server.url + suffix)
        monkeypatch.setenv(model_env, MODEL)
        [value], _ = score(judge(policy=FailurePolicy(retries=0)))
        assert len(server.asked) == (2 if judge is VieScore else 1)
        assert server.malformed == []
    assert not math.isnan(value)


@every_judge
def test_options_go_before_the_environment(judge, url_env, model_env, monkeypatch):
    monkeypatch.setenv(url_env, "http://nowhere.invalid")
    monkeypatch.setenv(model_env, "another")
    with OpenAiServer(lambda question: ANY_ANSWER) as server:
        [value], _ = score(connect(judge, server))
    assert not math.isnan(value)


@every_judge
def test_a_missing_setting_names_the_option_and_the_variable(judge, url_env, model_env):
    option = f"reward_options.{judge.name}"
    with pytest.raises(UserError, match=rf"no url: set {option}\.url or .*{url_env}$"):
        judge(model="m")
    with pytest.raises(UserError, match=rf"no model: set {option}\.model or .*{model_env}$"):
        judge(url="http://host")


def test_a_url_that_is_none_names_where_it_was_set(monkeypatch):
    with pytest.raises(UserError, match=r"reward_options.qwenvl.url='host:8000' must read like"):
        QwenVl(url="host:8000", model="m")
    monkeypatch.setenv("QWEN_VL_VLLM_URL", "host:8000")
    with pytest.raises(UserError, match=r"^QWEN_VL_VLLM_URL='host:8000' must read like"):
        QwenVl(model="m")


@pytest.mark.parametrize(
    ("judge", "options", "message"),
    [
        (QwenVl, {"question": "How good is it?"}, r"question=.* must be a text with \{prompt\}"),
        (QwenVl, {"question": "{promt}"}, r"must be a text with \{prompt\}"),
        (QwenVl, {"question": ""}, r"must be a text with \{prompt\}"),
        (QwenVl, {"question": 3}, r"must be a text with \{prompt\}"),
        (QwenVlOcr, {"question": "Find {prompt}"}, r"must be a text without \{prompt\}"),
        (QwenVlOcr, {"question": " "}, "must be a text"),
        (QwenVl, {"concurrency": 0}, "qwenvl.concurrency=0 must be a number from 1"),
        (QwenVl, {"max_tokens": 0.5}, "qwenvl.max_tokens=0.5 must be a number from 1"),
        (QwenVl, {"url": ["http://a"]}, r"qwenvl.url=\['http://a'\] must be a text"),
        (UnifiedReward, {"form": "best"}, "form='best' must be one of final, axes"),
        (UnifiedReward, {"weights": {"style": 1}}, "weights is of use with form='axes' only"),
        (UnifiedReward, {"form": "axes", "weights": {"beauty": 1}}, "must give alignment, coh"),
        (UnifiedReward, {"form": "axes", "weights": {"style": -1}}, "weights from 0"),
        (UnifiedReward, {"form": "axes", "weights": {"style": 0}}, "at least one above 0"),
        (UnifiedReward, {"form": "axes", "weights": {"style": "1"}}, "weights from 0"),
        (UnifiedReward, {"form": "axes", "weights": {"style": math.inf}}, "weights from 0"),
        (UnifiedReward, {"form": "axes", "weights": 1}, "must be a dict of"),
    ],
)
def test_wrong_options_are_named(judge, options, message):
    with pytest.raises(UserError, match=message):
        judge(**{"url": "http://host", "model": "m", **options})


def test_qwenvl_ocr_refuses_prompts_without_quotes():
    judge = QwenVlOcr(url="http://host", model="m")
    assert judge.why_not(prompt("CAT"), {}) is None
    assert judge.why_not("a cat", {}) == "it has no text in double quotes to compare with"


def test_the_servers_can_be_checked_beforehand():
    with OpenAiServer() as one, OpenAiServer() as two:
        judge = connect(QwenVl, one, two)
        judge.check_servers()
        assert [server.asked[0].max_tokens for server in (one, two)] == [1, 1]
        two.always = error(404, "no such model")
        with pytest.raises(UserError, match=f"'qwenvl': {two.url}.* answered 404 no such model"):
            judge.check_servers()
    with pytest.raises(UserError, match=r"'qwenvl': .*cannot connect, after 3 attempts"):
        connect(QwenVl, one).check_servers()
