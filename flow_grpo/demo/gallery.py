"""Prompts x (base, checkpoints) as one picture, and as one page that needs no other file."""

import base64
import html
import json
from pathlib import Path
from typing import Any

from flow_grpo.data.prompts import Prompt
from flow_grpo.draw.results import CandidateScores, comparison
from flow_grpo.show.grid import still

PICTURE, PAGE = "gallery.png", "gallery.html"
SMALL = 256  # pixels: narrower pictures are enlarged, and their pixels stay sharp
# The browser itself refuses whatever is not in the file, and any script.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body {font: 16px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem;
      color: #222; background: #fff}
h1 {font-size: 1.4rem; margin-bottom: 0}
.facts {color: #666; margin-top: .25rem}
h2 {font-size: 1rem; font-weight: 600; margin: 2rem 0 .5rem; overflow-wrap: anywhere}
.row {display: grid; grid-template-columns: repeat(auto-fit, minmax(min(192px, 100%), 1fr));
      gap: 1rem}
figure {margin: 0}
img {display: block; width: 100%; border-radius: 4px}
img.small {image-rendering: pixelated}
figcaption {font-size: .85rem; color: #555; overflow-wrap: anywhere}
figcaption b {color: #222}
"""


def write(
    out: Path, settings: dict[str, Any], scored: list[CandidateScores], prompts: list[Prompt]
) -> None:
    """From the pictures that an evaluation has saved in `out`."""
    images = scored[0].result.images
    shown = [p.prompt for p in prompts[: len(images)]]
    comparison(scored, shown).save(out / PICTURE)
    kind = "small" if still(images[0]).width < SMALL else "large"
    samples = {each.name: _read(out / "samples" / each.name) for each in scored}
    rows = [
        [
            *(_figure("source", source, [], kind) for source in samples[scored[0].name][row][1:]),
            *(_figure(s.name, samples[s.name][row][0], s.lines(row), kind) for s in scored),
        ]
        for row in range(len(shown))
    ]
    sections = map(_section, shown, rows)
    (out / PAGE).write_text(_page(settings, "\n".join(sections)), encoding="utf-8")


def _read(folder: Path) -> list[list[str]]:
    """The samples of a folder, and after each what it was made from, as addresses that hold all of
    their files."""
    lines = (folder / "samples.jsonl").read_text("utf-8").splitlines()
    rows = map(json.loads, lines)
    return [[_address(folder / n) for n in (r["file"], *r.get("sources", ()))] for r in rows]


def _address(path: Path) -> str:
    return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _figure(name: str, address: str, lines: list[str], kind: str) -> str:
    scores = "".join(f"<br>{html.escape(line)}" for line in lines)
    caption = f"<figcaption><b>{html.escape(name)}</b>{scores}</figcaption>"
    return f'<figure><img class="{kind}" src="{address}" alt="">{caption}</figure>'


def _section(prompt: str, figures: list[str]) -> str:
    return f'<h2>{html.escape(prompt)}</h2>\n<div class="row">{"".join(figures)}</div>'


def _page(settings: dict[str, Any], body: str) -> str:
    model = Path(settings["model"])  # a folder of one's own is nobody else's business
    facts = {"model": model.name if model.is_absolute() else model}
    facts |= {name: settings[name] for name in ("steps", "guidance_scale", "seed")}
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Gallery</title>
<style>{STYLE}</style>
<h1>Same prompts, same noise</h1>
<p class="facts">{html.escape(told)}</p>
{body}
</html>
"""
