"""Write the generated parts of docs/methods/*.md: settings tables, result tables and curves.

    python docs/make_methods.py

A page marks a generated part with a comment and ends it with `<!-- end -->`:

    <!-- settings grpo -->         settings that the method declares, from its dataclass
    <!-- settings trajectory -->   settings that all trajectory (or forward) methods share
    <!-- results tiny_ocr -->      rows of that preset in docs/results/{fair,compare}_h200.md
    <!-- comparison signs -->      all methods on one task, from docs/results/fair_h200.md
    <!-- copied compare_opd -->     the table of docs/results/compare_opd.md

Curves are drawn from docs/results/fair_h200.csv to docs/images/methods/PRESET.svg.
"""

import csv
import re
from collections import defaultdict
from dataclasses import asdict, fields
from pathlib import Path

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.forward_process import ForwardSettings
from flow_grpo.diffusion.algorithms.trajectory import TrajectorySettings
from flow_grpo.report.console import markdown_table

HERE = Path(__file__).parent
PAGES, CURVES = HERE / "methods", HERE / "images/methods"
TUNED, DEFAULT = HERE / "results/fair_h200.md", HERE / "results/compare_h200.md"
PLACE = re.compile(
    r"(<!-- (settings|results|comparison|copied) (\w+) -->\n).*?(<!-- end -->)", re.S
)
SHARED = {"trajectory": TrajectorySettings, "forward": ForwardSettings}
TASKS = {"signs": "text on signs (OCR)", "scenes": "scenes of shapes (GenEval)"}
# the page and the label of each preset in the comparison
LABELS = {
    "tiny_ocr": "[`grpo`](grpo.md)",
    "tiny_grpo_guard": "[`grpo_guard`](grpo_guard.md)",
    "tiny_dppo": "[`dppo`](dppo.md)",
    "tiny_mix": "[`mix`](mix.md)",
    "tiny_tempflow": "`grpo` with [branches](options.md#branches)",
    "tiny_nft": "[`nft`](nft.md)",
    "tiny_awm": "[`awm`](awm.md)",
    "tiny_ram": "[`ram`](ram.md)",
    "tiny_dgpo": "[`dgpo`](dgpo.md)",
    "tiny_dpo": "[`dpo`](dpo.md)",
    "tiny_sft": "[`sft`](baselines.md)",
    "tiny_rwr": "[`rwr`](baselines.md)",
}
REWARD, DIVERSITY = "held-out reward, before -> after", "diversity, first -> last epoch"
Row = dict[str, str]
Curve = list[tuple[int, float]]  # transformer passes, held-out reward


def own_settings(name: str) -> list[str]:
    """Return the names of the settings that a method declares or overrides itself, no aliases."""
    settings = SHARED.get(name) or ALGORITHMS[name].Settings
    if name not in SHARED and settings in SHARED.values():
        return []
    return [
        field.name
        for field in fields(settings)
        if field.name in settings.__annotations__ and "alias_of" not in field.metadata
    ]


def settings_table(name: str) -> str:
    settings = SHARED.get(name) or ALGORITHMS[name].Settings
    defaults = asdict(settings())
    described = {field.name: field.metadata["help"] for field in fields(settings)}
    rows = [[f"`{n}`", f"`{defaults[n]!r}`", described[n]] for n in own_settings(name)]
    return markdown_table([["setting", "default", "description"], *rows])


def read_results(path: Path) -> dict[str, dict[str, Row]]:
    """Read the tables of scripts/compare.py: {task: {preset: {column: cell}}}."""
    found = {}
    for part in re.split(r"^## ", path.read_text("utf-8"), flags=re.M)[1:]:
        task, _, text = part.partition("\n")
        cells = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if "|" in line]
        head, _, *body = cells
        rows = {row[0]: dict(zip(head, row, strict=True)) for row in body}
        for preset, passes in re.findall(r"^(\w+) ended at ([\d,]+) passes", text, re.M):
            rows[preset]["passes"] = f"{int(passes.replace(',', '')) / 1000:.0f} k"
        found[task] = rows
    return found


def results_table(preset: str) -> str:
    tuned, default = read_results(TUNED), read_results(DEFAULT)
    rows = [["task", "learning rate", "epochs", REWARD, "passes to 0.9", "passes", DIVERSITY]]
    for task, label in TASKS.items():
        for results, epochs in ((tuned, "6"), (default, "12")):
            if row := results[task].get(preset):
                rate = f"{row['learning rate']} (tuned)" if results is tuned else "preset"
                row = [row[REWARD], row["passes to 0.9"], row["passes"], row[DIVERSITY]]
                rows.append([label, rate, epochs, *row])
    return markdown_table(rows)


def comparison_table(task: str) -> str:
    columns = ["learning rate", REWARD, "passes to 0.9", "seconds to 0.9", "passes", DIVERSITY]
    results = read_results(TUNED)[task]
    rows = [[label, *(results[preset][c] for c in columns)] for preset, label in LABELS.items()]
    return markdown_table([["method", *columns], *rows])


def copied_table(name: str) -> str:
    lines = (HERE / f"results/{name}.md").read_text("utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


MAKE = {
    "settings": settings_table,
    "results": results_table,
    "comparison": comparison_table,
    "copied": copied_table,
}


def page(text: str) -> str:
    """Return the page with its generated parts updated."""
    return PLACE.sub(lambda at: f"{at[1]}\n{MAKE[at[2]](at[3])}\n\n{at[4]}", text)


def read_curves() -> dict[str, dict[str, dict[str, Curve]]]:
    """Return {task: {preset: {seed: curve}}}, without seed 0, which selected the learning rate."""
    found: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with (HERE / "results/fair_h200.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["seed"] != "0" and row["reward"]:
                point = int(row["passes"]), float(row["reward"])
                found[row["task"]][row["method"]][row["seed"]].append(point)
    return found


WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 180, 44, 30, 60
LOWEST, MOST = 0.55, 115_000


def _line(curve: Curve, left: float, kind: str) -> str:
    points = (
        f"{left + WIDTH * x / MOST:.1f},{TOP + HEIGHT * (1 - y) / (1 - LOWEST):.1f}"
        for x, y in curve
    )
    return f'<polyline class="{kind}" points="{" ".join(points)}"/>'


def curve(preset: str) -> str:
    """Return an SVG with one panel per task: this preset's seeds in blue, others in grey."""
    parts = []
    for column, (task, label) in enumerate(TASKS.items()):
        left, runs = LEFT + column * (WIDTH + GAP), read_curves()[task]
        parts.append(f'<text class="title" x="{left}" y="18">{label}</text>')
        for reward in (0.6, 0.7, 0.8, 0.9, 1.0):
            y = TOP + HEIGHT * (1 - reward) / (1 - LOWEST)
            parts.append(f'<path class="grid" d="M{left} {y:.1f}h{WIDTH}"/>')
            parts.append(f'<text class="y" x="{left - 6}" y="{y + 4:.1f}">{reward:.1f}</text>')
        for passes in (0, 50_000, 100_000):
            x, name = left + WIDTH * passes / MOST, f"{passes // 1000} k"
            parts.append(f'<text class="x" x="{x:.1f}" y="{TOP + HEIGHT + 16}">{name}</text>')
        others = [c for name, seeds in runs.items() if name != preset for c in seeds.values()]
        parts += [_line(each, left, "other") for each in others]
        parts += [_line(each, left, "own") for each in runs[preset].values()]
    middle, bottom = LEFT + WIDTH + GAP / 2, TOP + HEIGHT + 34
    caption = f"held-out reward over transformer passes, {preset}, seeds 1 to 3 (grey: others)"
    parts.append(f'<text class="x" x="{middle:.0f}" y="{bottom}">{caption}</text>')
    size = f"0 0 {LEFT + 2 * WIDTH + GAP + 20} {bottom + 12}"
    return SVG.format(size=size, body="\n".join(parts))


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="11">
<style>
polyline {{fill: none}}
polyline.own {{stroke: #1f77b4; stroke-width: 2}}
polyline.other {{stroke: #ddd}}
path.grid {{stroke: #eee}}
text {{fill: #333; text-anchor: middle}}
text.y {{text-anchor: end}}
text.title {{text-anchor: start; font-weight: 600}}
</style>
<rect width="100%" height="100%" fill="white"/>
{body}
</svg>
"""


if __name__ == "__main__":
    for path in PAGES.glob("*.md"):
        path.write_text(page(path.read_text("utf-8")), "utf-8")
    CURVES.mkdir(exist_ok=True)
    for name in LABELS:
        (CURVES / f"{name}.svg").write_text(curve(name), "utf-8")
