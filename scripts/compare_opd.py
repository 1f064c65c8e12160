"""Two skills in one model: a student of two teachers (algorithm=opd) beside a run on mixed rewards.

    python scripts/compare_opd.py --seeds 1 2 3 --jobs 3 [--students FIELD=VALUE+FIELD=VALUE ...] \\
        [--config.FIELD=VALUE ...]

Trains the teachers of signs and scenes first, then the student of each seed's teachers and the run
that has both rewards, and prints a table (OUT.md). --students are other ways to learn from the same
teachers, shown beside the usual one. The same command goes on where it was stopped.
"""

import argparse
import shlex
import sys
from pathlib import Path

from compare import make_folders, mean, short, with_range
from runs import SIGNS, Run, train_all

from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.errors import UserError
from flow_grpo.show.reading import read_metrics

# by prompt set: the reward, and the preset of the teacher
TEACHERS = {"ocr": ("ocr", "tiny_nft"), "scenes": ("geneval", "tiny_geneval")}
MIXED = "tiny_mixed"
STUDENT = f"{MIXED}+algorithm=opd+num_epochs=12+eval_freq=1"


def teachers_of(seed: int) -> dict[str, Run]:
    return {name: Run(SIGNS, preset, seed) for name, (_, preset) in TEACHERS.items()}


def student_of(seed: int, logdir: Path, changes: str = "") -> Run:
    folders = {
        name: str(logdir.resolve() / run.name / "checkpoints/latest/lora")
        for name, run in teachers_of(seed).items()
    }
    method = "+".join(filter(None, [STUDENT, f"opd.teachers={folders}", changes]))
    return Run(SIGNS, method, seed, label=name_of(changes))


def name_of(changes: str) -> str:
    return "+".join(filter(None, ["opd", changes]))


def table(logdir: Path, seeds: list[int], students: list[str]) -> str:
    """The last evaluation of each run; passes of the student do not count those of its teachers."""
    rows = {
        **{f"teacher of {name}": [teachers_of(s)[name] for s in seeds] for name in TEACHERS},
        "mixed rewards": [Run(SIGNS, MIXED, s) for s in seeds],
        **{name_of(each): [student_of(s, logdir, each) for s in seeds] for each in students},
    }
    lines = ["| run | signs | scenes | passes |", "|---|---|---|---|"]
    for name, runs in rows.items():
        last = [read_metrics(logdir / run.name)[-1] for run in runs]
        cells = []
        for part, (reward, _) in TEACHERS.items():
            own = name == f"teacher of {part}"
            key = f"eval/{reward}" if own else f"eval/{part}/{reward}"
            cells.append(with_range([each[key] for each in last]) if key in last[0] else "-")
        passes = short(mean([each["perf/passes"] for each in last]))
        lines.append(f"| {name} | {' | '.join(cells)} | {passes} |")
    return "\n".join(lines)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--students", nargs="+", default=[], help="FIELD=VALUE+FIELD=VALUE, each")
    parser.add_argument("--out", type=Path, default=Path("docs/results/compare_opd"))
    parser.add_argument("--logdir", type=Path, default=Path("logs/opd"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, which slows each")
    args, overrides = parser.parse_known_args()
    if wrong := [option for option in overrides if not option.startswith("--config.")]:
        raise UserError(f"unexpected argument {wrong[0]!r}; fields are --config.FIELD=VALUE")
    return args, overrides


def compare() -> None:
    args, overrides = parse_args()
    make_folders(args.out.parent, args.logdir)
    first = [run for s in args.seeds for run in (*teachers_of(s).values(), Run(SIGNS, MIXED, s))]
    students = ["", *args.students]
    second = [student_of(s, args.logdir, each) for each in students for s in args.seeds]
    for runs in (first, second):
        if not train_all(runs, args.logdir, overrides, args.jobs):
            sys.exit(1)
    command = shlex.join(["python", "scripts/compare_opd.py", *sys.argv[1:]])
    text = f"{table(args.logdir, args.seeds, students)}\n\n    {command}\n"
    Path(f"{args.out}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    told_plainly(compare, debug=False)
