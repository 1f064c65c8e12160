"""Pictures side by side, each under its caption."""

from pathlib import Path

from PIL import Image, ImageDraw

from flow_grpo.rewards.frames import Sample, is_clip
from flow_grpo.run.clips import still
from flow_grpo.run.tracking import save_samples

CAPTION_HEIGHT, GAP = 14, 6


def save_grid(folder: Path, images: list[Sample], captions: list[str]) -> None:
    """grid.png, of clips with their middle frames; the clips themselves go into a folder: a grid
    that moves would be too large to play."""
    picture_grid([still(image) for image in images], captions).save(folder / "grid.png")
    if any(map(is_clip, images)):
        save_samples(folder / "clips", images, prompt=captions)


def picture_grid(
    images: list[Image.Image], captions: list[str], *, columns: int = 4, min_width: int = 192
) -> Image.Image:
    """Small pictures are enlarged by a whole factor, to at least `min_width`."""
    width, height = images[0].size
    zoom = max(1, -(-min_width // width))
    width, height = zoom * width, zoom * height
    cell = width + GAP, height + CAPTION_HEIGHT + GAP
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (min(columns, len(images)) * cell[0], rows * cell[1]), "white")
    pen = ImageDraw.Draw(grid)
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = i % columns * cell[0], i // columns * cell[1]
        while caption and pen.textlength(caption) > width:
            caption = caption[:-2].rstrip("…") + "…"
        pen.text((x, y), caption, "black")
        grid.paste(image.resize((width, height), Image.Resampling.NEAREST), (x, y + CAPTION_HEIGHT))
    return grid
