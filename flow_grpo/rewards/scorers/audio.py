"""Rewards of the sound of a video that need no weights: loudness, silence, synchrony with motion.

Levels are in dBFS, decibels relative to full scale: 20 log10 of a root mean square, over all
channels, where 1 is the largest value of a waveform.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.errors import UserError
from flow_grpo.rewards.protocol import AUDIO, MetadataRows, Scorer

QUIETEST_DB, LOUDEST_DB = -60.0, -6.0  # levels with the scores 0 and 1
SILENCE_DB = -50.0  # a window at or below this level is silent
WINDOW_SECONDS = 0.02
STILL = 0.002  # mean change of the pixels, in [0, 1], below which consecutive frames are equal
NEIGHBOURS = (0.25, 0.5, 0.25)  # an onset counts half in the frames before and after it
MAX_FPS = 1000  # of the option `fps`
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


def onsets(values: np.ndarray) -> np.ndarray:
    """Return the increases of a series (N,), spread over the neighbours of each, (N - 1,)."""
    return np.convolve(np.maximum(np.diff(values), 0.0), NEIGHBOURS, "same")


def motion_per_frame(video: list[Image.Image]) -> np.ndarray:
    """Return the mean change of the pixels from each frame to the next, (frames - 1,)."""
    frames = np.stack([np.asarray(frame.convert("L"), np.float32) for frame in video]) / 255
    change = np.abs(np.diff(frames, axis=0)).mean((1, 2))
    return np.where(change < STILL, 0.0, change)


def sound_per_frame(audio: Audio, frames: int, fps: float) -> np.ndarray:
    """Return the root mean square of the sound while each frame is shown, (frames,).

    It is 0 where the sound is silent or has ended.
    """
    edges = np.round(np.arange(frames + 1) / fps * audio.sample_rate).astype(int)
    parts = [audio.waveform[:, a:b] for a, b in itertools.pairwise(edges)]
    levels = [level_db(part) if part.size else -math.inf for part in parts]
    return np.array([10 ** (db / 20) if db > SILENCE_DB else 0.0 for db in levels])


@dataclass(kw_only=True, eq=False)
class AudioSync(Scorer):
    """Synchrony of the onsets of sound and motion: cosine similarity of their series, from 0 to 1.

    A series has one value per frame. An onset is an increase, of the change between frames or of
    the energy of the sound. A video whose sound or motion has no onset scores 0.
    """

    reads_audio = True
    frames = "clip"
    fps: float = 24.0  # frames per second of the videos

    def __post_init__(self) -> None:
        """Check the option."""
        if type(self.fps) not in (int, float) or not 0 < self.fps <= MAX_FPS:
            raise UserError(
                f"must be a number above 0 and at most {MAX_FPS}", field="fps", value=self.fps
            )

    def __call__(
        self, images: list[list[Image.Image]], prompts: list[str], metadata: MetadataRows
    ) -> list[float]:
        rows = zip(images, metadata, strict=True)
        return [synchrony(video, row[AUDIO], self.fps) for video, row in rows]


def synchrony(video: list[Image.Image], audio: Audio, fps: float) -> float:
    """Return the synchrony of the onsets of a video and its sound, see `AudioSync`."""
    if len(video) < 3:
        return 0.0
    sound = sound_per_frame(audio, len(video), fps)
    # the motion into a frame is seen when that frame is shown
    motion, heard = onsets(motion_per_frame(video)), onsets(sound[1:])
    norm = float(np.linalg.norm(motion) * np.linalg.norm(heard))
    return float(motion @ heard) / norm if norm else 0.0
