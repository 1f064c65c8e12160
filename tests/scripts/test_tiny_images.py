"""Training images and prompts of the small text-to-image model."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from tiny.images import (
    CLEAN,
    HEIGHT,
    WIDTH,
    Degradation,
    Painter,
    draw,
    encode_scene,
    encode_word,
    to_pil,
)
from tiny.pool import PromptPool, byt5_ids, sign_words
from tiny.prompts import (
    COLOURS,
    KEYWORDS,
    Scene,
    parse_scene,
    parse_sign,
    scenes_by_kind,
    sign_prompt,
)
from tiny.words import all_words, split_words
from transformers import ByT5Tokenizer
from untrained.small.components import clip_tokenizer

from flow_grpo.rewards.scorers.geneval.rules import RGB
from flow_grpo.rewards.scorers.ocr import OcrScorer

ROOT = Path(__file__).parents[2]
SPOILED = Degradation(blur_share=0.3, low_contrast_share=0.2, wrong_share=0.4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_scenes() -> list[Scene]:
    return [scene for kind in scenes_by_kind() for scene in kind]


def paint_scenes(scenes: list[Scene], degradation: Degradation) -> torch.Tensor:
    numbers = torch.tensor([encode_scene(scene) for scene in scenes])
    return Painter().scenes(numbers, degradation, generator()).images


def colours_seen(image: torch.Tensor) -> list[str]:
    """Return the colours of an image's shapes, left to right, from its middle row."""
    row = image[:, HEIGHT // 2].T  # (96, 3)
    drawn = ((row - row[0]).abs().amax(1) > 0.2).tolist()
    starts = [x for x in range(1, WIDTH) if drawn[x] and not drawn[x - 1]]
    ends = [x for x in range(1, WIDTH) if drawn[x - 1] and not drawn[x]]
    palette = torch.tensor([RGB[name] for name in COLOURS])
    middles = [row[(a + b) // 2] for a, b in zip(starts, ends, strict=True)]
    return [COLOURS[(palette - rgb).abs().sum(1).argmin()] for rgb in middles]


def colours_asked(scene: Scene) -> list[str]:
    return [group.colour for group in scene.left_to_right for _ in range(group.count)]


def load_make_ocr():
    spec = importlib.util.spec_from_file_location("make_ocr", ROOT / "scripts" / "make_ocr.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("prompt", ['a sign that says "WORD"', "two red circles"])
def test_a_seed_determines_the_image(prompt):
    first, again, other = (draw(prompt, degradation=SPOILED, seed=seed) for seed in (1, 1, 2))
    assert first.size == (WIDTH, HEIGHT)
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_an_unknown_prompt_is_rejected():
    with pytest.raises(ValueError, match="five red circles"):
        draw("five red circles")


def test_pixels_stay_in_range():
    letters = torch.tensor([encode_word(word) for word in all_words()])
    signs = Painter().signs(letters, SPOILED, generator()).images
    scenes = paint_scenes(all_scenes(), SPOILED)
    for images in (signs, scenes):
        assert images.shape[1:] == (3, HEIGHT, WIDTH)
        assert images.min() >= 0
        assert images.max() <= 1 + 1e-5


def test_every_prompt_parses_back():
    for word in all_words():
        assert parse_sign(sign_prompt(word)) == word
        assert parse_scene(sign_prompt(word)) is None
    for scene in all_scenes():
        assert parse_scene(str(scene)) == scene
        assert parse_sign(str(scene)) is None


def test_the_grammar_has_one_to_four_shapes_and_no_duplicates():
    assert [len(kind) for kind in scenes_by_kind()] == [72, 612, 1836]
    prompts = [str(scene) for scene in all_scenes()]
    assert len(set(prompts)) == len(prompts)
    totals = {sum(group.count for group in scene.left_to_right) for scene in all_scenes()}
    assert totals == {1, 2, 3, 4}
    assert {"two red circles", "a green square left of a yellow triangle"} <= set(prompts)


def test_every_prompt_fits_in_sixteen_tokens():
    tokenizer = clip_tokenizer(KEYWORDS, max_length=16)
    prompts = [sign_prompt("WWWWWW"), *map(str, all_scenes())]
    lengths = [len(ids) for ids in tokenizer(prompts, truncation=False).input_ids]
    assert max(lengths) <= 16
    assert max(lengths[1:]) <= 10  # every word of a scene is one token


@pytest.mark.parametrize("length", [8, 256])
def test_t5_ids_match_the_tokenizer(length):
    tokenizer = ByT5Tokenizer()
    for prompt in ["", sign_prompt("CAT"), "three green circles and an orange square"]:
        wanted = tokenizer(prompt, padding="max_length", max_length=length, truncation=True)
        assert byt5_ids(prompt, length) == wanted.input_ids


def test_clean_scenes_match_their_prompts():
    scenes = all_scenes()
    for scene, image in zip(scenes, paint_scenes(scenes, CLEAN), strict=True):
        assert colours_seen(image) == colours_asked(scene)


def test_wrong_scenes_have_a_wrong_count_or_colour():
    scenes = all_scenes()
    images = paint_scenes(scenes, Degradation(wrong_share=1.0))
    miscounted = 0
    for scene, image in zip(scenes, images, strict=True):
        seen, asked = colours_seen(image), colours_asked(scene)
        assert seen != asked
        assert 1 <= len(seen) <= 4
        miscounted += len(seen) != len(asked)
    assert 0.3 < miscounted / len(scenes) < 0.6


def test_images_are_degraded_in_the_configured_fractions():
    letters = torch.tensor([encode_word("WORD")]).expand(4000, -1)
    scenes = torch.tensor([encode_scene(parse_scene("two red circles"))]).expand(4000, -1)
    signs = Painter().signs(letters, SPOILED, generator())
    assert signs.degraded.float().mean().item() == pytest.approx(0.5, abs=0.03)
    scenes = Painter().scenes(scenes, SPOILED, generator())
    assert scenes.degraded.float().mean().item() == pytest.approx(0.4, abs=0.03)
    assert not Painter().signs(letters, CLEAN, generator()).degraded.any()


def test_shares_above_one_are_rejected():
    with pytest.raises(ValueError, match=r"blur 0\.7, low contrast 0\.6"):
        Degradation(blur_share=0.7, low_contrast_share=0.6)


def test_a_batch_pairs_images_with_their_prompts():
    tokenizer = clip_tokenizer(KEYWORDS, max_length=16)
    pool = PromptPool(
        tokenizer,
        t5_lengths=(64,),
        num_words=50,
        degradation=CLEAN,
        device=torch.device("cpu"),
        seed=0,
    )
    batch = pool.batch(64, 0.5, 64, generator())
    prompts = [bytes(i - 3 for i in ids if i > 1).decode() for ids in batch.t5_ids.tolist()]
    again = tokenizer(prompts, padding="max_length", max_length=16, return_tensors="pt")
    assert torch.equal(batch.clip_ids, again.input_ids)
    assert "" in prompts  # dropped for guidance
    scenes = [(parse_scene(prompt), i) for i, prompt in enumerate(prompts) if i >= 32 and prompt]
    assert len(scenes) > 20
    for scene, i in scenes:
        assert colours_seen(batch.images[i]) == colours_asked(scene)
    assert all(parse_sign(prompt) for prompt in prompts[:32] if prompt)


def test_training_words_exclude_test_words():
    train, test = split_words()
    assert len(test) == 96
    assert len(train) >= 400
    assert not set(train) & set(test)
    assert not set(sign_words(20_000, seed=0)) & set(test)


def test_ocr_reads_clean_signs_but_not_degraded_ones():
    words = random.Random(0).sample(all_words(), 24)
    prompts = [sign_prompt(word) for word in words]
    letters = torch.tensor([encode_word(word) for word in words])
    blurred = Degradation(blur_share=1.0, low_contrast_share=0.0)
    with OcrScorer(workers=1) as scorer:
        clean, unclear = (
            scorer(to_pil(Painter().signs(letters, kind, generator()).images), prompts)
            for kind in (CLEAN, blurred)
        )
    assert clean == [1.0] * 24
    assert sum(unclear) / 24 < 0.8


def test_the_script_reproduces_the_shipped_words():
    for name, prompts in zip(("train", "test"), load_make_ocr().tiny_prompts(0), strict=True):
        assert (ROOT / "dataset" / "ocr" / f"{name}.txt").read_text().splitlines() == prompts


def test_full_size_prompts_are_distinct_and_split_by_text():
    make_ocr = load_make_ocr()
    train, test = make_ocr.full_prompts(0)
    assert (train, test) == make_ocr.full_prompts(0)
    assert train != make_ocr.full_prompts(1)[0]
    assert (len(train), len(test)) == (10_000, 1_000)
    texts = [prompt.split('"')[1] for prompt in train + test]
    assert len({text.lower().replace(" ", "") for text in texts}) == 11_000
    assert {len(text.split()) for text in texts} == {1, 2, 3, 4, 5}
    assert all(prompt.count('"') == 2 for prompt in train + test)
