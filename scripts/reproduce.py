"""Check, train, benchmark and publish a task; repeat the command to resume it.

    python scripts/reproduce.py --list
    python scripts/reproduce.py sd3_ocr --check
    python scripts/reproduce.py sd3_ocr --gpus 8
    python scripts/reproduce.py sd3_ocr --small          # with a small model, on any machine
    python scripts/reproduce.py sd3_pickscore -- --config.dataset=../Flow-GRPO/dataset/pickscore_sfw

Options --config.FIELD=VALUE after -- apply to every training run of the task.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from flow_grpo.config import command_line
from flow_grpo.config.command import SCRIPTS_DIR
from flow_grpo.config.error_reporting import ScriptParser, print_text
from flow_grpo.config.overrides import option_values
from flow_grpo.config.paths import ROOT
from flow_grpo.errors import UserError
from flow_grpo.training.tasks import SMALL, TASKS, Task, TrainingRun

OWN_FIELDS = ("logdir", "run_name", "resume", "resume_changed")


def main() -> None:
    """Parse the command line and run a task."""
    sys.argv = [word for word in sys.argv if word != "--"]
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--list", action="store_true", help="list the tasks and their requirements")
    parser.add_argument("--small", action="store_true", help="run on a small model, on any machine")
    parser.add_argument("--check", action="store_true", help="only check the requirements")
    parser.add_argument(
        "--out", type=Path, help="output directory; default: reproduce/TASK[-small]"
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs; default: that of the task")
    parser.add_argument("--data", help="dataset of the first training run")
    parser.add_argument(
        "--num_prompts", type=int, help="number of benchmark prompts; reported as a deviation"
    )
    parser.add_argument(
        "--repo", default="", help="hub id to upload to, used in the card: USER/NAME"
    )
    args, overrides = parser.parse_with_overrides()
    if args.list:
        print_text(list_tasks())
        return
    if args.task not in TASKS:
        parser.error(f"TASK={args.task!r} must be one of {', '.join(TASKS)}")
    for name in ("gpus", "num_prompts"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name}={value} must be at least 1")
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: reproduce(args, overrides), debug=False)


def list_tasks() -> str:
    """Return the tasks with their GPUs, memory, disk space and benchmarks."""
    lines = []
    for name, task in TASKS.items():
        disk = task.run_gib + sum(task.models.values())
        lines.append(f"{name:22} {task.title}")
        lines.append(
            f"{'':22} {task.gpus} GPUs of {task.gpu_memory_gib:g} GiB, {disk:.0f} GiB of disk, "
            f"benchmarks: {', '.join(task.benches) or 'none'}"
        )
    return "\n".join(lines)


def reproduce(args: Namespace, overrides: list[str]) -> None:
    """Run the stages of a task."""
    # imported here so that --help and user errors do not wait for torch
    from flow_grpo.training.lock import lock_output
    from flow_grpo.training.stages import StageState, run_stages

    task = (SMALL if args.small else TASKS)[args.task]
    for option in overrides:
        field = option.removeprefix("--config.").partition("=")[0]
        if field in OWN_FIELDS:
            raise UserError("is set by reproduce", field=option, hint="use --out")
    if args.small and args.gpus:
        raise UserError("has no effect with --small", field="--gpus", value=args.gpus)
    gpus = args.gpus or task.gpus
    out = (args.out or Path("reproduce", args.task + "-small" * args.small)).absolute()
    if args.check:
        check(task, args.data, overrides, gpus, out)
        print_text(f"{args.task} can run here")
        return
    options = {
        "task": args.task,
        "--small": args.small,
        "--gpus": gpus,
        "--data": args.data,
        "--num_prompts": args.num_prompts,
        "--repo": args.repo,
        "options after --": overrides,
    }
    lock = lock_output(out)
    try:
        state = StageState.open(out, options)
        stages = build_stages(task, args, overrides, gpus, out)
        trained = [stage.name for stage in stages if stage.run is not None]
        if set(trained) - set(state.done):  # a resumed run needs the same as a new one
            check(task, args.data, overrides, gpus, out)
        run_stages(state, stages)
    finally:
        lock.release()
    print_text(f"model card: {published_folder(args, out)}/README.md")


def check(task: Task, data: str | None, overrides: list[str], gpus: int, out: Path) -> None:
    """Print a line for each reason why the task cannot run here, and raise a UserError if any."""
    from flow_grpo.training.readiness import find_problems

    needs = [find_needs(run, run_overrides(task, run, data, overrides), gpus) for run in task.runs]
    problems = [*find_problems(task, needs, gpus, out), *find_missing_prompts(task.benches)]
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(
            f"the task cannot run: {count}, listed above",
            hint="to use other paths, pass --data=PATH or -- --config.pretrained.model=PATH",
        )


def find_missing_prompts(benchmarks: Iterable[str]) -> list["Problem"]:  # noqa: F821
    """Download the prompts of benchmarks, and return a problem for each that is unavailable.

    Otherwise the run would fail only after training.
    """
    from flow_grpo.benchmarks.protocol import get_protocol
    from flow_grpo.benchmarks.sources import find_files
    from flow_grpo.training.readiness import Problem

    problems = []
    for name in benchmarks:
        try:
            find_files(get_protocol(name).prompts)
        except UserError as error:
            remedy = "run this with --check on a machine with network access and the same HF_HOME"
            problems.append(Problem(f"prompts of the benchmark {name}: {error.rule}", remedy))
    return problems


def run_overrides(
    task: Task, run: TrainingRun, data: str | None, overrides: list[str]
) -> list[str]:
    """Return the config options of a run; the user's come last, so that they take precedence."""
    own = [f"--config.dataset={data}"] if data and run is task.runs[0] else []
    return [*run.overrides, *own, *overrides]


def find_needs(run: TrainingRun, options: list[str], gpus: int) -> "Needs":  # noqa: F821
    """Return the model, dataset and rewards that a run reads."""
    from flow_grpo.diffusion import presets as diffusion
    from flow_grpo.training.readiness import Needs
    from flow_grpo.vlm import presets as vlm

    if run.vlm:
        config = vlm.get_config(run.preset)
    else:
        config = diffusion.get_config(f"{run.preset}_{gpus}gpu" if gpus else run.preset)
    model = [config.pretrained.model, *option_values(options, "config.pretrained.model")][-1]
    dataset = [config.dataset, *option_values(options, "config.dataset")][-1]
    return Needs(model, dataset, tuple(config.reward_fn))


def build_stages(
    task: Task, args: Namespace, overrides: list[str], gpus: int, out: Path
) -> list["Stage"]:  # noqa: F821
    """Return the commands that train, export, benchmark and publish."""
    from flow_grpo.training.stages import Stage

    stages, model = [], ""
    for run in task.runs:
        options = run_overrides(task, run, args.data, overrides)
        folder = out / "logs" / run.name
        if model:
            options.append(f"--config.pretrained.model={model}")
        options += [
            f"--config.logdir={folder.parent}",
            f"--config.run_name={run.name}",
            "--config.resume=auto",
        ]
        command = [*launcher(gpus), SCRIPTS_DIR / run.script, f"--config={ROOT / run.config}"]
        stages.append(Stage(f"train {run.name}", [*command, *options], run=folder))
        if run is not task.runs[-1]:
            model = str(out / f"{run.name}-model")
            export = [python("export"), "--checkpoint", folder, "--out", model]
            stages.append(Stage(f"export {run.name}", flatten(export), result=Path(model)))
    benches = []
    for name in task.benches:
        benches.append(out / "bench" / name)
        bench = [python("bench"), name, "--checkpoint", "base", "--checkpoint", folder]
        bench += ["--out", benches[-1]]
        bench += ["--num_prompts", args.num_prompts] if args.num_prompts else []
        stages.append(Stage(f"bench {name}", flatten(bench)))
    published = published_folder(args, out)
    publish = [python("publish"), folder, "--out", published]
    publish += ["--repo", args.repo] if args.repo else []
    publish += ["--base_model", next(iter(task.models))] if model and task.models else []
    for path in benches:
        publish += ["--bench", path]
    stages.append(Stage("publish", flatten(publish), result=published))
    return stages


def published_folder(args: Namespace, out: Path) -> Path:
    """Return the directory for the hub, whose name is the title of the card."""
    return out / (args.repo.rpartition("/")[2] or f"flow_grpo-{args.task}{'-small' * args.small}")


def python(script: str) -> list[str]:
    return [sys.executable, str(SCRIPTS_DIR / f"{script}.py")]


def flatten(words: list) -> list[str]:
    """Return a command from words and lists of words."""
    return [str(each) for word in words for each in (word if isinstance(word, list) else [word])]


def launcher(gpus: int) -> list[str | Path]:
    """Return the command that starts a training script on this number of GPUs."""
    if gpus < 2:
        return [sys.executable]
    return [
        *(sys.executable, SCRIPTS_DIR / "multi_node/launch.py", "accelerate"),
        *("--config_file", SCRIPTS_DIR / "accelerate_configs/multi_gpu.yaml"),
        *("--num_processes", str(gpus), "--main_process_port", "0"),
    ]


if __name__ == "__main__":
    main()
