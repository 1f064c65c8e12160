"""Parsing the replies of VLM judges into a score, or a failure with a reason."""

import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import MODEL, OpenAiServer, completion
from vlm_judges import (
    AXES_RESPONSE,
    BLANK,
    clear_environment,  # noqa: F401 (a fixture)
    connect,
    every_judge,
    score,
    short_delays,  # noqa: F401 (a fixture)
)

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import Failed, FailurePolicy
from flow_grpo.rewards.judges.chat import ChatJudge
from flow_grpo.rewards.judges.qwen_vl import QwenVl, QwenVlOcr
from flow_grpo.rewards.judges.templates import (
    JudgeReply,
    NoScoreError,
    parse_completion,
    parse_labelled_score,
    parse_ocr_reply,
)
from flow_grpo.rewards.judges.unified_reward import UnifiedReward
from flow_grpo.rewards.scorers.ocr import ocr_score


def graded(judge: type[ChatJudge], answer: str | dict, **options):
    """Return the score and the extra values for one reply."""
    with OpenAiServer(lambda question: answer) as server:
        [value], extras = score(connect(judge, server, **options))
        assert server.malformed == []
        assert len(server.requests) == 1
    return value, {name: values[0] for name, values in extras.items()}


@pytest.mark.parametrize(
    ("answer", "grade"),
    [
        ("It fits.\nScore: 4.5", 4.5),
        ("**Score:** 1", 1.0),
        ("<think>Score: 2</think>Score: 5", 5.0),
    ],
)
def test_qwenvl_is_the_grade_over_five(answer, grade):
    assert graded(QwenVl, answer) == (grade / 5, {"raw": grade})


def test_unifiedreward_is_the_final_score_over_five():
    answer = "Alignment: 3.\nScore: 2\nFinal Score: 3.5"
    assert graded(UnifiedReward, answer) == (0.7, {"raw": 3.5})


def test_unifiedreward_is_the_mean_of_its_axes():
    value, extras = graded(UnifiedReward, AXES_RESPONSE, form="axes")
    assert value == pytest.approx((4 + 2.5 + 1) / 3 / 5)
    assert extras == {"alignment": 4.0, "coherence": 2.5, "style": 1.0}


def test_unifiedreward_weights_its_axes():
    weights = {"alignment": 3, "style": 1.0}
    value, extras = graded(UnifiedReward, AXES_RESPONSE, form="axes", weights=weights)
    assert value == pytest.approx((3 * 4 + 1) / 4 / 5)
    assert extras["coherence"] == 2.5


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("CAT", "CAT"),
        ("cot", "cot"),
        ('"COT"', "COT"),
        ("```text\nC O T\n```", "COT"),
        ("<think>a DOG?</think>\nCAT", "CAT"),
        ("Sorry, I cannot read this.", "DOG"),
        ("[no text]", ""),
        ("[No text].", ""),
    ],
)
def test_qwenvl_ocr_scores_like_the_ocr_reward(answer, read):
    assert graded(QwenVlOcr, answer, wording="alternative") == (ocr_score(read, "CAT"), {})


def test_no_text_is_not_read_as_the_words_no_text():
    with OpenAiServer(lambda question: "[no text]") as server:
        scores, _ = score(
            connect(QwenVlOcr, server, wording="alternative"), prompts=['a sign "no text"']
        )
    assert scores == [0.0]


def test_a_truncated_text_counts_only_if_it_contains_the_target():
    assert graded(QwenVlOcr, completion("the CAT sat on", "length")) == (1.0, {})
    value, _ = graded(QwenVlOcr, completion("the CA", "length"), max_tokens=3)
    assert math.isnan(value)
    assert "max_tokens=3" in value.reason
    assert "'the CA'" in value.reason


def test_build_reward_returns_scores_and_further_values():
    weights = {"qwenvl": 1.0, "unifiedreward": 2.0}

    def answer(question):
        return AXES_RESPONSE if "Style" in question.text else "Score: 5"

    with OpenAiServer(answer) as server:
        common = {"url": f"{server.url}/v1", "model": MODEL}
        options = {"qwenvl": common, "unifiedreward": {**common, "form": "axes"}}
        reward = build_reward(weights, options=options, policy=FailurePolicy(retries=0, timeout=5))
        result = reward([BLANK], ["a cat"])
    assert result["avg"] == pytest.approx(1 + 2 * 0.5)
    assert result["unifiedreward/coherence"].tolist() == [2.5]
    assert result["qwenvl/raw"].tolist() == [5.0]


@every_judge
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"object": "error"}, "chat completion.*{'object': 'error'}"),
        ({"choices": []}, "chat completion"),
        ({"choices": [{"message": "Score: 5"}]}, "chat completion"),
        (completion(None), "no content"),
        (completion(["Score: 5"]), "no content"),
        (completion(None, refusal="I won't."), 'refused.*"I won\'t."'),
        (completion("<think>Score: 5"), "no reply.*'<think>Score: 5'"),
        (completion("<think>Score: 5", "length"), "no reply.*max_tokens"),
        (completion(None, "length"), "no reply.*max_tokens"),
    ],
)
def test_a_completion_without_a_reply_is_a_failure(judge, url_env, model_env, answer, reason):
    value, extras = graded(judge, answer)
    assert isinstance(value, Failed)
    assert re.search(reason, value.reason)
    assert all(math.isnan(extra) for extra in extras.values())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "no number .*\"Score\": ''"),
        ("I'm sorry, I can't judge people.", "no number .*\"I'm sorry, I can't judge people.\""),
        ("Score: X", "no number"),
        ("Score:\n1. It is blurred.", "no number"),
        ("Score: 4-5", "no number"),
        ("Score: 4,5", "no number"),
        ("Score: 4.5.1", "no number"),
        ("Score: 90%", "no number"),
        ("Underscore: 4", "no number"),
        ("Score: 0", "'Score: 0'.* 1 to 5"),
        ("Score: 5.1", "'Score: 5.1'.* 1 to 5"),
        ("Score: -3", "'Score: -3'.* 1 to 5"),
        ("Score: 4/10", "'Score: 4/10'.* 1 to 5"),
        ("Score: 4\nScore: 40", "'Score: 40'.* 1 to 5"),
        ("long " * 100, "'long long .*…'$"),
        (completion("It is a", "length"), 'max_tokens.*"Score"'),
        (completion("Score: 4.", "length"), 'max_tokens.*"Score"'),
    ],
)
def test_a_reply_without_a_clear_grade_is_a_failure(answer, reason):
    value, extras = graded(QwenVl, answer)
    assert isinstance(value, Failed)
    assert re.search(reason, value.reason)
    assert math.isnan(extras["raw"])


def test_a_missing_axis_is_a_failure():
    answer = "Alignment Score (1-5): 4\nStyle Score (1-5): 3"
    value, extras = graded(UnifiedReward, answer, form="axes")
    assert re.search('no number .*"Coherence Score"', value.reason)
    assert all(math.isnan(extra) for extra in extras.values())
    assert isinstance(graded(UnifiedReward, "Score: 4")[0], Failed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Score: 4", 4),
        ("score : 4.25 because", 4.25),
        ("**Score**: 4/5.", 4),
        ("Score: **4 out of 5**", 4),
        ("_Score: 3_", 3),
        ("Score: [2]", 2),
        ('{"score": 1.5}', 1.5),
        ("Score：5", 5),
        ("Score (1-5): 3", 3),
        ("Score (1 to 5) = 3", 3),
        ("Score: 2. On a second look:\nScore: 3", 3),
        ("Score: 4\n- 2 people", 4),
        ("Overall score: 4", 4),
    ],
)
def test_grades_are_found_in_the_formats_that_models_write(text, expected):
    assert parse_labelled_score(JudgeReply(text), "Score") == expected
    truncated = JudgeReply(text + "\nThat is all", cut_off=True)
    assert parse_labelled_score(truncated, "Score") == expected


PIECES = ["Score", "Final ", " (1-5)", ":", " ", "\n", "**", "0", "1", "4.5", "5", "/", "-"]
PIECES += ["²", "٤"]
texts = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
shapes = st.recursive(
    st.none() | st.booleans() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "finish_reason", "refusal"]), inner
        )
    ),
)


def reason_or(call, *args):
    """Return the result of `call`, or the reason why there is no score."""
    try:
        return call(*args)
    except NoScoreError as error:
        return str(error)


@given(texts, st.booleans(), st.sampled_from(["Score", "Final Score", "Style Score"]))
def test_no_text_has_a_grade_off_the_scale(text, cut_off, label):
    grade = reason_or(parse_labelled_score, JudgeReply(text, cut_off), label)
    assert grade if isinstance(grade, str) else 1 <= grade <= 5


@given(shapes | texts.map(completion))
def test_any_json_is_a_reply_or_has_a_reason(shape):
    reply = reason_or(parse_completion, shape)
    if isinstance(reply, JudgeReply):
        assert "<think>" not in reply.text
        assert 0 <= ocr_score(parse_ocr_reply(reply), "CAT") <= 1
    else:
        assert reply


def test_a_long_reply_is_parsed_quickly():
    start = time.process_time()
    for filler in (" ", "Score ", "Score: ", "Score (1-5)", "*", "Score: 1", "\n"):
        with pytest.raises(NoScoreError):
            parse_labelled_score(JudgeReply("Score" + filler * 50_000 + "x"), "Score")
    assert time.process_time() - start < 2.0
