"""Judges in the wordings and with the formulas of their authors.

The checksums are those of the texts in the authors' repositories, computed there.
"""

import hashlib
import json
import math
import re

import numpy as np
import pytest
import torch
from openai_server import OpenAiServer, completion
from PIL import Image
from sign_images import prompt
from small_qwen_rewards import build_model, hidden_states, image_patches, token_ids
from small_vlm import CHARACTERS
from user_errors import raises_user_error
from vlm_judges import (
    BLANK,
    clear_environment,  # noqa: F401 (a fixture)
    connect,
    score,
    short_delays,  # noqa: F401 (a fixture)
)

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.judges import wordings
from flow_grpo.rewards.judges.edit_score import EditScore
from flow_grpo.rewards.judges.qwen_vl import QwenVl, QwenVlOcr
from flow_grpo.rewards.judges.unified_reward import UnifiedReward
from flow_grpo.rewards.judges.unified_reward_pair import UnifiedRewardPair

# SHA-256 of each text, with {prompt} for the prompt; grades of EditScore from 0 to 25
CHECKSUMS = {
    "editscore_edit": "80bac216c8f7b47e",
    "editscore_quality": "8249deba103d112d",
    "qwenvl": "14a112e01d0fd4ce",
    "qwenvl_ocr": "d233c642a829efc9",
    "unifiedreward_axes": "75d52d3ae771f89b",
    "unifiedreward_axes_words": "88d1d1c5f0fba9dc",
    "unifiedreward_final": "f56f919ce3bc6aab",
    "unifiedreward_flow_grpo": "d68ab1dcf4dc3a39",
    "unifiedreward_pair_axes": "828e9ab2f81c3b6d",
    "unifiedreward_pair_final": "0fd2f5c43a065165",
    "unifiedreward_pair_flex": "bd0c2d5635a7b6b3",
    "unifiedreward_pair_think": "a8a0d80818246406",
}
POINT_JUDGES = [
    (QwenVl, {}, "qwenvl", 2048),
    (QwenVlOcr, {}, "qwenvl_ocr", 512),
    (UnifiedReward, {}, "unifiedreward_final", 512),
    (UnifiedReward, {"wording": "flow_grpo"}, "unifiedreward_flow_grpo", 512),
    (UnifiedReward, {"form": "axes"}, "unifiedreward_axes", 512),
    (
        UnifiedReward,
        {"form": "axes", "wording": "word_scores"},
        "unifiedreward_axes_words",
        4096,
    ),
]
SOURCE, EDITED = Image.new("RGB", (16, 8), "red"), Image.new("RGB", (16, 8), "grey")


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ask(judge, reply, images=(BLANK,), prompts=None, rows=None, **options):
    """Return the scores, the extra values and the requests for a fixed reply or a function."""
    with OpenAiServer(reply if callable(reply) else lambda request: reply) as server:
        images = list(images)
        prompts = ["a {cat}"] * len(images) if prompts is None else prompts
        rows = [{}] * len(images) if rows is None else rows
        scores, extras = connect(judge, server, **options)(images, prompts, rows)
        assert server.malformed == []
    return scores, extras, server.requests


@pytest.mark.parametrize("name", CHECKSUMS)
def test_a_published_question_is_that_of_its_authors(name):
    assert sha(wordings.quote(name)) == CHECKSUMS[name]


@pytest.mark.parametrize(("judge", "options", "name", "max_tokens"), POINT_JUDGES)
def test_the_published_question_is_sent(judge, options, name, max_tokens):
    text = prompt("CAT")
    _, _, [request] = ask(judge, "", prompts=[text], **options)
    assert sha(request.text.replace(text, "{prompt}")) == CHECKSUMS[name]
    assert request.max_tokens == max_tokens
    assert request.sampling == {"temperature": 0}
    assert request.layout == ("", request.text)
    helpful = "You are a helpful assistant." if judge is QwenVlOcr else None
    assert request.system == helpful


def test_flow_grpo_shows_unifiedreward_images_of_512_pixels():
    noise = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    _, _, [request] = ask(UnifiedReward, "", [image], wording="flow_grpo")
    np.testing.assert_array_equal(request.image, image.resize((512, 512)))
    _, _, [request] = ask(UnifiedReward, "", [image])
    assert request.image.size == (64, 96)


# Replies and the scores of the authors' code: yifan123/flow_grpo:flow_grpo/qwenvl.py:19
# and flow_grpo/rewards.py:300, leibniz-csi/mm_grpo:gerl/utils/reward_score/vllm.py:163
REPLIES = [
    (QwenVl, {}, "<Thought>sharp</Thought>\n<Score>4</Score>", 0.8),
    (QwenVl, {}, "<Score>3.5</Score>", 0.0),
    (QwenVl, {}, "Score: 4", 0.0),
    (UnifiedReward, {}, "cat (object): 1\nFinal Score: 3.5", 0.7),
    (UnifiedReward, {"wording": "flow_grpo"}, "Final Score: 4", 0.8),
    (UnifiedReward, {"wording": "flow_grpo"}, "I cannot tell.", 0.0),
]


@pytest.mark.parametrize(("judge", "options", "reply", "published"), REPLIES)
def test_scores_are_those_of_the_published_code(judge, options, reply, published):
    [value], extras, _ = ask(judge, reply, unparsed="published", **options)
    assert value == pytest.approx(published)
    assert extras["unparsed"] == [float(published == 0)]


def test_a_reply_without_a_score_is_a_failure_by_default():
    for judge in (QwenVl, UnifiedReward):
        [value], extras, _ = ask(judge, "I cannot tell.")
        assert isinstance(value, Failed)
        assert "'I cannot tell.'" in value.reason
        assert "unparsed" not in extras
    assert ask(QwenVl, "**Score:** 4")[0] == [0.8]  # clear, although not in the published format


def test_a_failed_request_is_never_a_published_zero():
    with OpenAiServer(lambda request: completion(None, refusal="no")) as server:
        [value], extras = score(connect(QwenVl, server, unparsed="published"))
    assert isinstance(value, Failed)
    assert math.isnan(extras["unparsed"][0])


@pytest.mark.parametrize("read", ["COT", "c o\nt", "the CAT sat", "", "no text at all", '"CAT"'])
def test_qwenvl_ocr_is_the_published_formula(read):
    from Levenshtein import distance

    target, text = "cat", re.sub(r"\s+", "", read).lower()
    edits = 0 if target in text else min(distance(text, target), len(target))
    [value], _, _ = ask(QwenVlOcr, read, prompts=['a sign "C AT"'])
    assert value == pytest.approx(1 - edits / len(target))


def test_the_axes_of_unifiedreward_1_follow_its_word_scores():
    reply = (
        '---\n\nWord-wise Scores: [["cat", 0.2], ["[No_mistakes]", 1.5]]\n\n'
        "Alignment Score (1-5): 3.5\nCoherence Score (1-5): 2\nStyle Score (1-5): 4.25"
    )
    [value], extras, _ = ask(UnifiedReward, reply, form="axes", wording="word_scores")
    assert value == pytest.approx((3.5 + 2 + 4.25) / 3 / 5)
    assert extras["coherence"] == [2.0]


# EditScore


def edit_reply(request):
    """Return grades that depend on which images are shown, in the formats that models write."""
    if len(request.images) == 2:
        return '{"reasoning": "the "red" car, 3 of 5", "score": [20, 12.5]}'
    return 'Fine.\n```json\n{\n"reasoning" : "[1, 2]",\n"score" : [15, 18]\n}\n```'


def test_editscore_is_the_published_formula():
    rows = [{"source": SOURCE}, {}, {"source": "text"}]
    scores, extras, asked = ask(EditScore, edit_reply, [EDITED] * 3, ["make it grey"] * 3, rows)
    following, consistency, naturalness, artifacts = np.array([20, 12.5, 15, 18]) / (25 / 10)
    expected = math.sqrt(min(following, consistency) * min(naturalness, artifacts))
    assert scores[0] == pytest.approx(expected, abs=1e-12)
    assert [isinstance(each, NotApplicable) for each in scores] == [False, True, True]
    grades = {name: values[0] for name, values in extras.items()}
    assert grades == pytest.approx(
        {"prompt_following": following, "consistency": consistency, "perceptual_quality": 6.0}
    )
    edit, quality = sorted(asked, key=lambda request: -len(request.images))
    shown = [[image.getpixel((0, 0)) for image in request.images] for request in (edit, quality)]
    assert shown == [[(255, 0, 0), (128, 128, 128)], [(128, 128, 128)]]
    assert sha(edit.text.replace("make it grey", "{prompt}")) == CHECKSUMS["editscore_edit"]
    assert sha(quality.text) == CHECKSUMS["editscore_quality"]
    assert edit.layout == ("<img1>: ", "", "<img2>: ", "", edit.text)
    assert quality.layout == ("<img1>: ", "", quality.text)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 42}
    assert edit.sampling == quality.sampling == sampling


class SmallJudge:
    """Small random Qwen2.5-VL whose grades are derived from its next-token logits."""

    def __init__(self) -> None:
        self.model = build_model("qwen2_5_vl", 0)

    def grades(self, parts: list[str | Image.Image]) -> list[float]:
        """Return two grades from 0 to 25 for a message of texts and images."""
        visuals = [image_patches(part, (56, 56)) for part in parts if not isinstance(part, str)]
        pads = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
        unknown = f"[^{re.escape(''.join(CHARACTERS))}]"
        texts = [re.sub(unknown, " ", part) if isinstance(part, str) else pads for part in parts]
        ids = token_ids(f"<|im_start|>{''.join(texts)}<|im_end|><|im_start|>", ())
        states = hidden_states(self.model, ids, visuals)
        logits = self.model.lm_head(states[-1])
        # a steep function, because a random model's logits hardly differ
        return [round(12.5 + 12.5 * torch.sin(20 * logit).item(), 3) for logit in logits[-2:]]

    def __call__(self, request) -> str:
        images = iter(request.images)
        parts = [text or next(images) for text in request.layout]
        return json.dumps({"reasoning": "as asked", "score": self.grades(parts)})


def test_editscore_of_a_small_qwen_vl_is_the_published_formula():
    """Scores depend on the judge's class, its template and the image order, but not on batches."""
    judge, instruction = SmallJudge(), "make it grey"
    noise = np.random.default_rng(0).integers(0, 256, (4, 56, 56, 3), dtype=np.uint8)
    images = [Image.fromarray(each) for each in noise]
    pairs = [(images[0], images[1]), (images[1], images[0]), (images[2], images[3])]

    def reference(source: Image.Image, edited: Image.Image) -> float:
        question, alone = (
            wordings.quote(f"editscore_{name}").replace("{prompt}", instruction)
            for name in ("edit", "quality")
        )
        following = judge.grades(["<img1>: ", source, "<img2>: ", edited, question])
        quality = judge.grades(["<img1>: ", edited, alone])
        return math.sqrt(min(following) * min(quality)) / 2.5

    expected = [reference(*pair) for pair in pairs]
    assert np.std(expected) > 0.05
    rows = [{"source": source} for source, _ in pairs]
    edits = [edited for _, edited in pairs]
    together, _, _ = ask(EditScore, judge, edits, [instruction] * 3, rows)
    assert together == pytest.approx(expected, abs=1e-5)
    for edited, row, value in zip(edits, rows, expected, strict=True):
        assert ask(EditScore, judge, [edited], [instruction], [row])[0] == [pytest.approx(value)]


def test_editscore_averages_its_passes():
    """Pass 1: sqrt(10 * 6.4); pass 2: sqrt(2.5 * 10). Qwen3-VL gets no image labels."""

    def reply(request):
        edit = {42: [25, 25], 43: [6.25, 25]}[request.sampling["seed"]]
        return f'{{"score": {edit if len(request.images) == 2 else [16, 25]}}}'

    options = {"passes": 2, "backbone": "qwen3vl", "rows": [{"source": SOURCE}]}
    [value], extras, asked = ask(EditScore, reply, **options)
    assert value == pytest.approx((math.sqrt(64) + math.sqrt(2.5 * 6.4)) / 2)
    assert extras["prompt_following"] == [pytest.approx(6.25)]
    assert {request.layout[0] for request in asked} == {""}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("It looks nice.", "no grades.*'It looks nice.'"),
        ('{"score": [26, 3]}', "0 to 25"),
        ('{"score": [-1, 3]}', "0 to 25"),
        ('{"score": [1, 2, 3]}', "two numbers"),
        ('{"score": []}', "two numbers"),
        ('{"score": NaN}', "0 to 25"),
        ('{"score": "high"}', "no grades"),
        (completion('{"reasoning": "a long', "length"), "max_tokens"),
    ],
)
def test_editscore_without_valid_grades(reply, reason):
    rows = [{"source": SOURCE}]
    [value], extras, _ = ask(EditScore, reply, rows=rows)
    assert re.search(reason, value.reason)
    assert math.isnan(extras["consistency"][0])
    [value], extras, _ = ask(EditScore, reply, rows=rows, unparsed="published")
    assert value == pytest.approx(5.0)  # 12.5 of 25: editscore/__init__.py:177
    assert extras["unparsed"] == [1.0]


def test_a_single_grade_counts_for_both():
    [value], _, _ = ask(EditScore, "score: [10]", rows=[{"source": SOURCE}])
    assert value == pytest.approx(4.0)


def test_editscore_needs_sources():
    with OpenAiServer(edit_reply) as server:
        options = {"editscore": {"url": server.url, "model": "judge-7b"}}
        reward = build_reward({"editscore": 1.0}, options=options)
        result = reward([EDITED, EDITED], ["make it grey"] * 2, [{"source": SOURCE}, {}])
    assert result["editscore"][0] == pytest.approx(math.sqrt(5 * 6))
    assert not math.isfinite(result["editscore"][1])


# UnifiedReward on pairs

AXES_REPLY = (
    "Alignment Score:\n Image 1: {0}\n Image 2: {1}\n\nCoherence Score:\n Image 1: 0.5\n"
    " Image 2: 0.5\n\nStyle Score:\n Image 1: 0.407900005578\n Image 2: 0.592099994422"
)
PAIR_REPLIES = {
    "final": ("1 is nice. Image {better} is better.", "Both images are equally good."),
    "think": ("<think>Image 1 is better?</think>\n<answer>Image {better} is better</answer>", None),
    "flex": ('{{"cat_winner": "Image 1", "winner": "Image {better}"}}', None),
}


@pytest.mark.parametrize("form", PAIR_REPLIES)
def test_the_pairwise_verdict_is_read(form):
    verdict, tie = PAIR_REPLIES[form]
    dark, light = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "white")

    def lighter(request):
        return verdict.format(better=1 + request.images[1].getpixel((0, 0))[0] // 255)

    scores, extras, asked = ask(UnifiedRewardPair, lighter, [dark, light], form=form)
    assert scores == [0.0, 1.0]
    assert extras["flipped"] == [0.0, 0.0]
    assert {sha(each.text.replace("a {cat}", "{prompt}")) for each in asked} == {
        CHECKSUMS[f"unifiedreward_pair_{form}"]
    }
    if tie:
        assert ask(UnifiedRewardPair, tie, [dark, light], form=form)[0] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("shares", "wins"), [((0.6, 0.4), 1.0), ((0.59, 0.41), 0.0), ((0.5921, 0.4079), 0.5)]
)
def test_the_greater_sum_of_the_axes_wins(shares, wins):
    from flow_grpo.rewards.judges.templates import JudgeReply
    from flow_grpo.rewards.judges.unified_reward_pair import parse_axes

    text = AXES_REPLY.replace("0.407900005578", "0.4079").replace("0.592099994422", "0.5921")
    assert parse_axes(JudgeReply(text.format(*shares))) == wins


@pytest.mark.parametrize("form", ["final", "axes", "think", "flex"])
def test_a_pair_without_a_verdict_is_a_failure(form):
    for reply in ("I cannot tell.", completion("Image 1 is better", "length")):
        scores, extras, _ = ask(UnifiedRewardPair, reply, [BLANK, BLANK], form=form)
        assert all("no verdict" in each.reason for each in scores)
        assert extras["unjudged"] == [1.0, 1.0]


def test_pairs_have_no_published_score_for_an_unreadable_reply():
    with raises_user_error("no published code", field="reward_options.unifiedreward_pair.unparsed"):
        UnifiedRewardPair(url="http://host", model="m", unparsed="published")
