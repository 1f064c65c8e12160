"""Gallery of prompts x (base, checkpoints), as one image and as one self-contained page."""

import base64
import html
import json
from pathlib import Path
from typing import Any

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.results import CandidateScores, candidate_grid
from flow_grpo.report.grid import middle_frame

IMAGE_FILE, PAGE_FILE = "gallery.png", "gallery.html"
MIN_SMOOTH_WIDTH = 256  # pixels; narrower images are enlarged with sharp pixels
# The browser rejects everything that is not in the file, and any script.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
)
STYLE = """
body {font: 16px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem;
      color: #222; background: #fff}
h1 {font-size: 1.4rem; margin-bottom: 0}
.facts {color: #666; margin-top: .25rem}
h2 {font-size: 1rem; font-weight: 600; margin: 2rem 0 .5rem; overflow-wrap: anywhere}
.row {display: grid; grid-template-columns: repeat(auto-fit, minmax(min(192px, 100%), 1fr));
      gap: 1rem}
figure {margin: 0}
img, video {display: block; width: 100%; border-radius: 4px}
figcaption {font-size: .85rem; color: #555; overflow-wrap: anywhere}
figcaption b {color: #222}
"""
PIXELATED = "img, video {image-rendering: pixelated}\n"


def write(
    out: Path, settings: dict[str, Any], scored: list[CandidateScores], prompts: list[Prompt]
) -> None:
    """Write the gallery of an evaluation.

    Args:
        out: Directory of the evaluation, which has the images in samples/.
        settings: Of these, model, steps, guidance and seed are shown.
        scored: The base model, then the checkpoints; one column each.
        prompts: One row each, as far as there are images.
    """
    images = scored[0].result.images
    shown = [p.prompt for p in prompts[: len(images)]]
    candidate_grid(scored, shown).save(out / IMAGE_FILE)
    files = {each.name: _sample_files(out / "samples" / each.name) for each in scored}
    sections = []
    for row, prompt in enumerate(shown):
        _, *sources = files[scored[0].name][row]
        figures = [_figure("source", source, []) for source in sources]
        figures += [_figure(s.name, files[s.name][row][0], s.score_lines(row)) for s in scored]
        heading = f"<h2>{html.escape(prompt)}</h2>"
        sections.append(f'{heading}\n<div class="row">{"".join(figures)}</div>')
    is_small = middle_frame(images[0]).width < MIN_SMOOTH_WIDTH
    page = _page(settings, STYLE + (PIXELATED if is_small else ""), "\n".join(sections))
    (out / PAGE_FILE).write_text(page, encoding="utf-8")


def _sample_files(folder: Path) -> list[list[Path]]:
    """Return the file of each sample in a directory, followed by its source images."""
    lines = (folder / "samples.jsonl").read_text("utf-8").splitlines()
    return [
        [folder / n for n in (r["file"], *r.get("sources", ()))] for r in map(json.loads, lines)
    ]


def _figure(name: str, file: Path, lines: list[str]) -> str:
    """Return an embedded image or video with its name and scores below."""
    is_video, data = file.suffix == ".mp4", base64.b64encode(file.read_bytes()).decode()
    source = f"data:{'video' if is_video else 'image'}/{file.suffix[1:]};base64,{data}"
    shown = f'<img src="{source}" alt="">'
    if is_video:
        shown = f'<video src="{source}" controls loop muted playsinline></video>'
    scores = "".join(f"<br>{html.escape(line)}" for line in lines)
    caption = f"<figcaption><b>{html.escape(name)}</b>{scores}</figcaption>"
    return f"<figure>{shown}{caption}</figure>"


def _page(settings: dict[str, Any], style: str, body: str) -> str:
    """Return the HTML page around `body`, with the settings in its header."""
    model = Path(settings["model"])  # a local path is private
    facts = {"model": model.name if model.is_absolute() else model}
    facts |= {name: settings[name] for name in ("steps", "guidance_scale", "seed")}
    line = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Gallery</title>
<style>{style}</style>
<h1>Same prompts, same noise</h1>
<p class="facts">{html.escape(line)}</p>
{body}
</html>
"""
