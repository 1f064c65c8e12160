"""Prompt sets, and which prompt each sample of an epoch is drawn from."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flow_grpo.errors import UserError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Prompt:
    prompt: str
    negative_prompt: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)  # handed to the rewards


def load_prompts(folder: str | Path, split: Split, prompt_fn: str = "auto") -> list[Prompt]:
    """Read `<split>_metadata.jsonl` or `<split>.txt`; "auto" prefers the first where both exist."""
    folder = Path(folder)
    text, jsonl = folder / f"{split}.txt", folder / f"{split}_metadata.jsonl"
    choices = {"auto": (jsonl, text), "text": (text,), "metadata": (jsonl,)}
    if prompt_fn not in choices:
        raise UserError(f"unknown prompt_fn={prompt_fn!r}; choose one of {', '.join(choices)}")
    path = next((p for p in choices[prompt_fn] if p.is_file()), None)
    if path is None:
        wanted = " or ".join(p.name for p in choices[prompt_fn])
        raise UserError(f"no dataset at {folder}: it must hold {wanted} (prompt_fn={prompt_fn!r})")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not at U+2028
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    read = _read_json if path == jsonl else lambda line, where: Prompt(line.strip())
    prompts = [read(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"{path} is empty; write one prompt per line")
    return prompts


def _read_json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error}); each line is one JSON object") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise UserError(f'{where}: needs an object with a "prompt" string, got {line.strip()[:80]}')
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a pair, which no tokenizer or file takes
        broken = ascii(error.object[error.start])
        raise UserError(f"{where}: {broken} is half a character; write it whole") from error
    negative = row.get("negative_prompt") or ""
    if not isinstance(negative, str):
        raise UserError(f'{where}: "negative_prompt" must be a string, got {negative!r}')
    metadata = {k: v for k, v in row.items() if k not in ("prompt", "negative_prompt")}
    return Prompt(row["prompt"], negative, metadata)


@dataclass(frozen=True)
class Draw:
    """The samples one process draws together. Both arrays are (batch_size,)."""

    index: np.ndarray  # of the sample within the epoch, over all processes
    row: np.ndarray  # of the dataset; also the group id


def epoch_draws(
    *,
    rows: int,
    groups: int,
    group_size: int,
    batch_size: int,
    updates: int,
    process: int,
    num_processes: int,
    rng: np.random.Generator,
) -> list[Draw]:
    """Draw `groups` distinct rows, `group_size` samples each, and deal them out in batches.

    Each of the `updates` of an epoch takes the next samples by index, of which every process has an
    equal share: what makes up an update follows from the seed alone. Samples of a group lie side by
    side, so a batch holds few distinct prompts.
    """
    chosen = rng.choice(rows, size=groups, replace=False)
    index = np.arange(groups * group_size).reshape(updates, num_processes, -1)[:, process]
    return [Draw(index=i, row=chosen[i // group_size]) for i in index.reshape(-1, batch_size)]
