"""Fields that are dicts with names of the user's: what to write for a name that is not in there."""

import ast
import inspect
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.errors import UserError, nearest
from flow_grpo.rewards import REWARDS, import_scorer
from flow_grpo.rewards.frames import OPTION


def whole_dict(field: str, key: str, config: ConfigDict, value: str | None) -> str:
    """The mistake, and the option that works: `field` as it is, with this value under `key`, which
    for rewards' names and options is the nearest that there is."""
    names = key.split(".")
    # what is behind a server or in custom_rewards may have any name
    anything = field in ("custom_rewards", "reward_servers")
    meant = names if anything else _meant(names, config)
    whole = _without_empty(_as_dict(config, field))
    place = whole
    for name in meant[:-1]:
        place[name] = place[name] if isinstance(place.get(name), dict) else {}
        place = place[name]
    place[meant[-1]] = "..." if value is None else _read(value)
    text = repr(whole).replace("'...'", "...")
    option = f'--config.{field}="{text}"'
    if meant != names:
        return f"unknown config key {f'{field}.{key}'!r}; did you mean {option}?"
    return f"{f'{field}.{key}'!r} is not in the config; give the whole dict: {option}"


def _meant(names: list[str], config: ConfigDict) -> list[str]:
    paths = {**REWARDS, **_as_dict(config, "custom_rewards")}
    served = _without_empty(_as_dict(config, "reward_servers"))
    known = {*paths, *served}
    reward = names[0] if names[0] in known else nearest(names[0], known) or names[0]
    if len(names) == 1 or reward not in paths or reward in served:
        return [reward, *names[1:]]
    known = option_names(reward, paths[reward])
    if known is None or names[1] in known:
        return [reward, *names[1:]]
    if not (option := nearest(names[1], known)):
        raise UserError(f"unknown reward_options.{reward}.{names[1]}; it takes {', '.join(known)}")
    return [reward, option, *names[2:]]


def option_names(reward: str, path: str) -> list[str] | None:
    """What reward_options of it takes; None where that may be anything."""
    try:
        scorer = import_scorer(reward, path)
    except UserError:  # told when it is built
        return None
    parameters = inspect.signature(scorer).parameters if isinstance(scorer, type) else {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return None if takes_any else [*parameters, OPTION]


def _as_dict(config: ConfigDict, field: str) -> dict[str, Any]:
    """Empty where a config file has none: that is told when all is checked."""
    return config.get(field, ConfigDict()).to_dict()


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Servers that are not set need not be repeated."""
    return {name: value for name, value in values.items() if value != ""}


def _read(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
