"""Train methods over several seeds, concurrently, skipping finished runs; used by compare.py."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.saved_config import LOCATION_FIELDS
from flow_grpo.diffusion.config_loading import apply_overrides
from flow_grpo.diffusion.presets import get_config
from flow_grpo.errors import UserError
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.untrusted_files import flatten_fields, read_json

ROOT = Path(__file__).parents[1]
PER_RUN_FIELDS = ("seed", *LOCATION_FIELDS)  # set for each run
SIGNS = "signs"  # the task of the small model's presets
TASKS = {  # overrides of the preset
    SIGNS: {},
    "scenes": {
        "dataset": "dataset/scenes",
        "reward_fn": {"geneval": 1.0},
        "reward_options": {"geneval": {"detector": "shapes"}},
    },
}


@dataclass(frozen=True)
class Run:
    """One training run of a comparison."""

    task: str
    method: str  # PRESET, or PRESET+FIELD=VALUE+FIELD=VALUE with overrides
    seed: int
    rate: float | None = None  # learning rate that replaces the preset's
    also: str = ""  # a reward to evaluate but not train
    label: str = ""  # replaces a method that is too long for a directory name

    @property
    def preset(self) -> str:
        return self.method.partition("+")[0]

    @property
    def changes(self) -> list[str]:
        return [f"--config.{change}" for change in self.method.split("+")[1:]]

    @property
    def name(self) -> str:
        task = "" if self.task == SIGNS else f"{self.task}-"
        rate = "" if self.rate is None else f"-lr{self.rate:g}"
        return f"{task}{self.label or self.method}{rate}-{self.seed}".replace("/", "_")

    def fields(self) -> dict[str, Any]:
        """Return the settings with which the task and this run override the preset, but no seed."""
        fields = dict(TASKS[self.task])
        if self.rate is not None:
            fields["train.learning_rate"] = self.rate
        if self.also:
            trained = fields.get("reward_fn") or get_config(self.preset).reward_fn.to_dict()
            fields["eval_reward_fn"] = {**trained, self.also: 0.0}  # not in the held-out reward
        return fields


def resolve(run: Run, overrides: list[str]) -> dict[str, Any]:
    """Return the flattened config that a run has with these overrides."""
    config = get_config(run.preset)
    for name, value in run.fields().items():
        section, _, field = name.rpartition(".")
        target = config[section] if section else config
        target[field] = ConfigDict(value) if isinstance(value, dict) else value
    config = apply_overrides(config, [*run.changes, *overrides])
    config.seed = run.seed
    return dict(flatten_fields(json.loads(config.to_json_best_effort())))


def read_saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the flattened config of a run directory, or None if it has none."""
    try:
        return dict(flatten_fields(read_json(folder / "config.json")))
    except FileNotFoundError:
        return None
    except (UserError, OSError, AttributeError) as error:
        raise UserError(
            f"is not the config of a run: {error}", field=folder / "config.json"
        ) from error


def is_finished(folder: Path, config: dict[str, Any]) -> bool:
    """Return whether a run has all its epochs.

    Raises:
        UserError: The run has another config. A smaller `num_epochs` is accepted: it is continued.
    """
    saved = read_saved_config(folder)
    if saved is None:
        return False
    for name in sorted({*saved, *config} - {*LOCATION_FIELDS}):
        old, new = saved.get(name), config.get(name)
        if old != new and not (name == "num_epochs" and old is not None and old < new):
            raise UserError(
                f"differs from the requested {new!r} in {folder}",
                field=name,
                value=old,
                hint="choose another --logdir or remove that run",
            )
    epochs = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    return bool(epochs) and epochs[-1]["epoch"] >= config["num_epochs"]


def check_unchanged_config(folder: Path, run: Run, overrides: list[str]) -> None:
    """Reject an existing run whose config differs in a field set by its method or `overrides`.

    A run without a config.json is not checked.
    """
    options = [*run.changes, *overrides]
    names = tuple(option.removeprefix("--config.").partition("=")[0] for option in options)
    if not names:
        return
    wanted = resolve(run, overrides)
    saved = read_saved_config(folder)
    if saved is None:  # a metrics file without a config
        return
    for name, value in wanted.items():
        is_set = any(name == each or name.startswith(f"{each}.") for each in names)
        if is_set and saved.get(name) != value:
            raise UserError(
                f"differs from the given {value!r} in {folder}",
                field=name,
                value=saved.get(name),
                hint="omit that option or choose another --logdir",
            )


def start(run: Run, logdir: Path, overrides: list[str]) -> Popen:
    """Start a run in a new session and return its process; it resumes if it exists.

    The output goes to <logdir>/<name>.log.
    """
    fields = run.fields() | {"seed": run.seed}
    fields |= {"run_name": run.name, "logdir": logdir, "resume": "auto"}
    command = [
        sys.executable,
        ROOT / "scripts/train.py",
        f"--config={ROOT}/config/grpo.py:{run.preset}",
    ]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    with (logdir / f"{run.name}.log").open("ab") as log:
        # In a new session, so that Ctrl-C reaches it only once, through us.
        command += [*run.changes, *overrides]
        return Popen(command, stdout=log, stderr=log, start_new_session=True)


def train_all(runs: list[Run], logdir: Path, overrides: list[str], jobs: int) -> bool:
    """Train the unfinished runs, `jobs` at a time.

    Returns:
        Whether all runs are finished; a failed run does not stop the others.
    """
    wanted = {run.name: run for run in runs}
    waiting = [
        n for n, run in wanted.items() if not is_finished(logdir / n, resolve(run, overrides))
    ]
    count = len(wanted) - len(waiting)
    failed: list[str] = []
    running: dict[str, tuple[Popen, float]] = {}  # with the start time
    if count:
        print(f"{count}/{len(wanted)}  done before", flush=True)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                process = start(wanted[name], logdir, overrides)
                running[name] = process, time.monotonic()
            time.sleep(0.1)
            for name in [n for n, (process, _) in running.items() if process.poll() is not None]:
                process, began = running.pop(name)
                count += 1
                line = f"{count}/{len(wanted)}  {name}  {time.monotonic() - began:.0f} s"
                if process.returncode:
                    failed.append(name)
                    output = (logdir / f"{name}.log").read_text("utf-8", "replace")
                    line += f"  failed: {(output.strip().splitlines() or ['?'])[-1]}"
                print(line, flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()  # it saves a checkpoint
        for process, _ in running.values():
            process.wait()
    if failed:
        summary = f"{len(failed)} of {len(wanted)} runs failed: {', '.join(failed)}"
        print(f"error: {summary}; repeat the command to retry", file=sys.stderr)
    return not failed
