"""Pictures side by side, with captions, headings and scores."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.frames import Sample, choose_frames, is_clip

FRAME_MS = 60  # 16 frames a second, as Wan draws them; GIF counts in hundredths of a second
PALETTE_WIDTH = 96  # of the copies that colours are taken from
LINE, GAP = 14, 6


def still(sample: Sample) -> Image.Image:
    """A picture, or the middle frame of a clip."""
    [chosen] = choose_frames([sample], "middle")
    return chosen[0] if is_clip(chosen) else chosen


def save_sample(sample: Sample, folder: Path, name: str) -> dict[str, str]:
    """As a PNG file; of a clip that has its middle frame, which a GIF of 256 colours cannot show as
    it was drawn. Returns what was written, by its use."""
    png, gif = f"{name}.png", f"{name}.gif"
    still(sample).save(folder / png)
    if not is_clip(sample) or len(sample) == 1:
        return {"file": png}
    first, *rest = _in_256_colours(sample)
    first.save(folder / gif, save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
    return {"file": gif, "still": png}


def _in_256_colours(clip: list[Image.Image]) -> list[Image.Image]:
    """The same for all frames, from small copies of them: over ten times as fast as a palette each,
    and still areas do not flicker."""
    small = [frame.reduce(max(1, frame.width // PALETTE_WIDTH)) for frame in clip]
    width, height = small[0].size
    strip = Image.new("RGB", (width, height * len(small)))
    for place, frame in enumerate(small):
        strip.paste(frame, (0, height * place))
    palette = strip.quantize()
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in clip]


def strip(images: Sequence[Image.Image]) -> Image.Image:
    """In a row, as large as they are."""
    sheet, _ = _sheet(sum(i.width + GAP for i in images) - GAP, max(i.height for i in images))
    for place, image in enumerate(images):
        sheet.paste(image, (sum(i.width + GAP for i in images[:place]), 0))
    return sheet


def source_columns(sources: Sequence[Sequence[Image.Image]]) -> dict[str, list[Image.Image | None]]:
    """What samples were made from, as columns to stand before them; none of samples without."""
    most = max(map(len, sources), default=0)
    return {
        f"source {i + 1}" if i else "source": [own[i] if i < len(own) else None for own in sources]
        for i in range(most)
    }


def save_grid(
    folder: Path, images: list[Sample], captions: list[str], scores: list[str] | None = None
) -> None:
    """grid.png; clips are shown by their middle frames: a grid that moves would be too large to
    play."""
    picture_grid([still(image) for image in images], captions, scores).save(folder / "grid.png")


def picture_grid(
    images: list[Image.Image | None],
    captions: list[str],
    scores: list[str] | None = None,
    *,
    headings: Sequence[str] = (),
    columns: int = 4,
    min_width: int = 192,
) -> Image.Image:
    """Each picture under its caption and score; headings are repeated over the columns.

    Small pictures are enlarged by a whole factor, to at least `min_width`; the place of None is
    left empty.
    """
    width, height = _enlarged(images, min_width)
    cell = width + GAP, height + LINE + GAP
    columns = min(columns, len(images))
    top = LINE if headings else 0
    grid, pen = _sheet(columns * cell[0], top + -(-len(images) // columns) * cell[1])
    for column in range(columns if headings else 0):
        _write(pen, column * cell[0], 0, headings[column % len(headings)], width)
    scores = scores or [""] * len(images)
    for i, (image, caption, score) in enumerate(zip(images, captions, scores, strict=True)):
        x, y = i % columns * cell[0], top + i // columns * cell[1]
        _write(pen, x, y, caption, width, end=f"  {score}" if score else "")
        _paste(grid, image, (width, height), (x, y + LINE))
    return grid


def paired_grid(
    columns: dict[str, list[Image.Image | None]],
    prompts: list[str],
    scores: dict[str, list[list[str]]],
    *,
    min_width: int = 192,
) -> Image.Image:
    """A row per prompt, which stands over it, and a column per heading; `scores` has the lines to
    write under each picture of some columns."""
    width, height = _enlarged([image for own in columns.values() for image in own], min_width)
    lines = max((len(own) for rows in scores.values() for own in rows), default=0)
    cell = width + GAP, LINE + height + lines * LINE + GAP
    whole = len(columns) * cell[0]
    grid, pen = _sheet(whole, LINE + len(prompts) * cell[1])
    for row, prompt in enumerate(prompts):
        _write(pen, 0, LINE + row * cell[1], prompt, whole)
    for column, (heading, images) in enumerate(columns.items()):
        x = column * cell[0]
        _write(pen, x, 0, heading, width)
        for row, image in enumerate(images):
            y = LINE + row * cell[1] + LINE
            _paste(grid, image, (width, height), (x, y))
            for place, line in enumerate(scores[heading][row] if heading in scores else ()):
                _write(pen, x, y + height + place * LINE, line, width)
    return grid


def score_text(score: float | None) -> str:
    """None or NaN: it failed."""
    if score == NotAsked():
        return "-"
    if score is None or math.isnan(score):
        return "failed"
    return f"{score:.2g}" if 0 < abs(score) < 0.1 else f"{score:.2f}"


def fitted(pen: ImageDraw.ImageDraw, text: str, width: float, *, end: str = "") -> str:
    """`text` and `end`; where that is too wide, `text` is cut short and `end` is not."""
    text, room = " ".join(text.split()), width - pen.textlength(end)
    text = text[: max(0, int(room))]  # no letter is narrower than a pixel
    if pen.textlength(text) > room:
        lengths = range(len(text))
        fits = bisect_right(lengths, room, key=lambda n: pen.textlength(f"{text[:n]}…")) - 1
        text = f"{text[:fits].rstrip()}…" if fits > 0 else ""
    return text + end


def _write(
    pen: ImageDraw.ImageDraw, x: int, y: int, text: str, width: int, *, end: str = ""
) -> None:
    pen.text((x, y), fitted(pen, text, width, end=end), "black")


def _sheet(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    grid = Image.new("RGB", (width, height), "white")
    return grid, ImageDraw.Draw(grid)


def _enlarged(images: Sequence[Image.Image | None], min_width: int) -> tuple[int, int]:
    first = next(image for image in images if image)
    zoom = max(1, -(-min_width // first.width))
    return zoom * first.width, zoom * first.height


def _paste(
    grid: Image.Image, image: Image.Image | None, size: tuple[int, int], place: tuple[int, int]
) -> None:
    if image:
        grid.paste(image.resize(size, Image.Resampling.NEAREST), place)
