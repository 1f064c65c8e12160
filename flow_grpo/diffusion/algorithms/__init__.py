"""Training algorithms, one file each; their settings are in settings.py.

The algorithms are imported when they are looked up: importing this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flow_grpo.config.registry import Registry
from flow_grpo.config.settings import check_settings, setting

if TYPE_CHECKING:
    from flow_grpo.diffusion.algorithms.base import Algorithm, Batch, Loss, Setup

__all__ = ["ALGORITHMS", "Algorithm", "Batch", "Loss", "Setup", "check_settings", "setting"]

ALGORITHMS: "Registry[type[Algorithm]]" = Registry(
    "algorithm",
    {
        "awm": f"{__name__}.awm:Awm",
        "dgpo": f"{__name__}.dgpo:Dgpo",
        "dpo": f"{__name__}.dpo:Dpo",
        "dppo": f"{__name__}.dppo:Dppo",
        "grpo": f"{__name__}.grpo:Grpo",
        "grpo_guard": f"{__name__}.grpo_guard:GrpoGuard",
        "ipo": f"{__name__}.ipo:Ipo",
        "kto": f"{__name__}.kto:Kto",
        "leap": f"{__name__}.leap:Leap",
        "mix": f"{__name__}.mix:Mix",
        "nft": f"{__name__}.nft:Nft",
        "opd": f"{__name__}.opd:Opd",
        "ram": f"{__name__}.ram:Ram",
        "rwr": f"{__name__}.rwr:Rwr",
        "sft": f"{__name__}.sft:Sft",
    },
)


def __getattr__(name: str) -> Any:
    """Import the public classes of base.py, which needs torch, on first access."""
    if name in ("Algorithm", "Batch", "Loss", "Setup"):
        return getattr(importlib.import_module(f"{__name__}.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
