"""Pictures of a run, for people.

    python scripts/plot.py curve logs/A logs/B --metric eval/ocr [--out curve.png]
    python scripts/plot.py pictures logs/A/samples/eval-00000 logs/A/samples/eval-00012

Without --out the picture goes into the first run's folder.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import parse_json, read_text
from flow_grpo.pictures import read_picture
from flow_grpo.show.grid import picture_grid, score_text, source_columns
from flow_grpo.show.reading import read_metrics, short_names

EVALUATION = re.compile(r"eval-(\d+)")  # a folder of a run's samples


def read_curve(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Epochs and values."""
    rows = read_metrics(run)
    points = [(row["epoch"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        names = ", ".join(sorted({name for row in rows for name in row if "/" in name}))
        raise UserError(f"{run} has no {metric!r}; it has {names}")
    return [p[0] for p in points], [p[1] for p in points]


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """A picture, to a folder that need not be there; an ending that is none of a picture's is
    told."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot write {out}: {why}; name another file with --out") from error


@contextmanager
def panels(out: Path, count: int, *, x: str) -> Iterator[list[Any]]:
    """Axes under one another to draw labelled lines on, which are saved as a picture afterwards."""
    import matplotlib  # an extra: only figures need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6, 3.5 if count == 1 else 2.5 * count)
    drawn, grid = plt.subplots(count, figsize=size, sharex=True, squeeze=False)
    every = [axes for [axes] in grid]
    yield every
    every[-1].set_xlabel(x)
    for axes in every:
        axes.grid(alpha=0.3)
        labels = len(axes.get_legend_handles_labels()[1])
        if labels:
            axes.legend(ncols=2 if labels > 5 else 1, fontsize="small" if labels > 5 else None)
    drawn.tight_layout()
    with writing(out):
        drawn.savefig(out, dpi=120)
    plt.close(drawn)


def plot_curve(runs: list[Path], metrics: list[str], out: Path) -> None:
    """Metrics of one scale share their axes."""
    curves = {metric: [read_curve(run, metric) for run in runs] for metric in metrics}
    groups = by_scale({m: [v for _, values in curves[m] for v in values] for m in metrics})
    with panels(out, len(groups), x="epoch") as every:
        for axes, group in zip(every, groups, strict=True):
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.set_ylabel(group[0] if len(group) == 1 else "")
            for metric in group:
                for run, curve in zip(runs, curves[metric], strict=True):
                    name = run.name if len(group) == 1 else f"{run.name} {metric}"
                    axes.plot(*curve, marker="o", markersize=3, label=name)


def by_scale(values: dict[str, list[float]]) -> list[list[str]]:
    """Names whose largest values are within a factor of ten; others would be flat lines."""
    sizes = {name: max(map(abs, own)) for name, own in values.items()}
    groups: list[list[str]] = []
    for name in values:
        for group in groups:
            own = [sizes[n] for n in (*group, name) if sizes[n]]  # zeros go anywhere
            if not own or max(own) <= 10 * min(own):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def plot_pictures(folders: list[Path], count: int, out: Path) -> None:
    """The same samples of each folder next to each other, one column per folder; what they were
    made from stands first."""
    tables = [_read_samples(folder) for folder in folders]
    count = min(count, *(len(table) for table in tables))
    if count < 1:
        raise UserError("no pictures to show; --count and the run's log_images must be at least 1")
    sources = source_columns([_sources(folders[0], row) for row in tables[0][:count]])
    images, prompts, scores = [], [], []
    for i in range(count):
        images += [own[i] for own in sources.values()]
        prompts += [""] * len(sources)
        scores += [""] * len(sources)
        for folder, table in zip(folders, tables, strict=True):
            images.append(_open(folder, table[i].get("still") or table[i].get("file")))
            prompts.append(str(table[i].get("prompt", "")))
            scores.append(score_text(table[i].get("avg")))
    names = [*sources, *headings(folders)]
    columns = len(names) * (2 if count % 2 == 0 else 1)
    grid = picture_grid(images, prompts, scores, headings=names, columns=columns)
    with writing(out):
        grid.save(out)


def headings(folders: list[Path]) -> list[str]:
    """Two evaluations of a run are before and after; others have what tells them apart."""
    where = [folder.resolve() for folder in folders]
    epochs = [EVALUATION.fullmatch(folder.name) for folder in where]
    if len(where) == 2 and where[0].parent == where[1].parent and all(epochs):
        numbers = [int(match[1]) for match in epochs]
        if numbers[0] < numbers[1]:
            return [f"before (epoch {numbers[0]})", f"after (epoch {numbers[1]})"]
    return short_names(where) if len({*where}) == len(where) else [folder.name for folder in where]


def default_out(command: str, first: Path) -> Path:
    """In the folder of the run that is named first; beside a file of metrics."""
    if command == "curve":
        return first / "curve.png" if first.is_dir() else first.with_suffix(".png")
    run = first.parent.parent if first.parent.name == "samples" else first.parent
    return run / "pictures.png"


def _read_samples(folder: Path) -> list[dict]:
    path = folder / "samples.jsonl"
    if not path.is_file():
        raise UserError(f"no samples at {path}: name a folder under a run's samples/")
    lines = read_text(path).split("\n")
    return [parse_json(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def _sources(folder: Path, row: dict[str, Any]) -> list[Image.Image]:
    names = row.get("sources", [])
    return [_open(folder, name) for name in (names if isinstance(names, list) else [names])]


def _open(folder: Path, name: Any) -> Image.Image:
    if not isinstance(name, str):
        raise UserError(f"{folder} has a sample without a picture")
    return read_picture(folder / Path(name).name)  # which does not lead elsewhere


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    curve = commands.add_parser("curve", help="metrics over epochs, one line per run")
    curve.add_argument("runs", nargs="+", type=Path, help="run folders or metrics files")
    curve.add_argument("--metric", nargs="+", default=["eval/avg"])
    pictures = commands.add_parser("pictures", help="samples of several folders side by side")
    pictures.add_argument("folders", nargs="+", type=Path)
    pictures.add_argument("--count", type=int, default=12, help="samples per folder")
    for command in (curve, pictures):
        command.add_argument("--out", type=Path, help="if not given, in the first run's folder")
    args = parser.parse_args()
    told_plainly(lambda: draw(args), debug=False)


def draw(args: Namespace) -> None:
    named = args.runs if args.command == "curve" else args.folders
    out = args.out or default_out(args.command, named[0])
    if args.command == "curve":
        plot_curve(args.runs, args.metric, out)
    else:
        plot_pictures(args.folders, args.count, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
