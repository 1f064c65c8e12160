"""Scripts, run as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import warm

ROOT = Path(__file__).parents[1]
# what is started that way needs not import torch again
WARM = (sys.executable, warm.__file__)

# beside the fields of `short_runs`, which name another model
EDITS = {
    "config": "config/grpo.py:tiny_edit",
    "pretrained__model": "assets/tiny-edit",
    "dataset": "dataset/edits",
    "resolution": 512,  # it has a height and a width
    "max_sequence_length": 12,
    "eval_prompts": 4,
}


def torchrun(processes: int = 2) -> tuple[str, ...]:
    run = ("-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone")
    return (*WARM, *run, warm.__file__)


def accelerate(*options: str) -> tuple[str, ...]:
    return (*WARM, "-m", "accelerate.commands.launch", *options, warm.__file__)


class Runner:
    """Runs scripts/train.py and its like as a user does, with some config fields set."""

    def __init__(self, logdir: Path, **fields) -> None:
        self.logdir = logdir
        self.fields = {"logdir": logdir, "run_name": "run", **_dotted(fields)}

    def __call__(self, *extra: str, **overrides) -> subprocess.CompletedProcess:
        """Overrides are config fields, with __ for the dot, or what `start` takes."""
        if "launcher" not in overrides:
            command = self.command(*extra, **overrides)
            done = warm.run(command, cwd=ROOT, env=environment(), timeout=600)
            if done is not None:
                return done
        process = self.start(*extra, **overrides)
        try:
            stdout, stderr = process.communicate(timeout=600)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def command(
        self,
        *extra: str,
        script: str = "scripts/train.py",
        config: str = "config/base.py",
        **overrides,
    ) -> list[str]:
        fields = {**self.fields, **_dotted(overrides)}
        arguments = [f"--config.{k}={v}" for k, v in fields.items()]
        return [script, f"--config={config}", *arguments, *extra]

    def start(
        self, *extra: str, launcher: tuple[str, ...] = (sys.executable,), **overrides
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [*launcher, *self.command(*extra, **overrides)],
            cwd=ROOT,
            env=environment(warm.__file__ in launcher),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def metrics(self, run_name: str = "run") -> list[dict]:
        lines = (self.logdir / run_name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def run_script(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Any script with its arguments, in the root of the repo unless another folder is given."""
    command = [str(word) for word in words]
    done = warm.run(command, cwd=cwd, env=environment(), timeout=600)
    if done is not None:
        return done
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_light(*words: str, **env: str) -> tuple[int, str, set[str]]:
    """The exit code of a script, what it printed, and the packages that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        cwd=ROOT,
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = done.stderr.splitlines()
    imports = [line for line in lines if line.startswith("import time:")]
    told = "\n".join([done.stdout, *(line for line in lines if line not in imports)])
    return done.returncode, told.strip(), {line.rpartition("|")[2].strip() for line in imports}


def files_of_repo() -> set[str]:
    """But for caches, which other tests may fill at the same time."""
    places = [ROOT, *(ROOT / name for name in ("config", "dataset", "docs", "scripts"))]
    names = {str(place / name) for place in places for name in os.listdir(place)}
    return {name for name in names if not Path(name).name.startswith((".", "__", "build"))}


def environment(warmed: bool = False) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    return {**env, **warm.address(env)} if warmed else env


def python_path() -> str:
    """With this tree, whatever is installed, and the rewards of the tests."""
    own = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]
    return os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))


def _dotted(fields: dict) -> dict:
    return {name.replace("__", "."): value for name, value in fields.items()}
