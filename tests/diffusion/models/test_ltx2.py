"""Sound of LTX-2: equality with the stock pipeline, joint log-probabilities, files and rewards."""

import copy
import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline
from families import FAMILIES, TOKENS, at_size, run_fields, save_prompts, save_small_pipeline
from sessions import short_config
from train import train
from user_errors import raises_user_error

from flow_grpo.diffusion.models import ModelAdapter, Size, load_adapter
from flow_grpo.diffusion.models.ltx2 import LTX2Adapter
from flow_grpo.diffusion.rollout import Denoiser, Dynamics
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.report.page import build_report_data, write_report

[FAMILY] = (family for family in FAMILIES if family.name == "ltx2")
[IMAGES] = (family for family in FAMILIES if family.name == "sd3")
SIZE = Size(64, 96, 17)  # LTX-2 pads by reflection, which needs two latent rows
STEPS, SCALE = 3, 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_pipeline(FAMILY, tmp_path_factory.mktemp("ltx2") / "model")


@pytest.fixture(scope="module")
def adapter(folder) -> ModelAdapter:
    return at_size(load_adapter(str(folder), max_sequence_length=TOKENS), SIZE)


def packed_noise(adapter: ModelAdapter, size: Size) -> torch.Tensor:
    """Draw noise as the pipeline does: video, then audio."""
    generator = torch.Generator().manual_seed(7)
    config, length = adapter.pipeline.audio_vae.config, adapter.num_audio_tokens(size.frames)
    channels = adapter.transformer.config.in_channels
    video = torch.randn(1, channels, *adapter.video_shape(size), generator=generator)
    shape = 1, config.latent_channels, length, config.mel_bins // 4
    audio = torch.randn(shape, generator=generator)
    return torch.cat([video.flatten(2).transpose(1, 2), audio.transpose(1, 2).flatten(2)], 1)


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_video_and_sound_equal_those_of_the_pipeline(version, tmp_path):
    folder = save_small_pipeline(FAMILY, tmp_path / "model", version=version)
    adapter = at_size(load_adapter(str(folder), max_sequence_length=TOKENS), SIZE)
    stock = LTX2Pipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    height, width, frames = SIZE
    expected = stock(
        "rain on a tin roof",
        "blurry",
        height,
        width,
        frames,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        generator=torch.Generator().manual_seed(7),
        max_sequence_length=TOKENS,
        output_type="pt",
        **FAMILY.options,
    )
    dynamics = Dynamics(adapter.schedule(STEPS, *SIZE), guidance_scale=SCALE)
    given = adapter.encode(["rain on a tin roof"], ["blurry"])
    latents = (
        Denoiser(adapter, adapter.transformer, dynamics)
        .sample(packed_noise(adapter, SIZE), given)
        .final
    )
    [sound] = adapter.decode_audio(latents)
    close = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(adapter.decode(latents), expected.frames, **close)
    torch.testing.assert_close(torch.from_numpy(sound.waveform), expected.audio[0], **close)
    assert sound.sample_rate == {"2.0": 24_000, "2.3": 48_000}[version]
    assert sound.seconds == pytest.approx(frames / 24, abs=0.05)
    assert sound.waveform.std() > 0.01


def test_the_log_probability_is_the_mean_over_both_modalities(adapter):
    dynamics = Dynamics(adapter.schedule(STEPS, *SIZE), kind="cps", noise_level=0.8)
    denoiser = Denoiser(adapter, adapter.transformer, dynamics)
    given, noise = adapter.encode(["a"], None), packed_noise(adapter, SIZE)
    sampled = denoiser.sample(
        noise, given, steps=range(1), generators=[torch.Generator()], keep_means=True
    )
    error = (sampled.latents[:, 1] - sampled.means[:, 0]).square()
    video, audio = adapter.unpack(error)
    counts = video.shape[1], audio.shape[1]
    assert counts == (3 * 2 * 3, 18)  # 17 frames at 24 fps have 17.7 audio latents
    means = np.array([float(video.mean()), float(audio.mean())])
    assert min(means) > 0.01
    expected = -np.average(means, weights=counts)
    assert float(sampled.log_probs) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory) -> Session:
    """A run with a reward of the images and one of the sound."""
    root = tmp_path_factory.mktemp("ltx2_run")
    fields = run_fields(FAMILY, folder, save_prompts(root / "dataset", 0))
    rewards = {"jpeg_compressibility": 1.0, "audio_loudness": 1.0, "audio_silence": -0.5}
    session = build_session(short_config(root, "run", **{**fields, "reward_fn": rewards}))
    try:
        train(session)
    finally:
        session.close()
    return session


def test_both_rewards_are_trained_on_policy(trained):
    before, epoch = map(json.loads, (trained.folder / "metrics.jsonl").open())
    assert epoch["train/first_update_ratio_dev"] == 0
    assert epoch["train/ratio_mean"] != 1  # of the second update
    for name in ("jpeg_compressibility", "audio_loudness"):
        assert epoch[f"reward/{name}"] is not None
        assert epoch[f"eval/{name}"] != before[f"eval/{name}"]


def test_sound_is_saved_next_to_the_video_and_shown_in_the_report(trained, tmp_path):
    for split in ("train", "eval"):
        folder = trained.folder / f"samples/{split}-00001"
        rows = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        assert rows
        for row in rows:
            assert row["audio"] == Path(row["file"]).with_suffix(".wav").name
            with wave.open(str(folder / row["audio"])) as sound:
                assert (sound.getnchannels(), sound.getsampwidth()) == (2, 2)
                assert sound.getframerate() == 48_000
                assert sound.getnframes() == 48_000 * (4 * 9 - 3) // 100
                pcm = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
            level = 20 * np.log10(np.sqrt(np.mean((pcm / 32767) ** 2)))
            assert row["audio_loudness/db"] == pytest.approx(level, abs=0.1)
            assert row["audio_loudness"] == pytest.approx((level + 60) / 54, abs=0.01)
    [run] = build_report_data([trained.folder])["runs"]
    for sample in run["eval"]["samples"][-1]:
        assert sample["audio"].startswith("data:audio/wav;base64,")
    write_report([trained.folder], tmp_path / "report.html")
    assert "data:audio/wav" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("family", "fields", "shown"),
    [(FAMILY, {"frames": 1}, "frames=1"), (IMAGES, {}, "model")],
    ids=["image", "no sound"],
)
def test_rewards_of_sound_are_rejected_without_sound(tmp_path, family, fields, shown):
    folder = save_small_pipeline(family, tmp_path / "model")
    fields = {**run_fields(family, folder, save_prompts(tmp_path / "data", 0)), **fields}
    fields["reward_fn"] = {"jpeg_compressibility": 1.0, "audio_silence": 1.0}
    with raises_user_error(shown, "sound", field="reward 'audio_silence'"):
        build_session(short_config(tmp_path / "logs", "run", **fields))
    assert not (tmp_path / "logs").exists()


def test_prompts_of_other_lengths_than_the_learned_tokens_divide_are_rejected(folder):
    with raises_user_error("multiple of 8", field="max_sequence_length", value=50):
        load_adapter(str(folder), max_sequence_length=50)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("transformer", "audio_sampling_rate"),
        ("transformer", "audio_hop_length"),
        ("vocoder", "input_sampling_rate"),
    ],
)
def test_components_for_different_audio_rates_are_rejected(adapter, part, field):
    pipeline = copy.copy(adapter.pipeline)
    component = copy.copy(getattr(pipeline, part))
    component.register_to_config(**{field: 8000})
    setattr(pipeline, part, component)
    with raises_user_error("audio VAE", field=field, value=8000):
        LTX2Adapter(pipeline, max_sequence_length=TOKENS)


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_connectors_that_keep_padding_are_rejected(adapter, stream):
    pipeline = copy.copy(adapter.pipeline)
    pipeline.connectors = copy.copy(pipeline.connectors)
    changed = {f"{stream}_connector_num_learnable_registers": None}
    pipeline.connectors.register_to_config(**changed)
    with raises_user_error("without learned tokens", field="pretrained.model"):
        LTX2Adapter(pipeline, max_sequence_length=TOKENS)


def test_cuda_graphs_which_return_one_tensor_are_not_used(adapter):
    adapter.apply_optimizations(fold=False, compiled=False, graphs=True)
    assert not adapter.uses_cuda_graphs


def test_latents_of_another_size_are_rejected(adapter):
    with pytest.raises(ValueError, match="tokens are not of Size"):
        adapter.decode(torch.zeros(1, 12, 16))
