"""The reward `clap` equals an independent computation on a small random model."""

import string
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    ClapAudioConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapTextConfig,
    RobertaTokenizer,
)
from user_errors import raises_user_error

from flow_grpo.audio import Audio
from flow_grpo.rewards import build_reward
from flow_grpo.rewards.protocol import AUDIO
from flow_grpo.rewards.scorers.clap import Clap

RATE = 48_000
PROMPTS = ["two beeps", "a dog barks", "rain"]


def save_clap(folder: Path, *, fusion: bool = False) -> Path:
    """Save a small random CLAP with the published sampling rate."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *string.printable, "\u0120"])}
    tokenizer = RobertaTokenizer(vocab=vocabulary, merges=[])
    audio = ClapAudioConfig(
        spec_size=64,
        num_mel_bins=16,
        window_size=4,
        patch_embeds_hidden_size=8,
        depths=[1, 1],
        num_attention_heads=[1, 2],
        hidden_size=16,
        num_hidden_layers=2,
        projection_dim=12,
        enable_fusion=fusion,
    )
    text = ClapTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        projection_dim=12,
    )
    torch.manual_seed(0)
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=12)).eval()
    for weight in model.parameters():  # larger than at initialization, so that inputs matter
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ClapFeatureExtractor(feature_size=16, max_length_s=1, truncation="fusion").save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_clap(tmp_path_factory.mktemp("clap"))


def noise(seconds: float, seed: int, rate: int = RATE) -> Audio:
    wave = 0.1 * np.random.default_rng(seed).standard_normal((2, round(seconds * rate)))
    return Audio(wave.astype(np.float32), rate)


def test_the_score_is_the_cosine_of_sound_and_prompt(folder):
    """Compare with the model's own forward pass on each sound alone."""
    sounds = [noise(0.4, 0), noise(1.0, 1), noise(1.7, 2)]
    reward = build_reward({"clap": 1.0}, options={"clap": {"model": str(folder), "batch_size": 2}})
    videos = torch.zeros(3, 2, 3, 8, 8)
    found = reward.submit(videos, PROMPTS, None, sounds).result()["clap"]
    model = ClapModel.from_pretrained(folder).eval()
    extractor = ClapFeatureExtractor.from_pretrained(folder)
    tokenizer = RobertaTokenizer.from_pretrained(folder)
    expected = []
    for sound, prompt in zip(sounds, PROMPTS, strict=True):
        left, right = sound.waveform[:, :RATE]  # the first second, without a random crop
        features = extractor(
            (left + right) / 2, sampling_rate=RATE, truncation="rand_trunc", return_tensors="pt"
        )
        with torch.no_grad():
            out = model(**tokenizer(prompt, return_tensors="pt"), **features)
        expected.append(float(out.audio_embeds[0] @ out.text_embeds[0]))
    assert found == pytest.approx(expected, abs=1e-5)
    assert np.ptp(found) > 1e-3


def test_the_score_does_not_depend_on_the_rate_or_the_length_of_other_prompts(folder):
    clap = Clap(model=str(folder))
    sound = noise(0.5, 3, RATE // 2)
    [alone] = clap([], ["rain"], [{AUDIO: sound}])
    rows = [{AUDIO: sound}, {AUDIO: sound.resampled(RATE)}]
    both = clap([], ["rain", "a long text " * 9], rows)
    assert both[0] == pytest.approx(alone, abs=1e-5)
    assert clap([], ["rain"], rows[1:]) == pytest.approx([alone], abs=1e-5)


def test_models_that_are_no_clap_without_fusion_are_rejected(tmp_path, tiny_sd3):
    fused = save_clap(tmp_path / "fused", fusion=True)
    with raises_user_error("random", field="model", value=str(fused)):
        Clap(model=str(fused))
    with raises_user_error("CLAP", field="model"):
        Clap(model=str(tiny_sd3 / "text_encoder"))
