"""Models to evaluate: the base model, or weights to load into it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flow_grpo.errors import UserError
from flow_grpo.report.run_reader import short_names
from flow_grpo.training.checkpoint import find_weights

BASE = "base"


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate: the base model, or weights to load into it."""

    name: str  # short and unique
    weights: Path | None  # None: the base model


def parse_candidates(
    arguments: list[str], *, base: Callable[[], Candidate] = lambda: Candidate(BASE, None)
) -> list[Candidate]:
    """Parse the values of --checkpoint, in order.

    Args:
        arguments: Each is "base", a path that `find_weights` accepts, or several of these separated
            by commas. Empty means the base model.
        base: Called if "base" is among them.
    """
    named = [name for word in arguments for name in _split_names(word) if name] or [BASE]
    base_model = base() if BASE in named else None
    found = [None if name == BASE else find_weights(Path(name)) for name in named]
    resolved = [weights and weights.resolve() for weights in found]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            first = named[resolved.index(path)]
            raise UserError(
                f"selects the same weights as {first!r} ({path or BASE})",
                field="--checkpoint",
                value=named[i],
                hint="leave one out",
            )
    short = short_names([path for path in resolved if path])
    names = iter(f"checkpoint {name}" if name == BASE else name for name in short)
    return [Candidate(next(names), weights) if weights else base_model for weights in found]


def _split_names(word: str) -> list[str]:
    if os.path.exists(word):  # a folder name may contain a comma
        return [word]
    return [part.strip() for part in word.split(",")]
