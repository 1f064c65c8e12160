"""Run scripts from the command line, as users do."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import fork_server

ROOT = Path(__file__).parents[2]
# prefix of commands whose process need not import torch again
FORK_SERVER = (sys.executable, fork_server.__file__)

# image editing: overrides of the fixture `short_runs`, which has another model
EDITS = {
    "config": "config/grpo.py:tiny_edit",
    "pretrained__model": "assets/tiny-edit",
    "dataset": "dataset/edits",
    "resolution": 512,  # ignored, because the preset has a height and a width
    "max_sequence_length": 12,
    "eval_prompts": 4,
}


def torchrun(processes: int = 2) -> tuple[str, ...]:
    run = ("-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone")
    return (*FORK_SERVER, *run, fork_server.__file__)


def accelerate(*options: str) -> tuple[str, ...]:
    return (*FORK_SERVER, "-m", "accelerate.commands.launch", *options, fork_server.__file__)


class Runner:
    """Runs scripts/train.py or another script with config fields that are set for every run."""

    def __init__(self, logdir: Path, **fields) -> None:
        self.logdir = logdir
        self.fields = {"logdir": logdir, "run_name": "run", **_dotted(fields)}

    def __call__(self, *extra: str, **overrides) -> subprocess.CompletedProcess:
        """Run the script to its end.

        Overrides are arguments of `start`, or config fields with `__` for a dot.
        """
        if "launcher" not in overrides:
            command = self.command(*extra, **overrides)
            done = fork_server.run(command, cwd=ROOT, env=environment(), timeout=600)
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
            env=environment(fork_server.__file__ in launcher),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def metrics(self, run_name: str = "run") -> list[dict]:
        lines = (self.logdir / run_name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def run_script(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a script with its arguments, by default in the root of the repository."""
    command = [str(word) for word in words]
    done = fork_server.run(command, cwd=cwd, env=environment(), timeout=600)
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


def run_with_import_times(*words: str, **env: str) -> tuple[int, str, set[str]]:
    """Return the exit code of a script, its output, and the modules that it imported."""
    with tempfile.TemporaryDirectory() as folder:
        imports = Path(folder, "imports")
        variables = {**environment(), **env, fork_server.IMPORTS: str(imports)}
        fork_server.address(environment(), light=True)  # started without the variables in `env`
        done = fork_server.run([*words], cwd=ROOT, env=variables, timeout=600, light=True)
        if done is not None:
            output = "\n".join(filter(None, [done.stdout.strip(), done.stderr.strip()]))
            return done.returncode, output, {*imports.read_text().splitlines()}
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
    output = "\n".join([done.stdout, *(line for line in lines if line not in imports)])
    return done.returncode, output.strip(), {line.rpartition("|")[2].strip() for line in imports}


def list_repo_files() -> set[str]:
    """Return the files of some directories except caches, which other tests may write."""
    folders = [ROOT, *(ROOT / name for name in ("config", "dataset", "docs", "scripts"))]
    names = {str(folder / name) for folder in folders for name in os.listdir(folder)}
    return {name for name in names if not Path(name).name.startswith((".", "__", "build"))}


def environment(warmed: bool = False) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    return {**env, **fork_server.address(env)} if warmed else env


def python_path() -> str:
    """Return PYTHONPATH with this checkout first, and the modules in tests/support and scripts."""
    paths = [str(ROOT / name) for name in ("tests/support", "scripts", "")]
    return os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))


def _dotted(fields: dict) -> dict:
    return {name.replace("__", "."): value for name, value in fields.items()}
