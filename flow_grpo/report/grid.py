"""Image grids with captions, headings and scores."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from flow_grpo.report.video_files import save_video
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.frames import Sample, is_video, select_frames

LINE_HEIGHT, CELL_GAP = 14, 6


def middle_frame(sample: Sample) -> Image.Image:
    """Return an image itself, or the middle frame of a video."""
    [chosen] = select_frames([sample], "middle")
    return chosen[0] if is_video(chosen) else chosen


def save_sample_files(
    sample: Sample, folder: Path, name: str, *, animated_image: bool = False
) -> dict[str, str]:
    """Save an image as PNG, a video as MP4 or GIF with its middle frame as PNG and sound as WAV.

    The PNG shows the frame as generated, without compression or a palette.

    Args:
        sample: An image, or the frames of a video.
        folder: Existing directory.
        name: Name of the files without their suffix.
        animated_image: Save a video as GIF, where only images can be shown.

    Returns:
        The file names by use: `file`, `still` for a video, and `audio` for its sound.
    """
    png = f"{name}.png"
    middle_frame(sample).save(folder / png)
    if not is_video(sample) or len(sample) == 1:
        return {"file": png}
    file = save_video(sample, folder, name, animated_image=animated_image)
    files = {"file": file, "still": png}
    if audio := getattr(sample, "audio", None):
        files["audio"] = f"{name}.wav"
        audio.save(folder / files["audio"])
    return files


def concatenate_images(images: Sequence[Image.Image]) -> Image.Image:
    """Return the images in a row, at their own sizes."""
    sheet, _ = _blank_image(
        sum(i.width + CELL_GAP for i in images) - CELL_GAP, max(i.height for i in images)
    )
    for index, image in enumerate(images):
        sheet.paste(image, (sum(i.width + CELL_GAP for i in images[:index]), 0))
    return sheet


def source_image_columns(
    sources: Sequence[Sequence[Image.Image]],
) -> dict[str, list[Image.Image | None]]:
    """Return the source images of samples as grid columns; None where a sample has fewer."""
    most = max(map(len, sources), default=0)
    return {
        f"source {i + 1}" if i else "source": [own[i] if i < len(own) else None for own in sources]
        for i in range(most)
    }


def save_image_grid(
    folder: Path, images: list[Sample], captions: list[str], scores: list[str] | None = None
) -> None:
    """Write grid.png; videos are shown by their middle frames."""
    image_grid([middle_frame(image) for image in images], captions, scores).save(
        folder / "grid.png"
    )


def image_grid(
    images: list[Image.Image | None],
    captions: list[str],
    scores: list[str] | None = None,
    *,
    headings: Sequence[str] = (),
    columns: int = 4,
    min_width: int = 192,
) -> Image.Image:
    """Return a grid with each image below its caption and score.

    Args:
        images: Images; None leaves a gap.
        captions: Text above each image.
        scores: Text after each caption, which is truncated first.
        headings: Text at the top of the columns, repeated over them.
        columns: Images per row.
        min_width: Images are enlarged by an integer factor to at least this width.
    """
    width, height = _scaled_size(images, min_width)
    cell = width + CELL_GAP, height + LINE_HEIGHT + CELL_GAP
    columns = min(columns, len(images))
    top = LINE_HEIGHT if headings else 0
    grid, pen = _blank_image(columns * cell[0], top + -(-len(images) // columns) * cell[1])
    for column in range(columns if headings else 0):
        _draw_text(pen, column * cell[0], 0, headings[column % len(headings)], width)
    scores = scores or [""] * len(images)
    for i, (image, caption, score) in enumerate(zip(images, captions, scores, strict=True)):
        x, y = i % columns * cell[0], top + i // columns * cell[1]
        _draw_text(pen, x, y, caption, width, end=f"  {score}" if score else "")
        _paste(grid, image, (width, height), (x, y + LINE_HEIGHT))
    return grid


def comparison_grid(
    columns: dict[str, list[Image.Image | None]],
    prompts: list[str],
    scores: dict[str, list[list[str]]],
    *,
    min_width: int = 192,
) -> Image.Image:
    """Return a grid with a row per prompt, below its text, and a column per heading.

    Args:
        columns: Image of each prompt, by heading; None leaves a gap.
        prompts: Text of each row.
        scores: Lines of text below each image, by heading.
        min_width: Images are enlarged by an integer factor to at least this width.
    """
    width, height = _scaled_size([image for own in columns.values() for image in own], min_width)
    lines = max((len(own) for rows in scores.values() for own in rows), default=0)
    cell = width + CELL_GAP, LINE_HEIGHT + height + lines * LINE_HEIGHT + CELL_GAP
    full_width = len(columns) * cell[0]
    grid, pen = _blank_image(full_width, LINE_HEIGHT + len(prompts) * cell[1])
    for row, prompt in enumerate(prompts):
        _draw_text(pen, 0, LINE_HEIGHT + row * cell[1], prompt, full_width)
    for column, (heading, images) in enumerate(columns.items()):
        x = column * cell[0]
        _draw_text(pen, x, 0, heading, width)
        for row, image in enumerate(images):
            y = LINE_HEIGHT + row * cell[1] + LINE_HEIGHT
            _paste(grid, image, (width, height), (x, y))
            for number, line in enumerate(scores[heading][row] if heading in scores else ()):
                _draw_text(pen, x, y + height + number * LINE_HEIGHT, line, width)
    return grid


def format_score(score: float | None) -> str:
    """Return a score as text; None or NaN: scoring failed."""
    if score == NotApplicable():
        return "-"
    if score is None or math.isnan(score):
        return "failed"
    return f"{score:.2g}" if 0 < abs(score) < 0.1 else f"{score:.2f}"


def truncate_to_width(pen: ImageDraw.ImageDraw, text: str, width: float, *, end: str = "") -> str:
    """Return `text` and `end`; if they are too wide, `text` is truncated."""
    text, available = " ".join(text.split()), width - pen.textlength(end)
    text = text[: max(0, int(available))]  # no character is narrower than a pixel
    if pen.textlength(text) > available:
        lengths = range(len(text))
        fits = bisect_right(lengths, available, key=lambda n: pen.textlength(f"{text[:n]}…")) - 1
        text = f"{text[:fits].rstrip()}…" if fits > 0 else ""
    return text + end


def _draw_text(
    pen: ImageDraw.ImageDraw, x: int, y: int, text: str, width: int, *, end: str = ""
) -> None:
    pen.text((x, y), truncate_to_width(pen, text, width, end=end), "black")


def _blank_image(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    grid = Image.new("RGB", (width, height), "white")
    return grid, ImageDraw.Draw(grid)


def _scaled_size(images: Sequence[Image.Image | None], min_width: int) -> tuple[int, int]:
    first = next(image for image in images if image)
    zoom = max(1, -(-min_width // first.width))
    return zoom * first.width, zoom * first.height


def _paste(
    grid: Image.Image, image: Image.Image | None, size: tuple[int, int], position: tuple[int, int]
) -> None:
    if image:
        grid.paste(image.resize(size, Image.Resampling.NEAREST), position)
