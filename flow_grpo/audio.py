"""Sound of a generated video, and its WAV files."""

import io
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_BYTES = 2  # 16-bit PCM
FULL_SCALE = 2 ** (8 * SAMPLE_BYTES - 1) - 1
MAX_SECONDS, MAX_CHANNELS, MAX_SAMPLE_RATE = 600, 8, 192_000  # of a file that is read
NOISE_RATE, NOISE_LEVEL = 16_000, 0.1  # of `noise_audio`


@dataclass(frozen=True, eq=False)
class Audio:
    """A waveform with values in [-1, 1]; larger ones are clipped in files."""

    waveform: np.ndarray  # (channels, samples), float32
    sample_rate: int  # samples per second

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.waveform.shape[1] / self.sample_rate

    @property
    def is_finite(self) -> bool:
        """Return whether there are samples and all are finite; decoding failed otherwise."""
        return self.waveform.size > 0 and bool(np.isfinite(self.waveform).all())

    def reduced(self, max_rate: int) -> "Audio":
        """Return mono at `max_rate` or less, for pages: means of channels and adjacent samples."""
        factor = -(-self.sample_rate // max_rate)
        mono = np.nan_to_num(self.waveform, nan=0.0).mean(0)
        mono = np.pad(mono, (0, -len(mono) % factor), mode="edge")
        means = mono.reshape(-1, factor).mean(1)
        return Audio(means[None].astype(np.float32), self.sample_rate // factor)

    def resampled(self, rate: int) -> "Audio":
        """Return the sound at `rate` samples per second, resampled in the frequency domain.

        Frequencies above half of the lower rate are removed.
        """
        count = self.waveform.shape[1]
        wanted = max(1, round(count * rate / self.sample_rate))
        if rate == self.sample_rate or not count:
            return Audio(self.waveform, rate)
        spectrum = np.fft.rfft(self.waveform.astype(np.float64))
        shared = min(count, wanted)
        kept = np.zeros((len(spectrum), wanted // 2 + 1), complex)
        kept[:, : (shared + 1) // 2] = spectrum[:, : (shared + 1) // 2]  # below both limits
        wave = np.fft.irfft(kept, wanted) * (wanted / count)
        return Audio(wave.astype(np.float32), rate)

    def pcm(self) -> np.ndarray:
        """Return the waveform as 16-bit integers, (samples, channels); NaN becomes silence."""
        clipped = np.clip(np.nan_to_num(self.waveform, nan=0.0), -1, 1)
        return np.round(clipped.T * FULL_SCALE).astype("<i2")

    def to_wav(self) -> bytes:
        """Encode as a WAV file with 16-bit PCM."""
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(len(self.waveform))
            file.setsampwidth(SAMPLE_BYTES)
            file.setframerate(self.sample_rate)
            file.writeframes(self.pcm().tobytes())
        return buffer.getvalue()

    def save(self, path: Path) -> None:
        """Write a WAV file."""
        path.write_bytes(self.to_wav())

    @staticmethod
    def from_wav(content: bytes) -> "Audio":
        """Decode a WAV file with 16-bit PCM.

        Raises:
            ValueError: The file is damaged, has another encoding or is too long.
        """
        try:
            with wave.open(io.BytesIO(content), "rb") as file:
                channels, rate, count = file.getnchannels(), file.getframerate(), file.getnframes()
                if file.getsampwidth() != SAMPLE_BYTES:
                    raise ValueError(f"has {8 * file.getsampwidth()}-bit samples, not 16-bit")
                if not (0 < channels <= MAX_CHANNELS and 0 < rate <= MAX_SAMPLE_RATE):
                    raise ValueError(f"has {channels} channels at {rate} Hz")
                if not 0 < count <= MAX_SECONDS * rate:
                    raise ValueError(f"has {count / rate:g} seconds, not 0 to {MAX_SECONDS}")
                data = file.readframes(count)
        except (wave.Error, EOFError) as error:
            raise ValueError(f"is not a WAV file: {error}") from error
        if len(data) != count * channels * SAMPLE_BYTES:
            raise ValueError("is truncated")
        pcm = np.frombuffer(data, "<i2").reshape(count, channels)
        return Audio((pcm.T / FULL_SCALE).astype(np.float32), rate)


def noise_audio() -> Audio:
    """Return a second of quiet noise in stereo, for test calls of rewards."""
    noise = np.random.default_rng(0).normal(0, NOISE_LEVEL, (2, NOISE_RATE))
    return Audio(noise.astype(np.float32), NOISE_RATE)
