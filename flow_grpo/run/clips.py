"""Videos as files that a browser plays."""

from pathlib import Path

from PIL import Image

from flow_grpo.rewards.frames import Sample, choose_frames, is_clip

FRAME_MS = 60  # 16 frames a second, as Wan draws them; GIF counts in hundredths of a second
PALETTE_WIDTH = 96  # of the copies that colours are taken from


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
