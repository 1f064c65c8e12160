"""Training and evaluation from Python, by the code of the scripts.

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

from flow_grpo import disk
from flow_grpo.config import command_line, overrides
from flow_grpo.config.places import ROOT, find_files
from flow_grpo.data.columns import has_binary, parse_names
from flow_grpo.data.rows import MASK, RULES, Columns
from flow_grpo.draw import presets
from flow_grpo.draw.compare import evaluate_all
from flow_grpo.draw.fields import DRAW
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import parse_json
from flow_grpo.pictures import upright
from flow_grpo.rewards.frames import png_base64
from flow_grpo.rewards.given import path_of
from flow_grpo.show.reading import read_metrics

Reward = str | Callable
Rewards = Sequence[Reward | tuple[Reward, float]] | Mapping[Reward, float]
Prompts = str | Path | Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """What a training left."""

    folder: Path  # absolute, as is the next
    checkpoint: Path  # the newest: lora/ and ema_lora/ are what `pipe.load_lora_weights` takes
    metrics: list[dict[str, float]]  # one dict for each evaluation or epoch, as in metrics.jsonl


class Trainer:
    """A preset, with your model, rewards, prompts and fields: {"train.learning_rate": 1e-4}."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        rewards: Rewards | None = None,
        prompts: Prompts | None = None,
        test_prompts: Sequence[str | Mapping[str, Any]] | None = None,
        preset: str = "tiny_ocr",
        **fields: Any,
    ) -> None:
        self.config = build_config(model, rewards, prompts, test_prompts, preset, fields)

    def train(self) -> Run:
        """What scripts/train.py does with this config."""
        command_line.set_up_logging()
        session = _script("train").main(ConfigDict(self.config))
        folder = session.folder.resolve()
        return Run(folder, (folder / "checkpoints/latest").resolve(), read_metrics(folder))


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
    """What scripts/evaluate.py does: the mean of each reward, by checkpoint. `prompts` are those to
    draw; `out` is a new folder, for tables and pictures."""
    command_line.set_up_logging()
    config = build_config(model, rewards, prompts, prompts, preset, fields)
    one = isinstance(checkpoints, str | Path)
    names = [str(c) for c in ([checkpoints] if one else checkpoints)]
    lora = str(fields.get("train.lora_path", ""))
    scored = evaluate_all(config, names, Path(out), lora_given=lora)
    return {each.candidate.name: each.result.means() for each in scored}


def build_config(
    model: str | Path,
    rewards: Rewards | None,
    prompts: Prompts | None,
    test_prompts: Prompts | None,
    preset: str,
    fields: Mapping[str, Any],
) -> ConfigDict:
    DRAW.load_custom(fields)
    config = presets.get_config(preset)
    for name, value in fields.items():
        overrides.check_name(name, config, DRAW)
        try:
            config.update_from_flattened_dict({name: value})
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}={value!r} does not fit: {first_line(error)}") from error
    if model:
        config.pretrained.model = str(model)
    if rewards is not None:
        config.reward_fn, config.custom_rewards = _reward_fields(rewards)
    if isinstance(prompts, str | Path):
        config.dataset = str(prompts)
    elif prompts is not None:
        sets = {"train": prompts, **({} if test_prompts is None else {"test": test_prompts})}
        metadata = parse_names(config.metadata_columns)
        columns = Columns(config.dataset_column, config.image_column, metadata)
        config.dataset = str(_write_prompts(Path(config.logdir), sets, columns))
    find_files(config)
    return config


def _reward_fields(rewards: Rewards) -> tuple[ConfigDict, ConfigDict]:
    """Weights by name, and where the functions among them are found."""
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        rewards = [rewards]
    pairs = rewards.items() if isinstance(rewards, Mapping) else map(_pair, rewards)
    weights, paths = {}, {}
    for reward, weight in pairs:
        known = isinstance(reward, str) or callable(reward)
        if not known or isinstance(weight, bool) or not isinstance(weight, Real):
            raise UserError(
                f"rewards has {reward!r:.80} with weight {weight!r:.80}; give names or functions, "
                "alone or with a number: rewards={'ocr': 1.0}"
            )
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", None)
        name = name or type(reward).__name__
        if name in weights:
            raise UserError(f"two rewards are called {name!r}; give one of them another name")
        weights[name] = float(weight)
        if callable(reward):
            paths[name] = path_of(reward, name)
    if not weights:
        raise UserError("rewards is empty; name one, like rewards=['ocr'], or give a function")
    return ConfigDict(weights), ConfigDict(paths)


def _pair(reward: Reward | tuple[Reward, float]) -> tuple[Reward, float]:
    return reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)


def _write_prompts(
    logdir: Path, sets: Mapping[str, Sequence[str | Mapping[str, Any]]], columns: Columns
) -> Path:
    """In a folder named by what is in it, so that a run that goes on finds the same."""
    files = {}
    for split, prompts in sets.items():
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise UserError(f"{split} prompts must be a list, not {prompts!r:.80}")
        rows = enumerate(prompts, 1)
        lines = [_row(prompt, f"{split} prompt {n}", columns) for n, prompt in rows]
        if not lines:
            raise UserError(f"the {split} prompts are empty; give at least one")
        files[f"{split}.jsonl"] = "".join(lines)
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]
    folder = logdir / f"prompts-{digest}"
    try:
        disk.make_folders(folder)
        for name, text in files.items():
            disk.write_text(folder / name, text)  # whole, for the other processes of a run too
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to logdir={str(logdir)[:80]!r}: {error}") from error
    return folder


def _row(prompt: str | Mapping[str, Any], where: str, columns: Columns) -> str:
    if not isinstance(prompt, str | Mapping):
        raise UserError(f"{where} must be a text or a dict with one, not {prompt!r:.80}")
    row = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    files = (*columns.pictures, MASK)
    try:
        binary = {name: value for name, value in row.items() if has_binary(value)}
        RULES.check(binary, files, where, **columns.unread)
        row = {name: value for name, value in row.items() if name not in binary or name in files}
        line = json.dumps(row | {name: _kept(row[name]) for name in files if name in row})
    except (TypeError, ValueError, RecursionError, OSError) as error:
        # an object, a dict in itself, a picture that is cut off
        raise UserError(f"{where} cannot be saved as JSON: {first_line(error)}") from error
    parse_json(line, where)
    return f"{line}\n"


def _kept(pictures: Any) -> Any:
    """As they stand in a file that is written elsewhere: paths start there, unless they are whole,
    and the pictures themselves are text."""
    if isinstance(pictures, list | tuple):
        return [_kept(each) for each in pictures]
    if isinstance(pictures, Image.Image):
        return f"data:image/png;base64,{png_base64(upright(pictures))}"
    if isinstance(pictures, bytes):
        return f"data:;base64,{base64.b64encode(pictures).decode()}"
    is_file = isinstance(pictures, str | Path) and os.path.isfile(pictures)
    return os.path.abspath(pictures) if is_file else pictures


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
