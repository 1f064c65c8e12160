"""Video files: H.264 in MP4 if PyAV is installed (the extra `video`), animated GIF otherwise.

An MP4 contains the sound of a video as AAC; a WAV file next to it has it without losses.

PyAV (`av`) contains FFmpeg's libraries and runs no other program. A GIF has 256 colours and is
several times as large.
"""

import io
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.rewards.frames import DEFAULT_FPS

logger = logging.getLogger("flow_grpo")

GIF_UNIT_MS = 10
AUDIO_ENCODER = "aac"
ENCODER = "libx264"
CRF, SMALL_CRF = 18, 28  # constant rate factors: visually lossless, and for small copies
PALETTE_WIDTH = 96  # of the small copies that the palette is computed from
MAX_FRAMES, MAX_PIXELS = 1024, 2**22  # of a video that is read


@cache
def find_encoder() -> ModuleType | None:
    """Return PyAV if it is installed with an H.264 encoder, else None."""
    try:
        import av

        av.codec.Codec(ENCODER, "w")
    except (ImportError, OSError, ValueError):  # missing, its libraries do not load, no encoder
        logger.info("videos are saved as GIF; for MP4 run: pip install -e '.[video]'")
        return None
    return av


def save_video(
    video: Sequence[Image.Image], folder: Path, name: str, *, animated_image: bool = False
) -> str:
    """Save a video as MP4, or as GIF without an H.264 encoder; return the file's name.

    Args:
        video: Frames of the same size; a `Video` has a frame rate, and may have sound, which
            becomes part of an MP4.
        folder: Existing directory.
        name: Name of the file without its suffix.
        animated_image: Always save a GIF, for pages that can show images only.
    """
    fps, audio = getattr(video, "fps", DEFAULT_FPS), getattr(video, "audio", None)
    if animated_image or find_encoder() is None:
        first, *rest = _quantize_frames(video)
        duration = GIF_UNIT_MS * round(1000 / fps / GIF_UNIT_MS)
        options = {"duration": duration, "loop": 0}
        first.save(folder / f"{name}.gif", save_all=True, append_images=rest, **options)
        return f"{name}.gif"
    path = str(folder / f"{name}.mp4")
    write_mp4(video, path, fps=fps, audio=audio, movflags="faststart")
    return f"{name}.mp4"


def write_mp4(
    video: Sequence[Image.Image],
    file: str | io.BytesIO,
    *,
    crf: int = CRF,
    fps: float = DEFAULT_FPS,
    audio: Audio | None = None,
    **muxer_options: str,
) -> None:
    """Encode frames as H.264 in MP4; only if `find_encoder` finds PyAV with an H.264 encoder.

    All browsers play the file. Its 4:2:0 chroma subsampling requires an even height and width, so
    the last row or column is repeated where they are odd.

    Args:
        video: Frames of the same size.
        file: Path or buffer.
        crf: Constant rate factor: 0 is lossless, and larger values give smaller files.
        fps: Frames per second.
        audio: Sound, encoded as AAC.
        muxer_options: Options of FFmpeg. movflags="faststart" puts the index first, so that a
            browser plays a file while it is loading.
    """
    av = find_encoder()
    frames = [_with_even_sides(frame) for frame in video]
    with av.open(file, "w", format="mp4", options=muxer_options) as container:
        options = {"crf": str(crf), "preset": "veryfast"}
        stream = container.add_stream(ENCODER, rate=round(fps), options=options)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        sound = container.add_stream(AUDIO_ENCODER, rate=audio.sample_rate) if audio else None
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
        if sound:
            layout = "mono" if len(audio.waveform) == 1 else "stereo"
            packed = np.ascontiguousarray(audio.pcm()[:, :2]).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
            frame.sample_rate = audio.sample_rate
            container.mux(sound.encode(frame))
            container.mux(sound.encode())


def shrink_mp4(path: Path, edge: int) -> bytes:
    """Return a video with sides of at most `edge` pixels as MP4; needs `find_encoder`.

    Raises:
        ValueError: If it is longer or larger than `MAX_FRAMES` and `MAX_PIXELS`.
    """
    frames = []
    with find_encoder().open(str(path), format="mp4") as container:
        [stream] = container.streams.video
        if stream.width * stream.height > MAX_PIXELS:
            raise ValueError(f"{path} has {stream.width} x {stream.height} pixels")
        for frame in container.decode(stream):
            if len(frames) == MAX_FRAMES:
                raise ValueError(f"{path} has more than {MAX_FRAMES} frames")
            image = frame.to_image()
            image.thumbnail((edge, edge), Image.Resampling.LANCZOS, reducing_gap=2.0)
            frames.append(image)
        small = io.BytesIO()
        write_mp4(frames, small, crf=SMALL_CRF, fps=stream.average_rate or DEFAULT_FPS)
        return small.getvalue()


def _with_even_sides(frame: Image.Image) -> Image.Image:
    """Return an RGB frame with even sides, by repeating its last row and column."""
    width, height = frame.width + frame.width % 2, frame.height + frame.height % 2
    if (width, height) == frame.size:
        return frame.convert("RGB")
    even = Image.new("RGB", (width, height))
    for left, top in ((1, 1), (1, 0), (0, 1), (0, 0)):  # the original last, over its shifted copies
        if left <= width - frame.width and top <= height - frame.height:
            even.paste(frame, (left, top))
    return even


def _quantize_frames(video: Sequence[Image.Image]) -> list[Image.Image]:
    """Quantize all frames with one palette, computed from small copies.

    Ten times as fast as a palette per frame, and static areas do not flicker.
    """
    small = [frame.reduce(max(1, frame.width // PALETTE_WIDTH)) for frame in video]
    width, height = small[0].size
    strip = Image.new("RGB", (width, height * len(small)))
    for index, frame in enumerate(small):
        strip.paste(frame, (0, height * index))
    palette = strip.quantize()
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in video]
