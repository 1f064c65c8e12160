"""Losses of VLM training, one file each; `train.loss` selects one by name.

base.py defines the interface of policy losses, given.py that of losses of given responses. A new
loss is a file in this package and an entry in `LOSSES`. The losses are imported on first use, so
that importing this package does not import torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from flow_grpo.config.registry import Registry

if TYPE_CHECKING:
    from flow_grpo.data.responses import ResponseKind
    from flow_grpo.vlm.losses.base import TrainLoss

LOSSES: "Registry[type[TrainLoss]]" = Registry(
    "loss",
    {
        "cispo": f"{__name__}.cispo:CispoLoss",
        "clip": f"{__name__}.clip:ClipLoss",
        "gspo": f"{__name__}.gspo:GspoLoss",
        "sapo": f"{__name__}.sapo:SapoLoss",
        "drpo": f"{__name__}.drpo:DrpoLoss",
        "cppo": f"{__name__}.cppo:CppoLoss",
        "sft": f"{__name__}.sft:SftLoss",
        "dpo": f"{__name__}.dpo:DpoLoss",
        "ipo": f"{__name__}.dpo:IpoLoss",
        "kto": f"{__name__}.kto:KtoLoss",
    },
)
BUILT_IN_LOSSES = tuple(LOSSES.paths)
# policy losses without a clip range
UNCLIPPED_LOSSES = ("sapo", "drpo", "cppo")
# losses of given responses, which need no rollout, and what they train on
GIVEN_LOSSES: "Mapping[str, ResponseKind]" = {
    "sft": "demonstrations",
    "dpo": "pairs",
    "ipo": "pairs",
    "kto": "ratings",
}
# values of `train` settings that are unset, for policy losses that have no others
DEFAULTS = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token", "beta": 0.0}
LOSS_NAMES = tuple(name for name in BUILT_IN_LOSSES if name not in GIVEN_LOSSES)
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def find_loss(kind: str) -> type["TrainLoss"]:
    """Return the class of the loss of this name."""
    return LOSSES.find(kind, "train.loss")


def build_loss(kind: str, settings: Any) -> "TrainLoss":
    """Build the loss of this name from the settings that it reads."""
    return find_loss(kind).from_settings(settings)
