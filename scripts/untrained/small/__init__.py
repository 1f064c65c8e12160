"""Small diffusers pipelines of the real classes with random weights, built offline.

Each family has a module with a `build` function; `scripts/make_small.py` saves the pipeline. They
run the trainer end to end without downloading weights.
"""

import importlib
import pkgutil

from diffusers import DiffusionPipeline

FAMILIES = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "components")


def build(family: str, **settings) -> DiffusionPipeline:
    return importlib.import_module(f"{__name__}.{family}").build(**settings)
