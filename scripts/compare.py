"""Compare training methods at equal numbers of model evaluations: presets x seeds, on one task or
several: one figure with bands over the seeds (OUT.png), a table of each task (OUT.md) and what each
run had reached after every epoch (OUT.csv).

    python scripts/compare.py tiny_ocr tiny_awm tiny_nft --seeds 1 2 3 --passes 100000 \\
        --out docs/results/compare [--tasks signs scenes] [--config.FIELD=VALUE ...]

With --rates, each method first runs with each learning rate and the seed --choose, which is not
shown; --seeds then run at the rate whose held-out reward was the highest, averaged over passes.
--also NAME evaluates a second reward that is not trained: where it falls, the first is hacked.

Each run is a folder under --logdir. The same command goes on where it was stopped.
"""

import argparse
import csv
import importlib.util
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from plot import panels
from runs import OWN_FIELDS, SIGNS, TASKS, Run, check_changes, resolve, train_all

from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.errors import Stopped, UserError
from flow_grpo.show.reading import read_metrics

WORK = ("time/sample", "time/reward_wait", "time/train")


@dataclass(frozen=True)
class Epoch:
    """What a run had reached after an epoch; None where nothing was logged."""

    passes: int  # of samples through the transformer, since the start
    seconds: float  # since the start, without evaluations
    reward: float | None  # held-out
    kl: float | None
    diversity: float | None
    also: float | None = None  # of a reward that is not trained


Runs = dict[str, list[list[Epoch]]]  # of each method those of its seeds


def read_run(folder: Path, also: str = "") -> list[Epoch]:
    """`folder` may also be a metrics file, without its ending; `also` is a reward beside the
    trained one."""
    epochs, seconds = [], 0.0
    alone = folder.parent / f"{folder.name}.jsonl"
    for row in read_metrics(alone if alone.is_file() else folder):
        passes = row.get("perf/passes", None if row["epoch"] else 0)
        if passes is None:
            raise UserError(f"{folder} has no perf/passes: an older version wrote it; train anew")
        seconds += sum(row.get(name) or 0.0 for name in WORK)
        names = ("eval/avg", "train/kl", "reward/diversity", f"eval/{also}")
        epochs.append(Epoch(passes, seconds, *map(row.get, names)))
    if not epochs or epochs[0].reward is None:
        raise UserError(f"{folder} does not begin with an evaluation; name whole runs")
    if also and epochs[0].also is None:
        raise UserError(f"{folder} has no eval/{also}: it was not evaluated; leave --also out")
    return epochs


def cut(run: list[Epoch], passes: int) -> list[Epoch]:
    """Up to the last evaluation at or below so many passes."""
    evaluated = [i for i, e in enumerate(run) if e.reward is not None and e.passes <= passes]
    if not evaluated:
        raise UserError(f"no evaluation at or below {passes:,} passes; ask for more with --passes")
    return run[: evaluated[-1] + 1]


def first_crossing(run: list[Epoch], threshold: float) -> Epoch | None:
    return next((e for e in run if e.reward is not None and e.reward >= threshold), None)


def carried_forward(x: Sequence[float], y: Sequence[float], grid: Sequence[float]) -> np.ndarray:
    """At each point of the grid the value of the last x at or below it; x ascends."""
    return np.asarray(y)[np.searchsorted(x, grid, side="right") - 1]


def band(runs: list[list[Epoch]], end: int) -> tuple[np.ndarray, np.ndarray]:
    """Passes, and at each the held-out rewards (seeds, passes); nothing beyond the longest run."""
    curves = [[(e.passes, e.reward) for e in cut(run, end) if e.reward is not None] for run in runs]
    last = min(end, max(run[-1].passes for run in runs))
    grid = np.unique([last, *(passes for curve in curves for passes, _ in curve)])
    return grid, np.stack([carried_forward(*zip(*curve, strict=True), grid) for curve in curves])


def mean_reward(run: list[Epoch], end: int) -> float:
    """Held-out, averaged over the passes up to `end`: high if it learns soon and then stays."""
    evaluated = [(e.passes, e.reward) for e in cut(run, end) if e.reward is not None]
    passes, rewards = zip(*evaluated, strict=True)
    return float(np.average(rewards, weights=np.diff([*passes, end])))


def best_rate(runs: dict[float, list[Epoch]], end: int) -> float:
    return max(runs, key=lambda rate: mean_reward(runs[rate], end))


def table_row(
    name: str, runs: list[list[Epoch]], threshold: float, also: bool = False
) -> list[str]:
    """The row of one method, whose runs are cut already."""
    before, after = ([run[i].reward for run in runs] for i in (0, -1))
    others = [[run[i].also for run in runs] for i in (0, -1)] if also else []
    crossings = [e for run in runs if (e := first_crossing(run, threshold)) is not None]
    missed = "" if len(crossings) == len(runs) else f" ({len(crossings)} of {len(runs)} seeds)"
    diversity = [logged(run, "diversity") for run in runs]
    spread = [mean([d[i] for d in diversity if d]) for i in (0, -1)]
    return [
        name,
        f"{with_range(before)} -> {with_range(after)}",
        short(mean([e.passes for e in crossings]), missed),
        short(mean([e.seconds for e in crossings]), missed),
        short(mean([kl[-1] for run in runs if (kl := logged(run, "kl"))])),
        "-" if spread[0] is None else f"{short(spread[0])} -> {short(spread[1])}",
        *([" -> ".join(map(with_range, others))] if also else []),
    ]


def logged(run: list[Epoch], name: str) -> list[float]:
    return [value for e in run if (value := getattr(e, name)) is not None]


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def with_range(rewards: list[float]) -> str:
    """Two decimals, more where a reward's scale is small."""
    largest = max(map(abs, rewards))
    decimals = 1 - math.floor(math.log10(largest)) if 0 < largest < 0.1 else 2
    middle, low, high = (f"{v:.{decimals}f}" for v in (mean(rewards), min(rewards), max(rewards)))
    return middle if low == high else f"{middle} ({low} to {high})"


def short(value: float | None, note: str = "") -> str:
    """Two digits: a crossing is known to an evaluation only, and three seeds are few."""
    if value is None:
        return "-"
    value = float(f"{value:.2g}")
    size, unit = next((s for s in ((1e6, " M"), (1e3, " k")) if abs(value) >= s[0]), (1, ""))
    return f"{value / size:g}{unit}{note}"


def table(
    runs: Runs, end: int, threshold: float, rates: dict[str, str] | None = None, also: str = ""
) -> str:
    """The table of one task, in Markdown; `rates` are those that the methods were run at."""
    head = ["method", "held-out reward, before -> after"]
    head += [f"{unit} to {threshold:g}" for unit in ("passes", "seconds")]
    head += ["KL at the end", "diversity, first -> last epoch"]
    head += [f"{also}, before -> after"] if also else []
    every = {name: [cut(run, end) for run in of] for name, of in runs.items()}
    rows = [table_row(name, of, threshold, bool(also)) for name, of in every.items()]
    for cells in [head, *rows] if rates else []:
        cells.insert(1, "learning rate" if cells is head else rates[cells[0]])
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    totals = {name: min(run[-1].passes for run in of) for name, of in runs.items()}
    ended = [f"{name} ended at {total:,} passes." for name, total in totals.items() if total < end]
    return "\n".join([*lines, "", *ended])


def report(
    tasks: dict[str, Runs],
    end: int,
    threshold: float,
    command: str,
    rates: dict[str, dict[str, str]],
    also: str = "",
) -> str:
    """The table of each task, and how they were made."""
    parts = [table(runs, end, threshold, rates.get(t), also) for t, runs in tasks.items()]
    if len(tasks) > 1:
        parts = [f"## {task}\n\n{part}" for task, part in zip(tasks, parts, strict=True)]
    notes = [
        f"Means over the seeds (lowest to highest), after at most {end:,} passes of a sample",
        "through the transformer: forward 1, forward and backward 3. Seconds are of sampling,",
        "scoring and training, without evaluations.",
    ]
    if rates:
        notes += ["Of each method the best of several learning rates, by a seed that is not shown;"]
        notes += ["* is the lowest or the highest that was tried."]
    return "\n\n".join([*parts, "\n".join(notes), f"    {command}\n"])


def draw(tasks: dict[str, Runs], end: int, threshold: float, out: Path) -> None:
    """A panel for each task."""
    with panels(out, len(tasks), x="transformer passes (thousands)") as every:
        for axes, (task, runs) in zip(every, tasks.items(), strict=True):
            axes.set_ylabel("held-out reward" + (f", {task}" if len(tasks) > 1 else ""))
            for name, of in runs.items():
                passes, rewards = band(of, end)
                passes = passes / 1000
                label = name if axes is every[0] else ""  # the colours are the same in all
                [line] = axes.plot(passes, rewards.mean(0), drawstyle="steps-post", label=label)
                low, high = rewards.min(0), rewards.max(0)
                axes.fill_between(
                    passes, low, high, step="post", color=line.get_color(), alpha=0.15, linewidth=0
                )
            axes.axhline(threshold, color="grey", linestyle=":", linewidth=1)


def write_curves(runs: dict[Run, list[Epoch]], out: Path) -> None:
    """A line for each epoch of each run, those that chose a learning rate among them."""
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "method", "rate", "seed", *(f.name for f in fields(Epoch))])
        for run, epochs in runs.items():
            for epoch in epochs:
                values = [f"{v:.6g}" if isinstance(v, float) else v for v in astuple(epoch)]
                writer.writerow([run.task, run.method, run.rate, run.seed, *values])


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    variants = "of config/grpo.py; PRESET+FIELD=VALUE+FIELD=VALUE for one with other fields"
    parser.add_argument("presets", nargs="*", help=variants)
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    tasks = "signs: as the presets are; scenes: the shapes of dataset/scenes"
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="of learning, to try")
    parser.add_argument("--choose", type=int, help="the seed that chooses among them; 0")
    parser.add_argument("--also", default="", help="a reward to evaluate that is not trained")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[SIGNS], help=tasks)
    parser.add_argument("--passes", type=int, help="where to cut; else where the shortest run ends")
    parser.add_argument("--threshold", type=float, default=0.9, help="a held-out reward")
    parser.add_argument("--out", type=Path, required=True, help="without an ending")
    parser.add_argument("--logdir", type=Path, default=Path("logs/compare"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, which slows each")
    parser.add_argument("--no-train", action="store_true", help="show the runs as they are")
    args, overrides = parser.parse_known_args()
    lists = {"presets": args.presets, "--seeds": args.seeds, "--tasks": args.tasks}
    for name, values in lists.items():
        if not values or len({*values}) < len(values):
            raise UserError(f"{name} must be one or more, each once, not {values}")
    rates, choose = args.rates, args.choose or 0
    if args.choose is not None and not rates:
        raise UserError(f"--choose={choose} has no effect without --rates; leave it out")
    if rates and (len({*rates}) < len(rates) or min(rates) <= 0 or choose in args.seeds):
        raise UserError(
            f"--rates {rates} must be above 0, each once, and --choose={choose} none of --seeds"
        )
    args.choose = choose
    for name, values in {"--rates": rates, "--threshold": [args.threshold]}.items():
        if not all(map(math.isfinite, values)):
            raise UserError(f"{name} {values} must be finite")
    if args.out.name in ("", ".."):
        raise UserError(f"--out={args.out} has no file name; name the files, without their ending")
    for name, value in {"--passes": args.passes, "--jobs": args.jobs}.items():
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    for option in overrides:
        field, equals, _ = option.removeprefix("--config.").partition("=")
        if not (option.startswith("--config.") and equals):
            raise UserError(f"unexpected argument {option!r}; fields are --config.FIELD=VALUE")
        if field in OWN_FIELDS:
            raise UserError(f"{option} cannot be the same for all runs; see --seeds and --logdir")
    return args, overrides


def compare() -> None:
    args, overrides = parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install -e .[plot]")
    both = [(task, preset) for task in args.tasks for preset in args.presets]

    def trained(wanted: list[Run]) -> dict[Run, list[Epoch]]:
        if wanted and not args.no_train:
            train_missing(wanted, args, overrides)
        for run in wanted:
            check_changes(args.logdir / run.name, run, overrides)
        return {run: read_run(args.logdir / run.name, args.also) for run in wanted}

    def shortest(runs: dict[Run, list[Epoch]]) -> int:
        return args.passes or min(run[-1].passes for run in runs.values())

    tried = trained([Run(*b, args.choose, r, args.also) for r in args.rates for b in both])
    rates = {}
    for task, preset in both if args.rates else []:
        own = [(r.rate, of) for r, of in tried.items() if (r.task, r.method) == (task, preset)]
        rates[task, preset] = best_rate(dict(own), shortest(tried))
    # all methods with one seed, then with the next: what is there early can be compared
    shown = trained([Run(*b, s, rates.get(b), args.also) for s in args.seeds for b in both])
    end = shortest(shown)
    tasks = {task: {preset: [] for preset in args.presets} for task in args.tasks}
    for run, epochs in shown.items():
        tasks[run.task][run.method].append(epochs)
    ends = (min(args.rates), max(args.rates)) if args.rates else ()
    told = {
        task: {p: f"{rates[task, p]:g}{'*' * (rates[task, p] in ends)}" for p in args.presets}
        for task in (args.tasks if rates else [])
    }
    options = [a for a in sys.argv[1:] if a != "--no-train"]
    command = shlex.join(["python", "scripts/compare.py", *options])
    text = report(tasks, end, args.threshold, command, told, args.also)
    make_folders(args.out.parent)
    draw(tasks, end, args.threshold, Path(f"{args.out}.png"))
    write_curves(tried | shown, Path(f"{args.out}.csv"))
    Path(f"{args.out}.md").write_text(text, encoding="utf-8")
    print(text)


def train_missing(wanted: list[Run], args: argparse.Namespace, overrides: list[str]) -> None:
    for run in wanted:
        resolve(run, overrides)
    make_folders(args.out.parent, args.logdir)
    try:
        if not train_all(wanted, args.logdir, overrides, args.jobs):
            sys.exit(1)
    except KeyboardInterrupt as stop:
        raise Stopped("stopped; the same command goes on") from stop


def make_folders(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}; name another") from error


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    told_plainly(compare, debug=False)


if __name__ == "__main__":
    main()
