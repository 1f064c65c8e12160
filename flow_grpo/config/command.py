"""The command `flow-grpo`, whose subcommands run the scripts of scripts/ and the reward server.

Several processes: torchrun -m flow_grpo.config.command train --config ...
"""

import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from flow_grpo import __version__
from flow_grpo.config.error_reporting import ScriptParser, print_text
from flow_grpo.config.paths import ROOT
from flow_grpo.errors import did_you_mean

SCRIPTS_DIR = ROOT / "scripts"
SERVER = "reward-server"
SERVER_PACKAGE = "reward_server"
COMMANDS = {  # name, as the script with underscores: summary
    "bench": "Score models on a benchmark with its pinned protocol",
    "benchmark": "Measure time and memory of sampling and training",
    "benchmark-vlm": "Measure time and memory of VLM training",
    "compare": "Compare algorithms at equal numbers of model evaluations",
    "compare-opd": "Distil two skills into one model and compare",
    "demo": "Try a model before and after training in the browser",
    "doctor": "Check the installation: packages, GPU, hub access, disk space",
    "evaluate": "Score a model and its checkpoints on a prompt set",
    "export": "Merge a checkpoint into its model",
    "gallery": "Sample prompts from a model and checkpoints of a run, as an image and a page",
    "make-ocr": "Write prompt sets for the OCR reward",
    "make-small": "Write a small diffusers pipeline with random weights",
    "migrate": "Translate a command or config of another trainer into ours",
    "plan": "Plan a run for any number of GPUs: batches, time, communication, memory",
    "plot": "Plot the metrics and images of a run",
    "publish": "Write weights, figures and a model card of a run for the hub",
    "report": "Write the HTML report of a run",
    "reproduce": "Check, train, benchmark and publish a published task",
    "reward-env": "Create an isolated environment for a reward",
    "rewards": "List and check the rewards, compare them with votes, convert weights",
    SERVER: "Serve rewards over HTTP",
    "train": "Train a diffusion model with online reinforcement learning",
    "train-vlm": "Train a vision-language model with online reinforcement learning",
    "vote": "Serve a page on which people choose the better of two images",
}
COPY = "cp"
COPY_SUMMARY = "Copy a training loop (train or train_vlm) to a file of yours for editing"
LOOPS = ("train", "train_vlm")
USAGE_EXAMPLES = """\
flow-grpo doctor                                   check the installation
flow-grpo train --config config/grpo.py:tiny_ocr   train the small model in the repository
flow-grpo train --help                             list the common settings
flow-grpo cp train my_train.py                     copy the training loop for editing

docs/README.md lists the documentation. --version prints the version."""


def list_commands() -> dict[str, Path]:
    """Return the script of each available command."""
    scripts = {name: SCRIPTS_DIR / f"{name.replace('-', '_')}.py" for name in COMMANDS}
    server = find_spec(SERVER_PACKAGE)
    if server is None:
        del scripts[SERVER]
    else:
        scripts[SERVER] = Path(server.origin).with_name("__main__.py")
    return scripts


def format_usage() -> str:
    """Return the text of `flow-grpo --help`."""
    summaries = {COPY: COPY_SUMMARY, **{name: COMMANDS[name] for name in list_commands()}}
    width = max(map(len, summaries))
    lines = [f"  {name:{width}}  {summaries[name]}" for name in sorted(summaries)]
    usage = "usage: flow-grpo COMMAND ...; see flow-grpo COMMAND --help"
    return "\n".join([usage, "", *lines, "", USAGE_EXAMPLES])


def copy_loop(arguments: list[str]) -> None:
    """Copy a training loop to a new file; existing files are never overwritten."""
    parser = ScriptParser(prog="flow-grpo cp", description=COPY_SUMMARY)
    parser.add_argument("loop", type=lambda name: name.replace("-", "_"), choices=LOOPS)
    parser.add_argument("file", type=Path, help="new file, such as my_train.py")
    args = parser.parse_args(arguments)
    source = SCRIPTS_DIR / f"{args.loop}.py"
    try:
        with source.open("rb") as original, args.file.open("xb") as copy:
            shutil.copyfileobj(original, copy)
    except FileExistsError:
        parser.fail(f"{args.file} already exists; choose another name")
    except OSError as error:
        parser.fail(f"cannot write {args.file}: {error.strerror}")
    print_text(f"copied {args.loop} to {args.file}; run it with: python {args.file} --config ...")


def main() -> None:
    """Run the subcommand that the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    scripts = list_commands()
    if name in ("-h", "--help", "help"):
        print_text(format_usage())
        return
    if name == "--version":
        print_text(f"flow-grpo {__version__}")
        return
    if name == COPY:
        copy_loop(arguments)
        return
    if name not in scripts:
        names = sorted([*scripts, COPY])
        hint = did_you_mean(name, names) or f"choose one of {', '.join(names)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    script = str(scripts[name])
    sys.argv = [script, *arguments]
    if name == SERVER:
        runpy.run_module(SERVER_PACKAGE, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(SCRIPTS_DIR))  # as in `python scripts/train.py`
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
