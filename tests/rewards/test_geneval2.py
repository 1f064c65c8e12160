"""GenEval 2's soft scores equal an independent computation on a small Qwen3-VL.

The tokenizer has one token per character, so "Yes" and "yes" count as Y and y, and the variants
that begin with a space count as a space each.
"""

import json
import math

import pytest
import torch
from scipy.stats import gmean
from small_vlm import build_image_processor, build_tokenizer, random_image, save
from transformers import Qwen3VLForConditionalGeneration
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.scorers.geneval2 import GenEval2, answer_variants

ROW = {
    "vqa_list": [["How many cows are in the image?", "three"], ["Are the cows plastic?", "Yes"]],
    "skills": ["count", "attribute"],
}
LONGER = {
    "vqa_list": [
        ["Are there any cows in the image?", "Yes"],
        ["How many pigs are in the whole image?", "ten"],
        ["Is it?", "Yes"],
    ],
    "skills": ["object", "count", "object"],
}
IMAGES = [random_image(0, 32, 48), random_image(1, 48, 16)]
VARIANTS = {"Yes": ["Yes", "yes", " yes", " Yes"]}
VARIANTS["three"] = ["three", "Three", " three", " Three", "3", " 3"]
VARIANTS["ten"] = ["ten", "Ten", " ten", " Ten", "10", " 10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("qwen3_vl")))


@pytest.fixture(scope="module")
def scorer(folder):
    return GenEval2(model=folder, dtype="float32", batch_size=1)


def soft_scores(folder, image, row):
    """Follow facebookresearch/GenEval2:evaluation.py:73-147 with `generate`, one at a time."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    tokenizer, processor = build_tokenizer(), build_image_processor()
    soft = []
    for question, answer in row["vqa_list"]:
        pixels = processor(images=[image], return_tensors="pt")
        count = int(pixels["image_grid_thw"].prod()) // 4
        chat = f"<|im_start|><|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
        chat += f"{question} Answer in one word.<|im_end|><|im_start|>"
        ids = tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            **pixels,
            max_new_tokens=1,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        probabilities = out.scores[0][0].softmax(-1)
        firsts = [tokenizer.encode(variant)[0] for variant in VARIANTS[answer]]
        soft.append(sum(probabilities[token].item() for token in firsts))
    return soft


def test_scores_are_the_means_of_the_answers_probabilities(folder, scorer):
    scores, extras = scorer(IMAGES, ["", ""], [ROW, LONGER])
    for number, row in enumerate((ROW, LONGER)):
        soft = soft_scores(folder, IMAGES[number], row)
        assert scores[number] == pytest.approx(gmean(soft), abs=1e-6)
        assert extras["gm"][number] == scores[number]
        assert extras["am"][number] == pytest.approx(sum(soft) / len(soft), abs=1e-6)
        assert 0.01 < extras["gm"][number] < extras["am"][number]
    assert extras["object"][1] == pytest.approx((soft[0] + soft[2]) / 2, abs=1e-6)
    assert extras["count"][1] == pytest.approx(soft[1], abs=1e-6)
    assert math.isnan(extras["object"][0])
    assert math.isnan(extras["verb"][1])


def test_batches_and_padding_do_not_change_scores(folder, scorer):
    alone = scorer(IMAGES, ["", ""], [ROW, LONGER])
    batched = GenEval2(model=folder, dtype="float32", batch_size=16, mean="arithmetic")
    scores, extras = batched(IMAGES, ["", ""], [ROW, LONGER])
    assert scores == extras["am"] == pytest.approx(alone[1]["am"], abs=1e-5)
    assert extras["gm"] == pytest.approx(alone[0], abs=1e-5)


def test_scores_depend_on_the_preprocessing(folder, scorer, tmp_path):
    wrong = save(tmp_path / "wrong")
    config = json.loads((wrong / "preprocessor_config.json").read_text())
    config["image_mean"] = [0.48, 0.46, 0.41]
    (wrong / "preprocessor_config.json").write_text(json.dumps(config))
    other = GenEval2(model=str(wrong), dtype="float32")
    right, _ = scorer(IMAGES[:1], [""], [ROW])
    assert abs(other(IMAGES[:1], [""], [ROW])[0][0] - right[0]) > 1e-4


@pytest.mark.parametrize(("quantize", "tolerance"), [("fp8", 0.05), ("nf4", 0.3)])
def test_a_quantized_judge_gives_similar_scores(folder, scorer, quantize, tolerance):
    options = {"model": folder, "dtype": "float32", "quantize": quantize, "offload": True}
    quantized = GenEval2(**options)
    layer = quantized.network.model.language_model.layers[0].self_attn.q_proj
    assert layer.low.element_size() == 1
    assert layer.weight.numel() == 0
    full, low = (each(IMAGES, ["", ""], [ROW, LONGER])[0] for each in (scorer, quantized))
    assert full != low
    assert low == pytest.approx(full, rel=tolerance)


def test_the_variants_of_numbers_are_those_of_the_authors():
    for answer in ("three", "ten"):
        assert list(answer_variants("How many cows?", answer)) == VARIANTS[answer]
    assert answer_variants("How many?", "many")[-2:] == ("other", " other")
    assert list(answer_variants("Are there many?", "Yes")) == VARIANTS["Yes"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"vqa_list": "Is it?"}, "must be a list of [question, answer]"),
        ({"vqa_list": [["Is it?"]]}, "must be a list of [question, answer]"),
        ({"vqa_list": [["<|im_end|>?", "Yes"]]}, "special token <|im_end|>"),
        ({**ROW, "skills": ["count"]}, "one skill per question"),
        ({**ROW, "skills": ["count", "beauty"]}, "'beauty', not one of object"),
    ],
)
def test_invalid_questions_are_rejected(scorer, row, reason):
    assert reason in scorer.invalid_row("a cow", row)
    [value], _ = scorer(IMAGES[:1], [""], [row])
    assert isinstance(value, Failed)
    assert reason in value.reason


def test_prompts_without_questions_have_no_score(scorer):
    assert "no vqa_list" in scorer.skip_reason("a cow", {})
    scores, extras = scorer(IMAGES, ["", ""], [{}, ROW])
    assert isinstance(scores[0], NotApplicable)
    assert math.isnan(extras["am"][0])
    assert scores[1] > 0
    assert scorer([], [], []) == ([], {name: [] for name in extras})


def test_invalid_options_and_models_are_rejected(folder, tmp_path):
    for option, rule in (("mean", "geometric, arithmetic"), ("quantize", "none, fp8, nf4")):
        with raises_user_error(rule, field=option, value="int4"):
            GenEval2(model=folder, **{option: "int4"})
    other = save(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    with raises_user_error("is a qwen2_5_vl model", field="model"):
        GenEval2(model=str(other))
    config = save(tmp_path / "plain") / "chat_template.jinja"
    config.write_text("{{ 1 / 0 }}")
    with raises_user_error("ZeroDivisionError", field="model"):
        GenEval2(model=str(tmp_path / "plain"))
    config.unlink()
    with raises_user_error("no chat template", field="model"):
        GenEval2(model=str(tmp_path / "plain"))


def test_the_reward_is_built_by_name(folder):
    options = {"geneval2": {"model": folder, "dtype": "float32"}}
    result = build_reward({"geneval2": 1.0}, options=options)(IMAGES[:1], ["a cow"], [ROW])
    assert 0 < result["avg"][0] < 1
    assert torch.isfinite(torch.tensor(result["geneval2/count"])).all()
