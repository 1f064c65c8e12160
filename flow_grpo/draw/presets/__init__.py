"""Named presets: --config config/grpo.py:general_ocr_sd3_8gpu

A preset of a full-size model takes the number of GPUs from its name (_1gpu, _4gpu, _8gpu,
_32gpu, any that divides), or without one from the launcher.
"""

import os
import re
from collections.abc import Callable

from ml_collections import ConfigDict

from flow_grpo.config import old_names
from flow_grpo.config.places import find_files
from flow_grpo.draw.presets.full import BENCHMARKS, LARGE, SD3
from flow_grpo.draw.presets.tiny import TINY
from flow_grpo.draw.presets.variants import VARIANTS
from flow_grpo.errors import UserError, nearest

Preset = Callable[[int], ConfigDict]


def _varied(preset: Preset, change: Callable[[ConfigDict, int], None]) -> Preset:
    def varied(gpus: int) -> ConfigDict:
        config = preset(gpus)
        change(config, gpus)
        return config

    return varied


PRESETS: dict[str, Preset] = {
    **{preset.__name__: preset for preset in (*TINY, *SD3, *LARGE)},
    **{f"{p.__name__}_{v.__name__}": _varied(p, v) for p in SD3 for v in VARIANTS},
    **BENCHMARKS,
}


def get_config(name: str = "") -> ConfigDict:
    preset, gpus = re.fullmatch(r"(?s)(.*?)(?:_([1-9]\d{0,5})gpu)?", str(name)).groups()
    ending = f"_{gpus}gpu" if gpus else ""
    if preset in old_names.PRESETS:
        raise UserError(f"unknown preset {name!r}; it is {old_names.PRESETS[preset]}{ending} here")
    if preset not in PRESETS and (near := nearest(preset, PRESETS)):
        raise UserError(f"unknown preset {name!r}; did you mean {near}{ending}?")
    if not preset:
        raise UserError(f"name a preset: config/grpo.py:NAME; there are {', '.join(PRESETS)}")
    if preset not in PRESETS:
        raise UserError(f"unknown preset {name!r}; config/grpo.py has {', '.join(PRESETS)}")
    launched = os.environ.get("WORLD_SIZE", gpus)
    if gpus is not None and gpus != launched:
        raise UserError(f"preset {name!r} is for {gpus} GPUs but {launched} processes were started")
    config = PRESETS[preset](int(launched or 1))
    find_files(config)
    return config
