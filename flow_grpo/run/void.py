"""Settings that others make void are refused: nobody should wait for what they would do.

scripts/void_settings.py finds them, by trying all pairs.
"""

from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from flow_grpo.algorithms import Algorithm
from flow_grpo.errors import UserError
from flow_grpo.models import ModelAdapter
from flow_grpo.run.fields import get_config
from flow_grpo.run.tracking import dotted

STEPS = ("sample.sde_type", "sample.noise_level")
WINDOW = ("sample.sde_window_range", "sample.sde_window_per")


def check_void(config: ConfigDict, algorithm: Algorithm) -> None:
    """One line for those that were changed from their default and have no effect."""
    if config.sample.same_latent and not algorithm.noisy_steps(np.random.default_rng(0), 0):
        raise UserError(
            f"sample.same_latent=True does not go with algorithm={algorithm.name!r}, which samples "
            "without noise: all samples of a group would be the same; set it to False"
        )
    given, default = (dict(dotted(c.to_dict())) for c in (config, get_config()))
    for names, why in _void(config, algorithm):
        if changed := [name for name in names if given.get(name) != default.get(name)]:
            told = ", ".join(f"{name}={given[name]!r}" for name in changed)
            values = ", ".join(repr(default[name]) for name in changed)
            verb, them = ("have", "them") if changed[1:] else ("has", "it")
            raise UserError(f"{told} {verb} no effect with {why}; leave {them} at {values}")


def check_gradient(config: ConfigDict, model: type[ModelAdapter]) -> None:
    gradient = config.train.guidance_gradient
    name, scale = "sample.guidance_scale", config.sample.guidance_scale
    if (trained := config[config.algorithm].get("train_guidance")) is not None:
        name, scale = f"{config.algorithm}.train_guidance", trained
    if gradient != "both" and not model.is_guided(scale):
        raise UserError(
            f"train.guidance_gradient={gradient!r} has no effect with {name}={scale}, where this "
            "model has one pass; leave it at 'both'"
        )


def _void(config: ConfigDict, algorithm: Algorithm) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of settings, and what makes them void."""
    sample, name, own = config.sample, algorithm.name, algorithm.settings
    method, noisy = f"algorithm={name!r}", algorithm.noisy_steps(np.random.default_rng(0), 0)
    if not noisy:
        compared = algorithm.needs_reference and own.kl_type != "velocity"
        names = ("train.timestep_fraction", *WINDOW, *(() if compared else STEPS))
        yield names, f"{method}, which samples without noise"
    elif hasattr(own, "window_size"):
        yield ("train.timestep_fraction", *WINDOW), f"{method}, which moves a window of its own"
    elif sample.sde_window_size:
        yield ("train.timestep_fraction",), f"sample.sde_window_size={sample.sde_window_size}"
    else:
        yield WINDOW, "sample.sde_window_size=0"
    if len(noisy) == sample.num_steps - 1 and config.train.advantage != "remax":
        yield ("sample.solver",), "noise on all steps but the last"
    if algorithm.own_credit:
        yield ("sample.global_std",), f"{method}, which gives credit in a way of its own"
    elif config.train.advantage not in ("grpo", "pairwise"):
        yield ("sample.global_std",), f"train.advantage={config.train.advantage!r}"
    if not algorithm.needs_reference:
        yield (f"{name}.kl_type", f"{name}.kl_guidance"), "no KL: its weight is 0"
    sides = [f"{name}.clip_range_{side}" for side in ("low", "high")]
    if all(getattr(own, side.rpartition(".")[2], None) is not None for side in sides):
        yield (f"{name}.clip_range",), f"both {sides[0]} and {sides[1]}"
    names = ("old_most", "old_rate", "old_start", "old_after")
    averaged = [n for n in names if hasattr(own, n)]
    if zero := [n for n in averaged[:2] if getattr(own, n) == 0]:
        others = tuple(f"{name}.{n}" for n in averaged if getattr(own, n) or n == "old_after")
        yield others, f"{name}.{zero[0]}=0.0"
    if config.height and config.width and config.resolution:  # 0 says that there is none
        yield ("resolution",), f"height={config.height} and width={config.width}"
