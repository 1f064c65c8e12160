"""Image rewards of responses drawn by a diffusion model, and rewards that guard against drift."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import small_reward_model
import torch
from diffusers import StableDiffusion3Pipeline
from ml_collections import ConfigDict
from runner import ROOT
from transformers import AutoModel, AutoTokenizer
from user_errors import raises_user_error

from flow_grpo.rewards import WeightedReward, build_scorers, guard_scorers
from flow_grpo.rewards.draw_settings import DrawSettings
from flow_grpo.rewards.protocol import as_scorer, score
from flow_grpo.rewards.text.prompt_guards import PromptLength, PromptSimilarity
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.presets import get_config

TINY = str(ROOT / "assets/tiny-sd3")
SETTINGS = DrawSettings(
    model=TINY,
    height=32,
    width=96,
    num_steps=2,
    guidance_scale=1.0,
    max_sequence_length=8,
    batch_size=3,
)
SIGNS = [f'a sign that says "{word}"' for word in ("DOG", "BEE", "CAT", "OWL")]


def brightness(images, prompts, metadata):
    return [np.asarray(image).mean() / 255 for image in images]


def prompt_length(images, prompts, metadata):
    return [float(len(prompt)) for prompt in prompts]


CUSTOM = {name: f"{__name__}:{name}" for name in ("brightness", "prompt_length")}


def build(*names, draw=SETTINGS, **options):
    return build_scorers(names, custom=CUSTOM, draw=draw, **options)


@pytest.fixture(scope="module")
def drawn():
    """Return two drawn rewards that share a diffusion model."""
    return build("drawn:brightness", "drawn:prompt_length")


def values(scorer, responses, questions, metadata=None):
    return score(scorer, responses, questions, metadata or [{} for _ in responses]).values


def test_the_image_is_that_of_the_stock_pipeline(drawn):
    images = drawn["drawn:brightness"].images
    [image] = images.draw(["a sign"], ["request"])
    key = hashlib.sha256(b"0 0 request").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    pipeline = StableDiffusion3Pipeline.from_pretrained(TINY)
    shape = (
        pipeline.transformer.config.in_channels,
        32 // pipeline.vae_scale_factor,
        96 // pipeline.vae_scale_factor,
    )
    [expected] = pipeline(
        "a sign",
        height=32,
        width=96,
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=8,
        latents=torch.randn(1, *shape, generator=generator),
    ).images
    assert np.abs(np.asarray(image, int) - np.asarray(expected, int)).max() <= 1


def test_scores_depend_neither_on_the_batch_nor_on_its_order(drawn):
    scorer = drawn["drawn:brightness"]
    questions = [f"request {i}" for i in range(4)]
    together = values(scorer, SIGNS, questions)
    assert len(set(together)) == 4
    alone = build("drawn:brightness")["drawn:brightness"]
    one_by_one = [values(alone, [s], [q])[0] for s, q in zip(SIGNS, questions, strict=True)][::-1]
    assert one_by_one[::-1] == pytest.approx(together, abs=1e-3)  # pixels are rounded to 8 bits


def test_responses_to_a_question_share_their_noise_and_equal_ones_their_image(drawn):
    images = drawn["drawn:brightness"].images
    assert images is drawn["drawn:prompt_length"].images
    first, again, other = images.draw([SIGNS[0]] * 3, ["same", "same", "other"])
    assert first is again
    assert first is not other
    assert np.abs(np.asarray(first, int) - np.asarray(other, int)).max() > 10


def test_images_are_scored_against_the_question_or_a_column(drawn):
    responses = ["<think>short</think><answer>a much longer prompt</answer>", ""]
    scorer = drawn["drawn:prompt_length"]
    result = score(scorer, responses, ["four", "request"], [{}, {}])
    assert result.values == [4.0, 7.0]
    assert result.extras == {"empty": [0.0, 1.0]}
    keyed = build("drawn:prompt_length", draw=replace(SETTINGS, prompt_key="prompt"))
    rows = [{"prompt": "123"}, {"prompt": "12345"}]
    assert values(keyed["drawn:prompt_length"], responses, ["a", "b"], rows) == [3.0, 5.0]
    with raises_user_error("prompt_key", "'prompt'", field="train.jsonl, line 1"):
        reward = WeightedReward(guard_scorers(keyed), {"drawn:prompt_length": 1.0})
        reward.check(["a"], [{}], ["train.jsonl, line 1"])


def test_a_model_on_the_cpu_draws_the_same_after_its_memory_was_released(drawn):
    offloaded = build("drawn:brightness", draw=replace(SETTINGS, offload=True))["drawn:brightness"]
    expected = values(drawn["drawn:brightness"], SIGNS[:2], ["a", "b"])
    for _ in range(2):
        assert values(offloaded, SIGNS[:2], ["a", "b"]) == expected
        offloaded.release_memory()
        offloaded.images._recent.clear()  # draw them again


def test_equal_responses_are_scored_once(drawn):
    rows = [{"answer_tokens": i, "include": i // 3} for i in range(4)]
    calls = []
    scorer = drawn["drawn:prompt_length"]
    inner, scorer.scorer = scorer.scorer, as_scorer(lambda *batch: calls.append(batch) or [1.0] * 3)
    try:
        found = score(scorer, ["a", "b", " a ", "a"], ["same"] * 4, rows)
    finally:
        scorer.scorer = inner
    assert found.values == [1.0] * 4
    assert [row["include"] for row in calls[0][2]] == [0, 0, 1]  # the last has other metadata


def test_several_images_are_averaged(drawn):
    two = build("drawn:brightness", draw=replace(SETTINGS, images=2))["drawn:brightness"]
    found = [np.asarray(image).mean() / 255 for image in two.images.draw(SIGNS[:1], ["a"])]
    assert len(found) == 2
    assert found[0] != found[1]
    assert values(two, SIGNS[:1], ["a"]) == pytest.approx([sum(found) / 2])
    assert values(drawn["drawn:brightness"], SIGNS[:1], ["a"]) == pytest.approx(found[:1], abs=1e-3)


def test_an_image_that_is_not_finite_has_no_score(drawn):
    """Replaced with a black image, it might get a good score."""
    scorer = drawn["drawn:brightness"]
    renderer = scorer.images._renderer
    decode = renderer.adapter.decode
    renderer.adapter.decode = lambda latents: decode(latents).index_fill(
        0, torch.tensor([1]), torch.nan
    )
    try:
        found = values(scorer, ["new", "newer"], ["one", "two"])
    finally:
        renderer.adapter.decode = decode
    assert np.isfinite(found).tolist() == [True, False]


def test_options_of_a_reward_override_the_section():
    options = {"drawn:brightness": {"images": 3, "model": TINY}}
    small = replace(SETTINGS, model="missing/model")
    scorer = build("drawn:brightness", draw=small, options=options)["drawn:brightness"]
    assert len(scorer.images.draw(["a"], ["b"])) == 3


@pytest.mark.parametrize(
    ("names", "changes", "field", "shown"),
    [
        (["drawn:brightness"], {"model": ""}, "draw.model", "drawn:brightness"),
        (["drawn:brightness"], {"model": "/missing/folder"}, "draw.model", "/missing/folder"),
        (["drawn:brightness"], {"lora": "/missing/lora"}, "draw.lora", "/missing/lora"),
        (["drawn:brightness"], {"height": 33}, "draw.height", "33"),
        (["drawn:brightness"], {"device": "cuda:99"}, "draw.device", "cuda:99"),
        (["drawn:oct"], {}, "reward 'drawn:oct'", "did you mean drawn:ocr?"),
        (["drawn:math_answer"], {}, "reward 'drawn:math_answer'", "math_answer"),
        (["drawn:vlm_pairwise"], {}, "reward 'drawn:vlm_pairwise'", "group"),
        (["drawn:video_motion"], {}, "reward 'drawn:video_motion'", "videos"),
    ],
)
def test_invalid_rewards_and_settings_are_rejected(names, changes, field, shown):
    options = {"vlm_pairwise": {"model": "judge", "url": "http://localhost:9/v1"}}
    with raises_user_error(shown, field=field):
        build(*names, draw=replace(SETTINGS, **changes), options=options)


def test_unknown_options_are_rejected():
    with raises_user_error("num_steps", field="reward_options.drawn:brightness.num_step"):
        build("drawn:brightness", options={"drawn:brightness": {"num_step": 2}})
    with raises_user_error(field="reward_options.drawn:brightness.num_steps", value="2"):
        build("drawn:brightness", options={"drawn:brightness": {"num_steps": "2"}})


def test_an_image_reward_without_its_metadata_names_the_question():
    scorers = build("drawn:geneval", options={"geneval": {"detector": "shapes"}})
    reward = WeightedReward(guard_scorers(scorers), {"drawn:geneval": 1.0})
    with raises_user_error("include", "drawn:geneval", value="two red circles"):
        reward.check(["two red circles"], [{}])


@pytest.mark.parametrize(
    ("changes", "field", "shown"),
    [
        ({"draw": {"model": ""}}, "draw.model", "drawn:ocr"),
        ({"reward_fn": {"answer_format": 1.0}}, "draw.model", "add one"),
        ({"reward_servers": {"drawn:ocr": "http://localhost:9"}}, "draw.model", "server"),
        ({"reward_fn": {"drawn:nothing": 1.0}}, "reward 'drawn:nothing'", "drawn:nothing"),
        ({"reward_fn": {"ocr": 1.0}}, "reward_fn.ocr", "drawn:ocr"),
        ({"draw": {"num_steps": 0}}, "draw.num_steps", "0"),
    ],
)
def test_a_config_is_checked_before_anything_is_loaded(changes, field, shown):
    config = get_config("tiny_enhancer")
    for name, value in changes.items():
        if name == "draw":
            config.draw.update(value)
        else:
            config[name] = ConfigDict(value)
    with raises_user_error(shown, field=field):
        check_config(config)


def test_length_is_penalised_beyond_the_limit():
    scorer = PromptLength(limit=4, buffer=2)
    texts = ["one two", "a b c d", "a b c d e", "a, b; c d e f", "w " * 100]
    assert values(scorer, texts, ["q"] * 5) == [0.0, 0.0, -0.5, -1.0, -1.0]
    for option in ("limit", "buffer"):
        with raises_user_error(field=option, value=0):
            PromptLength(**{option: 0})


def test_similarity_is_the_fraction_of_words_that_are_left():
    texts = ["a DOG, crisp", "<answer>sign dog</answer> x", "", "sign sign sign dog crisp"]
    expected = [2 / 3, 2 / 3, 0.0, 1.0]
    assert values(PromptSimilarity(), texts, ["sign DOG crisp"] * 4) == pytest.approx(expected)
    half = PromptSimilarity(enough=0.5)
    assert values(half, texts, ["sign DOG crisp"] * 4) == [1.0, 1.0, 0.0, 1.0]
    with raises_user_error(field="enough", value=0):
        PromptSimilarity(enough=0)


def test_similarity_by_an_encoder_is_the_cosine_of_mean_embeddings(tmp_path):
    folder = str(small_reward_model.save(tmp_path, pairs=True))
    questions, prompts = ["what is 2 + 3 ?", "5 is", "5"], ["5 is 2", "5 is", ""]
    found = values(PromptSimilarity(model=folder, batch_size=2), prompts, questions)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)

    def embed(text):
        with torch.no_grad():
            hidden = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return torch.nn.functional.normalize(hidden[0].mean(0), dim=0)

    expected = max(0.0, float(embed(prompts[0]) @ embed(questions[0])))
    assert found == pytest.approx([expected, 1.0, 0.0], abs=1e-5)
    assert 0 < expected < 0.999
