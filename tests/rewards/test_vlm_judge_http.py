"""The requests of VLM judges, and how they handle failing servers."""

import math
import threading
import time

import numpy as np
import pytest
from openai_server import Delay, Hang, HangUp, OpenAiServer, RawResponse, completion, error
from PIL import Image
from sign_images import WORDS, prompt, sign
from vlm_judges import (
    AXES_RESPONSE,
    BLANK,
    clear_environment,  # noqa: F401 (a fixture)
    connect,
    score,
    short_delays,  # noqa: F401 (a fixture)
)

from flow_grpo.rewards.failure import Failed, FailurePolicy, NotApplicable
from flow_grpo.rewards.judges.qwen_vl import QwenVl, QwenVlOcr
from flow_grpo.rewards.judges.unified_reward import UnifiedReward
from flow_grpo.rewards.judges.vie_score import VieScore
from flow_grpo.rewards.scorers.ocr import ocr_score

SIGNS = {sign(word).tobytes(): word for word in WORDS}


# Requests


def test_each_image_is_judged_with_its_own_prompt_and_in_order():
    def read(question):
        time.sleep(0.01 * (question.image.getpixel((0, 0))[0] % 5))  # replies are out of order
        return SIGNS.get(question.image.tobytes(), "[no text]")

    targets = WORDS[::-1]
    with OpenAiServer(read) as server:
        judge = connect(QwenVlOcr, server, concurrency=8)
        scores, _ = score(judge, map(sign, WORDS), [prompt(word) for word in targets])
        assert server.malformed == []
    assert scores == [ocr_score(read, target) for read, target in zip(WORDS, targets, strict=True)]
    assert 1.0 in scores


def test_concurrency_is_the_number_of_concurrent_requests():
    barrier = threading.Barrier(4, timeout=5)

    def answer(question):
        barrier.wait()  # fails if there are fewer requests
        time.sleep(0.1)  # long enough for another request to arrive
        return "Score: 3"

    with OpenAiServer(answer) as server:
        scores, _ = score(connect(QwenVl, server, concurrency=4), [BLANK] * 12)
        assert server.max_concurrent == 4
    assert scores == [0.6] * 12


def test_images_are_sent_without_loss():
    noise = np.random.default_rng(0).integers(0, 256, (5, 24, 40, 3), dtype=np.uint8)
    with OpenAiServer(lambda question: "Score: 3") as server:
        score(connect(QwenVl, server, concurrency=1), map(Image.fromarray, noise))
    assert len(server.requests) == 5
    for sent, question in zip(noise, server.requests, strict=True):
        np.testing.assert_array_equal(np.asarray(question.image), sent)


def test_images_of_other_modes_are_sent_as_rgb():
    grey = Image.new("L", (8, 8), 77)
    with OpenAiServer(lambda question: "Score: 3") as server:
        score(connect(QwenVl, server), [grey, Image.new("RGBA", (8, 8), (77, 77, 77, 0))])
    assert server.malformed == []
    assert {question.image.getpixel((0, 0)) for question in server.requests} == {(77, 77, 77)}


def test_an_unreadable_image_does_not_affect_the_others(tmp_path):
    path = tmp_path / "truncated.png"
    sign("CAT").save(path)
    path.write_bytes(path.read_bytes()[:60])
    with OpenAiServer(lambda question: "Score: 3") as server:
        scores, extras = score(connect(QwenVl, server), [BLANK, Image.open(path), BLANK])
    assert scores[::2] == [0.6, 0.6]
    assert "OSError" in scores[1].reason
    assert math.isnan(extras["raw"][1])


@pytest.mark.parametrize("text", ['a "CAT" {with} {prompt} 100 %', "ein Schild: „Café“ 🐈"])
def test_the_question_contains_the_unchanged_prompt(text):
    for judge, options in ((QwenVl, {}), (UnifiedReward, {}), (UnifiedReward, {"form": "axes"})):
        with OpenAiServer() as server:
            options = {"max_tokens": 77, "wording": "alternative", **options}
            score(connect(judge, server, **options), prompts=[text])
        [question] = server.requests
        assert f"\n{text}\n" in question.text
        assert question.max_tokens == 77


def test_the_questions_ask_for_the_format_that_is_parsed():
    with OpenAiServer() as server:
        for judge, form in ((QwenVl, {}), (UnifiedReward, {}), (UnifiedReward, {"form": "axes"})):
            score(connect(judge, server, wording="alternative", **form))
    plain, final, axes = [question.text.splitlines() for question in server.requests]
    assert plain[-1] == "Score: X"
    assert final[-1] == "Final Score: X"
    assert [line[:-3] for line in axes[-3:]] == [
        line.split(":")[0] for line in AXES_RESPONSE.split("\n")
    ]


def test_the_ocr_question_does_not_reveal_the_target():
    with OpenAiServer(lambda question: "CAT") as server:
        score(connect(QwenVlOcr, server))
    assert "CAT" not in server.requests[0].text


def test_a_prompt_without_quotes_sends_no_request():
    with OpenAiServer(lambda question: "CAT") as server:
        scores, _ = score(connect(QwenVlOcr, server), [BLANK] * 2, ["a cat", prompt("CAT")])
        assert len(server.requests) == 1
    assert isinstance(scores[0], NotApplicable)
    assert scores[1] == 1.0


def test_an_edit_is_graded_with_its_sources_and_by_itself():
    replies = {1: "Naturalness (0-10): 9\nCleanness: 6", 2: "fine\nSuccess: 8/10\nKept: 4.5"}
    replies[3] = replies[2].replace("8/10", "0")
    first, second, edited = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "grey"))
    rows = [{"source": first}, {"source": [first, second]}, {}, {"source": "a text"}]
    with OpenAiServer(lambda question: replies[len(question.images)]) as server:
        judge = connect(VieScore, server, concurrency=1)
        scores, extras = judge([edited] * 4, ["make it grey"] * 4, rows)
        assert server.malformed == []
        judge.check_servers()
    assert scores[:2] == [pytest.approx(math.sqrt(4.5 * 6) / 10), 0.0]
    assert [isinstance(each, NotApplicable) for each in scores] == [False, False, True, True]
    grades = {name: values[0] for name, values in extras.items()}
    assert grades == {"success": 8, "kept": 4.5, "naturalness": 9, "cleanness": 6}
    shown = [[image.getpixel((0, 0)) for image in question.images] for question in server.requests]
    red, blue, grey = (255, 0, 0), (0, 0, 255), (128, 128, 128)
    assert shown[:4] == [[red, grey], [grey], [red, blue, grey], [grey]]
    assert ["make it grey" in question.text for question in server.requests[:2]] == [True, False]
    ends = [question.text.splitlines()[-2:] for question in server.requests[:2]]
    assert ends == [["Success: X", "Kept: Y"], ["Naturalness: X", "Cleanness: Y"]]
    with OpenAiServer(lambda question: "Success: 11\nKept: 3") as server:
        [grade], _ = score(connect(VieScore, server))
    assert "'Success: 11'" in grade.reason
    assert "0 to 10" in grade.reason


def test_the_question_can_be_replaced():
    with OpenAiServer(lambda question: "Score: 3") as server:
        wording = 'Rate {prompt} as {"n": 1}, end with Score: X'
        score(connect(QwenVl, server, question=wording), prompts=["a {dog}"])
        score(connect(QwenVlOcr, server, question="Read it."))
    sent = [question.text for question in server.requests]
    assert sent == ['Rate a {dog} as {"n": 1}, end with Score: X', "Read it."]


def test_an_api_key_is_sent_if_it_is_set(monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "k2")
    with OpenAiServer(lambda question: "Score: 3") as server:
        score(connect(QwenVl, server))
        score(connect(QwenVl, server, api_key_env="OTHER_KEY"))
        monkeypatch.setenv("OPENAI_API_KEY", "k1")
        score(connect(QwenVl, server))
        score(connect(QwenVl, server, api_key_env=None))
    assert [q.authorization for q in server.requests] == [None, "Bearer k2", "Bearer k1", None]


# Failing servers


@pytest.mark.parametrize(
    "failure",
    [
        error(500, "CUDA out of memory"),
        error(429, "too many", Retry_After="0"),
        HangUp(),
        RawResponse(200, b"not json"),
    ],
    ids=["500", "429", "hangs up", "not JSON"],
)
def test_a_temporary_failure_costs_no_score(failure):
    with OpenAiServer(lambda question: "Score: 4", script=[failure] * 2) as server:
        scores, extras = score(connect(QwenVl, server, retries=2), [BLANK] * 3)
    assert scores == [0.8] * 3
    assert extras == {"raw": [4.0] * 3}


def test_a_permanent_failure_is_reported_after_the_attempts():
    with OpenAiServer(always=error(500, "CUDA out of memory")) as server:
        [value], _ = score(connect(QwenVl, server, retries=2))
        assert len(server.requests) == 3
    assert isinstance(value, Failed)
    assert value.reason.startswith(f"{server.url}: ")
    assert "500 CUDA out of memory" in value.reason
    assert "3 attempts" in value.reason


def test_a_rejected_request_fails_at_once():
    with OpenAiServer() as server:
        judge = QwenVl(url=server.url, model="another", policy=FailurePolicy())
        [value], _ = score(judge)
    assert "400" in value.reason
    assert "model 'another' does not exist" in value.reason  # from the server


def test_a_failed_image_does_not_affect_the_others():
    def answer(question):
        return completion("no") if question.image.tobytes() == sign("DOG").tobytes() else "Score: 5"

    with OpenAiServer(answer) as server:
        scores, _ = score(connect(QwenVl, server), map(sign, ["CAT", "DOG", "SUN"]))
    assert [scores[0], scores[2]] == [1.0, 1.0]
    assert "'no'" in scores[1].reason


def test_slow_replies_within_the_deadline_are_accepted():
    with OpenAiServer(lambda question: "Score: 4", always=Delay(0.4)) as server:
        scores, _ = score(connect(QwenVl, server, timeout=6.0, retries=0), [BLANK] * 4)
    assert scores == [0.8] * 4


def test_a_batch_shares_one_deadline():
    with OpenAiServer(always=Hang(), hide_models=True) as server:
        judge = connect(QwenVl, server, timeout=0.9, retries=100, concurrency=4)
        scores, _ = score(judge, [BLANK] * 40)
    assert all(isinstance(value, Failed) for value in scores)
    assert scores[0].reason.startswith(server.url)
    assert not scores[-1].reason.startswith(server.url)  # not sent
    assert "0.9 s" in scores[-1].reason


def test_replies_before_the_deadline_are_kept():
    with OpenAiServer(lambda q: "Score: 4", script=[Delay(0.01)] * 4, always=Hang()) as server:
        judge = connect(QwenVl, server, timeout=1.2, retries=0, concurrency=1)
        scores, _ = score(judge, [BLANK] * 8)
    assert scores[:4] == [0.8] * 4
    assert all(isinstance(value, Failed) for value in scores[4:])


def test_requests_are_distributed_over_the_servers():
    with OpenAiServer(lambda q: "Score: 4") as one, OpenAiServer(lambda q: "Score: 2") as two:
        judge = connect(QwenVl, one, two)
        for _ in range(10):
            score(judge)  # a batch of one image: the round robin continues over batches
        assert (len(one.requests), len(two.requests)) == (5, 5)


def test_another_server_takes_over():
    with OpenAiServer(lambda q: "Score: 4") as alive, OpenAiServer(lambda q: "Score: 2") as dead:
        judge = connect(QwenVl, alive, dead, retries=0)
        assert sorted(score(judge, [BLANK] * 4)[0]) == [0.4, 0.4, 0.8, 0.8]
        dead.__exit__()
        assert score(judge, [BLANK] * 4)[0] == [0.8] * 4
