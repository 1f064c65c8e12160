"""Rewards of the sound of a video that need no weights: loudness and share of silence.

Levels are in dBFS, decibels relative to full scale: 20 log10 of a root mean square, over all
channels, where 1 is the largest value of a waveform.
"""

import math

import numpy as np
from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.rewards.protocol import AUDIO, MetadataRows, Scorer

QUIETEST_DB, LOUDEST_DB = -60.0, -6.0  # levels with the scores 0 and 1
SILENCE_DB = -50.0  # a window at or below this level is silent
WINDOW_SECONDS = 0.02
MIN_RMS = 1e-10  # -200 dBFS, in place of 0, which has no logarithm


def level_db(samples: np.ndarray) -> float:
    """Return the level of a waveform of any shape in dBFS."""
    rms = math.sqrt(float(np.mean(np.square(samples, dtype=np.float64))))
    return 20 * math.log10(max(rms, MIN_RMS))


def silence_share(audio: Audio) -> float:
    """Return the share of windows of 20 ms that are silent; an incomplete last one counts fully."""
    window = max(1, round(WINDOW_SECONDS * audio.sample_rate))
    starts = range(0, audio.waveform.shape[1], window)
    silent = [level_db(audio.waveform[:, i : i + window]) <= SILENCE_DB for i in starts]
    return sum(silent) / len(silent)


class AudioLoudness(Scorer):
    """Level of the sound, linear in decibels from 0 at -60 dBFS to 1 at -6 dBFS.

    Also logs the level, "db".
    """

    reads_audio = True
    frames = "first"  # frames are not used

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> tuple[list[float], dict[str, list[float]]]:
        levels = [level_db(row[AUDIO].waveform) for row in metadata]
        span = LOUDEST_DB - QUIETEST_DB
        scores = [min(1.0, max(0.0, (level - QUIETEST_DB) / span)) for level in levels]
        return scores, {"db": levels}


class AudioSilence(Scorer):
    """Share of silence, from 0 to 1; a negative weight rewards sound without pauses."""

    reads_audio = True
    frames = "first"  # frames are not used

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> list[float]:
        return [silence_share(row[AUDIO]) for row in metadata]
