"""Plot the metrics of runs, or show their samples side by side.

    python scripts/plot.py curve logs/A logs/B --metric eval/ocr [--out curve.png]
    python scripts/plot.py pictures logs/A/samples/eval-00000 logs/A/samples/eval-00012

Without --out the figure is saved in the first run's directory.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error
from flow_grpo.errors import UserError, first_line
from flow_grpo.images import read_image
from flow_grpo.report.grid import format_score, image_grid, source_image_columns
from flow_grpo.report.run_reader import read_metrics, short_names
from flow_grpo.untrusted_files import parse_json, read_text

EVALUATION_DIR = re.compile(r"eval-(\d+)")  # a directory of a run's samples


def read_curve(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Return the epochs and values of a metric.

    Raises:
        UserError: If no row has the metric.
    """
    rows = read_metrics(run)
    points = [(row["epoch"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        names = ", ".join(sorted({name for row in rows for name in row if "/" in name}))
        raise UserError(f"has no metric {metric!r}", field=run, hint=f"choose from {names}")
    return [p[0] for p in points], [p[1] for p in points]


@contextmanager
def figure_writer(out: Path) -> Iterator[None]:
    """Context manager for writing a figure, whose directory it creates.

    Raises:
        UserError: For write errors and unknown suffixes.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"cannot be written: {reason}", field=out, hint="choose another file with --out"
        ) from error


@contextmanager
def panels(out: Path, count: int, *, x: str) -> Iterator[list[Any]]:
    """Context manager that creates a figure of `count` vertically stacked axes and saves it.

    It yields the axes; grids, legends and the label `x` are added on exit.
    """
    import matplotlib  # optional dependency

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6, 3.5 if count == 1 else 2.5 * count)
    figure, grid = plt.subplots(count, figsize=size, sharex=True, squeeze=False)
    all_axes = list(grid[:, 0])
    yield all_axes
    all_axes[-1].set_xlabel(x)
    for axes in all_axes:
        axes.grid(alpha=0.3)
        labels = len(axes.get_legend_handles_labels()[1])
        if labels:
            axes.legend(ncols=2 if labels > 5 else 1, fontsize="small" if labels > 5 else None)
    figure.tight_layout()
    with figure_writer(out):
        figure.savefig(out, dpi=120)
    plt.close(figure)


def plot_curve(runs: list[Path], metrics: list[str], out: Path) -> None:
    """Plot metrics over epochs; metrics of similar scale share their axes."""
    curves = {metric: [read_curve(run, metric) for run in runs] for metric in metrics}
    groups = group_by_scale({m: [v for _, values in curves[m] for v in values] for m in metrics})
    with panels(out, len(groups), x="epoch") as all_axes:
        for axes, group in zip(all_axes, groups, strict=True):
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.set_ylabel(group[0] if len(group) == 1 else "")
            for metric in group:
                for run, curve in zip(runs, curves[metric], strict=True):
                    name = run.name if len(group) == 1 else f"{run.name} {metric}"
                    axes.plot(*curve, marker="o", markersize=3, label=name)


def group_by_scale(values: dict[str, list[float]]) -> list[list[str]]:
    """Group names whose largest values are within a factor of ten; others would look flat."""
    scales = {name: max(map(abs, series)) for name, series in values.items()}
    groups: list[list[str]] = []
    for name in values:
        for group in groups:
            nonzero = [scales[n] for n in (*group, name) if scales[n]]  # zeros fit anywhere
            if not nonzero or max(nonzero) <= 10 * min(nonzero):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def plot_images(folders: list[Path], count: int, out: Path) -> None:
    """Show the same samples of each directory side by side, preceded by their source images."""
    tables = [_read_samples(folder) for folder in folders]
    count = min(count, *(len(table) for table in tables))
    if count < 1:
        raise UserError(
            "no images to show", hint="set --count and the run's log_images to at least 1"
        )
    sources = source_image_columns([_sources(folders[0], row) for row in tables[0][:count]])
    images, prompts, scores = [], [], []
    for i in range(count):
        images += [column[i] for column in sources.values()]
        prompts += [""] * len(sources)
        scores += [""] * len(sources)
        for folder, table in zip(folders, tables, strict=True):
            images.append(_open(folder, table[i].get("still") or table[i].get("file")))
            prompts.append(str(table[i].get("prompt", "")))
            scores.append(format_score(table[i].get("avg")))
    names = [*sources, *headings(folders)]
    columns = len(names) * (2 if count % 2 == 0 else 1)
    grid = image_grid(images, prompts, scores, headings=names, columns=columns)
    with figure_writer(out):
        grid.save(out)


def headings(folders: list[Path]) -> list[str]:
    """Return "before" and "after" for two evaluations of a run, else distinguishing names."""
    paths = [folder.resolve() for folder in folders]
    epochs = [EVALUATION_DIR.fullmatch(path.name) for path in paths]
    if len(paths) == 2 and paths[0].parent == paths[1].parent and all(epochs):
        numbers = [int(match[1]) for match in epochs]
        if numbers[0] < numbers[1]:
            return [f"before (epoch {numbers[0]})", f"after (epoch {numbers[1]})"]
    return short_names(paths) if len({*paths}) == len(paths) else [path.name for path in paths]


def default_out(command: str, first: Path) -> Path:
    """Return a path in the first run's directory, or next to a metrics file."""
    if command == "curve":
        return first / "curve.png" if first.is_dir() else first.with_suffix(".png")
    run = first.parent.parent if first.parent.name == "samples" else first.parent
    return run / "pictures.png"


def _read_samples(folder: Path) -> list[dict]:
    """Return the rows of samples.jsonl in a directory; raise a UserError if it is missing."""
    path = folder / "samples.jsonl"
    if not path.is_file():
        raise UserError(
            "does not exist", field=path, hint="pass a directory under a run's samples/"
        )
    lines = read_text(path).split("\n")
    return [parse_json(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def _sources(folder: Path, row: dict[str, Any]) -> list[Image.Image]:
    names = row.get("sources", [])
    return [_open(folder, name) for name in (names if isinstance(names, list) else [names])]


def _open(folder: Path, name: Any) -> Image.Image:
    if not isinstance(name, str):
        raise UserError("has a sample without an image", field=folder)
    return read_image(folder / Path(name).name)  # only the name: it must not leave the directory


def main() -> None:
    """Parse the command line and draw a figure."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    curve = commands.add_parser("curve", help="metrics over epochs, one line per run")
    curve.add_argument("runs", nargs="+", type=Path, help="run directories or metrics files")
    curve.add_argument("--metric", nargs="+", default=["eval/avg"])
    images = commands.add_parser("pictures", help="samples of several directories side by side")
    images.add_argument("folders", nargs="+", type=Path)
    images.add_argument("--count", type=int, default=12, help="samples per directory")
    for command in (curve, images):
        command.add_argument("--out", type=Path, help="default: in the first run's directory")
    args = parser.parse_args()
    exit_on_user_error(lambda: draw(args), debug=False)


def draw(args: Namespace) -> None:
    """Write the figure of the subcommand and print its path."""
    first = (args.runs if args.command == "curve" else args.folders)[0]
    out = args.out or default_out(args.command, first)
    if args.command == "curve":
        plot_curve(args.runs, args.metric, out)
    else:
        plot_images(args.folders, args.count, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
