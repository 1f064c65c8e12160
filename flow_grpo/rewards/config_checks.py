"""Checks of the config fields that name and weight rewards."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from flow_grpo.config.custom import check_file_exists
from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.rewards.drawn_names import check_drawn_names, image_reward_of
from flow_grpo.rewards.environments import is_environment, require_environment
from flow_grpo.rewards.registry import REWARDS

if TYPE_CHECKING:
    from flow_grpo.config.fields import RewardFields

MAX_WEIGHT = 10**6
# Metrics and fields of samples.jsonl that a reward of the same name would overwrite.
RESERVED_METRICS = ("avg", "diversity", "failed", "samples", "std_within_group", "zero_std_ratio")
RESERVED_FIELDS = ("prompt", "advantage", "group", "answer", "truth", "file", "still", "audio")
RESERVED_NAMES = RESERVED_METRICS + RESERVED_FIELDS


def check_weights(weights: Mapping[str, float], field: str = "reward_fn") -> None:
    """Reject an empty dict of weights and weights that are not finite numbers."""
    if not weights:
        raise UserError("is empty", field=field, hint="name at least one reward, e.g. {'ocr': 1.0}")
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise UserError(
                f"must be a number from -{MAX_WEIGHT} to {MAX_WEIGHT}",
                field=f"{field}.{name}",
                value=weight,
            )


def check_nonzero_weight(
    settings: "RewardFields", others: Mapping[str, float] | None = None
) -> None:
    """Reject rewards that all have weight 0; `others` are rewards in addition to reward_fn."""
    fields = {
        "reward_fn": {**(others or {}), **settings.reward_fn},
        "eval_reward_fn": settings.eval_reward_fn,
    }
    for field, weights in fields.items():
        if weights and not any(weights.values()):
            raise UserError(
                "has only weights of 0, so no sample is better than another",
                field=field,
                value=dict(weights),
                hint="give one of the rewards a nonzero weight",
            )


def check_reward_names(
    names: Collection[str], others: Iterable[str], custom: Collection[str], servers: Iterable[str]
) -> None:
    """Reject unknown and reserved reward names.

    Args:
        names: Rewards to compute; a server may have rewards that are unknown here.
        others: Rewards with options.
        custom: Names of custom rewards.
        servers: Rewards that are scored by a server.
    """
    known = {**REWARDS.paths, **dict.fromkeys(custom)}
    check_drawn_names({*names} - {*servers}, custom)
    for name in (*names, *others, *custom, *servers):
        if name in RESERVED_NAMES:
            raise UserError(
                "has a name reserved for a metric", field=f"reward {name!r}", hint="rename it"
            )
        is_drawn = image_reward_of(name) is not None
        if not (name in known or is_drawn or (name in servers and name in names)):
            raise UserError(
                f"unknown reward {name!r}; known are {', '.join(sorted(known))}; "
                "add your own with config.custom_rewards, or its server with config.reward_servers",
                hint=did_you_mean(name, known),
            )


def check_reward_fields(settings: "RewardFields") -> None:
    """Reject non-numeric weights and unknown reward names."""
    check_weights(settings.reward_fn, "reward_fn")
    if settings.eval_reward_fn:
        check_weights(settings.eval_reward_fn, "eval_reward_fn")
    names = [*settings.reward_fn, *settings.eval_weights()]
    if settings.second_reward in {**settings.reward_fn, **settings.eval_reward_fn}:
        raise UserError(
            "is already in reward_fn or eval_reward_fn",
            field="second_reward",
            value=settings.second_reward,
            hint="choose another reward, or leave it empty",
        )
    for name, urls in settings.reward_servers.items():
        if not isinstance(urls, str):
            raise UserError(
                "must be a string with one URL, or several separated by commas",
                field=f"reward_servers.{name}",
                value=urls,
                hint="use '' for none",
            )
        if is_environment(urls) and name in names:
            require_environment(urls, name)
    servers = [name for name, urls in settings.reward_servers.items() if urls]
    check_reward_names(names, settings.reward_options, settings.custom_rewards, servers)


def check_custom_reward_files(settings: "RewardFields") -> None:
    """Reject a custom reward in a file that does not exist, unless a server scores it."""
    for name in (*settings.reward_fn, *settings.eval_weights()):
        if name in settings.custom_rewards and not settings.reward_servers.get(name):
            check_file_exists(settings.custom_rewards[name], f"reward {name!r}")
