"""Train methods with seeds, some side by side; what is done is not done again. See compare.py."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.draw.presets import get_config
from flow_grpo.draw.saved import override
from flow_grpo.errors import UserError
from flow_grpo.files import dotted, read_json
from flow_grpo.run.resume import PLACES
from flow_grpo.show.reading import read_metrics

ROOT = Path(__file__).parents[1]
OWN_FIELDS = ("seed", *PLACES)  # set for each run
SIGNS = "signs"  # what the presets of the small model are for
TASKS = {  # what differs from the preset
    SIGNS: {},
    "scenes": {
        "dataset": "dataset/scenes",
        "reward_fn": {"geneval": 1.0},
        "reward_options": {"geneval": {"detector": "shapes"}},
    },
}


@dataclass(frozen=True)
class Run:
    task: str
    method: str  # a preset, or PRESET+FIELD=VALUE+FIELD=VALUE with what differs from it
    seed: int
    rate: float | None = None  # of learning, in place of the preset's
    also: str = ""  # a reward to evaluate beside the one that is trained
    label: str = ""  # where the method is too long to name a folder

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
        """What the task and this run change of the preset, beside the seed."""
        fields = dict(TASKS[self.task])
        if self.rate is not None:
            fields["train.learning_rate"] = self.rate
        if self.also:
            trained = fields.get("reward_fn") or get_config(self.preset).reward_fn.to_dict()
            fields["eval_reward_fn"] = {**trained, self.also: 0.0}  # no part of the held-out reward
        return fields


def resolve(run: Run, overrides: list[str]) -> dict[str, Any]:
    """The fields of this run."""
    config = get_config(run.preset)
    for name, value in run.fields().items():
        section, _, field = name.rpartition(".")
        own = config[section] if section else config
        own[field] = ConfigDict(value) if isinstance(value, dict) else value
    config = override(config, [*run.changes, *overrides])
    config.seed = run.seed
    return dict(dotted(json.loads(config.to_json_best_effort())))


def is_done(folder: Path, now: dict[str, Any]) -> bool:
    """Whether it has all its epochs; a run of another config is refused, more epochs are none."""
    try:
        before = dict(dotted(read_json(folder / "config.json")))
    except FileNotFoundError:
        return False
    except (UserError, OSError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} is not of a run: {error}") from error
    for name in sorted({*before, *now} - {*PLACES}):
        was, wanted = before.get(name), now.get(name)
        if was != wanted and not (name == "num_epochs" and was is not None and was < wanted):
            raise UserError(
                f"{folder} has {name}={was!r}, not {wanted!r} as asked for; choose another "
                "--logdir, or remove that run"
            )
    epochs = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    return bool(epochs) and epochs[-1]["epoch"] >= now["num_epochs"]


def check_changes(folder: Path, run: Run, overrides: list[str]) -> None:
    """Reject a run that is to be shown as it is, and that has other values in the fields that the
    method or the command line sets."""
    options = [*run.changes, *overrides]
    names = tuple(option.removeprefix("--config.").partition("=")[0] for option in options)
    if not names:
        return
    wanted = resolve(run, overrides)
    try:
        saved = dict(dotted(read_json(folder / "config.json")))
    except FileNotFoundError:  # a metrics file alone, which does not say
        return
    except (UserError, OSError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} is not of a run: {error}") from error
    for name, value in wanted.items():
        is_set = any(name == each or name.startswith(f"{each}.") for each in names)
        if is_set and saved.get(name) != value:
            raise UserError(
                f"{folder} has {name}={saved.get(name)!r}, not {value!r} as given; leave that "
                "option out, or choose another --logdir"
            )


def start(run: Run, logdir: Path, overrides: list[str]) -> Popen:
    fields = run.fields() | {"seed": run.seed}
    fields |= {"run_name": run.name, "logdir": logdir, "resume": "auto"}
    command = [
        sys.executable,
        ROOT / "scripts/train.py",
        f"--config={ROOT}/config/grpo.py:{run.preset}",
    ]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    with (logdir / f"{run.name}.log").open("ab") as log:
        # in a session of its own, so that it hears of Ctrl-C from us only, once
        command += [*run.changes, *overrides]
        return Popen(command, stdout=log, stderr=log, start_new_session=True)


def train_all(runs: list[Run], logdir: Path, overrides: list[str], jobs: int) -> bool:
    """Those that are not done yet, `jobs` side by side; whether all are now. One that fails does
    not stop the others."""
    wanted = {run.name: run for run in runs}
    waiting = [n for n, run in wanted.items() if not is_done(logdir / n, resolve(run, overrides))]
    count, failed, running = len(wanted) - len(waiting), [], {}
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
            process.terminate()  # it saves what it has
        for process, _ in running.values():
            process.wait()
    if failed:
        told = f"{len(failed)} of {len(wanted)} runs failed: {', '.join(failed)}"
        print(f"error: {told}; the same command tries again", file=sys.stderr)
    return not failed
