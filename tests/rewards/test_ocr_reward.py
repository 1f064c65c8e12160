"""The OCR reward: target text, score, options, and reading of real images."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from server_process import wait_until
from sign_images import WORDS, mono_bold, prompt, sign
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.scorers import ocr
from flow_grpo.rewards.scorers.ocr import OcrScorer, ocr_score, quoted_text

# Text and score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a sign that says "HELLO"', "HELLO"),
        ('"Open" on the door and "24 Hours" below', "Open 24 Hours"),
        ("a sign that says “Héllo”", "Héllo"),
        ("ein Schild mit „Straße“ darauf", "Straße"),
        ('ein Schild mit „Straße" darauf', "Straße"),
        ("un panneau « Bonjour »", "Bonjour"),
        ("et skilt med »Velkommen«", "Velkommen"),
        ("en skylt med ”Hej”", "Hej"),
        ('“One”, "two" and «three»', "One two three"),
        ("it's a dog's 'life'", None),
        ('a 6" pipe', None),
        ('an empty "" and a blank " " pair', None),
        ("no quotes", None),
    ],
)
def test_the_target_is_the_text_in_double_quotes(text: str, expected: str | None) -> None:
    assert quoted_text(text) == expected


@pytest.mark.parametrize(
    ("read", "target", "expected"),
    [
        ("HELLO", "hello", 1.0),
        ("H E L L O", "Hello", 1.0),
        ("the HELLO shop", "hello", 1.0),
        ("HELL", "HELLO", 0.8),
        ("HELPO", "HELLO", 0.8),
        ("HELO", "HELLO", 0.8),
        ("XYZ", "HELLO", 0.0),
        ("", "HELLO", 0.0),
        ("far too much text that is of no help", "HELLO", 0.0),
        ("open24hours", "Open 24 Hours", 1.0),
    ],
)
def test_the_score_is_the_fraction_of_the_target_that_was_read(
    read: str, target: str, expected: float
) -> None:
    assert ocr_score(read, target) == pytest.approx(expected)


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)


@given(read=st.text(max_size=12), target=st.text(min_size=1, max_size=12))
def test_the_score_is_1_exactly_when_the_target_is_contained(read: str, target: str) -> None:
    plain_target = "".join(target.lower().split())
    if not plain_target:
        with pytest.raises(ValueError, match="empty"):
            ocr_score(read, target)
        return
    score = ocr_score(read, target)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (plain_target in "".join(read.lower().split()))


@given(read=ASCII, target=ASCII.filter(str.strip), spaces=st.integers(0, 5))
def test_case_and_spaces_are_ignored(read: str, target: str, spaces: int) -> None:
    score = ocr_score(read, target)
    spread = (" " * spaces).join(read)
    assert ocr_score(read.swapcase(), target) == score
    assert ocr_score(read, target.swapcase()) == score
    assert ocr_score(spread, target) == score
    assert ocr_score(read, f" {target[:2]} {target[2:]} ") == score


@given(target=ASCII.filter(str.strip), before=ASCII, after=ASCII)
def test_text_around_the_target_does_not_lower_the_score(
    target: str, before: str, after: str
) -> None:
    assert ocr_score(before + target + after, target) == 1.0


# Invalid input


def test_a_prompt_without_quoted_text_is_rejected() -> None:
    reward = build_reward({"ocr": 1.0})
    reward.check([prompt("A"), "a sign that says “B”"])
    with raises_user_error("'ocr'", "double quotes", field="prompt 2", value="a red circle"):
        reward.check([prompt("A"), "a red circle"])
    close_scorers(reward)


def test_a_prompt_without_quoted_text_may_have_another_reward() -> None:
    reward = build_reward({"ocr": 1.0, "jpeg_compressibility": 1.0})
    prompts = [prompt("A"), "a red circle"]
    reward.check(prompts)
    assert reward.applicable_rows(prompts, [{}, {}]) == {"ocr": [0], "jpeg_compressibility": [0, 1]}
    blank = [Image.new("RGB", (96, 32))] * 2
    scores = reward(blank, prompts)
    assert np.isneginf(scores["ocr"]).tolist() == [False, True]
    assert scores["avg"][1] == scores["jpeg_compressibility"][1]
    close_scorers(reward)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("engine", "tesseract", "rapidocr, paddleocr"),
        ("mode", "lines", "auto, full, line"),
        ("workers", 0, "1"),
        ("timeout", 0, "more than 0"),
        ("rec_model_dir", "models", "paddleocr"),
    ],
)
def test_an_invalid_option_is_rejected(option: str, value: object, rule: str) -> None:
    with raises_user_error(rule, field=option, value=value):
        OcrScorer(**{option: value})


@pytest.mark.parametrize(("engine", "extra"), [("rapidocr", "ocr"), ("paddleocr", "paddleocr")])
def test_a_missing_package_names_its_pip_install(
    engine: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: None if name == engine else object())
    with raises_user_error(f"pip install flow_grpo[{extra}]", field="engine", value=engine):
        OcrScorer(engine=engine)


def test_a_directory_without_a_paddle_model_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: object())
    with raises_user_error("inference.yml", field="rec_model_dir", value=str(tmp_path)):
        OcrScorer(engine="paddleocr", rec_model_dir=str(tmp_path))


def test_local_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)), raising=False)
    assert ocr.default_workers() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ocr.default_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert ocr.default_workers() == 1


# Reading images


@pytest.fixture(scope="module")
def scorer() -> Iterator[OcrScorer]:
    with OcrScorer(workers=2) as scorer:
        score_words(scorer, WORDS)
        assert len(scorer.pool.pids()) == 2
        yield scorer


def score_words(scorer: OcrScorer, words: list[str], blur: float = 0.0) -> list[float]:
    images = [sign(word, blur) for word in words]
    return scorer(images, [prompt(word) for word in words], [{} for _ in words])


def test_clean_signs_score_exactly_1(scorer: OcrScorer) -> None:
    assert len(WORDS) >= 24
    missed = [w for w, s in zip(WORDS, score_words(scorer, WORDS), strict=True) if s != 1.0]
    assert missed == []


def test_the_wrong_word_does_not_score_1(scorer: OcrScorer) -> None:
    images = [sign(word) for word in WORDS]
    scores = scorer(images, [prompt(word) for word in WORDS[1:] + WORDS[:1]], [{}] * len(WORDS))
    assert max(scores) < 1.0
    assert np.mean(scores) < 0.3


def test_more_blur_never_scores_higher(scorer: OcrScorer) -> None:
    means = [np.mean(score_words(scorer, WORDS, blur)) for blur in (0.0, 2.0, 4.0, 5.0, 6.0, 8.0)]
    assert means == sorted(means, reverse=True)
    assert means[0] == 1.0
    assert means[-1] < 0.2


@pytest.mark.parametrize("size", [(96, 32), (256, 256)])
def test_blank_images_score_0(scorer: OcrScorer, size: tuple[int, int]) -> None:
    colours = ["black", "white", "grey", "red"]
    images = [Image.new("RGB", size, colour) for colour in colours]
    assert scorer(images, [prompt("CAT")] * 4, [{}] * 4) == [0.0] * 4


def test_text_is_found_in_a_large_image(scorer: OcrScorer) -> None:
    image = Image.new("RGB", (512, 512), (230, 220, 200))
    draw = ImageDraw.Draw(image)
    draw.rectangle((20, 20, 120, 90), fill=(200, 60, 60))
    draw.text((90, 180), "Hello", font=mono_bold(80), fill=(20, 20, 60))
    draw.text((150, 330), "World", font=mono_bold(50), fill=(60, 20, 20))
    prompts = [
        'a poster with "hello"',
        "a poster with “WORLD” on it",
        'a poster, "Hello" above and "World" below',
        'a poster with "hollow"',
    ]
    exact, unicode_quotes, joined, wrong = scorer([image] * 4, prompts, [{}] * 4)
    assert (exact, unicode_quotes, joined) == (1.0, 1.0, 1.0)
    assert wrong < 1.0


def test_batching_does_not_change_the_score(scorer: OcrScorer) -> None:
    images = [sign(word, blur) for word in WORDS[:8] for blur in (0.0, 5.0)]
    prompts = [prompt(word) for word in WORDS[:8] for _ in range(2)]
    batched = scorer(images, prompts, [{}] * len(images))
    single = [scorer([i], [p], [{}])[0] for i, p in zip(images, prompts, strict=True)]
    assert batched == single
    assert min(batched) < 1.0


def test_other_image_modes_are_supported(scorer: OcrScorer) -> None:
    image = sign("PLANET")
    images = [image.convert(mode) for mode in ("L", "RGBA", "P")]
    assert scorer(images, [prompt("Planet")] * 3, [{}] * 3) == [1.0] * 3


def test_a_corrupt_image_is_nan_and_the_others_are_scored(scorer: OcrScorer) -> None:
    file = io.BytesIO()
    Image.effect_noise((96, 32), 50).save(file, "PNG")
    truncated = Image.open(io.BytesIO(file.getvalue()[:200]))
    empty = Image.new("RGB", (0, 32))
    images = [sign("CAT"), truncated, sign("DOG"), empty, sign("SUN")]
    scores = scorer(
        images,
        [prompt("CAT"), prompt("DOG"), prompt("DOG"), prompt("SUN"), prompt("SUN")],
        [{}] * 5,
    )
    assert np.isnan(scores).tolist() == [False, True, False, True, False]
    assert scores[::2] == [1.0, 1.0, 1.0]
    assert scores[1].reason.startswith("OSError: ")


def test_a_prompt_without_quoted_text_is_not_applicable(scorer: OcrScorer) -> None:
    scores = scorer([sign("CAT")] * 2, ["a cat", prompt("CAT")], [{}] * 2)
    assert isinstance(scores[0], NotApplicable)
    assert scores[1] == 1.0


def test_a_killed_worker_costs_no_score(scorer: OcrScorer) -> None:
    words = WORDS * 4
    before = scorer.pool.pids()
    supervisor = psutil.Process(before[0])
    [worker] = supervisor.children()
    idle = worker.cpu_times().user
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(score_words, scorer, words)
        wait_until(lambda: worker.cpu_times().user > idle)  # it reads an image
        supervisor.kill()
        assert scores.result() == [1.0] * len(words)
    after = scorer.pool.pids()
    assert len(after) == 2
    assert before[0] not in after
