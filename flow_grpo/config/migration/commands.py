"""Read a command line, a shell script or a YAML file of another trainer; nothing is executed."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.config.migration.counterparts import Project, parse_value
from flow_grpo.config.migration.flow_grpo import FLOW_GRPO
from flow_grpo.config.migration.lmm_r1 import LMM_R1
from flow_grpo.config.migration.lmm_r1_sft import LMM_R1_SFT
from flow_grpo.config.migration.projects import PROJECTS
from flow_grpo.config.migration.trl import TRL
from flow_grpo.config.migration.trl_offline import TRL_DPO, TRL_KTO, TRL_SFT
from flow_grpo.errors import UserError

MAX_FILE_BYTES = 2**20
# Their options are --name value; those of the others are name=value.
FLAG_PROJECTS = (LMM_R1, TRL, TRL_SFT, TRL_DPO, TRL_KTO, LMM_R1_SFT)
ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\S*)")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
# Options of accelerate launch and torchrun.
PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node")
MACHINES = ("num_machines", "nnodes")


@dataclass(frozen=True)
class ForeignRun:
    """What a command line of another trainer asks for.

    Attributes:
        project: The trainer.
        program: The word that names it: a module or script; empty in a config file.
        settings: Its settings by their full names.
        config: Value of its --config or config=, such as config/grpo.py:general_ocr_sd3.
        unread: Words that are neither options nor settings.
    """

    project: Project
    program: str
    settings: Mapping[str, Any]
    config: str = ""
    unread: tuple[str, ...] = ()


def read_shell_script(path: Path) -> list[ForeignRun]:
    """Return the training commands of a shell script, with its own variables substituted."""
    return [run for words in split_commands(read_text(path)) if (run := read_command(words))]


def read_text(path: Path) -> str:
    """Return the text of a file of at most `MAX_FILE_BYTES`.

    Raises:
        UserError: If the file is larger, or cannot be read as text.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"is larger than {MAX_FILE_BYTES} bytes", field=path)
        return path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field=path) from error
    except UnicodeDecodeError as error:
        raise UserError("is not a text file", field=path) from error


def split_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script.

    Assignments of literals are substituted in later commands; other variables stay as they are.
    """
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that spans lines
            continue
        words = [_substitute(word, variables) for word in words]
        assigned = [ASSIGNMENT.fullmatch(word) for word in words if word != "export"]
        if assigned and all(assigned) and not any("." in word.split("=")[0] for word in words):
            variables |= {match[1]: match[2] for match in assigned if match}
        elif words:
            yield words


def _substitute(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    return VARIABLE.sub(value, word)


def read_command(words: Sequence[str]) -> ForeignRun | None:
    """Return what a command asks for, or None if it is not a training command."""
    for index, word in enumerate(words):
        pair = f"{word} {words[index + 1]}" if index + 1 < len(words) else word
        for project in PROJECTS:
            for program in project.programs:
                if word == program or word.endswith(f"/{program}") or pair == program:
                    start = index + (2 if pair == program else 1)
                    return _read_arguments(project, program, words[:index], words[start:])
    return None


def read_overrides(words: Sequence[str]) -> ForeignRun | None:
    """Return a run for settings without a program, of the trainer that has most of them."""
    names = [word.lstrip("+-").partition("=")[0] for word in words]
    project = nearest_project(names)
    return project and _read_arguments(project, "", [], words)


def read_yaml(path: Path) -> ForeignRun:
    """Return the settings of a YAML file, of the trainer that has most of them.

    Raises:
        UserError: If the file is not YAML, or has no setting of a known trainer.
    """
    import yaml  # slow

    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"is not YAML: {reason}", field=path) from error
    if not isinstance(content, dict):
        raise UserError("must contain settings", field=path)
    settings = dict(_flatten(content))
    project = nearest_project(list(settings))
    if project is None:
        raise UserError("contains no setting of a known trainer", field=path, hint=known_trainers())
    return ForeignRun(project, "", settings)


def known_trainers() -> str:
    """Return the hint that lists the trainers."""
    return f"known trainers: {', '.join(project.name for project in PROJECTS)}"


def nearest_project(names: Sequence[str]) -> Project | None:
    """Return the trainer that has most of these settings, or None if no trainer has one."""
    counts = {project.name: sum(name in project.keys for name in names) for project in PROJECTS}
    best = max(PROJECTS, key=lambda project: counts[project.name])
    return best if counts[best.name] else None


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _number(value)


def _number(value: Any) -> Any:
    """Return a number that YAML reads as text: 1e-6 without a dot."""
    return parse_value(value) if isinstance(value, str) and value[:1].isdigit() else value


def _read_arguments(
    project: Project, program: str, before: Sequence[str], words: Sequence[str]
) -> ForeignRun:
    """Return the settings in the words after a program; `before` are those of the launcher."""
    settings: dict[str, Any] = {}
    unread: list[str] = []
    is_flags = project in FLAG_PROJECTS
    options = dict(_read_options(words, unread, several=is_flags))
    config = str(options.pop("config", ""))
    for name, value in options.items():
        settings[name.removeprefix("config.") if project is FLOW_GRPO else name] = value
    if project is FLOW_GRPO:
        launcher = dict(_read_options(before, [], several=False))
        for names, ours in ((PROCESSES, "launch.gpus"), (MACHINES, "launch.nodes")):
            for name in names:
                if isinstance(launcher.get(name), int):
                    settings[ours] = launcher[name]
        stage = re.search(r"deepspeed_zero(\d)", str(launcher.get("config_file", "")))
        if stage:
            settings["launch.zero"] = int(stage[1])
    return ForeignRun(project, program, settings, config, tuple(unread))


def _read_options(
    words: Sequence[str], unread: list[str], *, several: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each option; words that belong to none go to `unread`.

    Args:
        words: The words of a command line.
        unread: Receives the others.
        several: Whether options are --name value value, and only those.
    """
    name, values = "", []
    for word in [*words, "--"]:
        if _ends_command(word) or word.startswith("--"):
            if name:
                yield name, _join_values(values)
            name, values = "", []
            if _ends_command(word) or word == "--":
                return
            option, equals, text = word.removeprefix("--").partition("=")
            if equals:
                yield option, parse_value(text)
            else:
                name = option
        elif name and (several or not values):
            values.append(word)
        elif "=" in word:
            option, _, text = word.lstrip("+").partition("=")
            yield option, parse_value(text)
        elif word not in ("$@", "\\"):
            unread.append(word)


def _ends_command(word: str) -> bool:
    """Return whether a word is a shell redirection or separator; a token <|...|> is neither."""
    if word.startswith("<|"):
        return False
    return word in ("&", "&&", "|", ";", ">", "2>&1", "||") or word[:1] in ("<", ">")


def _join_values(values: Sequence[str]) -> Any:
    """Return True for a flag without value, its value, or a tuple of several."""
    if not values:
        return True
    parsed = [parse_value(value) for value in values]
    return parsed[0] if len(parsed) == 1 else tuple(parsed)
