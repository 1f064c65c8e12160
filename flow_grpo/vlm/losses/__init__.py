"""Policy losses of VLM training, one file each; `train.loss` selects one by name.

base.py defines the interface. A new loss is a file in this package and an entry in `LOSSES`. The
losses are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

from flow_grpo.config.registry import Registry

if TYPE_CHECKING:
    from flow_grpo.vlm.losses.base import VlmLoss

LOSSES: "Registry[type[VlmLoss]]" = Registry(
    "loss",
    {
        "cispo": f"{__name__}.cispo:CispoLoss",
        "clip": f"{__name__}.clip:ClipLoss",
        "gspo": f"{__name__}.gspo:GspoLoss",
    },
)
LOSS_NAMES = tuple(LOSSES.paths)  # built-in losses
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def find_loss(kind: str) -> type["VlmLoss"]:
    """Return the class of the loss of this name."""
    return LOSSES.find(kind, "train.loss")


def build_loss(kind: str, settings: Any) -> "VlmLoss":
    """Build the loss of this name from the settings that it reads."""
    return find_loss(kind).from_settings(settings)
