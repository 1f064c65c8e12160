"""Models to evaluate: the base model, or weights to load into it or in place of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flow_grpo.errors import UserError
from flow_grpo.hub_access import split_hub_id
from flow_grpo.report.run_reader import short_names
from flow_grpo.training.weight_sources import PIPELINE_INDEX, locate_weights

BASE = "base"
CandidateKind = Literal["base", "lora", "model", "pipeline"]


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate: the base model, or weights to load into it or in place of it."""

    name: str  # short and unique
    weights: Path | None  # local directory or LoRA file; None: the base model

    @property
    def kind(self) -> CandidateKind:
        """What `weights` are.

        "lora": a directory or file; "model": a directory with all weights of the trained model (the
        transformer of a diffusion pipeline, or a transformers model) and its config.json;
        "pipeline": a complete diffusers pipeline.
        """
        if self.weights is None:
            return "base"
        if (self.weights / PIPELINE_INDEX).is_file():
            return "pipeline"
        is_model = (self.weights / "config.json").is_file()
        is_adapter = (self.weights / "adapter_config.json").is_file()
        return "model" if is_model and not is_adapter else "lora"


def parse_candidates(
    arguments: list[str],
    *,
    base: Callable[[], Candidate] = lambda: Candidate(BASE, None),
    field: str = "--checkpoint",
) -> list[Candidate]:
    """Parse the values of --checkpoint, in order.

    Args:
        arguments: Each is "base", a path or hub id that `locate_weights` accepts, or several of
            these separated by commas. Empty means the base model.
        base: Called if "base" is among them.
        field: Option that names them, for messages.
    """
    named = [name for word in arguments for name in _split_names(word) if name] or [BASE]
    base_model = base() if BASE in named else None
    found = [None if name == BASE else locate_weights(name, field) for name in named]
    resolved = [weights and weights.resolve() for weights in found]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            first = named[resolved.index(path)]
            raise UserError(
                f"selects the same weights as {first!r} ({path or BASE})",
                field=field,
                value=named[i],
                hint="leave one out",
            )
    short = short_names(_displayed_paths(named, resolved))
    names = iter(f"checkpoint {name}" if name == BASE else name for name in short)
    return [Candidate(next(names), weights) if weights else base_model for weights in found]


def _displayed_paths(named: list[str], resolved: list[Path | None]) -> list[Path]:
    """Return the paths to shorten: hub ids instead of cached files, and files without suffix."""
    pairs = zip(named, resolved, strict=True)
    paths = [Path(name) if split_hub_id(name) else path for name, path in pairs if path]
    stems = [path.with_suffix("") if path.suffix == ".safetensors" else path for path in paths]
    return stems if len({*stems}) == len(stems) else paths


def _split_names(word: str) -> list[str]:
    if os.path.exists(word):  # a folder name may contain a comma
        return [word]
    return [part.strip() for part in word.split(",")]
