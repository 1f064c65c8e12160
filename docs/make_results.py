"""Write the tables of `PAGES` in docs/results from the metrics files in that directory.

    python docs/make_results.py

A page names the metric, the epochs and the runs of a table in a comment:

    <!-- runs eval/ocr 0,6,last
    seed 1: tiny_ocr_h200_seed1.jsonl
    -->
    <!-- end -->

`last` is the last evaluation. `threshold=0.9` adds a column with the epoch and the seconds at which
the metric first reaches 0.9, `seconds` one with the time of the whole run.
"""

import json
import re
from pathlib import Path
from typing import Any

from flow_grpo.report.console import markdown_table

RESULTS = Path(__file__).parent / "results"
PAGES = ("README.md", "vlm.md", "tools.md", "preferences.md", "two_players_cpu.md")
PLACE = re.compile(r"(<!-- runs (\S+) (\S+)(.*?)\n(.*?)-->\n).*?(<!-- end -->)", re.S)
Row = dict[str, Any]


def read_metrics(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def seconds(rows: list[Row]) -> float:
    """Return the total time of sampling, scoring, training, evaluation and saving."""
    return sum(value or 0.0 for row in rows for name, value in row.items() if "time/" in name)


def value_at(rows: list[Row], metric: str, epoch: str) -> str:
    values = {row["epoch"]: row[metric] for row in rows if row.get(metric) is not None}
    if epoch == "last":
        return f"{values[max(values)]:.3f} ({max(values)})"
    return f"{values[int(epoch)]:.3f}" if int(epoch) in values else "-"


def first_at_least(rows: list[Row], metric: str, threshold: float) -> str:
    for number, row in enumerate(rows):
        if (row.get(metric) or 0.0) >= threshold:
            return f"epoch {row['epoch']}, {seconds(rows[: number + 1]):.0f} s"
    return "-"


def table(metric: str, epochs: list[str], options: list[str], runs: dict[str, str]) -> str:
    limits = [float(o.partition("=")[2]) for o in options if o.startswith("threshold=")]
    names = {"0": "before", "last": "last epoch"}
    head = [f"`{metric}`", *(names.get(epoch, f"epoch {epoch}") for epoch in epochs)]
    head += [f"first at {limit:g} or above" for limit in limits]
    head += ["time"] if "seconds" in options else []
    lines = [[*head, "metrics"]]
    for label, name in runs.items():
        rows = read_metrics(RESULTS / name)
        line = [label, *(value_at(rows, metric, epoch) for epoch in epochs)]
        line += [first_at_least(rows, metric, limit) for limit in limits]
        line += [f"{seconds(rows):.0f} s"] if "seconds" in options else []
        lines.append([*line, f"[file]({name})"])
    return markdown_table(lines)


def page(text: str) -> str:
    """Return the page with regenerated tables."""

    def replace(place: re.Match) -> str:
        start, metric, epochs, options, runs, end = place.groups()
        files = dict(line.rsplit(": ", 1) for line in runs.strip().splitlines())
        return f"{start}\n{table(metric, epochs.split(','), options.split(), files)}\n\n{end}"

    return PLACE.sub(replace, text)


if __name__ == "__main__":
    for name in PAGES:
        path = RESULTS / name
        path.write_text(page(path.read_text("utf-8")), "utf-8")
