"""Build rewards from their names and options."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.rewards.config_checks import check_reward_names, check_weights
from flow_grpo.rewards.custom import import_scorer
from flow_grpo.rewards.drawn_names import drawn_names
from flow_grpo.rewards.environments import is_environment, require_environment
from flow_grpo.rewards.failure import DEFAULT_POLICY, FailurePolicy
from flow_grpo.rewards.frames import FRAMES_OPTION, resolve_frame_rule, split_frame_rules
from flow_grpo.rewards.option_checks import check_type
from flow_grpo.rewards.protocol import GET_REWARD, Scorer, as_scorer, constructor_parameters
from flow_grpo.rewards.registry import OWN_CLIENTS, REWARDS
from flow_grpo.rewards.weighted_reward import WeightedReward
from flow_grpo.rewards.workers.guard import GuardedScorer

if TYPE_CHECKING:
    from flow_grpo.rewards.draw_settings import DrawSettings

TOKEN_ENV = "REWARD_SERVER_TOKEN"


def build_reward(
    weights: Mapping[str, float],
    *,
    device: str = "cpu",
    custom: Mapping[str, str] | None = None,
    servers: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    policy: FailurePolicy = DEFAULT_POLICY,
) -> WeightedReward:
    """Build the rewards named in `weights`.

    Args:
        weights: Weight of each reward; rewards of weight 0 are only logged.
        device: Passed to reward classes that have a `device` parameter.
        custom: Further rewards by name, as "package.module:attribute": a scorer or scorer class.
        servers: URLs, separated by commas, of the reward servers of rewards scored remotely, or
            "env:NAME" for an isolated environment of rewards/environments.
        options: Keyword arguments by name for rewards that are classes. Every reward also has the
            option `frames`, the frames of a video that it scores.
        policy: Retries and timeout. A class with a `policy` parameter handles its failures itself.

    Returns:
        A callable `reward(images, prompts, metadata)` that returns arrays (N,) by reward name.
    """
    check_weights(weights)
    scorers = build_scorers(
        weights, device=device, custom=custom, servers=servers, options=options, policy=policy
    )
    return WeightedReward(guard_scorers(scorers, policy), weights)


def option_names(reward: str, path: str) -> list[str] | None:
    """Return the names of a reward's options, or None if it accepts any.

    Args:
        reward: Name of the reward.
        path: Its function or class, as "package.module:attribute".
    """
    try:
        scorer = import_scorer(reward, path)
    except UserError:  # reported when it is built
        return None
    parameters = constructor_parameters(scorer)
    return None if _accepts_any_option(parameters) else [*parameters, FRAMES_OPTION]


def _accepts_any_option(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def build_scorers(
    names: Iterable[str],
    *,
    device: str = "cpu",
    custom: Mapping[str, str] | None = None,
    servers: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    policy: FailurePolicy = DEFAULT_POLICY,
    run: str = "",
    draw: "DrawSettings | None" = None,
) -> dict[str, Scorer]:
    """Build the scorers by name, without retries.

    Args:
        names: Rewards to build.
        device: As in `build_reward`, like the others.
        custom: Further rewards.
        servers: URLs of reward servers.
        options: Keyword arguments by name.
        policy: Retries and timeout.
        run: Name of the run, passed to reward classes that have a `run` parameter.
        draw: Settings of the rewards drawn:NAME; the options of such a reward override them.

    Raises:
        UserError: For an unknown reward or option, or options of a reward that a server scores.
    """
    names = list(names)
    custom = custom or {}
    paths = {**REWARDS.paths, **custom}
    servers = {name: urls for name, urls in (servers or {}).items() if urls}
    rules, options = split_frame_rules(options or {})
    check_reward_names(names, options, custom, servers)
    drawn = {name: inner for name, inner in drawn_names(names).items() if name not in servers}
    settings = _drawing_settings(drawn, draw, options) if drawn else {}
    for name in servers.keys() & {*OWN_CLIENTS} - {*custom}:
        options[name] = {"url": servers.pop(name), **options.get(name, {})}
    for name, urls in servers.items():
        if is_environment(urls):  # a server that is started with these options
            continue
        allowed = {"template"} if speaks_get_reward(urls) else set()
        if options.get(name, {}).keys() - allowed:
            raise UserError(
                f"is ignored, because reward_servers.{name} scores it",
                field=f"reward_options.{name}",
                hint="pass the options to the server (--options)",
            )
    local = [name for name in names if name not in servers and name not in drawn]
    found = {name: import_scorer(name, paths[name]) for name in local}

    def frame_rule(name: str, scorer: Any) -> str:
        return resolve_frame_rule(name, as_scorer(scorer), rules.get(name), custom=name in custom)

    def build(name: str) -> Scorer:
        """Build the scorer `name`; a UserError names its full config field."""
        if name in servers and is_environment(servers[name]):
            from flow_grpo.rewards.workers.environment import EnvironmentScorer

            return EnvironmentScorer(
                name,
                require_environment(servers[name], name),
                options=options.get(name, {}),
                device=device,
                policy=policy,
                frames=rules.get(name),
            )
        if name in servers:
            return _build_remote(
                name, servers[name], policy, rules.get(name), options.get(name, {})
            )
        try:
            provided = {"device": device, "policy": policy, "run": run}
            scorer = _instantiate(name, found[name], options.get(name, {}), provided)
        except UserError as error:
            raise _qualify_option_hint(error, name) from error.__cause__
        scorer = as_scorer(scorer)
        scorer.frames = frame_rule(name, scorer)
        return scorer

    for name, scorer in found.items():  # check all before building any, which may take long
        frame_rule(name, scorer)
    built = {name: build(name) for name in names if name not in drawn}
    if drawn:
        built |= _build_drawn(
            drawn,
            settings,
            device=device,
            custom=custom,
            servers=servers,
            options={name: own for name, own in options.items() if name not in drawn},
            policy=policy,
            run=run,
        )
    return {name: built[name] for name in names}


def _drawing_settings(
    drawn: Iterable[str], draw: "DrawSettings | None", options: Mapping[str, Mapping[str, Any]]
) -> dict[str, "DrawSettings"]:
    """Return the settings of each reward that draws."""
    from flow_grpo.rewards.draw_settings import draw_settings  # late: servers lack ml_collections

    return {name: draw_settings(name, draw, options.get(name, {})) for name in drawn}


def _build_drawn(
    drawn: Mapping[str, str], settings: "Mapping[str, DrawSettings]", *, device: str, **others: Any
) -> dict[str, Scorer]:
    """Build the rewards drawn:NAME from their image rewards, and load the diffusion models."""
    from flow_grpo.rewards.drawn import build_drawn_rewards  # imported late, because it needs torch

    inner = build_scorers(dict.fromkeys(drawn.values()), device=device, **others)
    return build_drawn_rewards({n: inner[i] for n, i in drawn.items()}, settings, device)


def guard_scorers(
    scorers: Mapping[str, Scorer], policy: FailurePolicy = DEFAULT_POLICY
) -> dict[str, GuardedScorer]:
    """Wrap each scorer with the policy for its failures."""
    return {name: GuardedScorer(name, scorer, policy) for name, scorer in scorers.items()}


def _qualify_option_hint(error: UserError, reward: str) -> UserError:
    """Replace the bare option name in a reward class's hint by the full config field."""
    message = error.hint or error.rule
    match = re.search(r"\b(?:pass|set) (?:(\w+)=(\S+)|the path of a copy as (\w+))$", message)
    if not match:
        return error
    option = {reward: {match[1] or match[3]: match[2] or "PATH"}}
    message = (
        f'{message[: match.start()]}pass --config.reward_options="{option}" (--options of a reward '
        "server and of flow-grpo rewards, as JSON)"
    )
    rule, hint = (error.rule, message) if error.hint else (message, "")
    return type(error)(rule, field=error.field, value=error.value, hint=hint)


def speaks_get_reward(urls: str) -> bool:
    """Return whether one of these URLs ends in /get_reward, as OpenRLHF's `--remote_rm_url`."""
    return any(url.strip().rstrip("/").endswith(GET_REWARD) for url in urls.split(","))


def _build_remote(
    name: str,
    urls: str,
    policy: FailurePolicy,
    frames: str | None,
    options: Mapping[str, Any],
) -> Scorer:
    """Build the scorer of a reward that servers compute, with the token of the environment."""
    from flow_grpo.rewards.workers.get_reward import GetRewardScorer  # late: needs `requests`
    from flow_grpo.rewards.workers.http import read_token
    from flow_grpo.rewards.workers.remote import RemoteScorer

    token = read_token(TOKEN_ENV)
    if speaks_get_reward(urls):
        return GetRewardScorer(name, urls, token=token, policy=policy, **options)
    return RemoteScorer(name, urls, token=token, policy=policy, frames=frames)


def _instantiate(
    name: str, scorer: Any, options: Mapping[str, Any], provided: Mapping[str, Any]
) -> Any:
    """Return the scorer of a reward: an instance of a class, or a function or object unchanged.

    Args:
        name: Name of the reward.
        scorer: What its import path names.
        options: Options of the reward; only classes have any.
        provided: Values for parameters of these names, if the class has them and no option does.

    Raises:
        UserError: For an unknown option.
    """
    if not isinstance(scorer, type):
        if options:
            raise UserError(
                f"is invalid, because the reward is a function; only {FRAMES_OPTION} is allowed",
                field=f"reward_options.{name}",
                value=dict(options),
            )
        return scorer
    parameters = constructor_parameters(scorer)
    unknown = [option for option in options if option not in parameters]
    if unknown and not _accepts_any_option(parameters):
        raise UserError(
            f"is unknown; the reward takes {', '.join(parameters)}",
            field=f"reward_options.{name}.{unknown[0]}",
            hint=did_you_mean(unknown[0], [*parameters, FRAMES_OPTION]),
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in variadic]
    if missing := [n for n in required if n not in {*provided, *options}]:
        raise UserError(
            f"needs {', '.join(missing)}",
            field=f"reward {name!r}",
            hint=f'set --config.reward_options="{ {name: dict.fromkeys(missing, "...")} }"',
        )
    if scorer.__module__.partition(".")[0] == __name__.partition(".")[0]:  # not a custom reward
        for option in options.keys() & parameters.keys():
            field = f"reward_options.{name}.{option}"
            check_type(field, options[option], parameters[option].annotation)
    return scorer(**{k: v for k, v in provided.items() if k in parameters} | dict(options))
