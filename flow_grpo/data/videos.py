"""Videos of data rows: files, or lists of frames. Errors carry the row as their `field`."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from flow_grpo.data.columns import VIDEO, VIDEO_SIGNATURES, VIDEO_SUFFIXES, bytes_kind
from flow_grpo.data.images import distinct_on_rank, find_image
from flow_grpo.data.rows import join_with_or
from flow_grpo.errors import UserError, first_line
from flow_grpo.images import MAX_PIXELS, ImageSource, normalize_image, open_image, read_image

if TYPE_CHECKING:
    from accelerate import Accelerator

DEFAULT_FPS = 2.0  # of frames that are given without a rate; Qwen's default
MIN_FPS, MAX_FPS = 1e-5, 1e5  # from one frame a day to high-speed cameras
ANIMATED_FORMATS = ("GIF", "WEBP")  # read by Pillow
FFMPEG_QUIET = "-8"  # AV_LOG_QUIET
MIN_DECODED_FRACTION = 0.95  # of the frame count in the header, which is often a little too high


@dataclass(frozen=True)
class Video:
    """A video file, or the frames of a video in order."""

    source: ImageSource | tuple[ImageSource, ...]
    fps: float = DEFAULT_FPS  # of frames; ignored for a file, which has its own


@dataclass(frozen=True)
class FrameSelection:
    """The frames of a video that the model sees; see `select_frames`."""

    indices: tuple[int, ...]  # indices of the selected frames
    fps: float  # of the whole video
    total: int  # frames of the whole video
    width: int
    height: int

    @property
    def seconds(self) -> list[float]:
        """Timestamp of each selected frame."""
        return [index / self.fps for index in self.indices]

    @property
    def spacing(self) -> float:
        """Mean time between selected frames in seconds."""
        return self.total / self.fps / len(self.indices)


class RowWithVideos(Protocol):
    """A row of a dataset with videos."""

    videos: tuple[Video, ...]
    where: str  # file and line


def find_videos(given: Any, fps: Any, folder: Path, where: str) -> tuple[Video, ...]:
    """Resolve the videos of a row.

    Args:
        given: One or a list of paths or lists of frames; empty for no videos.
        fps: Frame rate of videos given as frames; None for the default.
        folder: Directory that relative paths start from.
        where: File and row, the `field` of errors.
    """
    if not given:
        return ()
    given = given if isinstance(given, list) else [given]
    fps = DEFAULT_FPS if fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not MIN_FPS <= fps <= MAX_FPS:
        raise UserError(
            f'needs a number from {MIN_FPS:g} to {MAX_FPS:g} in "fps", got {fps!r:.80}', field=where
        )
    videos = []
    for each in given:
        frames = each if isinstance(each, list) else [each]
        if not frames or any(not isinstance(frame, str | bytes | dict) for frame in frames):
            raise UserError(
                f"needs a path or a list of images for each video, got {each!r:.80}", field=where
            )
        kind = "image" if isinstance(each, list) else "video"
        found = tuple(find_image(frame, folder, where, kind) for frame in frames)
        videos.append(Video(found if isinstance(each, list) else found[0], float(fps)))
    return tuple(videos)


def select_frames(video: Video, where: str, rate: float, max_frames: int) -> FrameSelection:
    """Select evenly spaced frames; only the header of a file is read.

    The number of frames is even where possible, because models merge frames in pairs.

    Args:
        video: The video.
        where: File and row, the `field` of errors.
        rate: Frames per second to select; 0 selects `max_frames` frames.
        max_frames: Maximum number of frames.
    """
    if isinstance(video.source, tuple):
        total, fps = len(video.source), video.fps
        with open_image(video.source[0], where) as image:
            size = image.size
    else:
        with _open_video(video.source, where) as file:
            total, fps, size = file.total, file.fps, file.size
    count = max_frames if rate == 0 else int(total / fps * rate)
    count = min(max(count, 2), max_frames, total)
    count -= count % 2 if count > 1 else 0
    indices = tuple(i * total // count for i in range(count))
    return FrameSelection(indices, fps, total, *size)


def read_frames(video: Video, selection: FrameSelection, where: str) -> list[Image.Image]:
    """Decode the selected frames, which must all have the same size."""
    if isinstance(video.source, tuple):
        frames = [read_image(video.source[index], where) for index in selection.indices]
    else:
        with _open_video(video.source, where) as file:
            frames = list(file.read(selection.indices))
    if len(sizes := {frame.size for frame in frames}) > 1:
        shown = " and ".join(f"{width} x {height}" for width, height in sorted(sizes)[:2])
        raise UserError(
            f"has a video with frames of {shown} pixels",
            field=where,
            hint="make all frames the same size",
        )
    return frames


def is_video_source(source: ImageSource) -> bool:
    """Return whether a source is a video, judged by a file's suffix or by the content of bytes."""
    if isinstance(source, bytes):
        return bytes_kind(source[:16]) == VIDEO
    return source.suffix.lower() in VIDEO_SUFFIXES


def read_source_video(source: ImageSource, count: int, where: str = "") -> Iterator[Image.Image]:
    """Yield the frames of a video file, which must have exactly `count` frames.

    The number in the header is checked before any frame is decoded.
    """
    with _open_video(source, where) as file:
        if file.total != count:
            raise UserError(
                f"has {file.total} frames, but {count} are needed",
                field=file.name,
                hint=f"cut it, e.g. ffmpeg -i {Path(source).name} -frames:v {count} cut.mp4"
                if file.total > count
                else f"use a longer video, or set frames={file.total}",
            )
        yield from file.read(range(count))


def check_videos(
    rows: Iterable[RowWithVideos],
    accelerator: "Accelerator",
    rate: float,
    max_frames: int,
    bar: Callable[[Iterable, str, int], Iterable] = lambda items, name, total: items,
) -> None:
    """Decode the selected frames of every distinct video once, divided among the processes.

    Arguments are those of `select_frames` and `flow_grpo.data.images.check_images`.
    """
    local = distinct_on_rank(
        ((video, row.where) for row in rows for video in row.videos), accelerator
    )
    if not local:
        return
    for video, where in bar(local, "checking videos", len(local)):
        read_frames(video, select_frames(video, where, rate, max_frames), where)


class _AnimatedImage:
    """An animated GIF or WebP, read with Pillow.

    Raises:
        UserError: If a frame cannot be decoded, here or in `read`.
    """

    def __init__(self, image: Image.Image, name: str) -> None:
        self.image, self.name = image, name
        with self._as_user_error():
            self.total, self.size = image.n_frames, image.size
            milliseconds = 0
            for index in range(self.total):
                image.seek(index)
                milliseconds += image.info.get("duration", 0) or 1000 / DEFAULT_FPS
        self.fps = 1000 * self.total / milliseconds

    def read(self, indices: Iterable[int]) -> Iterator[Image.Image]:
        """Yield the frames at these indices as 8-bit RGB."""
        for index in indices:
            with self._as_user_error():
                self.image.seek(index)
                frame = normalize_image(self.image)
            yield frame

    @contextmanager
    def _as_user_error(self) -> Iterator[None]:
        """Context manager that turns any error of Pillow into a UserError."""
        try:
            yield
        except Exception as error:  # every format raises other types
            raise _undecodable(self.name, f" ({first_line(error)[:200]})") from error


def _undecodable(name: str, reason: str = "") -> UserError:
    return UserError(f"cannot be decoded{reason}", field=name, hint="is the file complete?")


class _VideoFile:
    """A video file, read with OpenCV.

    Raises:
        UserError: If it has no frames, or an unusual frame rate or size.
    """

    def __init__(self, capture: Any, name: str) -> None:
        import cv2

        self.capture, self.name = capture, name
        self.total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.fps = float(capture.get(cv2.CAP_PROP_FPS))
        sides = (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        self.size = tuple(int(capture.get(side)) for side in sides)
        if self.total < 1 or min(self.size) < 1:
            raise _undecodable(name, " (no frames)")
        if not MIN_FPS <= self.fps <= MAX_FPS:
            raise UserError(
                f"has {self.fps:g} frames per second, which must be from {MIN_FPS:g} to "
                f"{MAX_FPS:g}",
                field=name,
                hint="re-encode it at a common rate",
            )
        if math.prod(self.size) > MAX_PIXELS:
            raise UserError(
                f"has frames of {self.size[0]} x {self.size[1]} pixels, more than {MAX_PIXELS}",
                field=name,
                hint="scale it down",
            )

    def read(self, indices: Iterable[int]) -> Iterator[Image.Image]:
        """Yield the frames at these indices; the last one repeats for a few missing at the end."""
        wanted = set(indices)
        read, last = 0, None
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
        if last is None or read < MIN_DECODED_FRACTION * self.total:
            raise _undecodable(self.name, f" beyond {read} of its {self.total} frames")
        for _ in wanted:
            yield last


@contextmanager
def _open_video(source: ImageSource, where: str) -> Iterator[_AnimatedImage | _VideoFile]:
    """Open a video for the context, with the reader for its format; reject other files."""
    if isinstance(source, bytes):
        name, start = f"a video of {len(source)} bytes", source[:16]
    else:
        name, start = str(source), b""
    name = f"{where}: {name}" if where else name
    if isinstance(source, Path):
        start = _read_signature(source, name)
    # OpenCV opens no other files, because FFmpeg would also follow playlists of URLs
    if any(start[offset:].startswith(magic) for offset, magic in VIDEO_SIGNATURES.values()):
        if isinstance(source, bytes):
            raise UserError(
                "cannot be read from bytes", field=name, hint="save it and pass its path"
            )
        yield from _open_with_opencv(source, name)
    elif start.startswith((b"GIF8", b"RIFF")):
        with open_image(source, where, formats=ANIMATED_FORMATS) as image:
            yield _AnimatedImage(image, name)
    else:
        raise UserError(
            f"is not a {join_with_or([*VIDEO_SIGNATURES, *ANIMATED_FORMATS])} file",
            field=name,
            hint="convert it, or pass its frames",
        )


def _read_signature(path: Path, name: str) -> bytes:
    """Return the first 16 bytes of a file; raise a UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field=name) from error


def _open_with_opencv(path: Path, name: str) -> Iterator[_VideoFile]:
    """Open a video file with OpenCV, and release it at the end of the context.

    Messages of OpenCV and FFmpeg about damaged files are suppressed, so that errors have one line.
    """
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", FFMPEG_QUIET)  # read with the first file
    try:
        import cv2
    except ImportError as error:
        raise UserError(
            "needs OpenCV",
            field=name,
            hint="pip install opencv-python-headless, or pass its frames as images",
        ) from error
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    capture = cv2.VideoCapture(os.path.abspath(path), cv2.CAP_FFMPEG)
    try:
        if not capture.isOpened():
            raise _undecodable(name)
        yield _VideoFile(capture, name)
    finally:
        capture.release()
