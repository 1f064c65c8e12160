"""Small diffusers pipelines of the real classes with random weights, built offline.

One file per family, whose `build` makes the pipeline; `scripts/make_small.py` writes it to disk.
Enough to try a setup, or to drive the trainer end to end, where no weights can be downloaded.
"""

import importlib
import pkgutil

from diffusers import DiffusionPipeline

FAMILIES = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "parts")


def build(family: str, **settings) -> DiffusionPipeline:
    return importlib.import_module(f"{__name__}.{family}").build(**settings)
