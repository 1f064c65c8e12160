"""Rewards by name, and several at work together. What a reward is stands in `protocol.py`.

This module stays light: scorers are imported when they are built.
"""

import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flow_grpo.errors import RewardOutage, UserError, with_nearest
from flow_grpo.rewards.calling import SerialThread
from flow_grpo.rewards.calling.guard import RESERVED, GuardedScorer
from flow_grpo.rewards.failure import DEFAULT_POLICY, FailurePolicy
from flow_grpo.rewards.frames import DEFAULT, OPTION, fetch_pictures, rule_of, split_rules
from flow_grpo.rewards.given import import_scorer
from flow_grpo.rewards.protocol import (
    BatchScores,
    Rows,
    Samples,
    Scorer,
    as_scorer,
    parameters_of,
)

if TYPE_CHECKING:
    import torch

    from flow_grpo.config.fields import RewardFields

LARGEST_WEIGHT = 10**6
PICTURE_REWARDS = {
    "aesthetic": "flow_grpo.rewards.scorers.clip:Aesthetic",
    "clipscore": "flow_grpo.rewards.scorers.clip:ClipScore",
    "deqa": "flow_grpo.rewards.scorers.deqa:DeQA",
    "geneval": "flow_grpo.rewards.scorers.geneval:GenEval",
    "hpsv2": "flow_grpo.rewards.scorers.clip:HpsV2",
    "imagereward": "flow_grpo.rewards.scorers.imagereward:ImageReward",
    "jpeg_compressibility": "flow_grpo.rewards.scorers.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "flow_grpo.rewards.scorers.jpeg:jpeg_incompressibility",
    "keep_source": "flow_grpo.rewards.scorers.keep_source:KeepSource",
    "ocr": "flow_grpo.rewards.scorers.ocr:OcrScorer",
    "pickscore": "flow_grpo.rewards.scorers.clip:PickScore",
    "qwenvl": "flow_grpo.rewards.judges.qwen_vl:QwenVl",
    "qwenvl_ocr": "flow_grpo.rewards.judges.qwen_vl:QwenVlOcr",
    "unifiedreward": "flow_grpo.rewards.judges.unified_reward:UnifiedReward",
    "viescore": "flow_grpo.rewards.judges.vie_score:VieScore",
    "vlm_pairwise": "flow_grpo.rewards.judges.pairwise:VlmPairwise",
}
ANSWER_REWARDS = {
    "answer_format": "flow_grpo.rewards.answers:AnswerFormat",
    "choice": "flow_grpo.rewards.answers:Choice",
    "environment": "flow_grpo.rewards.answers:EnvironmentReward",
    "math_answer": "flow_grpo.rewards.answers:MathAnswer",
    "overlong": "flow_grpo.rewards.answers:Overlong",
    "reward_model": "flow_grpo.rewards.answers.reward_model:RewardModel",
}
REWARDS = dict(sorted({**PICTURE_REWARDS, **ANSWER_REWARDS}.items()))
TOTAL = "avg"  # Flow-GRPO's name for the weighted sum
TOKEN_ENV = "REWARD_SERVER_TOKEN"


@dataclass
class PendingScores:
    """Scores that are being computed."""

    parts: "dict[str, Future[BatchScores]]"
    weights: Mapping[str, float]

    def result(self) -> dict[str, np.ndarray]:
        """Arrays (N,) float64: each reward's scores, NaN where it failed and -inf where it was not
        asked, the weighted sum of the others as "avg", and what scorers returned besides, as
        "<reward>/<name>". Rewards of weight 0 are not part of "avg", even if they failed."""
        parts = {name: part.result() for name, part in self.parts.items()}
        scores = {name: np.array(part.values, dtype=np.float64) for name, part in parts.items()}
        extras = {
            f"{reward}/{name}": np.array(values, dtype=np.float64)
            for reward, part in parts.items()
            for name, values in part.extras.items()
        }
        weights = nonzero(self.weights) or self.weights
        asked = {name: ~np.isneginf(scores[name]) for name in weights}
        total = sum(w * np.where(asked[n], scores[n], 0.0) for n, w in weights.items())
        total = np.where(np.any(list(asked.values()), axis=0), total, np.nan)
        return {**scores, TOTAL: total, **extras}


class WeightedReward:
    """Several scorers at work at the same time, each reported on its own, and their weighted sum.

    It does not raise when a scorer fails: the scores are NaN, and `last_errors` says why.
    """

    def __init__(self, scorers: Mapping[str, GuardedScorer], weights: Mapping[str, float]) -> None:
        self._guarded = {name: scorers[name] for name in weights}
        self.weights = dict(weights)
        self._to_pil = SerialThread()

    @property
    def scorers(self) -> dict[str, Scorer]:
        return {name: guarded.scorer for name, guarded in self._guarded.items()}

    @property
    def judges(self) -> set[str]:
        """Those whose scores are shares of wins over the other pictures of a prompt in a call."""
        return {name for name, scorer in self.scorers.items() if scorer.compares_groups}

    @property
    def kind(self) -> str:
        """What was scored last: "image" or "answer"."""
        return next(iter(self._guarded.values())).kind

    @property
    def last_errors(self) -> dict[str, str]:
        """Why each reward that failed did so the last time."""
        return {name: g.last_error for name, g in self._guarded.items() if g.last_error}

    def forget_errors(self) -> None:
        """Begin to collect errors anew, so that an epoch tells its own only."""
        for guarded in self._guarded.values():
            guarded.last_error = ""

    def submit(
        self, images: "torch.Tensor | Samples", prompts: list[str], metadata: Rows | None = None
    ) -> PendingScores:
        """Start scoring; images are a (N, 3, H, W) tensor in [0, 1] or PIL images, clips a
        (N, F, 3, H, W) tensor or lists of PIL images."""
        metadata = [{} for _ in prompts] if metadata is None else metadata
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata "
                "must be of one length"
            )
        # only of clips in a tensor do rewards fetch what is theirs
        clips = not isinstance(images, list) and images.ndim == 5
        rules = {n: s.frames if clips else DEFAULT for n, s in self.scorers.items()}
        pictures = {
            rule: self._to_pil.submit(fetch_pictures(images, rule))
            for rule in dict.fromkeys(rules.values())
        }
        parts = {
            name: guarded.submit(pictures[rules[name]], prompts, metadata)
            for name, guarded in self._guarded.items()
        }
        return PendingScores(parts, self.weights)

    def __call__(
        self, images: "torch.Tensor | Samples", prompts: list[str], metadata: Rows | None = None
    ) -> dict[str, np.ndarray]:
        return self.submit(images, prompts, metadata).result()

    def check(
        self,
        prompts: Sequence[str],
        metadata: Sequence[dict] | None = None,
        where: Sequence[str] | None = None,
    ) -> None:
        """Refuse, before training starts, prompts that no reward could ever score, and servers that
        do not answer. `where` has the file and line of each prompt, for messages."""
        for scorer in self.scorers.values():
            scorer.check_prompts(prompts)
        for scorer in self.scorers.values():
            scorer.check_servers()
        metadata = [{} for _ in prompts] if metadata is None else metadata
        credited = {name: self.scorers[name] for name in nonzero(self.weights) or self.weights}
        for place, (prompt, own) in enumerate(zip(prompts, metadata, strict=True), 1):
            for name, scorer in self.scorers.items():
                if invalid := scorer.invalid_row(prompt, own):
                    row = where[place - 1] if where else f"prompt {place}"
                    raise UserError(f"{row} is invalid for reward {name!r}: {invalid}")
            reasons = {name: s.why_not(prompt, own) for name, s in credited.items()}
            if all(reasons.values()):
                name, reason = next(iter(reasons.items()))
                raise UserError(
                    f"prompt {place} cannot be scored by {name!r}: {reason}: {prompt!r}"
                )

    def asked(self, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, list[int]]:
        """For each reward, the places of the prompts that ask for it."""
        rows = list(enumerate(zip(prompts, metadata, strict=True)))
        return {n: [i for i, row in rows if not s.why_not(*row)] for n, s in self.scorers.items()}

    def rehearse(
        self, prompts: Sequence[str], metadata: Rows, width: int, height: int, frames: int
    ) -> None:
        """Try each scorer on two pictures of noise, or clips."""
        noise = np.random.default_rng(0).integers(256, size=(frames, height, width, 3), dtype="u1")
        clip = [Image.fromarray(frame) for frame in noise]
        self.rehearse_with(clip if frames > 1 else clip[0], prompts, metadata)

    def rehearse_with(self, sample: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> None:
        """Try each scorer of this machine on `sample`, twice, for the first prompt that asks for
        it: what returns one number for all of them is found out."""
        asked = self.asked(prompts, metadata)
        for name, guarded in self._guarded.items():
            if asked[name] and not guarded.scorer.has_policy:  # servers may be slow
                row = asked[name][0]
                guarded.rehearse([sample] * 2, [prompts[row]] * 2, [metadata[row]] * 2)

    def check_differentiable(self, why: str) -> None:
        """Refuse a reward whose gradient is asked for and that has none."""
        for name in nonzero(self.weights) or self.weights:
            if self.scorers[name].score_pixels is None:
                raise UserError(
                    f"reward {name!r} cannot be differentiated, which {why} needs; take aesthetic, "
                    "clipscore, hpsv2, pickscore or one of your own with score_pixels, or another "
                    "algorithm"
                )

    def score_pixels(self, pixels: "torch.Tensor", prompts: list[str]) -> "torch.Tensor":
        """The weighted sum (N,) as a function of the pixels (N, 3, H, W)."""
        weighted = (nonzero(self.weights) or self.weights).items()
        return sum(w * self.scorers[n].score_pixels(pixels, prompts) for n, w in weighted)

    def end_if_broken(self) -> None:
        """Before a whole epoch is drawn for a reward whose code fails batch after batch."""
        for name, guarded in self._guarded.items():
            if guarded.mistakes > 1:
                raise RewardOutage(f"reward {name!r} fails on every batch: {guarded.last_error}")

    def rest(self) -> None:
        """Between epochs: scorers that were told to give up the GPU's memory do so."""
        for scorer in self.scorers.values():
            scorer.rest()

    def expect_no_more(self) -> None:
        """Silence the errors of what is still being scored."""
        for guarded in self._guarded.values():
            guarded.closed = True

    def end_threads(self) -> None:
        """Stop the threads, once no scorer works any more."""
        for thread in (self._to_pil, *(guarded.thread for guarded in self._guarded.values())):
            thread.close()


def nonzero(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards in the weighted sum; those of weight 0 are only logged."""
    return {name: weight for name, weight in weights.items() if weight != 0}


def close_scorers(*rewards: WeightedReward) -> None:
    """Each scorer once, also where rewards share it."""
    for reward in rewards:
        reward.expect_no_more()
    for scorer in {id(s): s for r in rewards for s in r.scorers.values()}.values():
        scorer.close()
    for reward in rewards:
        reward.end_threads()


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

    `custom` gives further names as "package.module:attribute", a scorer or a class of scorers.
    `servers` names the reward servers of those that are scored elsewhere, with commas between.
    `options` are keyword arguments per name for rewards that are classes; a class that takes a
    `device` gets this one, and one that takes the `policy` handles its failures itself. `frames`,
    which every reward has, says what it sees of a video.
    """
    check_weights(weights)
    scorers = build_scorers(
        weights, device=device, custom=custom, servers=servers, options=options, policy=policy
    )
    return WeightedReward(guard_scorers(scorers, policy), weights)


def check_weights(weights: Mapping[str, float], setting: str = "reward_fn") -> None:
    if not weights:
        raise UserError(f"{setting} is empty; name at least one reward, e.g. {{'ocr': 1.0}}")
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise UserError(f"{setting}.{name}={weight!r} must be a number, its weight")
        if abs(weight) > LARGEST_WEIGHT:
            raise UserError(
                f"{setting}.{name}={weight} must be from -{LARGEST_WEIGHT} to {LARGEST_WEIGHT}"
            )


def check_some_weight(settings: "RewardFields", others: Mapping[str, float] | None = None) -> None:
    """Reject rewards that all have weight 0; `others` are rewards in addition to reward_fn."""
    weights = {
        "reward_fn": {**(others or {}), **settings.reward_fn},
        "eval_reward_fn": settings.eval_reward_fn,
    }
    for field, own in weights.items():
        if own and not any(own.values()):
            raise UserError(
                f"{field}={dict(own)} has only weights of 0, so no sample is better than another; "
                "give one of the rewards a nonzero weight"
            )


def check_names(
    names: Collection[str], others: Iterable[str], custom: Collection[str], servers: Iterable[str]
) -> None:
    """Refuse rewards that there are not. `names` are asked for, and may be what a server has;
    `others` have options."""
    paths = {**REWARDS, **dict.fromkeys(custom)}
    for name in (*names, *others, *custom, *servers):
        if name in RESERVED:
            raise UserError(f"reward {name!r} has the name of a metric; call it something else")
        if not (name in paths or (name in servers and name in names)):
            message = (
                f"unknown reward {name!r}; known are {', '.join(sorted(paths))}; "
                "add your own with config.custom_rewards, or its server with config.reward_servers"
            )
            raise UserError(with_nearest(message, name, paths))


def check_fields(settings: "RewardFields") -> None:
    """Refuse weights that are no numbers, and names that are none."""
    weights = {"reward_fn": settings.reward_fn, "eval_reward_fn": settings.eval_reward_fn}
    for field, own in weights.items():
        if own or field == "reward_fn":
            check_weights(own, field)
    names = [*settings.reward_fn, *settings.eval_reward_fn]
    for name, urls in settings.reward_servers.items():
        if not isinstance(urls, str):
            raise UserError(
                f"reward_servers.{name}={urls!r} must be a string with one URL, or several with "
                "commas between; '' for none"
            )
    servers = [name for name, urls in settings.reward_servers.items() if urls]
    check_names(names, settings.reward_options, settings.custom_rewards, servers)


def option_names(reward: str, path: str) -> list[str] | None:
    """What reward_options of a reward takes; None where that may be anything."""
    try:
        scorer = import_scorer(reward, path)
    except UserError:  # told when it is built
        return None
    parameters = inspect.signature(scorer).parameters if isinstance(scorer, type) else {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return None if takes_any else [*parameters, OPTION]


def build_scorers(
    names: Iterable[str],
    *,
    device: str = "cpu",
    custom: Mapping[str, str] | None = None,
    servers: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    policy: FailurePolicy = DEFAULT_POLICY,
) -> dict[str, Scorer]:
    """The bare scorers, by name; arguments as of `build_reward`."""
    names, paths = list(names), {**REWARDS, **(custom or {})}
    servers = {name: urls for name, urls in (servers or {}).items() if urls}
    rules, options = split_rules(options or {})
    check_names(names, options, custom or {}, servers)
    for name in servers:
        if options.get(name):
            raise UserError(
                f"reward_options.{name} has no use: reward_servers.{name} scores it; give the "
                "options to the server (--options)"
            )
    found = {name: import_scorer(name, paths[name]) for name in names if name not in servers}

    def rule(name: str, scorer: Any) -> str:
        own = as_scorer(scorer)
        return rule_of(name, own, rules.get(name), custom=name in (custom or {}))

    def build(name: str) -> Scorer:
        if name in servers:
            return _build_remote(name, servers[name], policy, rules.get(name))
        try:
            scorer = as_scorer(_build(name, found[name], options.get(name, {}), device, policy))
        except UserError as error:
            raise type(error)(_with_option(str(error), name)) from error
        scorer.frames = rule(name, scorer)
        return scorer

    for name, scorer in found.items():  # before any is built, which may take long
        rule(name, scorer)
    return {name: build(name) for name in names}


def guard_scorers(
    scorers: Mapping[str, Scorer], policy: FailurePolicy = DEFAULT_POLICY
) -> dict[str, GuardedScorer]:
    """Each scorer with the policy for its failures."""
    return {name: GuardedScorer(name, scorer, policy) for name, scorer in scorers.items()}


def _with_option(told: str, reward: str) -> str:
    """A class tells of an option by its name alone; here it is where a config has it."""
    match = re.search(r"\bgive (?:(\w+)=(\S+)|the path of a copy as (\w+))$", told)
    if not match:
        return told
    option = {reward: {match[1] or match[3]: match[2] or "PATH"}}
    return (
        f'{told[: match.start()]}give --config.reward_options="{option}" (--options of a reward '
        "server)"
    )


def _build_remote(name: str, servers: str, policy: FailurePolicy, frames: str | None) -> Scorer:
    from flow_grpo.rewards.calling.http import token_from
    from flow_grpo.rewards.calling.remote import RemoteScorer

    return RemoteScorer(name, servers, token=token_from(TOKEN_ENV), policy=policy, frames=frames)


def _build(
    name: str, scorer: Any, options: Mapping[str, Any], device: str, policy: FailurePolicy
) -> Any:
    if not isinstance(scorer, type):
        if options:
            raise UserError(
                f"reward {name!r} is a function; of reward_options.{name} it takes frames alone"
            )
        return scorer
    parameters = parameters_of(scorer)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [option for option in options if option not in parameters]
    if unknown and not takes_any:
        message = f"unknown reward_options.{name}.{unknown[0]}; it takes {', '.join(parameters)}"
        raise UserError(with_nearest(message, unknown[0], [*parameters, OPTION]))
    ours = {"device": device, "policy": policy}
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in fixed]
    if missing := [n for n in required if n not in {*ours, *options}]:
        raise UserError(
            f"reward {name!r} needs {', '.join(missing)}; set "
            f'--config.reward_options="{ {name: dict.fromkeys(missing, "...")} }"'
        )
    return scorer(**{k: v for k, v in ours.items() if k in parameters} | dict(options))
