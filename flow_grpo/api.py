"""Python API for training and evaluation; it runs the same code as the scripts.

from flow_grpo import Trainer

def bright(images, prompts, metadata):
    return [sum(image.convert("L").resize((1, 1)).getdata()) / 255 for image in images]

run = Trainer("assets/tiny-sd3", rewards=[bright], prompts=["a red sign", "a blue sign"]).train()
run.metrics[-1]["eval/bright"], run.checkpoint
"""

import base64
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict
from PIL import Image

from flow_grpo import atomic_io
from flow_grpo.config import command_line, overrides
from flow_grpo.config.config_dicts import SHORTHANDS
from flow_grpo.config.paths import ROOT, resolve_config_paths
from flow_grpo.data.columns import has_binary
from flow_grpo.data.preference_rows import PREFERENCE_IMAGES, PreferenceLayout
from flow_grpo.data.prompts import MASK_COLUMN, PromptLayout
from flow_grpo.data.rows import RowLayout
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.checkpoint_evaluation import evaluate_checkpoints
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.prompts import row_layout
from flow_grpo.errors import UserError, first_line
from flow_grpo.images import normalize_image
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.rewards.custom import import_path
from flow_grpo.rewards.frames import encode_png_base64
from flow_grpo.untrusted_files import parse_json

Reward = str | Callable
Rewards = Sequence[Reward | tuple[Reward, float]] | Mapping[Reward, float]
Prompts = str | Path | Sequence[str | Mapping[str, Any]]
Preferences = str | Path | Sequence[Mapping[str, Any]]
FIELDS_OF_ARGUMENTS = {
    "model": "pretrained.model",
    "rewards": "reward_fn",
    "prompts": "dataset",
    "test_prompts": "eval_dataset",
    "preferences": "preferences.data",
}


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run."""

    folder: Path  # run directory, absolute
    checkpoint: Path  # newest one, absolute; `pipe.load_lora_weights` loads its lora/ and ema_lora/
    metrics: list[dict[str, float]]  # rows of metrics.jsonl


class Trainer:
    """Trains a diffusion model from Python.

    Args:
        model: Folder or hub id; the preset's by default.
        rewards: Names or functions, as a list, a list of (reward, weight) or {reward: weight}.
        prompts: Path of a dataset, or a list of texts or dicts.
        test_prompts: Held-out prompts; split off `prompts` by default. Only if `prompts` is a list.
        preferences: Pairs, rated images or demonstrations to train on: a path, or a list of dicts
            with paths, bytes or PIL images. Use preset="tiny_offline" or a preset of your own.
        preset: Preset that the remaining settings come from.
        **fields: Config fields by full name: `**{"train.learning_rate": 1e-4}`.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        rewards: Rewards | None = None,
        prompts: Prompts | None = None,
        test_prompts: Sequence[str | Mapping[str, Any]] | None = None,
        preferences: Preferences | None = None,
        preset: str = "tiny_ocr",
        **fields: Any,
    ) -> None:
        if test_prompts is not None and (prompts is None or isinstance(prompts, str | Path)):
            raise UserError(
                "needs a list of prompts",
                field="test_prompts",
                hint="pass prompts as a list, or a directory with a train and a test file",
            )
        self.config = build_config(
            model, rewards, prompts, test_prompts, preset, fields, preferences
        )

    def train(self) -> TrainingResult:
        """Run scripts/train.py with this config."""
        command_line.set_up_logging()
        session = _load_script("train").main(ConfigDict(self.config))
        folder = session.folder.resolve()
        return TrainingResult(
            folder, (folder / "checkpoints/latest").resolve(), read_metrics(folder)
        )


def evaluate(
    model: str | Path = "",
    *,
    out: str | Path,
    checkpoints: Sequence[str | Path] = ("base",),
    rewards: Rewards | None = None,
    prompts: Prompts | None = None,
    preset: str = "tiny_ocr",
    **fields: Any,
) -> dict[str, dict[str, float]]:
    """Score checkpoints as scripts/evaluate.py does.

    Args:
        model: As for `Trainer`.
        out: New folder for tables and images.
        checkpoints: Paths, or "base" for the model without training.
        rewards: As for `Trainer`.
        prompts: Prompts to sample, in the same form as for `Trainer`.
        preset: As for `Trainer`.
        **fields: As for `Trainer`.

    Returns:
        The mean of each reward, by checkpoint.
    """
    command_line.set_up_logging()
    config = build_config(model, rewards, prompts, prompts, preset, fields)
    if isinstance(checkpoints, str | Path):
        checkpoints = [checkpoints]
    names = [str(each) for each in checkpoints]
    lora = str(fields.get("train.lora_path", ""))
    scored = evaluate_checkpoints(config, names, Path(out), lora_override=lora)
    return {each.candidate.name: each.result.means() for each in scored}


def build_config(
    model: str | Path,
    rewards: Rewards | None,
    prompts: Prompts | None,
    test_prompts: Prompts | None,
    preset: str,
    fields: Mapping[str, Any],
    preferences: Preferences | None = None,
) -> ConfigDict:
    """Build the config of a preset with the arguments of `Trainer`.

    Lists of prompts are written to a directory in `logdir`.

    Raises:
        UserError: If a field is unknown or invalid, or also set by an argument.
    """
    DIFFUSION_SPEC.load_custom_classes(fields)
    given = {
        "model": model or None,
        "rewards": rewards,
        "prompts": prompts,
        "test_prompts": test_prompts,
        "preferences": preferences,
    }
    for argument, name in FIELDS_OF_ARGUMENTS.items():
        if given[argument] is not None and name in fields:
            rule = f"is set by the argument {argument!r} too"
            raise UserError(rule, field=name, value=fields[name], hint="pass only one of them")
    config = presets.get_config(preset)
    for name, value in fields.items():
        if isinstance(value, str | Path):
            name, value = SHORTHANDS.get(name, name), str(value)
        overrides.check_field_name(name, config, DIFFUSION_SPEC)
        try:
            config.update_from_flattened_dict({name: value})
        except (TypeError, ValueError) as error:
            rule = f"is invalid: {first_line(error)}"
            raise UserError(rule, field=name, value=value) from error
    if model:
        config.pretrained.model = str(model)
    if rewards is not None:
        config.reward_fn, config.custom_rewards = _reward_config(rewards)
    if test_prompts is not None:
        config.eval_dataset = ""  # of the preset
    if isinstance(prompts, str | Path):
        config.dataset = str(prompts)
    elif prompts is not None:
        sets = {"train": prompts}
        if test_prompts is not None:
            sets["test"] = test_prompts
        config.dataset = str(_write_prompts(Path(config.logdir), sets, row_layout(config)))
    if isinstance(preferences, str | Path):
        config.preferences.data = str(preferences)
    elif preferences is not None:
        config.preferences.data = str(_write_preferences(Path(config.logdir), preferences))
    resolve_config_paths(config)
    return config


def _reward_config(rewards: Rewards) -> tuple[ConfigDict, ConfigDict]:
    """Return weights by name, and import paths of the functions among the rewards."""
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        rewards = [rewards]
    pairs = rewards.items() if isinstance(rewards, Mapping) else map(_with_weight, rewards)
    weights, paths = {}, {}
    for reward, weight in pairs:
        known = isinstance(reward, str) or callable(reward)
        if not known or isinstance(weight, bool) or not isinstance(weight, Real):
            raise UserError(
                f"has the entry {reward!r:.80} with weight {weight!r:.80}",
                field="rewards",
                hint="pass names or functions, optionally with a number: rewards={'ocr': 1.0}",
            )
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", None)
        name = name or type(reward).__name__
        if name in weights:
            raise UserError(
                f"has two entries named {name!r}", field="rewards", hint="rename one of them"
            )
        weights[name] = float(weight)
        if callable(reward):
            paths[name] = import_path(reward, name)
    if not weights:
        raise UserError(
            "is empty", field="rewards", hint="pass a name, like rewards=['ocr'], or a function"
        )
    return ConfigDict(weights), ConfigDict(paths)


def _with_weight(reward: Reward | tuple[Reward, float]) -> tuple[Reward, float]:
    return reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)


def _write_prompts(
    logdir: Path, sets: Mapping[str, Sequence[str | Mapping[str, Any]]], layout: PromptLayout
) -> Path:
    """Write prompts to a folder named by their hash, so that a resumed run finds the same one."""
    files = {}
    for split, prompts in sets.items():
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise UserError(f"must be a list, not {prompts!r:.80}", field=f"{split} prompts")
        rows = enumerate(prompts, 1)
        lines = [_to_jsonl_line(prompt, f"{split} prompt {n}", layout) for n, prompt in rows]
        if not lines:
            raise UserError("are empty", field=f"{split} prompts", hint="pass at least one")
        files[f"{split}.jsonl"] = "".join(lines)
    return _write_folder(logdir, "prompts", files)


def _write_preferences(logdir: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write preferences to a folder like prompts."""
    if isinstance(rows, str | Mapping) or not all(isinstance(row, Mapping) for row in rows):
        raise UserError("must be a list of dicts", field="preferences")
    layout = PreferenceLayout()
    lines = [
        _row_to_line(dict(row), f"preference {n}", layout, PREFERENCE_IMAGES)
        for n, row in enumerate(rows, 1)
    ]
    if not lines:
        raise UserError("is empty", field="preferences", hint="pass at least one pair or image")
    return _write_folder(logdir, "preferences", {"train.jsonl": "".join(lines)})


def _write_folder(logdir: Path, kind: str, files: Mapping[str, str]) -> Path:
    """Write text files to a folder named by their hash."""
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]
    folder = logdir / f"{kind}-{digest}"
    try:
        atomic_io.make_directories(folder)
        for name, text in files.items():
            atomic_io.write_text_atomic(folder / name, text)  # other processes may read it
    except (OSError, ValueError) as error:
        rule = f"cannot be written to: {error}"
        raise UserError(rule, field="logdir", value=str(logdir)[:80]) from error
    return folder


def _to_jsonl_line(prompt: str | Mapping[str, Any], where: str, layout: PromptLayout) -> str:
    """Return a prompt as a line of a JSON Lines file; `where` names it in the UserError."""
    if not isinstance(prompt, str | Mapping):
        rule = f"must be a string or a dict with a prompt, not {prompt!r:.80}"
        raise UserError(rule, field=where)
    row = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    return _row_to_line(row, where, layout, (*layout.images, MASK_COLUMN))


def _row_to_line(row: dict[str, Any], where: str, layout: RowLayout, files: Sequence[str]) -> str:
    """Return a row as a line of a JSON Lines file.

    Args:
        row: Values by column.
        where: Names the row in the UserError.
        layout: Rules for columns with images that are not read.
        files: Columns that contain images.
    """
    try:
        binary = {name: value for name, value in row.items() if has_binary(value)}
        layout.reject_unused(binary, files, where)
        row = {name: value for name, value in row.items() if name not in binary or name in files}
        images = {name: _serialize_images(row[name]) for name in files if name in row}
        line = json.dumps(row | images)
    except (TypeError, ValueError, RecursionError, OSError) as error:
        # an arbitrary object, a dict that contains itself, a truncated image
        rule = f"cannot be saved as JSON: {first_line(error)}"
        raise UserError(rule, field=where) from error
    parse_json(line, where)
    return f"{line}\n"


def _serialize_images(images: Any) -> Any:
    """Convert images for a JSON file in another folder: absolute paths and data URLs."""
    if isinstance(images, list | tuple):
        return [_serialize_images(each) for each in images]
    if isinstance(images, Image.Image):
        return f"data:image/png;base64,{encode_png_base64(normalize_image(images))}"
    if isinstance(images, bytes):
        return f"data:;base64,{base64.b64encode(images).decode()}"
    is_file = isinstance(images, str | Path) and os.path.isfile(images)
    return os.path.abspath(images) if is_file else images


def _load_script(name: str) -> ModuleType:
    """Import scripts/<name>.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
