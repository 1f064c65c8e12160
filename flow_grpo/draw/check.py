"""Hold a config against its fields, and against rules that no single field can state, before
anything is loaded."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import ModuleType
from typing import Any, get_args

import numpy as np
from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS
from flow_grpo.config import old_names
from flow_grpo.config.command_line import OPEN_FIELDS, suggestion
from flow_grpo.draw import fields
from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm, check_settings
from flow_grpo.draw.fields import FLOW_GRPO_NAMES, get_config
from flow_grpo.draw.models import ModelAdapter
from flow_grpo.draw.models.base import GuidanceGradient
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.errors import UserError, with_nearest
from flow_grpo.files import dotted, refuse_halves
from flow_grpo.run import trackers
from flow_grpo.sde import KINDS, SOLVERS

CHOICES = {
    "sample.sde_type": [kind for kind in KINDS if kind != "ode"],
    "train.guidance_gradient": list(get_args(GuidanceGradient)),
    "algorithm": ALGORITHMS,
    "sample.solver": list(SOLVERS),
    "sample.sde_window_per": ["epoch", "batch"],
    "train.advantage": list(ESTIMATORS),
    "mixed_precision": ["no", "bf16", "fp16"],
    "device": ["auto", "cpu"],
}
AT_LEAST = {
    "seed": 0,
    "num_epochs": 1,
    "frames": 1,
    "eval_freq": 0,
    "save_freq": 0,
    "state_freq": 1,
    "distributed_timeout": 1,
    "num_checkpoint_limit": 0,
    "log_images": 0,
    "eval_prompts": 0,
    "reward_retries": 0,
    "max_failed_fraction": 0,
    "max_sequence_length": 1,
    "sample.eval_num_steps": 1,
    "sample.test_batch_size": 1,
    "sample.guidance_scale": 0,
    "sample.eval_guidance_scale": 0,
    "sample.async_depth": 0,
    "train.ema_update_interval": 1,
    "train.lora_rank": 1,
}
ABOVE_ZERO = [
    "reward_timeout",
    "sample.noise_level",
    *(f"train.{name}" for name in ("learning_rate", "max_grad_norm")),
    *(f"train.{name}" for name in ("adam_epsilon", "lora_alpha")),
]
AT_MOST = {
    "sample.async_depth": 1,
    "seed": 2**64 - 1,  # torch takes no more
    # seconds: what waits counts nanoseconds in 64 bits
    "distributed_timeout": 10**8,
    "reward_timeout": 10**8,
}
BELOW_ONE = ["train.ema_decay", "train.adam_beta1", "train.adam_beta2"]
TYPES = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: ((tuple, list), "a tuple"),
    ConfigDict: (ConfigDict, "a ConfigDict"),
}
PATHS = ("dataset", "logdir", "run_name", "resume", "pretrained.model", "train.lora_path")
LONGEST = 255  # bytes of a file's name, in all file systems of Linux
NAMED = 5  # of many wrong fields, as many are named
# by a field that the configs of one script have
SCRIPTS = {"algorithm": "scripts/train.py", "question_format": "scripts/train_vlm.py"}
CPS_CLIP = 1e-5  # of every published setting with sde_type="cps"
WIDE_FOR_CPS = 1e-4


@dataclass(frozen=True)
class Rules:
    """Of single fields; those that a config has not are passed over."""

    choices: Mapping[str, Collection[str]]
    at_least: Mapping[str, float]
    at_most: Mapping[str, float]
    above_zero: Collection[str]
    below_one: Collection[str]


RULES = Rules(CHOICES, AT_LEAST, AT_MOST, ABOVE_ZERO, BELOW_ONE)


def check_values(values: dict[str, Any], rules: Rules) -> None:
    flat = dict(dotted(values))

    def ruled(names: Collection[str]) -> Iterator[tuple[str, Any]]:
        yield from ((name, flat[name]) for name in names if flat.get(name) is not None)

    for name, value in ruled(rules.choices):
        if value not in rules.choices[name]:
            known = ", ".join(map(repr, rules.choices[name]))
            message = f"{name}={value!r} must be one of {known}"
            raise UserError(with_nearest(message, value, filter(None, rules.choices[name])))
    for name, value in ruled(rules.at_least):
        if value < rules.at_least[name]:
            raise UserError(f"{name}={value} must be at least {rules.at_least[name]}")
    for name, value in ruled(rules.at_most):
        if value > rules.at_most[name]:
            raise UserError(f"{name}={value} must be at most {rules.at_most[name]}")
    for name, value in ruled(rules.above_zero):
        if value <= 0:
            raise UserError(f"{name}={value} must be above 0")
    for name, value in ruled(rules.below_one):
        if not 0 <= value < 1:
            raise UserError(f"{name}={value} must be at least 0 and below 1")
    trackers.parse(values["log_with"])
    if values["train"]["offload_optimizer"] and values["train"]["use_8bit_adam"]:
        raise UserError("train.offload_optimizer=True does not go with train.use_8bit_adam=True")


def check(config: ConfigDict) -> None:
    check_fields(config)
    old_names.check_values(config)
    values = config.to_dict()
    check_values(values, RULES)
    if config.sample.sde_type == "cps" and config.sample.noise_level > 1:
        raise UserError(
            f"sample.noise_level={config.sample.noise_level} must be at most 1 for sde_type='cps'"
        )
    for name in FLOW_GRPO_NAMES:
        alias, value = values["train"][name], values["grpo"][name]
        if alias != value:  # in a config whose references were resolved
            raise UserError(
                f"train.{name}={alias!r} and grpo.{name}={value!r} are two names of one field; "
                "give both the same value"
            )
    for name, algorithm in ALGORITHMS.items():
        check_settings(name, algorithm.Settings(**values[name]))
    if config.sample.merge_lora and not config.use_lora:
        raise UserError("sample.merge_lora=True needs use_lora=True")
    if config.sample.guidance_scale > 1 and not config.train.cfg:
        raise UserError(
            f"train.cfg=False with sample.guidance_scale={config.sample.guidance_scale} would "
            "train another velocity than was sampled; set guidance_scale=1 or train.cfg=True"
        )


def check_fields(config: ConfigDict, of: ModuleType = fields) -> None:
    """Refuse other fields than those of fields.py, and values of other types."""
    default = of.get_config()
    known, given = dict(_fields(default)), dict(_fields(config))
    for name in known.keys() & given.keys():
        if isinstance(known[name], ConfigDict):
            _check_type(name, given[name], ConfigDict)
    for name, script in SCRIPTS.items():
        if name in given and name not in known:
            raise UserError(f"this is a config of {script}; run that, or start from {of.EXAMPLE}")
    problems = []
    if unknown := [name for name in given if name not in known]:
        hints = [suggestion(name, known, cutoff=0.75) for name in unknown]
        shown = [f"{n} ({h})" if h else n for n, h in zip(unknown, hints, strict=True)]
        problems.append(f"it has unknown fields: {_some(shown)}")
    absent = [name for name in known if name not in given]
    # of a section that is not there, only its name
    if missing := [name for name in absent if name.rpartition(".")[0] not in absent]:
        problems.append(f"it lacks {_some(missing)}")
    if problems:
        way_out = f"start from {of.__name__}.get_config() and change what differs"
        raise UserError(f"the config does not fit: {'; '.join([*problems, way_out])}")
    for name, value in dotted(config.to_dict()):
        _check_text(name, value)
    for name, value in given.items():
        section, _, key = name.rpartition(".")
        kind = (default[section] if section else default).get_type(key)
        _check_value(name, value, known[name], kind)


def check_judges(config: ConfigDict, judges: set[str], plan: BatchPlan) -> None:
    """Of rewards that compare the pictures of a group: each call has to have whole groups."""
    for name in sorted(judges):
        plan.check_judge(name)
        if plan.group_size < 2:
            raise UserError(
                f"sample.num_image_per_prompt={plan.group_size} must be at least 2 for reward "
                f"{name!r}, which compares the pictures of a group"
            )
        if config.train.advantage == "remax":
            raise UserError(
                f"train.advantage='remax' does not go with reward {name!r}: its baseline is one "
                "picture, with no group to compare it with; use 'pairwise'"
            )


def check_eval_judges(judges: set[str]) -> None:
    for name in sorted(judges):
        raise UserError(
            f"reward {name!r} compares the pictures of a group, and an evaluation draws one per "
            "prompt; name another, e.g. --config.eval_reward_fn=\"{'qwenvl': 1.0}\""
        )


def unusual(config: ConfigDict) -> list[str]:
    """What is allowed but hardly ever meant, one line each."""
    lines, own = [], config[config.algorithm]
    for side in ("clip_range_low", "clip_range_high") if "clip_range_low" in own else ():
        name = "clip_range" if own[side] is None else side
        if config.sample.sde_type == "cps" and own[name] >= WIDE_FOR_CPS:
            field = f"{config.algorithm}.{name}"
            lines.append(
                f"{field}={own[name]} is wide for sample.sde_type='cps': all published "
                f"settings have {CPS_CLIP}; set --config.{field}={CPS_CLIP}"
            )
    default = get_config()
    for other in [name for name in ALGORITHMS if name != config.algorithm]:
        changed = [name for name in default[other] if config[other][name] != default[other][name]]
        lines += [
            f"{other}.{name}={config[other][name]} has no effect: algorithm={config.algorithm!r}"
            for name in changed
        ]
    return list(dict.fromkeys(lines))


def _fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, ConfigDict) and key not in OPEN_FIELDS:
            yield from _fields(value, f"{prefix}{key}.")


def _check_value(name: str, value: Any, default: Any, kind: type) -> None:
    if value is None and default is None:
        return
    if value is None and default == "":
        raise UserError(f"{name}=None must be a string; '' is for none")
    _check_type(name, value, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}={value} must be a finite number")
    if kind is tuple:
        if len(value) != len(default):
            raise UserError(f"{name}={value} must have {len(default)} values")
        for one, one_default in zip(value, default, strict=True):
            _check_value(name, one, one_default, type(one_default))


def _check_text(name: str, value: Any) -> None:
    """Also of the fields whose names are the user's; what is not text is passed over."""
    for text in (name, value) if isinstance(value, str) else (name,):
        refuse_halves(text, ascii(name))
        if "\0" in text:
            raise UserError(f"{name}={value!r} has a zero byte in it; leave it out")
    parts = re.split("[/,]", value) if name in PATHS and isinstance(value, str) else []
    if any(len(part.encode()) > LONGEST for part in parts):
        raise UserError(f"{name}={value[:60]}... is too long for a path; name a shorter one")


def _check_type(name: str, value: Any, kind: type) -> None:
    allowed, words = TYPES[kind]
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name}={value!r} must be {words}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


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
