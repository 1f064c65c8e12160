"""One file per algorithm. All files of this folder are imported, so that a new one is found."""

import importlib
import pkgutil

from flow_grpo.config.settings import check_settings, setting
from flow_grpo.draw.algorithms.base import ALGORITHMS, Algorithm, Batch, Loss, Setup

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

OURS = frozenset(ALGORITHMS)

__all__ = ["ALGORITHMS", "OURS", "Algorithm", "Batch", "Loss", "Setup", "check_settings", "setting"]
