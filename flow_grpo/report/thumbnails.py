"""Thumbnails small enough for a page that embeds all of them."""

import base64
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.images import open_image
from flow_grpo.report.video_files import find_encoder, shrink_mp4
from flow_grpo.rewards.frames import frame_indices

EDGE_LENGTHS = (256, 192, 128, 96)  # pixels of the longer side; the first that fits the budget
WEBP_OPTIONS = {"quality": 75, "method": 2}  # a third of the time, and hardly larger
AUDIO_RATE = 16_000  # samples per second, mono
FRAME_SELECTION = "mean of 10"  # frames of a video


def thin_epochs(epochs: Sequence[int], limit: int, keep: Sequence[int] = ()) -> list[int]:
    """Return every 2nd, 4th, 8th ... epoch such that at most `limit` remain, the last, and `keep`.

    The stride is a power of two so that the choice changes only when the number of epochs doubles.
    """
    stride = 1
    while len(epochs) / stride > limit:
        stride *= 2
    chosen = {*epochs[::stride], *epochs[-1:], *keep}
    return [epoch for epoch in epochs if epoch in chosen]


def encode_thumbnails(
    files: dict[int, list[Path | None]],
    budget: float,
    max_epochs: int,
    keep: Sequence[int] = (),
) -> dict[int, list[str | None]]:
    """Return images and videos by epoch as data URIs, shrunk and then thinned out until they fit.

    Args:
        files: Image files by epoch; None for a missing one.
        budget: Maximum size of all data URIs, in bytes.
        max_epochs: Maximum number of epochs.
        keep: Epochs that are dropped last.
    """
    epochs = list(files)
    if not epochs:
        return {}
    probe = sorted({epochs[0], epochs[len(epochs) // 2], epochs[-1]})
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for edge in EDGE_LENGTHS:
            largest = max(_total_bytes(_encode_all(pool, files[epoch], edge)) for epoch in probe)
            most = int(min(max_epochs, budget // max(1, largest)))
            if most >= min(max_epochs, len(epochs)):
                break
        while True:
            chosen = thin_epochs(epochs, max(1, most), keep if most > 2 else ())
            encoded = {epoch: _encode_all(pool, files[epoch], edge) for epoch in chosen}
            if sum(map(_total_bytes, encoded.values())) <= budget or most <= 1:
                return encoded
            most //= 2


def _encode_all(pool: ThreadPoolExecutor, paths: list[Path | None], edge: int) -> list[str | None]:
    return list(pool.map(lambda path: None if path is None else _encode_file(path, edge), paths))


def _total_bytes(images: list[str | None]) -> int:
    return sum(len(image) for image in images if image)


def _encode_file(path: Path, edge: int) -> str | None:
    """Return a thumbnail as a data URI; None if the file cannot be read (incomplete or removed)."""
    try:
        return _encode(path, path.stat().st_mtime_ns, edge)
    except Exception:  # Pillow raises errors of many kinds for damaged files
        return None


@lru_cache(maxsize=8192)
def _encode(path: Path, _: int, edge: int) -> str:
    """Return an image, a video or sound as a data URI, with sides of at most `edge` pixels; cached.

    Images and animated GIFs become WebP. An MP4 stays one, or becomes its middle frame, which is
    saved next to it, if it cannot be encoded here. Sound is reduced to mono. The second argument is
    the modification time, a part of the cache key.
    """
    if path.suffix == ".wav":
        sound = Audio.from_wav(path.read_bytes()).reduced(AUDIO_RATE)
        return _data_uri("audio/wav", sound.to_wav())
    if path.suffix == ".mp4":
        if find_encoder() is not None:
            return _data_uri("video/mp4", shrink_mp4(path, min(edge, EDGE_LENGTHS[1])))
        path = path.with_suffix(".png")
    with open_image(path) as image:
        frames = getattr(image, "n_frames", 1)
        buffer = io.BytesIO()
        if frames == 1:
            _shrink(image, edge).save(buffer, "WEBP", **WEBP_OPTIONS)
        else:
            first, *rest = _animation_frames(image, frames, min(edge, EDGE_LENGTHS[1]))
            duration = image.info.get("duration", 60) * frames / (1 + len(rest))
            first.save(
                buffer,
                "WEBP",
                **WEBP_OPTIONS,
                save_all=True,
                append_images=rest,
                duration=round(duration),
                loop=0,
            )
    return _data_uri("image/webp", buffer.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _animation_frames(image: Image.Image, frames: int, edge: int) -> list[Image.Image]:
    """Return frames of an animation at `FRAME_SELECTION`, with sides of at most `edge` pixels."""
    chosen = []
    for index in frame_indices(frames, FRAME_SELECTION):
        image.seek(index)
        chosen.append(_shrink(image, edge))
    return chosen


def _shrink(image: Image.Image, edge: int) -> Image.Image:
    small = image.convert("RGB")
    small.thumbnail((edge, edge), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return small
