"""Translate a command, script or config file of another trainer into ours; nothing is executed.

    flow-grpo migrate bash examples/qwen2_5_vl_7b_geo3k_grpo.sh
    flow-grpo migrate "python -m openrlhf.cli.train_ppo_ray --pretrain MODEL --zero_stage 3 ..."
    flow-grpo migrate examples/config.yaml [name=value ...]
    flow-grpo migrate ../Flow-GRPO/config/grpo.py:pickscore_sd3

Supports Flow-GRPO, MM-GRPO, verl and verl-omni, EasyR1, LMM-R1 (OpenRLHF) and TRL. Prints the
equivalent command, then the settings without a counterpart, with the reason.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.config_dicts import iter_config_fields
from flow_grpo.config.error_reporting import exit_on_user_error, print_text, quote_for_shell
from flow_grpo.config.migration import RENAMED_PRESETS, translate_fields
from flow_grpo.config.migration.commands import (
    ForeignRun,
    known_trainers,
    read_command,
    read_overrides,
    read_shell_script,
    read_yaml,
)
from flow_grpo.config.migration.counterparts import (
    DIFFUSION,
    GPUS,
    LAUNCH,
    NODES,
    SHARDED,
    ZERO_STAGE,
    Settings,
    Translation,
    translate,
)
from flow_grpo.config.migration.flow_grpo import FLOW_GRPO, SCRIPTS, UNSUPPORTED_SCRIPTS
from flow_grpo.config.migration.python_configs import read_python_config
from flow_grpo.config.migration.readme_commands import README_COMMANDS, RECIPES, REPLACED
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.presets import PRESETS
from flow_grpo.errors import UserError
from flow_grpo.vlm.fields import VLM_SPEC

SHELLS = ("bash", "sh")
ZERO_STAGES = (0, 1, 2, 3)
RENAMED_BASES = ("config/dpo.py", "config/sft.py", "config/grpo_guard.py")


def read(words: Sequence[str]) -> list[ForeignRun]:
    """Parse the arguments: a config file, a script, or a command line of another trainer."""
    first, *others = words
    place, _, preset = first.partition(":")
    path = Path(first)
    if place.endswith(".py") and preset and not others:
        return [_read_preset(first)]
    if path.suffix in (".yaml", ".yml"):
        return [_with_overrides(read_yaml(path), others)]
    script = Path(others[0]) if first in SHELLS and others else path
    if script.suffix == ".sh":
        rest = others[1:] if script is not path else others
        return [_with_overrides(run, rest) for run in _read_script(script)]
    found = read_command(words) or read_overrides(words)
    if found is None:
        raise UserError(
            "contains no setting of a known trainer",
            field="the command",
            value=" ".join(words),
            hint=known_trainers(),
        )
    return [found]


def _read_script(path: Path) -> list[ForeignRun]:
    """Return the runs that a shell script, or a recipe of that path, starts."""
    if not path.exists() and (recipe := RECIPES.get(path.as_posix().removeprefix("./"))):
        found = [run] if (run := read_command(shlex.split(recipe))) else []
    else:
        found = read_shell_script(path)
    if not found:
        raise UserError(
            "contains no training command of a known trainer", field=path, hint=known_trainers()
        )
    return found


def _read_preset(place: str) -> ForeignRun:
    """Return the settings of a preset of Flow-GRPO, `path/config.py:name`."""
    path, _, name = place.partition(":")
    config = read_python_config(Path(path), name)
    return ForeignRun(FLOW_GRPO, "", config.settings, "", config.skipped)


def _with_overrides(run: ForeignRun, words: Sequence[str]) -> ForeignRun:
    """Add settings that follow a file on the command line."""
    added = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    if not added:
        return run
    more = read_command(["python", "-m", run.project.programs[0], *words])
    return replace(run, settings={**run.settings, **(more.settings if more else {})})


def answer(run: ForeignRun) -> str:
    """Return our command for a run of another trainer, and the settings without a counterpart."""
    spec = DIFFUSION_SPEC if run.project.trainer == DIFFUSION else VLM_SPEC
    known = {name for name, _ in iter_config_fields(spec.get_config(), closed=())}
    base, run = _choose_base(run, spec)
    if run.project is FLOW_GRPO:
        found = _translate_flow_grpo(run, known)
    else:
        found = translate(run.project, _with_file(run), known)
    found = replace(found, settings={n: _expand(v) for n, v in found.settings.items()})
    unset = {name for name, value in found.settings.items() if "$" in str(value)}
    settings = {n: v for n, v in found.settings.items() if n not in unset and n not in LAUNCH}
    config = _load(base, spec)
    changed = {n: v for n, v in settings.items() if _differs(config, n, v)}
    launch = {name: value for name, value in found.settings.items() if name in LAUNCH}
    lines = [f"# from {run.project.name}", *format_command(base, spec, launch, changed)]
    if rejected := _rejection(config, changed, spec):
        lines += ["", f"Fails validation: {rejected}"]
    stage = launch.get(ZERO_STAGE)
    if stage and stage not in ZERO_STAGES:
        raise UserError("must be 0, 1, 2 or 3", field="ZeRO stage", value=stage)
    is_alone = launch.get(NODES, 1) * launch.get(GPUS, 1) == 1
    is_set = stage and ({"zero_stage", ZERO_STAGE} & run.settings.keys())
    missing = [
        *([("ZeRO stage", stage, "not used on one GPU")] if is_set and is_alone else []),
        *(
            (name, value, "contains a shell variable; set it")
            for name, value in _pick(found, unset)
        ),
        *found.missing,
        *((word, "", "not evaluated") for word in run.unread),
    ]
    if missing:
        lines += ["", "Without counterpart:"]
        shown = [(f"{n}={v}" if v != "" else str(n), reason) for n, v, reason in missing]
        width = min(60, max(len(name) for name, _ in shown))
        lines += [f"  {name:{width}}  {reason}" for name, reason in shown]
    return "\n".join(lines)


def _expand(value: Any) -> Any:
    """Expand a leading `~` or `$HOME`, which the shell would not expand in a quoted option."""
    if not isinstance(value, str) or not value.startswith(("~/", "$HOME/", "${HOME}/")):
        return value
    return str(Path.home() / value.partition("/")[2])


def _pick(found: Translation, names: set[str]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in found.settings.items() if name in names]


def _choose_base(run: ForeignRun, spec: TrainerSpec) -> tuple[str, ForeignRun]:
    """Return the config that our command starts from: a preset of the same name, or the defaults.

    A preset of Flow-GRPO that does not exist here is read from its file.
    """
    script = Path(run.program).name
    if script in UNSUPPORTED_SCRIPTS:
        raise UserError(UNSUPPORTED_SCRIPTS[script], field=run.program)
    default = "config/base.py" if spec is DIFFUSION_SPEC else "config/vlm.py"
    if run.project is not FLOW_GRPO:
        return default, run
    run = replace(run, settings={**run.settings, **SCRIPTS.get(script, {})})
    if not run.config:
        return default, run
    name = run.config.partition(":")[2]
    kernel, _, gpus = name.rpartition("_") if name.endswith("gpu") else (name, "", "")
    ours = RENAMED_PRESETS.get(kernel, kernel)
    if ours in PRESETS:
        return f"config/grpo.py:{ours}{f'_{gpus}' if gpus else ''}", run
    own = _read_preset(run.config)
    return default, replace(own, settings={**own.settings, **run.settings}, program=run.program)


def _with_file(run: ForeignRun) -> Settings:
    """Return the settings of a run, over those of its YAML file if it exists."""
    path = Path(run.config)
    if run.config and path.suffix in (".yaml", ".yml") and path.is_file():
        return {**read_yaml(path).settings, **run.settings}
    return dict(run.settings)


def _translate_flow_grpo(run: ForeignRun, known: set[str]) -> Translation:
    """Translate Flow-GRPO's settings, most of which have the same name."""
    own = {name: value for name, value in run.settings.items() if value is not None}
    translations = translate_fields(own, known)
    settings: Settings = {}
    missing = []
    for name, value in own.items():
        if name in translations:
            settings |= translations[name]
            if not translations[name] and (found := FLOW_GRPO.find(name)):
                missing.append((name, value, found.note))
        elif name in known or name in LAUNCH:
            settings[name] = value
        else:
            missing.append((name, value, "unknown setting of Flow-GRPO"))
    return Translation(settings, tuple(missing))


def _load(base: str, spec: TrainerSpec) -> ConfigDict:
    preset = base.partition(":")[2]
    return spec.presets.get_config(preset) if preset else spec.get_config()


def _differs(config: ConfigDict, name: str, value: Any) -> bool:
    section, _, key = name.rpartition(".")
    ours = (config[section] if section else config)[key]
    ours = ours.to_dict() if isinstance(ours, ConfigDict) else ours
    return value != (list(ours) if isinstance(value, list) else ours)


def _rejection(config: ConfigDict, changed: Settings, spec: TrainerSpec) -> str:
    """Return the validation error of the translated config, or ""."""
    for name, value in changed.items():
        section, _, key = name.rpartition(".")
        place = config[section] if section else config
        with place.ignore_type():
            place[key] = ConfigDict(value) if isinstance(value, dict) else value
    try:
        spec.check(config)
    except UserError as error:
        return str(error)
    return ""


def format_command(base: str, spec: TrainerSpec, launch: Settings, settings: Settings) -> list[str]:
    """Return the lines of our command, one setting each."""
    script = "scripts/train.py" if spec is DIFFUSION_SPEC else "scripts/train_vlm.py"
    stage = launch.get(ZERO_STAGE)
    file = "fsdp2" if launch.get(SHARDED) else f"deepspeed_zero{stage}" if stage else ""
    nodes, gpus = launch.get(NODES, 1), launch.get(GPUS, 1)
    if nodes > 1:
        option = f" --accelerate-config scripts/accelerate_configs/{file}.yaml" if file else ""
        start = (
            f"bash scripts/multi_node/main.sh --nodes {nodes} --node-rank RANK "
            f"--master-addr HOST{option} -- {script}"
        )
    elif gpus > 1:
        start = (
            "accelerate launch --config_file "
            f"scripts/accelerate_configs/{file or 'multi_gpu'}.yaml --num_processes {gpus} {script}"
        )
    else:
        start = f"python {script}"
    options = [quote_for_shell(f"--config.{name}={value}") for name, value in settings.items()]
    return " \\\n    ".join([f"{start} --config {base}", *options]).split("\n")


def _split(line: str) -> list[str]:
    """Return the words of a command in one argument."""
    try:
        words = shlex.split(line)
    except ValueError as error:  # an unbalanced quote
        raise UserError(f"cannot be read: {error}", field="the command", value=line) from error
    if not words:
        raise UserError("is empty", field="the command", value=line, hint=known_trainers())
    return words


def main(arguments: Sequence[str]) -> None:
    """Print the equivalent of a command line."""
    words = _split(arguments[0]) if len(arguments) == 1 else list(arguments)
    line = " ".join(arguments)
    replaced = {each.line: each.answer for each in README_COMMANDS if each.kind == REPLACED}
    if line in replaced:
        print_text(replaced[line])
        return
    print_text("\n\n".join(map(answer, read(words))))


if __name__ == "__main__":
    if not sys.argv[1:] or {"-h", "--help"} & {*sys.argv[1:2]}:
        print_text(__doc__ or "")
        sys.exit()
    exit_on_user_error(lambda: main(sys.argv[1:]), debug=False)
