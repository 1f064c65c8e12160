"""Rewards by a vision-language model, against a server that is strict about the protocol."""

import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import MODEL, Hang, HangUp, OpenAiServer, Respond, Slowly, completion, error
from PIL import Image
from signs import WORDS, prompt, sign

from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS, build_reward
from flow_grpo.rewards.failure import Failed, FailurePolicy
from flow_grpo.rewards.ocr import ocr_score
from flow_grpo.rewards.vlm import ChatJudge, QwenVl, QwenVlOcr, UnifiedReward
from flow_grpo.rewards.vlm_answers import (
    Answer,
    Unscorable,
    labelled_score,
    read_completion,
    read_text,
)

BLANK = Image.new("RGB", (96, 32))
SIGNS = {sign(word).tobytes(): word for word in WORDS}
JUDGES = [
    ("QwenVlOcr", QwenVlOcr, "QWEN_VL_OCR_VLLM_URL", "QWEN_VL_OCR_PATH"),
    ("QwenVl", QwenVl, "QWEN_VL_VLLM_URL", "QWEN_VL_PATH"),
    ("UnifiedReward", UnifiedReward, "UNIFIED_REWARD_VLLM_URL", "UNIFIED_REWARD_PATH"),
]
every_judge = pytest.mark.parametrize(
    ("judge", "url_env", "model_env"), [each[1:] for each in JUDGES], ids=[j[0] for j in JUDGES]
)
AXES_ANSWER = "Alignment Score (1-5): 4\nCoherence Score (1-5): 2.5\nStyle Score (1-5): 1"


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.failure.FIRST_DELAY", 0.01)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for _, _, url_env, model_env in JUDGES:
        monkeypatch.delenv(url_env, raising=False)
        monkeypatch.delenv(model_env, raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def connect(judge, *servers, retries: int = 2, timeout: float = 10.0, **options):
    """A judge at these servers."""
    policy = FailurePolicy(retries=retries, timeout=timeout)
    url = ",".join(server.url for server in servers)
    return judge(url=url, model=MODEL, policy=policy, **options)


def score(judge, images=(BLANK,), prompts=None):
    images = list(images)
    prompts = [prompt("CAT")] * len(images) if prompts is None else prompts
    return judge(images, prompts, [{} for _ in images])


def graded(judge: type[ChatJudge], answer: str | dict, **options):
    """What becomes of one answer: its score and the further values."""
    with OpenAiServer(lambda question: answer) as server:
        [value], extras = score(connect(judge, server, **options))
        assert server.malformed == []
        assert len(server.asked) == 1
    return value, {name: values[0] for name, values in extras.items()}


# What each judge makes of an answer


def test_the_registry_has_them():
    for name, judge, _, _ in JUDGES:
        assert REWARDS[judge.name] == f"flow_grpo.rewards.vlm:{name}"


@pytest.mark.parametrize(
    ("answer", "grade"),
    [
        ("It fits.\nScore: 4.5", 4.5),
        ("**Score:** 1", 1.0),
        ("<think>Score: 2</think>Score: 5", 5.0),
    ],
)
def test_qwenvl_gives_a_fifth_of_the_grade(answer, grade):
    assert graded(QwenVl, answer) == (grade / 5, {"raw": grade})


def test_unifiedreward_gives_a_fifth_of_the_final_score():
    answer = "Alignment: 3.\nScore: 2\nFinal Score: 3.5"
    assert graded(UnifiedReward, answer) == (0.7, {"raw": 3.5})


def test_unifiedreward_gives_the_mean_of_its_axes():
    value, extras = graded(UnifiedReward, AXES_ANSWER, form="axes")
    assert value == pytest.approx((4 + 2.5 + 1) / 3 / 5)
    assert extras == {"alignment": 4.0, "coherence": 2.5, "style": 1.0}


def test_unifiedreward_weighs_its_axes():
    weights = {"alignment": 3, "style": 1.0}
    value, extras = graded(UnifiedReward, AXES_ANSWER, form="axes", weights=weights)
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
def test_qwenvl_ocr_scores_what_was_read_as_the_ocr_reward_does(answer, read):
    assert graded(QwenVlOcr, answer) == (ocr_score(read, "CAT"), {})


def test_no_text_is_not_read_as_the_words_no_text():
    with OpenAiServer(lambda question: "[no text]") as server:
        scores, _ = score(connect(QwenVlOcr, server), prompts=['a sign "no text"'])
    assert scores == [0.0]


def test_a_reading_that_was_cut_off_counts_only_if_it_has_the_text():
    assert graded(QwenVlOcr, completion("the CAT sat on", "length")) == (1.0, {})
    value, _ = graded(QwenVlOcr, completion("the CA", "length"), max_tokens=3)
    assert math.isnan(value)
    assert value.reason == "max_tokens=3 cut off what it read: 'the CA'"


@every_judge
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"object": "error"}, "this is no chat completion: \"{'object': 'error'}\""),
        ({"choices": []}, "this is no chat completion"),
        ({"choices": [{"message": "Score: 5"}]}, "this is no chat completion"),
        (completion(None), "the answer holds no reply, it has no content"),
        (completion(["Score: 5"]), "the answer holds no reply"),
        (completion(None, refusal="I won't."), 'the judge refused: "I won\'t."'),
        (completion("<think>Score: 5"), "holds no reply.*'<think>Score: 5'"),
        (completion("<think>Score: 5", "length"), "max_tokens cut it off"),
        (completion(None, "length"), "max_tokens cut it off"),
    ],
)
def test_an_answer_without_a_reply_is_a_failure(judge, url_env, model_env, answer, reason):
    value, extras = graded(judge, answer)
    assert isinstance(value, Failed)
    with pytest.raises(Unscorable, match=reason):
        raise Unscorable(value.reason)
    assert all(math.isnan(extra) for extra in extras.values())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "gives no number as its \"Score\": ''"),
        ("I'm sorry, I can't judge people.", "no number .*\"I'm sorry, I can't judge people.\""),
        ("Score: X", "no number"),
        ("Score:\n1. It is blurred.", "no number"),
        ("Score: 4-5", "no number"),
        ("Score: 4,5", "no number"),
        ("Score: 4.5.1", "no number"),
        ("Score: 90%", "no number"),
        ("Underscore: 4", "no number"),
        ("Score: 0", "'Score: 0' is not on the scale from 1 to 5"),
        ("Score: 5.1", "not on the scale"),
        ("Score: -3", "not on the scale"),
        ("Score: 4/10", "'Score: 4/10' is not on the scale"),
        ("Score: 4\nScore: 40", "'Score: 40' is not on the scale"),
        ("long " * 100, "'long long .*…'$"),
        (completion("It is a", "length"), 'max_tokens cut the answer off before its "Score"'),
        (completion("Score: 4.", "length"), "max_tokens cut the answer off"),
    ],
)
def test_an_answer_without_a_clear_grade_is_a_failure(answer, reason):
    value, extras = graded(QwenVl, answer)
    assert isinstance(value, Failed)
    with pytest.raises(Unscorable, match=reason):
        raise Unscorable(value.reason)
    assert math.isnan(extras["raw"])


def test_a_missing_axis_is_a_failure():
    answer = "Alignment Score (1-5): 4\nStyle Score (1-5): 3"
    value, extras = graded(UnifiedReward, answer, form="axes")
    assert 'no number as its "Coherence Score"' in value.reason
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
def test_grades_are_found_in_the_forms_models_write(text, expected):
    assert labelled_score(Answer(text), "Score") == expected
    assert labelled_score(Answer(text + "\nThat is all", cut_off=True), "Score") == expected


PIECES = [
    "Score",
    "Final ",
    " (1-5)",
    ":",
    " ",
    "\n",
    "**",
    "0",
    "1",
    "4.5",
    "5",
    "/",
    "-",
    "²",
    "٤",
]
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
    """What `call` returns, or the reason it gives instead."""
    try:
        return call(*args)
    except Unscorable as error:
        return str(error)


@given(texts, st.booleans(), st.sampled_from(["Score", "Final Score", "Style Score"]))
def test_no_text_gives_a_grade_off_the_scale(text, cut_off, label):
    grade = reason_or(labelled_score, Answer(text, cut_off), label)
    assert grade if isinstance(grade, str) else 1 <= grade <= 5


@given(shapes | texts.map(completion))
def test_any_json_gives_an_answer_or_a_reason(shape):
    answer = reason_or(read_completion, shape)
    if isinstance(answer, Answer):
        assert "<think>" not in answer.text
        assert 0 <= ocr_score(read_text(answer), "CAT") <= 1
    else:
        assert answer


def test_a_long_answer_is_read_in_no_time():
    start = time.monotonic()
    for filler in (" ", "Score ", "Score: ", "Score (1-5)", "*", "Score: 1", "\n"):
        with pytest.raises(Unscorable):
            labelled_score(Answer("Score" + filler * 50_000 + "x"), "Score")
    assert time.monotonic() - start < 2.0


# What is sent


def test_each_image_is_judged_with_its_own_prompt_and_in_order():
    def read(question):
        time.sleep(0.01 * (question.image.getpixel((0, 0))[0] % 5))  # answers come out of order
        return SIGNS.get(question.image.tobytes(), "[no text]")

    targets = WORDS[::-1]
    with OpenAiServer(read) as server:
        judge = connect(QwenVlOcr, server, concurrency=8)
        scores, _ = score(judge, map(sign, WORDS), [prompt(word) for word in targets])
        assert server.malformed == []
    assert scores == [ocr_score(read, target) for read, target in zip(WORDS, targets, strict=True)]
    assert 1.0 in scores


def test_so_many_are_asked_at_a_time():
    together = threading.Barrier(4, timeout=5)

    def answer(question):
        together.wait()  # fails where fewer are asked
        time.sleep(0.1)  # long enough for one too many to arrive
        return "Score: 3"

    with OpenAiServer(answer) as server:
        scores, _ = score(connect(QwenVl, server, concurrency=4), [BLANK] * 12)
        assert server.most_at_once == 4
    assert scores == [0.6] * 12


def test_images_arrive_pixel_by_pixel():
    noise = np.random.default_rng(0).integers(0, 256, (5, 24, 40, 3), dtype=np.uint8)
    with OpenAiServer(lambda question: "Score: 3") as server:
        score(connect(QwenVl, server, concurrency=1), map(Image.fromarray, noise))
    assert len(server.asked) == 5
    for sent, question in zip(noise, server.asked, strict=True):
        np.testing.assert_array_equal(np.asarray(question.image), sent)


def test_images_of_other_kinds_are_sent_as_rgb():
    grey = Image.new("L", (8, 8), 77)
    with OpenAiServer(lambda question: "Score: 3") as server:
        score(connect(QwenVl, server), [grey, Image.new("RGBA", (8, 8), (77, 77, 77, 0))])
    assert server.malformed == []
    assert {question.image.getpixel((0, 0)) for question in server.asked} == {(77, 77, 77)}


def test_a_picture_that_cannot_be_read_fails_alone(tmp_path):
    path = tmp_path / "torn.png"
    sign("CAT").save(path)
    path.write_bytes(path.read_bytes()[:60])
    with OpenAiServer(lambda question: "Score: 3") as server:
        scores, extras = score(connect(QwenVl, server), [BLANK, Image.open(path), BLANK])
    assert scores[::2] == [0.6, 0.6]
    assert "the picture cannot be read, OSError" in scores[1].reason
    assert math.isnan(extras["raw"][1])


@pytest.mark.parametrize("text", ['a "CAT" {with} {prompt} 100 %', "ein Schild: „Café“ 🐈"])
def test_the_question_holds_the_prompt_as_it_is(text):
    for judge, options in ((QwenVl, {}), (UnifiedReward, {}), (UnifiedReward, {"form": "axes"})):
        with OpenAiServer() as server:
            score(connect(judge, server, max_tokens=77, **options), prompts=[text])
        [question] = server.asked
        assert f"\n{text}\n" in question.text
        assert question.max_tokens == 77


def test_the_questions_ask_for_what_is_parsed():
    with OpenAiServer() as server:
        for judge, form in ((QwenVl, {}), (UnifiedReward, {}), (UnifiedReward, {"form": "axes"})):
            score(connect(judge, server, **form))
    plain, final, axes = [question.text.splitlines() for question in server.asked]
    assert plain[-1] == "Score: X"
    assert final[-1] == "Final Score: X"
    assert [line[:-3] for line in axes[-3:]] == [
        line.split(":")[0] for line in AXES_ANSWER.split("\n")
    ]


def test_the_reader_is_not_told_what_to_find():
    with OpenAiServer(lambda question: "CAT") as server:
        score(connect(QwenVlOcr, server))
    assert "CAT" not in server.asked[0].text


def test_the_wording_can_be_replaced():
    with OpenAiServer(lambda question: "Score: 3") as server:
        wording = 'Rate {prompt} as {"n": 1}, end with Score: X'
        score(connect(QwenVl, server, question=wording), prompts=["a {dog}"])
        score(connect(QwenVlOcr, server, question="Read it."))
    sent = [question.text for question in server.asked]
    assert sent == ['Rate a {dog} as {"n": 1}, end with Score: X', "Read it."]


def test_a_key_is_sent_if_there_is_one(monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "k2")
    with OpenAiServer(lambda question: "Score: 3") as server:
        score(connect(QwenVl, server))
        score(connect(QwenVl, server, api_key_env="OTHER_KEY"))
        monkeypatch.setenv("OPENAI_API_KEY", "k1")
        score(connect(QwenVl, server))
        score(connect(QwenVl, server, api_key_env=None))
    assert [q.authorization for q in server.asked] == [None, "Bearer k2", "Bearer k1", None]


# Servers in trouble


@pytest.mark.parametrize(
    "trouble",
    [
        error(500, "CUDA out of memory"),
        error(429, "too many", Retry_After="0"),
        HangUp(),
        Respond(200, b"not json"),
    ],
    ids=["500", "429", "hangs up", "not JSON"],
)
def test_trouble_that_passes_costs_no_score(trouble):
    with OpenAiServer(lambda question: "Score: 4", script=[trouble] * 2) as server:
        scores, extras = score(connect(QwenVl, server, retries=2), [BLANK] * 3)
    assert scores == [0.8] * 3
    assert extras == {"raw": [4.0] * 3}


def test_trouble_that_stays_is_a_failure_after_the_attempts():
    with OpenAiServer(always=error(500, "CUDA out of memory")) as server:
        [value], _ = score(connect(QwenVl, server, retries=2))
        assert len(server.asked) == 3
    assert isinstance(value, Failed)
    assert value.reason == f"{server.url}: answered 500 CUDA out of memory, after 3 attempts"


def test_what_the_server_refuses_is_a_failure_at_once():
    with OpenAiServer() as server:
        judge = QwenVl(url=server.url, model="another", policy=FailurePolicy())
        [value], _ = score(judge)
    assert "answered 400" in value.reason
    assert "model 'another' does not exist" in value.reason


def test_one_image_that_fails_leaves_the_others_their_scores():
    def answer(question):
        return completion("no") if question.image.tobytes() == sign("DOG").tobytes() else "Score: 5"

    with OpenAiServer(answer) as server:
        scores, _ = score(connect(QwenVl, server), map(sign, ["CAT", "DOG", "SUN"]))
    assert [scores[0], scores[2]] == [1.0, 1.0]
    assert "'no'" in scores[1].reason


def test_slow_answers_within_the_deadline_count():
    with OpenAiServer(lambda question: "Score: 4", always=Slowly(0.4)) as server:
        scores, _ = score(connect(QwenVl, server, timeout=6.0, retries=0), [BLANK] * 4)
    assert scores == [0.8] * 4


def test_a_batch_shares_one_deadline():
    with OpenAiServer(always=Hang(), mute=True) as server:
        judge = connect(QwenVl, server, timeout=0.9, retries=100, concurrency=4)
        start = time.monotonic()
        scores, _ = score(judge, [BLANK] * 40)
        assert time.monotonic() - start < 3.0
    assert all(isinstance(value, Failed) for value in scores)
    assert "no answer in time" in scores[0].reason
    assert scores[-1].reason == "not asked: the 0.9 s were over"


def test_what_was_answered_before_the_deadline_is_kept():
    with OpenAiServer(lambda q: "Score: 4", script=[Slowly(0.01)] * 4, always=Hang()) as server:
        judge = connect(QwenVl, server, timeout=1.2, retries=0, concurrency=1)
        scores, _ = score(judge, [BLANK] * 8)
    assert scores[:4] == [0.8] * 4
    assert all(isinstance(value, Failed) for value in scores[4:])


def test_a_batch_is_spread_over_the_servers():
    with OpenAiServer(lambda q: "Score: 4") as one, OpenAiServer(lambda q: "Score: 2") as two:
        judge = connect(QwenVl, one, two)
        for _ in range(10):
            score(judge)  # a batch of one image: the turns go on over batches
        assert (len(one.asked), len(two.asked)) == (5, 5)


def test_another_server_takes_over():
    with OpenAiServer(lambda q: "Score: 4") as alive, OpenAiServer(lambda q: "Score: 2") as dead:
        judge = connect(QwenVl, alive, dead, retries=0)
        assert sorted(score(judge, [BLANK] * 4)[0]) == [0.4, 0.4, 0.8, 0.8]
        dead.__exit__()
        assert score(judge, [BLANK] * 4)[0] == [0.8] * 4


def test_build_reward_gives_scores_and_further_values():
    weights = {"qwenvl": 1.0, "unifiedreward": 2.0}

    def answer(question):
        return AXES_ANSWER if "Style" in question.text else "Score: 5"

    with OpenAiServer(answer) as server:
        common = {"url": f"{server.url}/v1", "model": MODEL}
        options = {"qwenvl": common, "unifiedreward": {**common, "form": "axes"}}
        reward = build_reward(weights, options=options, policy=FailurePolicy(retries=0, timeout=5))
        result = reward([BLANK], ["a cat"])
    assert result["avg"] == pytest.approx(1 + 2 * 0.5)
    assert result["unifiedreward/coherence"].tolist() == [2.5]
    assert result["qwenvl/raw"].tolist() == [5.0]


# Settings and their mistakes


@every_judge
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_server_and_model_come_from_the_environment(judge, url_env, model_env, suffix, monkeypatch):
    with OpenAiServer(lambda question: "Final Score: 3") as server:
        monkeypatch.setenv(url_env, server.url + suffix)
        monkeypatch.setenv(model_env, MODEL)
        [value], _ = score(judge(policy=FailurePolicy(retries=0)))
        assert len(server.asked) == 1
        assert server.malformed == []
    assert not math.isnan(value)


@every_judge
def test_options_go_before_the_environment(judge, url_env, model_env, monkeypatch):
    monkeypatch.setenv(url_env, "http://nowhere.invalid")
    monkeypatch.setenv(model_env, "another")
    with OpenAiServer(lambda question: "Final Score: 3") as server:
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
    judge.check_prompts([prompt("CAT")])
    with pytest.raises(UserError, match="prompt 2 has no text in double quotes"):
        judge.check_prompts([prompt("CAT"), "a cat"])


def test_a_prompt_without_quotes_is_not_asked_about():
    with OpenAiServer(lambda question: "CAT") as server:
        scores, _ = score(connect(QwenVlOcr, server), [BLANK] * 2, ["a cat", prompt("CAT")])
        assert len(server.asked) == 1
    assert scores[0].reason == "its prompt has no text in double quotes"
    assert scores[1] == 1.0


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
