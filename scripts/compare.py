"""Compare training methods at equal numbers of transformer passes, over several seeds.

Writes a figure with a band over the seeds (OUT.png), a table per task (OUT.md) and the metrics of
every run after each epoch (OUT.csv).

    python scripts/compare.py tiny_ocr tiny_awm tiny_nft --seeds 1 2 3 --passes 100000 \\
        --out docs/results/compare [--tasks signs scenes] [--config.FIELD=VALUE ...]

With --rates, each method first runs at each learning rate with the seed --choose, which is not
shown; --seeds then run at the rate with the highest held-out reward, averaged over the passes.
--also NAME evaluates a second reward that is not trained; if it falls, the first is being hacked.

Each run is a directory under --logdir. Repeat the command to resume an interrupted comparison.
"""

import argparse
import csv
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from compare_utils import (
    format_change,
    format_two_digits,
    make_directories,
    mean,
    run_comparison,
    write_results,
)
from plot import panels
from runs import PER_RUN_FIELDS, SIGNS, TASKS, Run, check_unchanged_config, resolve, train_all

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.errors import UserError
from flow_grpo.report.console import markdown_table
from flow_grpo.report.run_reader import read_metrics

TIME_METRICS = ("time/sample", "time/reward_wait", "time/train")


@dataclass(frozen=True)
class Epoch:
    """Metrics of a run after one epoch; None if not logged."""

    passes: int  # samples through the transformer since the start
    seconds: float  # since the start, without evaluations
    reward: float | None  # held-out
    kl: float | None
    diversity: float | None
    also: float | None = None  # the reward that is evaluated but not trained


Runs = dict[str, list[list[Epoch]]]  # by method, one run per seed


def read_run(folder: Path, also: str = "") -> list[Epoch]:
    """Read the metrics of a run.

    Args:
        folder: The run directory, or a metrics file without its .jsonl suffix.
        also: A reward that was evaluated but not trained.

    Raises:
        UserError: If the run lacks the first evaluation, or a metric that is needed.
    """
    epochs, seconds = [], 0.0
    metrics_file = folder.parent / f"{folder.name}.jsonl"
    for row in read_metrics(metrics_file if metrics_file.is_file() else folder):
        passes = row.get("perf/passes", None if row["epoch"] else 0)
        if passes is None:
            raise UserError(
                "has no perf/passes: it was written by an older version",
                field=folder,
                hint="train it again",
            )
        seconds += sum(row.get(name) or 0.0 for name in TIME_METRICS)
        names = ("eval/avg", "train/kl", "reward/diversity", f"eval/{also}")
        epochs.append(Epoch(passes, seconds, *map(row.get, names)))
    if not epochs or epochs[0].reward is None:
        raise UserError("does not start with an evaluation", field=folder, hint="use a full run")
    if also and epochs[0].also is None:
        raise UserError(f"has no metric eval/{also}", field=folder, hint="omit --also")
    return epochs


def truncate_run(run: list[Epoch], passes: int) -> list[Epoch]:
    """Return the epochs up to the last evaluation at or below `passes`.

    Raises:
        UserError: If `passes` is before the first evaluation.
    """
    evaluated = [i for i, e in enumerate(run) if e.reward is not None and e.passes <= passes]
    if not evaluated:
        raise UserError(
            "is before the first evaluation", field="--passes", value=passes, hint="raise it"
        )
    return run[: evaluated[-1] + 1]


def first_crossing(run: list[Epoch], threshold: float) -> Epoch | None:
    return next((e for e in run if e.reward is not None and e.reward >= threshold), None)


def forward_fill(x: Sequence[float], y: Sequence[float], grid: Sequence[float]) -> np.ndarray:
    """Return, for each grid point, the value at the last x at or below it; x is ascending."""
    return np.asarray(y)[np.searchsorted(x, grid, side="right") - 1]


def band(runs: list[list[Epoch]], end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the held-out rewards of several seeds on a common grid of passes.

    Returns:
        The grid, (points,), up to the end of the longest run, and the last evaluated reward at each
        point, (seeds, points).
    """
    curves = [
        [(e.passes, e.reward) for e in truncate_run(run, end) if e.reward is not None]
        for run in runs
    ]
    last = min(end, max(run[-1].passes for run in runs))
    grid = np.unique([last, *(passes for curve in curves for passes, _ in curve)])
    return grid, np.stack([forward_fill(*zip(*curve, strict=True), grid) for curve in curves])


def mean_reward(run: list[Epoch], end: int) -> float:
    """Return the held-out reward averaged over the passes up to `end`."""
    evaluated = [(e.passes, e.reward) for e in truncate_run(run, end) if e.reward is not None]
    passes, rewards = zip(*evaluated, strict=True)
    return float(np.average(rewards, weights=np.diff([*passes, end])))


def best_learning_rate(runs: dict[float, list[Epoch]], end: int) -> float:
    return max(runs, key=lambda rate: mean_reward(runs[rate], end))


def table_row(
    name: str, runs: list[list[Epoch]], threshold: float, also: bool = False
) -> list[str]:
    """Return the table row of one method from its truncated runs."""
    before, after = ([run[i].reward for run in runs] for i in (0, -1))
    others = [[run[i].also for run in runs] for i in (0, -1)] if also else []
    crossings = [e for run in runs if (e := first_crossing(run, threshold)) is not None]
    missed = "" if len(crossings) == len(runs) else f" ({len(crossings)} of {len(runs)} seeds)"
    diversity = [logged(run, "diversity") for run in runs]
    spread = [mean([d[i] for d in diversity if d]) for i in (0, -1)]
    return [
        name,
        format_change(before, after),
        format_two_digits(mean([e.passes for e in crossings]), missed),
        format_two_digits(mean([e.seconds for e in crossings]), missed),
        format_two_digits(mean([kl[-1] for run in runs if (kl := logged(run, "kl"))])),
        "-" if spread[0] is None else " -> ".join(map(format_two_digits, spread)),
        *([format_change(*others)] if also else []),
    ]


def logged(run: list[Epoch], name: str) -> list[float]:
    return [value for e in run if (value := getattr(e, name)) is not None]


def table(
    runs: Runs, end: int, threshold: float, rates: dict[str, str] | None = None, also: str = ""
) -> str:
    """Return the Markdown table of one task; `rates` are the learning rates by method."""
    head = ["method", "held-out reward, before -> after"]
    head += [f"{unit} to {threshold:g}" for unit in ("passes", "seconds")]
    head += ["KL at the end", "diversity, first -> last epoch"]
    head += [f"{also}, before -> after"] if also else []
    rows = [
        table_row(name, [truncate_run(run, end) for run in seeds], threshold, bool(also))
        for name, seeds in runs.items()
    ]
    if rates:
        head.insert(1, "learning rate")
        for row in rows:
            row.insert(1, rates[row[0]])
    totals = {name: min(run[-1].passes for run in seeds) for name, seeds in runs.items()}
    ended = [f"{name} ended at {total:,} passes." for name, total in totals.items() if total < end]
    return "\n".join([markdown_table([head, *rows]), "", *ended])


def report(
    tasks: dict[str, Runs],
    end: int,
    threshold: float,
    rates: dict[str, dict[str, str]],
    also: str = "",
) -> list[str]:
    """Return the tables of all tasks and notes as paragraphs."""
    parts = [table(runs, end, threshold, rates.get(t), also) for t, runs in tasks.items()]
    if len(tasks) > 1:
        parts = [f"## {task}\n\n{part}" for task, part in zip(tasks, parts, strict=True)]
    notes = [
        f"Means over the seeds (lowest to highest), after at most {end:,} passes of a sample",
        "through the transformer: 1 for a forward pass, 3 for forward and backward. Seconds are",
        "sampling, scoring and training, without evaluations.",
    ]
    if rates:
        notes += ["Each method runs at the best of several learning rates, chosen with a seed that"]
        notes += ["is not shown; * marks the lowest or highest rate that was tried."]
    return [*parts, "\n".join(notes)]


def plot(tasks: dict[str, Runs], end: int, threshold: float, out: Path) -> None:
    """Write the figure with one panel per task."""
    with panels(out, len(tasks), x="transformer passes (thousands)") as every:
        for axes, (task, runs) in zip(every, tasks.items(), strict=True):
            axes.set_ylabel("held-out reward" + (f", {task}" if len(tasks) > 1 else ""))
            for name, seeds in runs.items():
                passes, rewards = band(seeds, end)
                passes = passes / 1000
                label = name if axes is every[0] else ""  # all panels share their colours
                [line] = axes.plot(passes, rewards.mean(0), drawstyle="steps-post", label=label)
                low, high = rewards.min(0), rewards.max(0)
                axes.fill_between(
                    passes, low, high, step="post", color=line.get_color(), alpha=0.15, linewidth=0
                )
            axes.axhline(threshold, color="grey", linestyle=":", linewidth=1)


def write_curves(runs: dict[Run, list[Epoch]], out: Path) -> None:
    """Write one CSV row per epoch of each run, including those that tuned the learning rate."""
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "method", "rate", "seed", *(f.name for f in fields(Epoch))])
        for run, epochs in runs.items():
            for epoch in epochs:
                values = [f"{v:.6g}" if isinstance(v, float) else v for v in astuple(epoch)]
                writer.writerow([run.task, run.method, run.rate, run.seed, *values])


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and the options --config.FIELD=VALUE."""
    parser = ScriptParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    variants = "presets of config/grpo.py; PRESET+FIELD=VALUE+FIELD=VALUE changes fields of one"
    parser.add_argument("presets", nargs="*", help=variants)
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    tasks = "signs: the presets unchanged; scenes: the shapes of dataset/scenes"
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="learning rates to try")
    parser.add_argument("--choose", type=int, help="seed that selects the learning rate; default 0")
    parser.add_argument("--also", default="", help="a reward to evaluate but not train")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[SIGNS], help=tasks)
    parser.add_argument("--passes", type=int, help="cut runs here; default: the shortest run's end")
    parser.add_argument("--threshold", type=float, default=0.9, help="held-out reward to reach")
    parser.add_argument("--out", type=Path, required=True, help="output files, without suffix")
    parser.add_argument("--logdir", type=Path, default=Path("logs/compare"))
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs, which slows each")
    parser.add_argument("--no-train", action="store_true", help="only show existing runs")
    args, overrides = parser.parse_known_args()
    lists = {"presets": args.presets, "--seeds": args.seeds, "--tasks": args.tasks}
    for name, values in lists.items():
        if not values or len({*values}) < len(values):
            raise UserError("needs one or more different values", field=name, value=values)
    rates, choose = args.rates, args.choose or 0
    if args.choose is not None and not rates:
        raise UserError(
            "has no effect without --rates", field="--choose", value=choose, hint="omit it"
        )
    if rates and (len({*rates}) < len(rates) or min(rates) <= 0):
        raise UserError("must be positive and different", field="--rates", value=rates)
    if rates and choose in args.seeds:
        raise UserError(
            "must not be one of --seeds", field="--choose", value=choose, hint="use another seed"
        )
    args.choose = choose
    for name, values in {"--rates": rates, "--threshold": [args.threshold]}.items():
        if not all(map(math.isfinite, values)):
            raise UserError("must be finite", field=name, value=values)
    if args.out.name in ("", ".."):
        raise UserError(
            "has no file name", field="--out", value=str(args.out), hint="add one, without suffix"
        )
    for name, value in {"--passes": args.passes, "--jobs": args.jobs}.items():
        if value is not None and value < 1:
            raise UserError("must be at least 1", field=name, value=value)
    for option in overrides:
        field, equals, _ = option.removeprefix("--config.").partition("=")
        if not (option.startswith("--config.") and equals):
            raise UserError(f"unexpected argument {option!r}", hint="use --config.FIELD=VALUE")
        if field in PER_RUN_FIELDS:
            raise UserError("is set for each run", field=option, hint="use --seeds and --logdir")
    return args, overrides


def compare() -> None:
    """Train what is missing, and write the table, the figure and the curves."""
    args, overrides = parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib", hint="pip install -e .[plot]")
    both = [(task, preset) for task in args.tasks for preset in args.presets]

    def train_and_read(wanted: list[Run]) -> dict[Run, list[Epoch]]:
        """Train the wanted runs unless --no_train is given, and return their metrics."""
        if wanted and not args.no_train:
            train_missing_runs(wanted, args, overrides)
        for run in wanted:
            check_unchanged_config(args.logdir / run.name, run, overrides)
        return {run: read_run(args.logdir / run.name, args.also) for run in wanted}

    def last_pass(runs: dict[Run, list[Epoch]]) -> int:
        return args.passes or min(run[-1].passes for run in runs.values())

    tried = train_and_read([Run(*b, args.choose, r, args.also) for r in args.rates for b in both])
    rates = {}
    if args.rates:
        for pair in both:
            runs = {r.rate: epochs for r, epochs in tried.items() if (r.task, r.method) == pair}
            rates[pair] = best_learning_rate(runs, last_pass(tried))
    # All methods with one seed, then with the next, so that partial results can be compared.
    shown = train_and_read([Run(*b, s, rates.get(b), args.also) for s in args.seeds for b in both])
    end = last_pass(shown)
    tasks = {task: {preset: [] for preset in args.presets} for task in args.tasks}
    for run, epochs in shown.items():
        tasks[run.task][run.method].append(epochs)
    shown_rates: dict[str, dict[str, str]] = {}
    for (task, preset), rate in rates.items():
        mark = "*" if rate in (min(args.rates), max(args.rates)) else ""
        shown_rates.setdefault(task, {})[preset] = f"{rate:g}{mark}"
    paragraphs = report(tasks, end, args.threshold, shown_rates, args.also)
    make_directories(args.out.parent)
    plot(tasks, end, args.threshold, Path(f"{args.out}.png"))
    write_curves(tried | shown, Path(f"{args.out}.csv"))
    write_results(args.out, *paragraphs, without=["--no-train"])


def train_missing_runs(wanted: list[Run], args: argparse.Namespace, overrides: list[str]) -> None:
    """Train the runs that are not finished; exit with 1 if one fails."""
    for run in wanted:
        resolve(run, overrides)
    make_directories(args.out.parent, args.logdir)
    if not train_all(wanted, args.logdir, overrides, args.jobs):
        sys.exit(1)


if __name__ == "__main__":
    run_comparison(compare)
