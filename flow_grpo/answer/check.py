"""Rules of a config that no single field can state, held before anything is loaded."""

import logging
from dataclasses import asdict, replace
from importlib.util import find_spec

from flow_grpo.answer.environment import find_environment
from flow_grpo.answer.fields import (
    ANSWER,
    CRITIC_LEARNING_RATE,
    ENVIRONMENT,
    GAE,
    VLLM,
    AnswerFields,
)
from flow_grpo.answer.losses import find_loss
from flow_grpo.config.places import with_files
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.config.trade import Unchecked
from flow_grpo.data.rows import NO_IMAGES
from flow_grpo.errors import UserError, check_model_folder
from flow_grpo.files import dotted
from flow_grpo.rewards import ANSWER_REWARDS, REWARDS, check_some_weight

logger = logging.getLogger("flow_grpo")
PER_REWARD = ("gdpo", "pairwise")  # estimators that compare answers by each reward alone
QUESTION = "{question}"
COLDEST, HOTTEST = 0.01, 2.0  # temperatures that vLLM takes as they are


def check(config: Unchecked | AnswerFields) -> AnswerFields:
    """The settings of a run, frozen, with files that come with the library found."""
    settings = ANSWER.check(config)
    _check_columns(settings)
    _check_unused(settings)
    settings = _with_critic(_with_kl(_with_loss(settings)))
    _check_environment(settings)
    parse_trackers(settings.log_with)
    sample, train = settings.sample, settings.train
    if QUESTION not in settings.question_format:
        raise UserError(f"question_format={settings.question_format!r} must contain {QUESTION}")
    check_model_folder(settings.pretrained.model, "preprocessor_config.json")
    _check_rewards(settings)
    check_some_weight(settings, {ENVIRONMENT: 1.0} if settings.environment else {})
    if sample.engine == VLLM:
        _check_vllm(sample.temperature)
    elif sample.vllm_tensor_parallel > 1:
        raise UserError(
            f"sample.vllm_tensor_parallel={sample.vllm_tensor_parallel} has no use with "
            f"sample.engine={sample.engine!r}; use sample.engine='vllm', or leave it at 1"
        )
    if 0 < train.importance_cap < 1:
        raise UserError(
            f"train.importance_cap={train.importance_cap} must be at least 1, or 0 to disable the "
            "weights: below 1 it scales down every token"
        )
    if 0 < train.dual_clip <= 1 + train.clip_high:
        raise UserError(
            f"train.dual_clip={train.dual_clip} must be above 1 + train.clip_high="
            f"{1 + train.clip_high:g}, or 0 for none"
        )
    if train.dual_clip and train.loss == "cispo":
        raise UserError(
            f"train.dual_clip={train.dual_clip} does not go with train.loss='cispo', whose weights "
            "train.clip_high bounds already; leave it at 0"
        )
    if train.beta > 0 and train.kl_in == "reward" and train.advantage in PER_REWARD:
        raise UserError(
            f"train.kl_in='reward' does not go with train.advantage={train.advantage!r}, which "
            f"brings every reward to one scale, whatever train.beta={train.beta} is; use "
            "train.kl_in='loss'"
        )
    if sample.group_size == 1 and train.advantage not in ("reinforce_pp", "remax", GAE):
        raise UserError(
            f"sample.group_size=1 leaves train.advantage={train.advantage!r} nothing to compare; "
            "use groups of 2 or more, or train.advantage='reinforce_pp', 'remax' or 'gae'"
        )
    if sample.refills and train.advantage == GAE:
        raise UserError(
            f"sample.refills={sample.refills} is incompatible with train.advantage='gae': it "
            "replaces groups without advantages, and gae computes one for every token; set it to 0"
        )
    if 0 < settings.max_pixels < settings.min_pixels:
        raise UserError(
            f"min_pixels={settings.min_pixels} must be at most max_pixels={settings.max_pixels}"
        )
    return with_files(settings)


def _with_loss(settings: AnswerFields) -> AnswerFields:
    """What is unset as the loss has it."""
    train, loss = settings.train, find_loss(settings.train.loss)
    unset = {name: value for name, value in loss.along.items() if getattr(train, name) is None}
    train = replace(train, **unset)
    if max(train.clip_low, train.clip_high) > loss.widest_clip:
        options = " ".join(f"--config.train.{name}={value}" for name, value in loss.along.items())
        raise UserError(
            f"train.clip_low={train.clip_low} and train.clip_high={train.clip_high} never hold a "
            f"ratio of train.loss={train.loss!r}; use {options}"
        )
    return replace(settings, train=train)


def _with_kl(settings: AnswerFields) -> AnswerFields:
    """Set the default KL estimator if it is unset; see `losses.base.divergence`."""
    train = settings.train
    kl = train.kl or {"loss": "k3", "reward": "k1"}[train.kl_in]
    if train.beta > 0 and (kl, train.kl_in) == ("k1", "loss"):
        raise UserError(
            f"train.kl='k1' is incompatible with train.kl_in='loss': its mean gradient is 0, so "
            f"train.beta={train.beta:g} would only add noise; use 'k3' or 'k2', or "
            "train.kl_in='reward'"
        )
    if train.beta > 0 and kl != "k1" and train.kl_in == "reward":
        logger.warning(
            "train.kl=%r with train.kl_in='reward' does not give the gradient of the KL: it nearly "
            "vanishes close to the reference; use train.kl='k1'",
            kl,
        )
    return replace(settings, train=replace(train, kl=kl))


def _with_critic(settings: AnswerFields) -> AnswerFields:
    """Set the default learning rate of the value head if there is one and the rate is unset."""
    train = settings.train
    if train.advantage == GAE:
        if train.critic_warmup >= settings.num_epochs:
            raise UserError(
                f"train.critic_warmup={train.critic_warmup} must be below num_epochs="
                f"{settings.num_epochs}: the policy would never be trained; lower it"
            )
        rate = train.critic_learning_rate or CRITIC_LEARNING_RATE
        return replace(settings, train=replace(train, critic_learning_rate=rate))
    for name, default in (("critic_learning_rate", None), ("critic_warmup", 0)):
        if (value := getattr(train, name)) != default:
            raise UserError(
                f"train.{name}={value:g} has no effect with train.advantage={train.advantage!r}, "
                "which has no value head; leave it out, or use train.advantage='gae'"
            )
    return settings


def _check_environment(settings: AnswerFields) -> None:
    if settings.environment:
        find_environment(settings.environment)
        return
    for field, names in (
        ("reward_fn", settings.reward_fn),
        ("eval_reward_fn", settings.eval_reward_fn),
    ):
        if ENVIRONMENT in names:
            raise UserError(
                f"{field} has 'environment', the reward of an environment, and there is none; name "
                "one with --config.environment=path/to/file.py:Class"
            )
    if settings.environment_options:
        raise UserError(
            f"environment_options={dict(settings.environment_options)} has no use without an "
            "environment; name one with --config.environment=path/to/file.py:Class"
        )


def _check_columns(settings: AnswerFields) -> None:
    """Reject one column for two inputs."""
    names = [f"{kind}_key" for kind in ("input", "image", "video", "answer")]
    named: dict[str, str] = {}
    for setting in names:
        column = getattr(settings, setting)
        if column and column != NO_IMAGES and column in named:
            raise UserError(
                f"{named[column]}={column!r} and {setting}={column!r} name one column; give each "
                "its own"
            )
        named[column] = setting


def _check_unused(settings: AnswerFields) -> None:
    """Reject settings that were changed from their defaults and have no effect."""
    default, sample, train = ANSWER.freeze(ANSWER.get_config()), settings.sample, settings.train
    unused: list[tuple[str, tuple[str, ...]]] = []
    if not settings.environment:
        names = ("sample.max_turns", "sample.max_observation_tokens")
        unused.append(("environment=''", (*names, "environment_timeout", "environment_workers")))
    if sample.engine != VLLM:
        unused.append((f"sample.engine={sample.engine!r}", ("sample.vllm_memory",)))
    if train.loss not in settings.custom_losses:  # which may read any setting
        method = f"train.advantage={train.advantage!r}"
        if train.advantage != GAE:
            names = ("discount", "gae_decay", "value_weight", "value_clip")
            unused.append((method, tuple(f"train.{name}" for name in names)))
        if train.advantage not in ("grpo", "pairwise"):
            unused.append((method, ("train.advantage_scale",)))
    given, usual = (dict(dotted(asdict(each))) for each in (settings, default))
    for why, names in unused:
        for name in names:
            if given[name] != usual[name]:
                raise UserError(
                    f"{name}={given[name]!r} has no effect with {why}; leave it at {usual[name]!r}"
                )


def _check_rewards(settings: AnswerFields) -> None:
    for name in (*settings.reward_fn, *settings.eval_reward_fn):
        elsewhere = name in settings.custom_rewards or settings.reward_servers.get(name)
        if name in REWARDS and name not in ANSWER_REWARDS and not elsewhere:
            raise UserError(
                f"reward {name!r} scores pictures, not answers; those that score answers are "
                f"{', '.join(ANSWER_REWARDS)}, and your own with custom_rewards"
            )


def _check_vllm(temperature: float) -> None:
    if find_spec(VLLM) is None:
        raise UserError(
            "sample.engine='vllm' needs vLLM: pip install -e '.[vllm]', or use "
            "sample.engine='transformers'"
        )
    if not COLDEST <= temperature <= HOTTEST:
        raise UserError(
            f"sample.temperature={temperature} must be from {COLDEST} to {HOTTEST} for "
            "sample.engine='vllm'"
        )
