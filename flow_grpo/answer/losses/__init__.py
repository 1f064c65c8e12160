"""The losses of answers, one file each: a new file is one more value that `train.loss` takes.

base.py says what a loss is given and gives. Names alone need no torch: a config is checked by them.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from flow_grpo.answer.losses.base import AnswerLoss

KINDS = tuple(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
OWN: dict[str, type["AnswerLoss"]] = {}  # the user's
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
Divergence = Literal["k1", "k2", "k3"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


def find_loss(kind: str) -> type["AnswerLoss"]:
    """The loss of this name."""
    if kind not in (*KINDS, *OWN):
        raise ValueError(f"unknown loss {kind!r}; choose one of {', '.join((*KINDS, *OWN))}")
    return OWN.get(kind) or importlib.import_module(f"{__name__}.{kind}").LOSS


def build_loss(kind: str, settings: Any) -> "AnswerLoss":
    """The loss of this name, with what it reads of the settings."""
    return find_loss(kind).read(settings)
