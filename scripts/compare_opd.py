"""Compare a student distilled from two teachers (algorithm=opd) with training on mixed rewards.

    python scripts/compare_opd.py --seeds 1 2 3 --jobs 3 [--students FIELD=VALUE+FIELD=VALUE ...] \\
        [--config.FIELD=VALUE ...]

Trains the two teachers (signs, scenes) and the run on both rewards, then the student of each seed's
teachers, and writes a table (OUT.md). --students adds variants of the student with other settings.
Repeat the command to resume an interrupted comparison.
"""

import argparse
import sys
from pathlib import Path

from compare_utils import (
    format_range,
    format_two_digits,
    make_directories,
    mean,
    run_comparison,
    write_results,
)
from runs import SIGNS, Run, train_all

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.report.console import markdown_table
from flow_grpo.report.run_reader import read_metrics

# by prompt set: its reward and the preset of its teacher
TEACHERS = {"ocr": ("ocr", "tiny_nft"), "scenes": ("geneval", "tiny_geneval")}
MIXED = "tiny_mixed"
STUDENT = f"{MIXED}+algorithm=opd+num_epochs=12+eval_freq=1"
LEGEND = """\
The columns signs (OCR score) and scenes (graded GenEval score) show the held-out reward after the
last epoch. Values are means over the seeds (lowest to highest). Cost is counted in passes of one
sample through the transformer: a forward pass counts as 1, a forward and backward pass as 3. The
passes of a student (opd) do not include the training of its teachers."""


def teacher_runs(seed: int) -> dict[str, Run]:
    """Return the runs of a seed's teachers, by task."""
    return {name: Run(SIGNS, preset, seed) for name, (_, preset) in TEACHERS.items()}


def student_run(seed: int, logdir: Path, changes: str = "") -> Run:
    """Return the run of the student that a seed's teachers are distilled into.

    Args:
        seed: Seed of the teachers and of the student.
        logdir: Directory of the runs.
        changes: Settings in which it differs from other students: "name=value+name=value".
    """
    folders = {
        name: str(logdir.resolve() / run.name / "checkpoints/latest/lora")
        for name, run in teacher_runs(seed).items()
    }
    method = "+".join(filter(None, [STUDENT, f"opd.teachers={folders}", changes]))
    return Run(SIGNS, method, seed, label=student_name(changes))


def student_name(changes: str) -> str:
    """Return the name of a student, from the settings in which it differs."""
    return "+".join(filter(None, ["opd", changes]))


def results_table(logdir: Path, seeds: list[int], students: list[str]) -> str:
    """Return a table of last evaluations; a student's passes do not include its teachers'."""
    rows = {
        **{f"teacher of {name}": [teacher_runs(s)[name] for s in seeds] for name in TEACHERS},
        "mixed rewards": [Run(SIGNS, MIXED, s) for s in seeds],
        **{student_name(each): [student_run(s, logdir, each) for s in seeds] for each in students},
    }
    table = [["run", "signs", "scenes", "passes"]]
    for name, runs in rows.items():
        last = [read_metrics(logdir / run.name)[-1] for run in runs]
        cells = []
        for part, (reward, _) in TEACHERS.items():
            is_teacher = name == f"teacher of {part}"
            key = f"eval/{reward}" if is_teacher else f"eval/{part}/{reward}"
            cells.append(format_range([each[key] for each in last]) if key in last[0] else "-")
        passes = format_two_digits(mean([each["perf/passes"] for each in last]))
        table.append([name, *cells, passes])
    return markdown_table(table)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and the options --config.FIELD=VALUE."""
    parser = ScriptParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    variants = "settings of further students: FIELD=VALUE+FIELD=VALUE"
    parser.add_argument("--students", nargs="+", default=[], help=variants)
    parser.add_argument("--out", type=Path, default=Path("docs/results/compare_opd"))
    parser.add_argument("--logdir", type=Path, default=Path("logs/opd"))
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs, which slows each")
    return parser.parse_with_overrides()


def compare() -> None:
    """Train the teachers and the mixed run, then the students, and write the table."""
    args, overrides = parse_args()
    make_directories(args.out.parent, args.logdir)
    first = [run for s in args.seeds for run in (*teacher_runs(s).values(), Run(SIGNS, MIXED, s))]
    students = ["", *args.students]
    second = [student_run(s, args.logdir, each) for each in students for s in args.seeds]
    for runs in (first, second):
        if not train_all(runs, args.logdir, overrides, args.jobs):
            sys.exit(1)
    write_results(args.out, results_table(args.logdir, args.seeds, students), LEGEND)


if __name__ == "__main__":
    run_comparison(compare)
