"""Config rules that involve several fields, checked before anything is loaded."""

import logging
import os
from dataclasses import replace
from importlib.util import find_spec

from flow_grpo.config.paths import resolve_path, resolve_settings_paths
from flow_grpo.config.settings import check_conditions, get_setting
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.early_checks import check_small_data_early
from flow_grpo.data.eval_dataset import name_eval_settings, parse_eval_sources
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.questions import check_questions_exist
from flow_grpo.data.rows import NO_COLUMN
from flow_grpo.errors import UserError, check_model_folder
from flow_grpo.rewards import REWARDS, TEXT_REWARDS, TOTAL, check_nonzero_weight
from flow_grpo.rewards.config_checks import check_custom_reward_files
from flow_grpo.rewards.draw_settings import draw_settings
from flow_grpo.rewards.drawn_names import check_drawn_names, drawn_names
from flow_grpo.training.plan import check_start, count_processes
from flow_grpo.vlm.chat_template_file import read_chat_template
from flow_grpo.vlm.environment import load_environment_class
from flow_grpo.vlm.fields import (
    BRADLEY_TERRY,
    CRITIC_LEARNING_RATE,
    ENVIRONMENT,
    GAE,
    ROLLOUT_SETTINGS,
    VLLM,
    VLM_SPEC,
    VlmConfig,
)
from flow_grpo.vlm.losses import DEFAULTS, GIVEN_LOSSES, UNCLIPPED_LOSSES, find_loss
from flow_grpo.vlm.plan import build_plan
from flow_grpo.vlm.questions import build_questions
from flow_grpo.vlm.reward_models.plan import (
    build_pair_plan,
    build_pairs,
    check_reward_model_config,
)

logger = logging.getLogger("flow_grpo")
PER_REWARD_ESTIMATORS = ("gdpo", "pairwise")  # these normalize each reward separately
QUESTION_PLACEHOLDER = "{question}"
MIN_VLLM_TEMPERATURE, MAX_VLLM_TEMPERATURE = 0.01, 2.0  # vLLM changes temperatures outside these


def check_config(config: UncheckedConfig | VlmConfig) -> VlmConfig:
    """Check the settings; return them frozen, with defaults set and bundled paths resolved."""
    settings = VLM_SPEC.check(config)
    check_conditions(settings)
    _check_columns(settings)
    if settings.image_dir and not os.path.isdir(settings.image_dir):
        raise UserError("is not a directory", field="image_dir", value=settings.image_dir)
    # the text instead of the path: exports and resumed runs do not need the file
    settings = replace(settings, chat_template=read_chat_template(settings.chat_template))
    if settings.train.loss == BRADLEY_TERRY:
        return check_reward_model_config(settings)
    _check_unused_settings(settings)
    settings = _set_critic_defaults(_set_kl_defaults(_set_loss_defaults(settings)))
    _check_environment(settings)
    parse_trackers(settings.log_with)
    sample, train = settings.sample, settings.train
    if QUESTION_PLACEHOLDER not in settings.question_format:
        raise UserError(
            f"must contain {QUESTION_PLACEHOLDER}",
            field="question_format",
            value=settings.question_format,
        )
    check_model_folder(settings.pretrained.model, "preprocessor_config.json")
    _check_rewards(settings)
    check_nonzero_weight(settings, {ENVIRONMENT: 1.0} if settings.environment else {})
    if sample.engine == VLLM:
        check_vllm_settings(sample.temperature)
    if 0 < train.importance_cap < 1:
        raise UserError(
            "must be at least 1, because a lower value scales down every token",
            field="train.importance_cap",
            value=train.importance_cap,
            hint="set 0 to disable the weights",
        )
    if 0 < train.dual_clip <= 1 + train.clip_high:
        raise UserError(
            f"must be above 1 + train.clip_high={1 + train.clip_high:g}",
            field="train.dual_clip",
            value=train.dual_clip,
            hint="set 0 to disable it",
        )
    _check_filter(settings)
    if train.beta > 0 and train.kl_in == "reward" and train.advantage in PER_REWARD_ESTIMATORS:
        raise UserError(
            f"is incompatible with train.advantage={train.advantage!r}, which normalizes each "
            f"reward separately and so ignores train.beta={train.beta}",
            field="train.kl_in",
            value=train.kl_in,
            hint="use train.kl_in='loss'",
        )
    compares_group = train.advantage not in ("reinforce_pp", "remax", GAE)
    if sample.group_size == 1 and compares_group:
        raise UserError(
            f"must be at least 2 with train.advantage={train.advantage!r}, which compares the "
            "responses of a group",
            field="sample.group_size",
            value=1,
            hint="raise it, or use train.advantage='reinforce_pp', 'remax' or 'gae'",
        )
    if 0 < settings.max_pixels < settings.min_pixels:
        raise UserError(
            f"must be at most max_pixels={settings.max_pixels}",
            field="min_pixels",
            value=settings.min_pixels,
        )
    return resolve_settings_paths(settings)


def preflight_check(config: VlmConfig) -> None:
    """Check batch arithmetic, paths and data files before torch is imported."""
    config = resolve_settings_paths(config)
    is_reward_model = config.train.loss == BRADLEY_TERRY
    plan_run = build_pair_plan if is_reward_model else build_plan
    plan = plan_run(config.sample, config.train, count_processes())
    check_start(config.logdir, config.run_name, config.resume, config.train.lora_path)
    check_custom_reward_files(config)
    sources = parse_sources(config.dataset)
    for source in sources:
        check_questions_exist(source.path)
    if config.eval_dataset:
        with name_eval_settings():
            tested = parse_eval_sources(config.eval_dataset)
            for source in tested:
                check_questions_exist(source.path, ("test", "train"))
        sources = [*sources, *tested]
    load = build_pairs if is_reward_model else build_questions
    check_small_data_early(sources, lambda: load(config, plan))


def _set_loss_defaults(settings: VlmConfig) -> VlmConfig:
    """Set unset fields to the defaults of the loss."""
    train, loss = settings.train, find_loss(settings.train.loss)
    is_given = train.loss in GIVEN_LOSSES
    defaults = {**({} if is_given else DEFAULTS), **loss.default_settings}
    if train.loss in UNCLIPPED_LOSSES:
        defaults = {name: own for name, own in defaults.items() if not name.startswith("clip_")}
    unset = {name: value for name, value in defaults.items() if getattr(train, name) is None}
    train = replace(train, **unset)
    if is_given or train.loss in UNCLIPPED_LOSSES:
        return replace(settings, train=train)
    if max(train.clip_low, train.clip_high) > loss.max_clip_range:
        options = " ".join(
            f"--config.train.{name}={value}" for name, value in loss.default_settings.items()
        )
        name = "clip_low" if train.clip_low > loss.max_clip_range else "clip_high"
        raise UserError(
            f"must be at most {loss.max_clip_range} for train.loss={train.loss!r}, or no ratio is "
            "ever clipped",
            field=f"train.{name}",
            value=getattr(train, name),
            hint=f"use {options}",
        )
    return replace(settings, train=train)


def _set_kl_defaults(settings: VlmConfig) -> VlmConfig:
    """Set the default KL estimator if it is unset; reject or warn of estimators that do not work.

    See `losses.base.estimate_kl`.
    """
    train = settings.train
    if train.loss in GIVEN_LOSSES:
        return settings
    kl = train.kl or {"loss": "k3", "reward": "k1"}[train.kl_in]
    if train.beta > 0 and (kl, train.kl_in) == ("k1", "loss"):
        raise UserError(
            "is incompatible with train.kl_in='loss': its expected gradient is 0, so "
            f"train.beta={train.beta:g} would only add noise",
            field="train.kl",
            value=kl,
            hint="use 'k3' or 'k2', or train.kl_in='reward'",
        )
    if train.beta > 0 and kl != "k1" and train.kl_in == "reward":
        logger.warning(
            "train.kl=%r with train.kl_in='reward' does not give the gradient of the KL, which "
            "then nearly vanishes close to the reference; use train.kl='k1'",
            kl,
        )
    return replace(settings, train=replace(train, kl=kl))


def _set_critic_defaults(settings: VlmConfig) -> VlmConfig:
    """Set the defaults of the critic, which only GAE has; check its warm-up."""
    train = settings.train
    if train.advantage != GAE:
        return settings
    if train.critic_warmup >= settings.num_epochs:
        raise UserError(
            f"must be below num_epochs={settings.num_epochs}, or the policy is never trained",
            field="train.critic_warmup",
            value=train.critic_warmup,
            hint="lower it",
        )
    rate = train.critic_learning_rate or CRITIC_LEARNING_RATE
    model = resolve_path(train.critic_model)
    return replace(settings, train=replace(train, critic_learning_rate=rate, critic_model=model))


def _check_filter(settings: VlmConfig) -> None:
    """Reject a group filter by an unknown reward or with an empty range."""
    sample = settings.sample
    names = [*settings.reward_fn, *([ENVIRONMENT] if settings.environment else []), TOTAL]
    if sample.filter_reward and sample.filter_reward not in names:
        raise UserError(
            f"is not a reward of the run; choose one of {', '.join(names)}",
            field="sample.filter_reward",
            value=sample.filter_reward,
        )
    if sample.filter_low >= sample.filter_high:
        raise UserError(
            f"must be below sample.filter_high={sample.filter_high:g}",
            field="sample.filter_low",
            value=sample.filter_low,
        )


def _check_environment(settings: VlmConfig) -> None:
    """Load the environment class; without one, reject the reward that needs it."""
    if settings.environment:
        load_environment_class(settings.environment)
        return
    for field, names in (
        ("reward_fn", settings.reward_fn),
        ("eval_reward_fn", settings.eval_reward_fn),
        ("second_reward", settings.second_weight()),
    ):
        if ENVIRONMENT in names:
            raise UserError(
                "needs an environment",
                field=f"{field}.{ENVIRONMENT}",
                hint="set --config.environment=path/to/file.py:Class",
            )


def _check_columns(settings: VlmConfig) -> None:
    """Reject two inputs that read the same column."""
    names = [f"{kind}_key" for kind in ("input", "image", "video", "answer")]
    named: dict[str, str] = {}
    for setting in names:
        column = getattr(settings, setting)
        if column and column != NO_COLUMN and column in named:
            raise UserError(
                f"and {setting}={column!r} name the same column",
                field=named[column],
                value=column,
                hint="give each its own column",
            )
        named[column] = setting


def _check_unused_settings(settings: VlmConfig) -> None:
    """Reject settings other than defaults that the advantage estimator does not read."""
    train, default = settings.train, type(settings.train)()
    if train.loss in settings.custom_losses:  # it may read any setting
        return
    if train.loss in GIVEN_LOSSES:
        _check_given(settings)
        return
    unused = []
    if train.advantage != GAE:
        unused += ["discount", "gae_decay", "value_weight", "value_clip"]
    if train.advantage not in ("grpo", "grpo_passk", "pairwise"):
        unused.append("advantage_scale")
    for name in unused:
        if (value := getattr(train, name)) != getattr(default, name):
            raise UserError(
                f"has no effect with train.advantage={train.advantage!r}",
                field=f"train.{name}",
                value=value,
                hint=f"reset it to {getattr(default, name)!r}",
            )


def _check_given(settings: VlmConfig) -> None:
    """Reject settings that losses of given responses do not read, other than defaults."""
    loss, default = settings.train.loss, type(settings)()
    unused = [*ROLLOUT_SETTINGS]
    if loss != "sft":
        unused.append("train.aggregation")
    elif settings.train.beta:
        unused.append("train.beta")
    for name in unused:
        if (value := get_setting(settings, name)) != get_setting(default, name):
            raise UserError(
                f"has no effect with train.loss={loss!r}, which trains on given responses",
                field=name,
                value=value,
                hint=f"reset it to {get_setting(default, name)!r}",
            )
    if loss != "sft" and settings.train.beta == 0:
        raise UserError(
            f"must be above 0 with train.loss={loss!r}",
            field="train.beta",
            value=settings.train.beta,
        )
    per_update = settings.sample.questions_per_epoch // settings.train.updates_per_epoch
    if loss == "kto" and per_update < 2:
        raise UserError(
            "must be at least 2 per update with train.loss='kto', which estimates the KL from "
            "mismatched prompts and responses of an update",
            field="sample.questions_per_epoch",
            value=settings.sample.questions_per_epoch,
            hint="raise it, or lower train.updates_per_epoch",
        )


def _check_rewards(settings: VlmConfig) -> None:
    """Reject built-in image rewards, and invalid settings of the rewards drawn:NAME."""
    for name in (*settings.reward_fn, *settings.eval_weights()):
        elsewhere = name in settings.custom_rewards or settings.reward_servers.get(name)
        if name in REWARDS and name not in TEXT_REWARDS and not elsewhere:
            raise UserError(
                "scores images, not text",
                field=_setting_of(settings, name),
                hint=f"use drawn:{name} to score images that a diffusion model draws from the "
                f"responses; rewards of text are {', '.join(TEXT_REWARDS)}",
            )
    names = {*settings.reward_fn, *settings.eval_weights()}
    drawn = [name for name in drawn_names(names) if not settings.reward_servers.get(name)]
    check_drawn_names(drawn, settings.custom_rewards)
    for name in drawn:
        draw_settings(name, settings.draw, settings.reward_options.get(name, {}))
    if settings.draw.model and not drawn:
        raise UserError(
            "has no effect without a reward drawn:NAME in this process",
            field="draw.model",
            value=settings.draw.model,
            hint="unset it, because the reward server generates the images"
            if drawn_names(names)
            else "add one to reward_fn, such as drawn:ocr, or unset it",
        )


def _setting_of(settings: VlmConfig, reward: str) -> str:
    """Return the setting that contains a reward."""
    if reward == settings.second_reward:
        return "second_reward"
    return f"{'reward_fn' if reward in settings.reward_fn else 'eval_reward_fn'}.{reward}"


def check_vllm_settings(temperature: float) -> None:
    """Raise a UserError if vLLM is missing, or for a temperature that it does not support."""
    if find_spec(VLLM) is None:
        raise UserError(
            "needs the vLLM package",
            field="sample.engine",
            value=VLLM,
            hint="run pip install -e '.[vllm]', or use sample.engine='transformers'",
        )
    if not MIN_VLLM_TEMPERATURE <= temperature <= MAX_VLLM_TEMPERATURE:
        raise UserError(
            f"must be from {MIN_VLLM_TEMPERATURE} to {MAX_VLLM_TEMPERATURE} for "
            "sample.engine='vllm'",
            field="sample.temperature",
            value=temperature,
        )
