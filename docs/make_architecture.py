"""Draw docs/images/architecture.svg from the imports of the code and the tables in architecture.md.

python docs/make_architecture.py
"""

import ast
import html
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE, FIGURE = ROOT / "docs/architecture.md", ROOT / "docs/images/architecture.svg"
# each package and what it contains
PACKAGES = {
    "scripts": "training loops and tools",
    "api": "Trainer, evaluate",
    "demo": "web demo, gallery",
    "votes": "voting page and server",
    "diffusion": "diffusion: algorithms/, models/",
    "vlm": "VLMs: losses/, models/",
    "training": "session, checkpoints, metrics",
    "benchmarks": "protocols, formulas, results",
    "report": "report, health checks, images",
    "reward_server": "rewards over HTTP",
    "rewards": "scorers/, judges/, text/, workers/",
    "data": "prompts, questions, seeding",
    "perf": "CUDA graphs, fused layers, LoRA",
    "config": "settings, command line, help",
    "maths": "sde, advantages, windows, losses",
    "basics": "errors, files, disk, hub, images",
}
MATHS = ("sde", "advantages", "windows", "losses")
BASICS = (
    "__version__",
    "atomic_io",
    "errors",
    "audio",
    "chat_templates",
    "context_length",
    "host_header",
    "host_memory",
    "hub_access",
    "images",
    "modelscope_hub",
    "untrusted_files",
    "weight_checks",
)
WIDTH, BOX, TALL, GAP, ROW = 1060, 196, 46, 16, 84


class Stop(NamedTuple):
    """A row of a data-flow table in architecture.md."""

    name: str
    file: str
    function: str  # or Class.method
    what: str


def package_of(module: str) -> str | None:
    """Return the package of a module by its dotted name; None for modules of other projects."""
    top, _, rest = module.partition(".")
    if top in ("scripts", "reward_server"):
        return top
    if top != "flow_grpo":
        return None
    name = rest.partition(".")[0]
    if name in MATHS:
        return "maths"
    if name in BASICS:
        return "basics"
    return "api" if name in ("", "__init__") else name


def package_imports() -> dict[str, set[str]]:
    """Return the packages that each package imports from, anywhere in its files."""
    found: dict[str, set[str]] = {name: set() for name in PACKAGES}
    for folder in ("flow_grpo", "scripts", "reward_server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            here = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    is_root = node.module == "flow_grpo"  # from flow_grpo import errors
                    names = (
                        [f"flow_grpo.{a.name}" for a in node.names] if is_root else [node.module]
                    )
                found[here] |= {
                    there for there in map(package_of, names) if there not in (None, here)
                }
    return found


def layers(packages: dict[str, set[str]]) -> list[list[str]]:
    """Return layers from the top: each package is above all that it imports. Raises on a cycle."""
    level: dict[str, int] = {}
    for name in TopologicalSorter(packages).static_order():
        level[name] = 1 + max((level[each] for each in packages[name]), default=-1)
    order = list(PACKAGES)
    return [
        sorted((n for n in level if level[n] == height), key=order.index)
        for height in range(max(level.values()), -1, -1)
    ]


def transitive_reduction(packages: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the transitive reduction: edges that no longer path implies."""

    def below(name: str) -> set[str]:
        return packages[name].union(*map(below, packages[name]))

    return [
        (name, each)
        for name, imported in packages.items()
        for each in sorted(imported)
        if not any(each in below(other) for other in imported if other != each)
    ]


def data_flows(text: str) -> dict[str, list[Stop]]:
    """Return the tables of the page by the heading above them."""
    found = {}
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        rows = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \| (.+?) \|$", part, flags=re.M)
        if rows:
            found[part.partition("\n")[0]] = [Stop(*row) for row in rows]
    return found


def render_svg(packages: dict[str, set[str]], stops: dict[str, list[Stop]]) -> str:
    """Return the SVG: the layers from the top, and below them each data flow as a row of boxes."""
    parts, place = [], {}
    for row, names in enumerate(layers(packages)):
        left = (WIDTH - len(names) * BOX - (len(names) - 1) * GAP) / 2
        for column, name in enumerate(names):
            place[name] = left + column * (BOX + GAP), 20 + row * ROW
    for name, each in transitive_reduction(packages):
        (x1, y1), (x2, y2) = place[name], place[each]
        start, end = (x1 + BOX / 2, y1 + TALL), (x2 + BOX / 2, y2 - 3)
        bend = (start[1] + end[1]) / 2
        parts.append(
            f'<path class="arrow" d="M{start[0]:.0f} {start[1]:.0f} C{start[0]:.0f} {bend:.0f} '
            f'{end[0]:.0f} {bend:.0f} {end[0]:.0f} {end[1]:.0f}"/>'
        )
    for name, (x, y) in place.items():
        parts += _box(x, y, BOX, name, PACKAGES[name], "room")
    height = 20 + len(layers(packages)) * ROW
    for title, way in stops.items():
        parts.append(f'<text class="title" x="20" y="{height + 14}">{html.escape(title)}</text>')
        wide = (WIDTH - 40 - (len(way) - 1) * 12) / len(way)
        for column, stop in enumerate(way):
            x, file = 20 + column * (wide + 12), stop.file.removeprefix("flow_grpo/")
            parts += _box(x, height + 26, wide, stop.name, file, "stop")
            if column:
                y = height + 26 + TALL / 2
                parts.append(f'<path class="arrow" d="M{x - 12:.0f} {y:.0f} H{x - 3:.0f}"/>')
        height += 100
    return SVG.format(width=WIDTH, height=height, body="\n".join(parts))


def _box(x: float, y: float, width: float, name: str, what: str, kind: str) -> list[str]:
    middle, size = x + width / 2, f'width="{width:.0f}" height="{TALL}" rx="6"'
    return [
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" {size}/>',
        f'<text class="name" x="{middle:.0f}" y="{y + 19:.0f}">{html.escape(name)}</text>',
        f'<text class="what" x="{middle:.0f}" y="{y + 36:.0f}">{html.escape(what)}</text>',
    ]


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">
<style>
rect.room {{fill: #eef4fb; stroke: #6b8fb8}}
rect.stop {{fill: #f5f2e9; stroke: #b39b5c}}
text {{text-anchor: middle; fill: #222}}
text.name {{font-size: 14px; font-weight: 600}}
text.what {{font-size: 9px; fill: #555}}
text.title {{font-size: 14px; font-weight: 600; text-anchor: start}}
path.arrow {{fill: none; stroke: #999; marker-end: url(#tip)}}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#999"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>
{body}
</svg>
"""


if __name__ == "__main__":
    FIGURE.write_text(
        render_svg(package_imports(), data_flows(PAGE.read_text("utf-8"))), encoding="utf-8"
    )
