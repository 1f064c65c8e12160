"""Pictures side by side, each under its caption."""

from PIL import Image, ImageDraw

CAPTION_HEIGHT, GAP = 14, 6


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
