"""The videos of data rows: files, or frames as pictures. Every mistake names the row."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from flow_grpo.data.images import find_picture
from flow_grpo.errors import UserError, first_line
from flow_grpo.pictures import MAX_PIXELS, Picture, open_picture, read_picture, upright

if TYPE_CHECKING:
    from accelerate import Accelerator

RATE = 2.0  # frames a second, of frames that are given without a rate; Qwen's own default
SLOWEST, FASTEST = 1e-5, 1e5  # frames per second: from one a day to high-speed cameras
MOVING = ("GIF", "WEBP")  # which Pillow reads
# how files of the other kinds begin, by the place of it: FFmpeg would also open lists of addresses
STARTS = {"MP4 or MOV": (4, b"ftyp"), "WebM or MKV": (0, b"\x1a\x45\xdf\xa3"), "AVI": (8, b"AVI ")}
WHOLE = 0.95  # share of the frames that a file tells of and has to have: many tell of too many


@dataclass(frozen=True)
class Video:
    """A file, or its frames in their order."""

    source: Picture | tuple[Picture, ...]
    fps: float = RATE  # of frames; a file knows its own


@dataclass(frozen=True)
class Clip:
    """Which frames of a video are shown."""

    places: tuple[int, ...]  # of all frames
    fps: float  # of all frames
    total: int
    width: int
    height: int

    @property
    def seconds(self) -> list[float]:
        """When each frame is shown."""
        return [place / self.fps for place in self.places]

    @property
    def spacing(self) -> float:
        """Seconds between two frames, in the mean."""
        return self.total / self.fps / len(self.places)


class Row(Protocol):
    videos: tuple[Video, ...]
    where: str  # file and line


def find_videos(given: Any, fps: Any, folder: Path, where: str) -> tuple[Video, ...]:
    """Those of a row's column, each a path, or a list of pictures with so many `fps`."""
    if not given:
        return ()
    given = given if isinstance(given, list) else [given]
    fps = RATE if fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not _is_rate(fps):
        raise UserError(
            f'{where}: "fps" must be a number from {SLOWEST:g} to {FASTEST:g}, got {fps!r:.80}'
        )
    videos = []
    for each in given:
        frames = each if isinstance(each, list) else [each]
        if not frames or any(not isinstance(frame, str | bytes | dict) for frame in frames):
            raise UserError(f'{where}: "videos" has {each!r:.80}, no path and no list of pictures')
        kind = "picture" if isinstance(each, list) else "video"
        found = tuple(find_picture(frame, folder, where, kind) for frame in frames)
        videos.append(Video(found if isinstance(each, list) else found[0], float(fps)))
    return tuple(videos)


def _is_rate(fps: float) -> bool:
    return SLOWEST <= fps <= FASTEST


def choose_frames(video: Video, where: str, rate: float, most: int) -> Clip:
    """By `rate` a second, or `most` of them where the rate is 0; evenly, and an even number, as
    models merge two. Nothing but the beginning of the file is read."""
    if isinstance(video.source, tuple):
        total, fps = len(video.source), video.fps
        with open_picture(video.source[0], where) as picture:
            size = picture.size
    else:
        with _opened(video.source, where) as file:
            total, fps, size = file.total, file.fps, file.size
    count = most if rate == 0 else int(total / fps * rate)
    count = min(max(count, 2), most, total)
    count -= count % 2 if count > 1 else 0
    places = tuple(i * total // count for i in range(count))
    return Clip(places, fps, total, *size)


def read_frames(video: Video, clip: Clip, where: str) -> list[Image.Image]:
    """The pictures of a clip, all of one size."""
    if isinstance(video.source, tuple):
        frames = [read_picture(video.source[place], where) for place in clip.places]
    else:
        with _opened(video.source, where) as file:
            frames = list(file.read(clip.places))
    if len(sizes := {frame.size for frame in frames}) > 1:
        told = " and ".join(f"{width} x {height}" for width, height in sorted(sizes)[:2])
        raise UserError(f"{where}: frames of a video have {told} pixels; make all the same")
    return frames


def check_videos(
    rows: Iterable[Row],
    accelerator: "Accelerator",
    rate: float,
    most: int,
    bar: Callable[[Iterable, str, int], Iterable] = lambda items, name, total: items,
) -> None:
    """Decode what is shown of every video once, each process its share, as `check_pictures`."""
    places: dict[Video, str] = {}
    for row in rows:
        for video in row.videos:
            places.setdefault(video, row.where)
    share = list(places.items())[accelerator.process_index :: accelerator.num_processes]
    for video, where in bar(share, "checking videos", len(share)) if share else ():
        read_frames(video, choose_frames(video, where, rate, most), where)


class _Moving:
    """A GIF or a WebP that moves."""

    def __init__(self, picture: Image.Image, name: str) -> None:
        self.picture, self.name = picture, name
        with self._explained():
            self.total, self.size, milliseconds = picture.n_frames, picture.size, 0
            for place in range(self.total):
                picture.seek(place)
                milliseconds += picture.info.get("duration", 0) or 1000 / RATE
        self.fps = 1000 * self.total / milliseconds

    def read(self, places: Iterable[int]) -> Iterator[Image.Image]:
        for place in places:
            with self._explained():
                self.picture.seek(place)
                frame = upright(self.picture)
            yield frame

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each format has errors of its own
            problem = f"cannot be decoded ({first_line(error)[:200]}); is the file whole?"
            raise UserError(f"{self.name} {problem}") from error


class _Film:
    """A file that OpenCV reads."""

    def __init__(self, capture: Any, name: str) -> None:
        import cv2

        self.capture, self.name = capture, name
        self.total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.fps = float(capture.get(cv2.CAP_PROP_FPS))
        sides = (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        self.size = tuple(int(capture.get(side)) for side in sides)
        if self.total < 1 or min(self.size) < 1:
            raise UserError(f"{name} cannot be decoded (no frames); is the file whole?")
        if not _is_rate(self.fps):
            raise UserError(
                f"{name} has {self.fps:g} frames per second, which must be from {SLOWEST:g} to "
                f"{FASTEST:g}; re-encode it at a usual rate"
            )
        if math.prod(self.size) > MAX_PIXELS:
            raise UserError(
                f"{name} has frames of {self.size[0]} x {self.size[1]} pixels; at most "
                f"{MAX_PIXELS} are allowed, shrink it"
            )

    def read(self, places: Iterable[int]) -> Iterator[Image.Image]:
        wanted, read, last = set(places), 0, None
        while read <= max(wanted) and self.capture.grab():
            if read in wanted:
                found, pixels = self.capture.retrieve()
                if not found:
                    break
                last = Image.fromarray(pixels[:, :, ::-1])
                yield last
                wanted.discard(read)
            read += 1
            if not wanted:
                return
        if last is None or read < WHOLE * self.total:
            raise UserError(
                f"{self.name} ends after {read} of its {self.total} frames; is the file whole?"
            )
        yield from [last] * len(wanted)


@contextmanager
def _opened(source: Picture, where: str) -> Iterator[_Moving | _Film]:
    name = f"{where}: a video of {len(source)} bytes" if isinstance(source, bytes) else ""
    name = name or f"{where}: {source}"
    start = source[:16] if isinstance(source, bytes) else _start(source, name)
    if any(start[place:].startswith(mark) for place, mark in STARTS.values()):
        if isinstance(source, bytes):
            raise UserError(f"{name} is not read from bytes; save it, and give its path")
        yield from _film(source, name)
    elif start.startswith((b"GIF8", b"RIFF")):
        with open_picture(source, where, formats=MOVING) as picture:
            yield _Moving(picture, name)
    else:
        kinds = ", ".join([*STARTS, *MOVING[:-1]])
        raise UserError(
            f"{name} is no {kinds} or {MOVING[-1]} file; save it as one, or give its frames"
        )


def _start(path: Path, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error


def _film(path: Path, name: str) -> Iterator[_Film]:
    try:
        import cv2
    except ImportError as error:
        raise UserError(
            f"{name} needs OpenCV: pip install -e '.[vlm]'; or give its frames as pictures"
        ) from error
    capture = cv2.VideoCapture(os.path.abspath(path), cv2.CAP_FFMPEG)
    try:
        if not capture.isOpened():
            raise UserError(f"{name} cannot be decoded; is the file whole?")
        yield _Film(capture, name)
    finally:
        capture.release()
