"""Train presets x seeds, some side by side; what is done is not done again. See compare.py."""

import json
import sys
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from absl import flags
from ml_collections import config_flags

from flow_grpo.errors import UserError
from flow_grpo.run.cli import check_name, plainly
from flow_grpo.run.presets import get_config
from flow_grpo.run.reading import read_metrics
from flow_grpo.run.resume import PLACES
from flow_grpo.run.tracking import dotted

ROOT = Path(__file__).parents[1]
OWN_FIELDS = ("seed", *PLACES)  # set for each run


def run_name(preset: str, seed: int) -> str:
    return f"{preset}-{seed}"


def resolve(preset: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """The fields of this run. Only overrides that sys.argv has are known to ml_collections."""
    config, values = get_config(preset), flags.FlagValues()
    for option in overrides:
        name, _, value = option.removeprefix("--config.").partition("=")
        check_name(name, config, value)
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        values([sys.argv[0], *overrides])
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(plainly(error, config, overrides)) from error
    values.config.seed = seed
    return dict(dotted(json.loads(values.config.to_json_best_effort())))


def is_done(folder: Path, now: dict[str, Any]) -> bool:
    """Whether it has all its epochs; a run of another config is refused, more epochs are none."""
    try:
        before = dict(dotted(json.loads((folder / "config.json").read_text("utf-8"))))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read {folder / 'config.json'}: {error}") from error
    for name in sorted({*before, *now} - {*PLACES}):
        was, wanted = before.get(name), now.get(name)
        if was != wanted and not (name == "num_epochs" and was is not None and was < wanted):
            raise UserError(
                f"{folder} has {name}={was!r}, not {wanted!r} as asked for; choose another "
                "--logdir, or remove that run"
            )
    epochs = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    return bool(epochs) and epochs[-1]["epoch"] >= now["num_epochs"]


def start(name: str, preset: str, seed: int, logdir: Path, overrides: list[str]) -> Popen:
    fields = {"seed": seed, "run_name": name, "logdir": logdir, "resume": "auto"}
    command = [
        sys.executable,
        ROOT / "scripts/train.py",
        f"--config={ROOT}/config/grpo.py:{preset}",
    ]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    with (logdir / f"{name}.log").open("ab") as log:
        # in a session of its own, so that it hears of Ctrl-C from us only, once
        return Popen([*command, *overrides], stdout=log, stderr=log, start_new_session=True)


def train_all(runs: list[tuple[str, int]], logdir: Path, overrides: list[str], jobs: int) -> bool:
    """Those that are not done yet, `jobs` side by side; whether all are now. One that fails does
    not stop the others."""
    wanted = {run_name(preset, seed): (preset, seed) for preset, seed in runs}
    waiting = [n for n, run in wanted.items() if not is_done(logdir / n, resolve(*run, overrides))]
    count, failed, running = len(wanted) - len(waiting), [], {}
    if count:
        print(f"{count}/{len(wanted)}  done before", flush=True)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                process = start(name, *wanted[name], logdir, overrides)
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
