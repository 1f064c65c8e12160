"""Pictures of a run, for people.

    python scripts/plot.py curve logs/A logs/B --metric eval/ocr --out curve.png
    python scripts/plot.py pictures logs/A/samples/eval-00000 logs/A/samples/eval-00012 \
        --out before_after.png
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.run.grid import picture_grid


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A row per epoch; `run` is a run folder or a metrics.jsonl file."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"no metrics at {path}: name a run folder or a metrics file")
    rows, lines = [], path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):  # the last one is cut where a run was killed
                raise UserError(f"line {number} of {path} is no JSON; mend or remove it") from error
    return rows


def read_curve(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Epochs and values."""
    rows = read_metrics(run)
    points = [(row["epoch"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        names = ", ".join(sorted({name for row in rows for name in row if "/" in name}))
        raise UserError(f"{run} has no {metric!r}; it has {names}")
    return [p[0] for p in points], [p[1] for p in points]


@contextmanager
def figure(out: Path, *, x: str, y: str) -> Iterator[Any]:
    """Axes to draw labelled lines on, which are saved as a picture afterwards."""
    import matplotlib  # an extra: only figures need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(figsize=(6, 3.5))
    yield axes
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    many = len(axes.get_legend_handles_labels()[1]) > 5
    axes.legend(ncols=2 if many else 1, fontsize="small" if many else None)
    drawn.tight_layout()
    drawn.savefig(out, dpi=120)
    plt.close(drawn)


def plot_curve(runs: list[Path], metrics: list[str], out: Path) -> None:
    with figure(out, x="epoch", y=metrics[0] if len(metrics) == 1 else "") as axes:
        for run in runs:
            for metric in metrics:
                name = run.name if len(metrics) == 1 else f"{run.name} {metric}"
                axes.plot(*read_curve(run, metric), marker="o", markersize=3, label=name)


def plot_pictures(folders: list[Path], count: int, out: Path) -> None:
    """The same samples of each folder next to each other, one column per folder."""
    tables = [_read_samples(folder) for folder in folders]
    count = min(count, *(len(table) for table in tables))
    if count < 1:
        raise UserError("no pictures to show; --count and the run's log_images must be at least 1")
    images, captions = [], []
    for i in range(count):
        for folder, table in zip(folders, tables, strict=True):
            images.append(Image.open(folder / table[i].get("still", table[i]["file"])))
            score = table[i]["avg"]
            captions.append(
                f"{table[i]['prompt']}  {'failed' if score is None else f'{score:.2f}'}"
            )
    picture_grid(images, captions, columns=len(folders) * (2 if count % 2 == 0 else 1)).save(out)


def _read_samples(folder: Path) -> list[dict]:
    path = folder / "samples.jsonl"
    if not path.is_file():
        raise UserError(f"no samples at {path}: name a folder under a run's samples/")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    curve = commands.add_parser("curve", help="metrics over epochs, one line per run")
    curve.add_argument("runs", nargs="+", type=Path, help="run folders or metrics files")
    curve.add_argument("--metric", nargs="+", default=["eval/avg"])
    pictures = commands.add_parser("pictures", help="samples of several folders side by side")
    pictures.add_argument("folders", nargs="+", type=Path)
    pictures.add_argument("--count", type=int, default=12, help="samples per folder")
    for command in (curve, pictures):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if args.command == "curve":
            plot_curve(args.runs, args.metric, args.out)
        else:
            plot_pictures(args.folders, args.count, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
