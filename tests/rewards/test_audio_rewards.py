"""Rewards of sound: formulas, missing and invalid sound, and WAV files."""

import math

import numpy as np
import pytest
import torch
from user_errors import raises_user_error

from flow_grpo.audio import Audio, noise_audio
from flow_grpo.rewards import WeightedReward, build_reward
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.protocol import AUDIO, Scorer
from flow_grpo.rewards.workers.guard import GuardedScorer
from reward_server.isolated import build_scorer

RATE = 8000


def tone(amplitude: float, seconds: float = 1.0, channels: int = 2) -> Audio:
    """Return a sine wave of whole periods."""
    time = np.arange(round(seconds * RATE)) / RATE
    wave = amplitude * np.sin(2 * math.pi * 500 * time)
    return Audio(np.tile(wave, (channels, 1)).astype(np.float32), RATE)


def score(names: dict[str, float], sounds: list[Audio] | None, count: int = 0) -> dict:
    reward = build_reward(names)
    count = count or len(sounds)
    videos = torch.zeros(count, 2, 3, 8, 8)
    return reward.submit(videos, ["a"] * count, None, sounds).result()


def test_loudness_is_the_level_between_minus_60_and_minus_6_db():
    sounds = [tone(1.0), tone(0.01), tone(1e-5), tone(0.0)]
    found = score({"audio_loudness": 1.0}, sounds)
    levels = [20 * math.log10(a / math.sqrt(2)) for a in (1.0, 0.01, 1e-5)]
    assert found["audio_loudness/db"] == pytest.approx([*levels, -200], abs=1e-3)
    assert found["audio_loudness"] == pytest.approx([1, (levels[1] + 60) / 54, 0, 0], abs=1e-4)


def test_silence_is_the_share_of_quiet_windows():
    loud, quiet = tone(0.5, 0.3).waveform, tone(0.001, 0.1).waveform
    sounds = [Audio(np.concatenate([loud, quiet], 1), RATE), tone(0.0), tone(0.5)]
    assert score({"audio_silence": 1.0}, sounds)["audio_silence"] == pytest.approx([0.25, 1, 0])


def jumping_square(jumps: list[int], frames: int = 24) -> torch.Tensor:
    """Return a video (1, F, 3, 32, 32) of a square that moves at each jump."""
    video = torch.zeros(1, frames, 3, 32, 32)
    for frame in range(frames):
        place = 8 * (sum(frame >= jump for jump in jumps) % 4)
        video[0, frame, :, 8:16, place : place + 8] = 1
    return video


def beeps(starts: list[int], rate: int = RATE) -> Audio:
    """Return a second of sound with beeps of 50 ms that start at these frames of 24 per second."""
    time = np.arange(rate) / rate
    wave = sum((time >= s / 24) & (time < s / 24 + 0.05) for s in starts) * np.sin(3000 * time)
    return Audio(wave[None].astype(np.float32), rate)


def test_synchrony_is_that_of_the_onsets_of_sound_and_motion():
    def synchrony(jumps: list[int], starts: list[int], **options) -> float:
        reward = build_reward({"audio_sync": 1.0}, options={"audio_sync": options})
        found = reward.submit(jumping_square(jumps), ["a"], None, [beeps(starts)]).result()
        return float(found["audio_sync"][0])

    assert synchrony([6, 15], [6, 15]) > 0.99
    assert synchrony([6, 15], [6]) == pytest.approx(math.sqrt(0.5), abs=0.01)
    # the kernel (1, 2, 1) / 4 with itself, one frame apart
    assert synchrony([6, 15], [7, 16]) == pytest.approx(4 / 6, abs=0.02)
    assert synchrony([6, 15], [10, 19]) == pytest.approx(0, abs=1e-3)
    assert synchrony([], [6]) == synchrony([6], []) == 0
    assert synchrony([6], [12]) == pytest.approx(0, abs=1e-3)
    assert synchrony([6], [12], fps=12) > 0.99
    with raises_user_error("above 0", field="fps", value=0):
        build_reward({"audio_sync": 1.0}, options={"audio_sync": {"fps": 0}})


@pytest.mark.parametrize("rate", [2 * RATE, RATE // 2])
def test_resampled_sound_has_the_same_frequencies_and_level(rate):
    time = np.arange(rate) / rate
    low = 0.5 * np.sin(2 * math.pi * 500 * time)
    found = tone(0.5).resampled(rate)
    assert found.sample_rate == rate
    np.testing.assert_allclose(found.waveform, np.tile(low, (2, 1)), rtol=0, atol=1e-6)
    high = np.sin(2 * math.pi * 3000 * np.arange(RATE) / RATE)[None].astype(np.float32)
    level = np.abs(Audio(high, RATE).resampled(rate).waveform).max()
    assert level == pytest.approx(1.0 if rate > RATE else 0.0, abs=0.01)


@pytest.mark.parametrize("broken", [np.nan, np.inf, None], ids=["nan", "inf", "empty"])
def test_invalid_sound_fails_and_does_not_affect_other_rewards(broken):
    wave = tone(0.5).waveform
    wave[0, 5] = np.nan if broken is None else broken
    sounds = [Audio(wave[:, :0] if broken is None else wave, RATE), tone(0.5)]
    found = score({"audio_silence": 1.0, "jpeg_compressibility": 1.0}, sounds)
    assert np.isnan(found["audio_silence"]).tolist() == [True, False]
    assert np.isfinite(found["jpeg_compressibility"]).all()


def test_samples_without_sound_fail():
    assert np.isnan(score({"audio_loudness": 1.0}, None, 2)["audio_loudness"]).all()


class Recorder(Scorer):
    frames = "first"

    def __init__(self) -> None:
        self.rows: list = []

    def __call__(self, images, prompts, metadata) -> list[float]:
        self.rows += metadata
        return [0.0] * len(images)


class Listener(Recorder):
    reads_audio = True


def weighted(scorers: dict[str, Scorer]) -> WeightedReward:
    """Return the sum of these rewards."""
    guarded = {name: GuardedScorer(name, each, FailurePolicy()) for name, each in scorers.items()}
    return WeightedReward(guarded, dict.fromkeys(scorers, 1.0))


def test_only_scorers_that_declare_it_receive_sound():
    custom = {"deaf": Recorder(), "hears": Listener()}
    reward = weighted(custom)
    sounds = [tone(0.1), tone(0.2)]
    reward.submit(torch.zeros(2, 2, 3, 8, 8), ["a", "b"], [{"k": 1}, {}], sounds).result()
    assert custom["deaf"].rows == [{"k": 1}, {}]
    assert custom["hears"].rows == [{"k": 1, AUDIO: sounds[0]}, {AUDIO: sounds[1]}]
    assert reward.audio_rewards == {"hears"}


def test_reward_servers_reject_rewards_of_sound():
    with raises_user_error("'audio_silence'", "scores sound"):
        build_scorer("audio_silence", device="cpu")


def test_test_calls_receive_sound():
    hears = Listener()
    weighted({"hears": hears}).smoke_test(["a"], [{}], 8, 8, 2)
    assert len(hears.rows) == 2
    assert all(row[AUDIO].is_finite for row in hears.rows)


def test_a_wav_file_preserves_rate_channels_and_samples():
    noise = noise_audio()
    found = Audio.from_wav(noise.to_wav())
    assert found.sample_rate == noise.sample_rate
    assert found.waveform.dtype == np.float32
    np.testing.assert_allclose(found.waveform, noise.waveform, rtol=0, atol=0.5 / 32767 + 1e-7)
    loud = Audio(np.array([[2.0, -3.0, np.nan]], np.float32), RATE)
    assert Audio.from_wav(loud.to_wav()).waveform.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda content: b"", "not a WAV"),
        (lambda content: b"RIFF" + content[8:], "not a WAV"),
        (lambda content: content[:-100], "truncated|not a WAV"),
        (lambda content: content[:24] + b"\xff\xff\xff\x7f" + content[28:], "Hz"),
        (lambda content: content[:34] + b"\x08\x00" + content[36:], "8-bit"),
    ],
    ids=["empty", "no header", "truncated", "rate", "8 bits"],
)
def test_a_damaged_wav_file_is_rejected(spoil, reason):
    with pytest.raises(ValueError, match=reason):
        Audio.from_wav(spoil(tone(0.5, 0.1).to_wav()))


def test_sound_is_reduced_for_pages():
    found = tone(0.5).reduced(3000)
    assert (found.sample_rate, found.waveform.shape) == (RATE // 3, (1, math.ceil(RATE / 3)))
    assert np.abs(found.waveform).max() == pytest.approx(0.5, rel=0.1)
