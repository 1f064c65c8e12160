"""One file per algorithm. All files of this folder are imported, so that a new one is found."""

import importlib
import pkgutil

from flow_grpo.algorithms.base import ALGORITHMS, Algorithm, Batch, Loss, Setup
from flow_grpo.algorithms.settings import check_settings, setting

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ALGORITHMS", "Algorithm", "Batch", "Loss", "Setup", "check_settings", "setting"]
