"""Pictures small enough for a page that holds all of them."""

import base64
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from PIL import Image

from flow_grpo.pictures import open_picture
from flow_grpo.rewards.frames import frame_places

EDGES = (256, 192, 128, 96)  # pixels of the longer side, the first that leaves room for enough
WEBP = {"quality": 75, "method": 2}  # a third of the time, and hardly larger
FRAMES = "mean of 10"  # of a clip


def thinned(epochs: Sequence[int], most: int, keep: Sequence[int] = ()) -> list[int]:
    """Every 2nd, 4th, 8th ... of them, the last, and those to `keep`. More epochs do not change
    which of the earlier ones are taken, until there are twice as many."""
    stride = 1
    while len(epochs) / stride > most:
        stride *= 2
    wanted = {*epochs[::stride], *epochs[-1:], *keep}
    return [epoch for epoch in epochs if epoch in wanted]


def fit(
    files: dict[int, list[Path | None]],
    budget: float,
    epochs_at_most: int,
    keep: Sequence[int] = (),
) -> dict[int, list[str | None]]:
    """Pictures by epoch as data URIs, which take `budget` bytes at most: smaller where there are
    many, then of fewer epochs."""
    epochs = list(files)
    if not epochs:
        return {}
    probe = sorted({epochs[0], epochs[len(epochs) // 2], epochs[-1]})
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for edge in EDGES:
            largest = max(_size(_encode_all(pool, files[epoch], edge)) for epoch in probe)
            most = int(min(epochs_at_most, budget // max(1, largest)))
            if most >= min(epochs_at_most, len(epochs)):
                break
        while True:
            chosen = thinned(epochs, max(1, most), keep if most > 2 else ())
            encoded = {epoch: _encode_all(pool, files[epoch], edge) for epoch in chosen}
            if sum(map(_size, encoded.values())) <= budget or most <= 1:
                return encoded
            most //= 2


def _encode_all(pool: ThreadPoolExecutor, paths: list[Path | None], edge: int) -> list[str | None]:
    return list(pool.map(lambda path: None if path is None else _encode_file(path, edge), paths))


def _size(pictures: list[str | None]) -> int:
    return sum(len(picture) for picture in pictures if picture)


def _encode_file(path: Path, edge: int) -> str | None:
    """None where it cannot be read: it is being written, or was removed."""
    try:
        return _encode(path, path.stat().st_mtime_ns, edge)
    except Exception:  # Pillow raises errors of many kinds for damaged files
        return None


@lru_cache(maxsize=8192)
def _encode(path: Path, _: int, edge: int) -> str:
    with open_picture(path) as image:
        frames = getattr(image, "n_frames", 1)
        buffer = io.BytesIO()
        if frames == 1:
            _shrunk(image, edge).save(buffer, "WEBP", **WEBP)
        else:
            first, *rest = _clip(image, frames, min(edge, EDGES[1]))
            duration = image.info.get("duration", 60) * frames / (1 + len(rest))
            first.save(
                buffer,
                "WEBP",
                **WEBP,
                save_all=True,
                append_images=rest,
                duration=round(duration),
                loop=0,
            )
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _clip(image: Image.Image, frames: int, edge: int) -> list[Image.Image]:
    taken = []
    for place in frame_places(frames, FRAMES):
        image.seek(place)
        taken.append(_shrunk(image, edge))
    return taken


def _shrunk(image: Image.Image, edge: int) -> Image.Image:
    small = image.convert("RGB")
    small.thumbnail((edge, edge), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return small
