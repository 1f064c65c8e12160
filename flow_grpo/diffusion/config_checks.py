"""Config rules over several fields, checked before anything is loaded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flow_grpo.config.fields import UNQUANTIZED
from flow_grpo.config.paths import resolve_path, resolve_settings_paths
from flow_grpo.config.settings import check_conditions
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.early_checks import check_small_data_early
from flow_grpo.data.eval_dataset import name_eval_settings, parse_eval_sources
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.preferences import check_preferences_exist
from flow_grpo.data.prompts import check_prompts_exist
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, DiffusionConfig
from flow_grpo.diffusion.plan import BatchPlan, build_plan, group_size, group_size_setting
from flow_grpo.diffusion.prompts import build_prompts
from flow_grpo.errors import UserError
from flow_grpo.rewards import check_nonzero_weight
from flow_grpo.rewards.config_checks import check_custom_reward_files
from flow_grpo.training.plan import check_start, count_processes
from flow_grpo.untrusted_files import flatten_fields

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flow_grpo.diffusion.algorithms import Algorithm
    from flow_grpo.diffusion.models import ModelAdapter
    from flow_grpo.rewards.protocol import Scorer

# Settings of rollouts and of what is computed from their rewards.
OFFLINE_FIELDS = (
    *(
        f"sample.{name}"
        for name in (
            "num_steps",
            "train_batch_size",
            "num_image_per_prompt",
            "num_batches_per_epoch",
            "sde_type",
            "noise_level",
            "global_std",
            "same_latent",
            "sde_window_size",
            "sde_window_range",
            "sde_window_per",
            "solver",
            "explore_steps",
            "async_depth",
        )
    ),
    *(f"train.{name}" for name in ("advantage", "keep_best_worst", "keep_gradients", "cfg")),
    "train.timestep_fraction",
    "anchors.diversity",
)
CPS_CLIP = 1e-5  # in all published settings with sde_type="cps"
CPS_CLIP_WARNING = 1e-4
SDE_FIELDS = ("sample.sde_type", "sample.noise_level")
SDE_WINDOW_FIELDS = ("sample.sde_window_range", "sample.sde_window_per")
METHODS_WITHOUT_REWARDS = ("opd",)  # methods that only log the rewards
METHODS_WITHOUT_GROUPS = (*METHODS_WITHOUT_REWARDS, "leap")  # methods that do not compare samples
CROSS_GROUP_ESTIMATORS = ("reinforce_pp", "remax")  # estimators that compare beyond the group


def check_config(config: UncheckedConfig | DiffusionConfig) -> DiffusionConfig:
    """Check and freeze the settings of a run; resolve paths of files that ship with the library."""
    settings = DIFFUSION_SPEC.check(config)
    check_conditions(settings)
    parse_trackers(settings.log_with)
    sample = settings.sample
    if sample.sde_type == "cps" and sample.noise_level > 1:
        raise UserError(
            "must be at most 1 for sample.sde_type='cps'",
            field="sample.noise_level",
            value=sample.noise_level,
        )
    _check_best_worst_selection(settings)
    if not (settings.resolution or (settings.height and settings.width)):
        raise UserError(
            f"requires height and width, but they are {settings.height} and {settings.width}",
            field="resolution",
            value=0,
            hint="set resolution, or both height and width",
        )
    if sample.guidance_scale > 1 and not settings.train.cfg and not settings.is_offline:
        raise UserError(
            f"is incompatible with sample.guidance_scale={sample.guidance_scale}: the trained "
            "velocity would differ from the sampled one",
            field="train.cfg",
            value=False,
            hint="set sample.guidance_scale=1 or train.cfg=True",
        )
    if settings.anchors.kl_gate and 0 not in settings.reward_fn.values():
        raise UserError(
            "needs a second reward to compare with",
            field="anchors.kl_gate",
            value=settings.anchors.kl_gate,
            hint="add one of weight 0 to reward_fn, e.g. {'ocr': 1.0, 'pickscore': 0.0}",
        )
    if (
        settings.anchors.diversity
        and not settings.is_offline
        and group_size(settings.sample, settings.train) < 3
    ):
        raise UserError(
            "weights samples by the distance to their nearest neighbour, which is the same for "
            f"both samples of a group of {group_size_setting(settings.sample, settings.train)}",
            field="anchors.diversity",
            value=True,
            hint="use groups of 3 or more",
        )
    data = resolve_path(settings.preferences.data)
    settings = replace(settings, preferences=replace(settings.preferences, data=data))
    return resolve_settings_paths(settings)


def preflight_check(config: DiffusionConfig) -> None:
    """Check the config, batch arithmetic, paths and data files before torch is imported."""
    settings = check_config(config)
    check_nonzero_advantages(settings)
    plan = None
    if not settings.is_offline:
        plan = build_plan(settings.sample, settings.train, count_processes())
    check_start(settings.logdir, settings.run_name, settings.resume, settings.train.lora_path)
    check_custom_reward_files(settings)
    sources = parse_sources(settings.dataset)
    for source in sources:
        check_prompts_exist(source.path, settings.prompt_fn)
    if settings.preferences.data:
        check_preferences_exist(settings.preferences.data)
    if settings.eval_dataset:
        with name_eval_settings():
            tested = parse_eval_sources(settings.eval_dataset)
            for source in tested:
                check_prompts_exist(source.path, settings.prompt_fn, ("test", "train"))
        sources = [*sources, *tested]
    if plan is not None:
        check_small_data_early(sources, lambda: build_prompts(settings, plan))


def check_nonzero_advantages(settings: DiffusionConfig) -> None:
    """Reject a run in which every advantage would be 0.

    Custom methods are not checked, because they may assign credit in any way.
    """
    method, advantage = settings.algorithm, settings.train.advantage
    if method in settings.custom_algorithms or settings.is_offline:
        return
    if method not in METHODS_WITHOUT_REWARDS:
        check_nonzero_weight(settings)
    if (
        group_size(settings.sample, settings.train) == 1
        and method not in METHODS_WITHOUT_GROUPS
        and advantage not in CROSS_GROUP_ESTIMATORS
    ):
        raise UserError(
            f"must be at least 2 for algorithm={method!r} with train.advantage={advantage!r}, "
            "which compares samples within a group",
            field="sample.num_image_per_prompt",
            value=1,
            hint="raise it, or set train.advantage='reinforce_pp'",
        )


def check_preferences(settings: DiffusionConfig, algorithm: "type[Algorithm]") -> None:
    """Reject `preferences` with a method or with settings that cannot train given images."""
    if not settings.preferences.data:
        return
    if not algorithm.given:
        known = [name for name in DIFFUSION_SPEC.algorithms() if ALGORITHMS[name].given]
        raise UserError(
            f"is incompatible with algorithm={settings.algorithm!r}, which trains rollouts",
            field="preferences.data",
            value=settings.preferences.data,
            hint=f"use {', '.join(known[:-1])} or {known[-1]}",
        )
    if settings.frames > 1:
        raise UserError(
            "must be 1 with preferences.data, which has images",
            field="frames",
            value=settings.frames,
        )
    if settings.anchors.kl_gate:
        raise UserError(
            "is incompatible with preferences.data, whose images have no rewards",
            field="anchors.kl_gate",
            value=settings.anchors.kl_gate,
            hint="set it to 0",
        )
    kl_type = getattr(settings.algorithm_settings, "kl_type", "velocity")
    if settings.is_offline and kl_type != "velocity":
        raise UserError(
            "compares steps of a rollout, and preferences.share=1 has none",
            field=f"{settings.algorithm}.kl_type",
            value=kl_type,
            hint="reset it to 'velocity'",
        )


def _check_best_worst_selection(settings: DiffusionConfig) -> None:
    """Reject group sizes and exploration steps that do not fit `train.keep_best_worst`."""
    sample, keep = settings.sample, settings.train.keep_best_worst
    field, explored = "train.keep_best_worst", sample.num_image_per_prompt
    if keep and (explored % (2 * keep) or explored == 2 * keep):
        raise UserError(
            f"keeps {2 * keep} samples of a group, so sample.num_image_per_prompt={explored} must "
            f"be a multiple of {2 * keep} and greater than {2 * keep}",
            field=field,
            value=keep,
            hint=f"use {4 * keep} images per prompt, or keep fewer",
        )
    if keep and sample.explore_steps > sample.num_steps:
        raise UserError(
            f"must be at most sample.num_steps={sample.num_steps}: exploration ({field}={keep}) is "
            "meant to take fewer steps than the rollout",
            field="sample.explore_steps",
            value=sample.explore_steps,
        )


def check_rollout_gradients(
    config: DiffusionConfig, algorithm: "Algorithm", plan: BatchPlan, accelerator: "Accelerator"
) -> None:
    """Reject `train.keep_gradients` where the result would differ from that of the plain loop."""
    method = algorithm.name
    if not config.train.keep_gradients:
        return

    def error(rule: str, hint: str = "") -> UserError:
        return UserError(rule, field="train.keep_gradients", value=True, hint=hint)

    if not algorithm.linear_in_credit:
        raise error(
            f"is incompatible with algorithm={method!r}: the gradient must be linear in the credit",
            "use grpo, mix, grpo_guard or dppo",
        )
    if algorithm.settings.ratio != "step":
        raise UserError(
            "has no effect with train.keep_gradients=True, where all ratios are 1",
            field=f"{method}.ratio",
            value=algorithm.settings.ratio,
            hint="reset it to 'step'",
        )
    if plan.updates > 1:
        raise error(
            "needs exactly one update per epoch, so that the samples are on-policy, but there are "
            f"{plan.updates}",
            "set train.num_inner_epochs=1 and "
            f"train.gradient_accumulation_steps={plan.micro_batches}",
        )
    if plan.sample_batch_size > 1:
        raise error(
            "computes the gradient of one sample at a time, so sample.train_batch_size="
            f"{plan.sample_batch_size} must be 1",
            "set it to False where larger batches are faster",
        )
    from flow_grpo.training.distributed import needs_equal_passes  # imports torch

    if needs_equal_passes(accelerator):
        raise error("is incompatible with DeepSpeed and FSDP", "use DDP")


def check_groupwise_rewards(config: DiffusionConfig, rewards: set[str], plan: BatchPlan) -> None:
    """Reject settings with which rewards that compare images of a group get incomplete groups.

    Args:
        config: Settings.
        rewards: Names of such rewards.
        plan: Batch arithmetic of an epoch.
    """
    for name in sorted(rewards):
        comparing = f"reward {name!r}, which compares the images of a group"
        if plan.exploration_factor > 1:
            raise UserError(
                f"is incompatible with {comparing}",
                field="train.keep_best_worst",
                value=config.train.keep_best_worst,
                hint="set it to 0",
            )
        plan.check_groupwise_reward(name)
        if plan.group_size < 2:
            raise UserError(
                f"must be at least 2 for {comparing}",
                field="sample.num_image_per_prompt",
                value=plan.group_size,
            )
        if config.train.advantage == "remax":
            raise UserError(
                f"is incompatible with {comparing}: the ReMax baseline is a single image",
                field="train.advantage",
                value="remax",
                hint="use 'pairwise'",
            )


def check_interactive_rewards(
    config: DiffusionConfig, scorers: "Mapping[str, Scorer]", plan: BatchPlan, frames: int
) -> None:
    """Reject settings that are incompatible with rewards from human votes.

    Args:
        config: Settings.
        scorers: Scorers that wait for human votes, by name.
        plan: Batch arithmetic of an epoch.
        frames: Frames of a sample; more than one is a video.
    """
    for name, scorer in scorers.items():
        if frames > 1:
            raise UserError(
                f"supports images only, but a sample is a video of {frames} frames",
                field=f"reward {name!r}",
                hint="use a reward that scores videos",
            )
        limit = config.distributed_timeout
        if plan.world_size > 1 and scorer.timeout >= limit:
            margin = 600  # seconds for everything else
            longer = math.ceil(scorer.timeout) + margin if math.isfinite(scorer.timeout) else "..."
            raise UserError(
                f"must be below distributed_timeout={limit}, after which {plan.world_size} "
                "processes no longer wait for each other",
                field=f"reward_options.{name}.timeout",
                value=scorer.timeout,
                hint=f"lower it or set --config.distributed_timeout={longer}",
            )


def reject_groupwise_eval_rewards(rewards: set[str]) -> None:
    """Raise a UserError if there are any `rewards`; all compare the images of a group.

    An evaluation samples one image per prompt.
    """
    for name in sorted(rewards):
        raise UserError(
            f"reward {name!r} compares the images of a group, and an evaluation samples one per "
            "prompt; use another reward, e.g. --config.eval_reward_fn=\"{'qwenvl': 1.0}\""
        )


def collect_config_warnings(settings: DiffusionConfig) -> list[str]:
    """Return a warning for each setting that is allowed but probably a mistake."""
    lines, method_settings = [], settings.algorithm_settings
    for side in ("clip_range_low", "clip_range_high"):
        name = side if getattr(method_settings, side, None) is not None else "clip_range"
        clip = getattr(method_settings, name) if hasattr(method_settings, side) else 0.0
        if settings.sample.sde_type == "cps" and clip >= CPS_CLIP_WARNING:
            field = f"{settings.algorithm}.{name}"
            lines.append(
                f"{field}={clip} is wide for sample.sde_type='cps': most published "
                f"settings have {CPS_CLIP}; set --config.{field}={CPS_CLIP}"
            )
    if settings.train.keep_gradients and (
        getattr(method_settings, "beta", 0) or settings.anchors.norm_guard
    ):
        lines.append(
            "train.keep_gradients=True saves no time with a KL or anchors.norm_guard, whose "
            "gradient takes a separate backward pass; set those to 0, or keep_gradients to False"
        )
    for other in [name for name in DIFFUSION_SPEC.algorithms() if name != settings.algorithm]:
        unused = getattr(settings, other)
        defaults = asdict(type(unused)())
        # a setting of the same name may mean something else, as nft.beta does
        common = common_field_names(method_settings, unused)
        aliases = {each.name for each in fields(unused) if "alias_of" in each.metadata}
        for name, value in asdict(unused).items():
            same = name in common and getattr(method_settings, name) == value
            if name not in aliases and value != defaults[name] and not same:
                line = f"{other}.{name}={value} has no effect: algorithm={settings.algorithm!r}"
                hint = f"; set {settings.algorithm}.{name} instead" if name in common else ""
                lines.append(line + hint)
    return list(dict.fromkeys(lines))


def common_field_names(one: Any, other: Any) -> set[str]:
    """Return the names of the fields that two settings inherit from a common base class."""
    common = next(kind for kind in type(one).__mro__ if isinstance(other, kind))
    return {each.name for each in fields(common)} if is_dataclass(common) else set()


def check_ineffective_settings(settings: DiffusionConfig, algorithm: "Algorithm") -> None:
    """Reject settings that are incompatible with the algorithm or changed without effect."""
    sample = settings.sample
    if (
        sample.same_latent
        and not settings.is_offline
        and not algorithm.noisy_steps(np.random.default_rng(0), 0)
    ):
        raise UserError(
            f"is incompatible with algorithm={algorithm.name!r}, which samples without noise: all "
            "samples of a group would be identical",
            field="sample.same_latent",
            value=True,
            hint="set it to False",
        )
    if (
        sample.sde_window_per == "group"
        and group_size(settings.sample, settings.train) % sample.train_batch_size
    ):
        raise UserError(
            f"needs sample.train_batch_size={sample.train_batch_size} to divide "
            f"{group_size_setting(sample, settings.train)}",
            field="sample.sde_window_per",
            value="group",
        )
    if settings.frames > 1 and algorithm.needs_reward_gradient:
        raise UserError(
            f"is incompatible with algorithm={algorithm.name!r}, which differentiates rewards of "
            "images",
            field="frames",
            value=settings.frames,
            hint="set it to 1",
        )
    given = dict(flatten_fields(asdict(settings)))
    default = DIFFUSION_SPEC.freeze(DIFFUSION_SPEC.get_config())  # aliases resolved
    defaults = dict(flatten_fields(asdict(default)))
    for names, reason in _ineffective_settings(settings, algorithm):
        changed = [name for name in names if given.get(name) != defaults.get(name)]
        if len(changed) == 1:
            name = changed[0]
            hint = f"reset it to {defaults[name]!r}"
            rule = f"has no effect with {reason}"
            raise UserError(rule, field=name, value=given[name], hint=hint)
        if changed:
            assignments = ", ".join(f"{name}={given[name]!r}" for name in changed)
            values = ", ".join(repr(defaults[name]) for name in changed)
            hint = f"reset them to {values}"
            if names is OFFLINE_FIELDS:
                hint = f"start from config/base.py instead of a preset, or {hint}"
            raise UserError(f"{assignments} have no effect with {reason}", hint=hint)


def check_guidance_gradient(settings: DiffusionConfig, model: "type[ModelAdapter]") -> None:
    """Reject `train.guidance_gradient` if the trained velocity is computed without guidance."""
    gradient = settings.train.guidance_gradient
    name, scale = "sample.guidance_scale", settings.sample.guidance_scale
    if settings.is_offline:
        name, scale = "preferences.share", 1.0  # unguided
    if (trained := getattr(settings.algorithm_settings, "train_guidance", None)) is not None:
        name, scale = f"{settings.algorithm}.train_guidance", trained
    if gradient != "both" and not model.is_guided(scale):
        raise UserError(
            f"has no effect with {name}={scale}, where the model runs a single pass",
            field="train.guidance_gradient",
            value=gradient,
            hint="reset it to 'both'",
        )


def _ineffective_settings(
    settings: DiffusionConfig, algorithm: "Algorithm"
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the names of settings that have no effect, and the reason."""
    given = ("preferences.per_epoch", "preferences.density")
    if not settings.preferences.data:
        yield ("preferences.share", "preferences.unlike_sizes", *given), "preferences.data=''"
    elif not settings.is_offline:
        yield given, f"preferences.share={settings.preferences.share}, where the rollout sets them"
    if settings.is_offline:
        yield OFFLINE_FIELDS, "preferences.share=1, which has no rollouts"
    sample, advantage = settings.sample, settings.train.advantage
    name, method_settings = algorithm.name, algorithm.settings
    method, noisy = f"algorithm={name!r}", algorithm.noisy_steps(np.random.default_rng(0), 0)
    if not noisy:
        names = ["train.timestep_fraction", *SDE_WINDOW_FIELDS]
        if not algorithm.needs_reference or method_settings.kl_type == "velocity":
            names += SDE_FIELDS
        yield names, f"{method}, which samples without noise"
    elif hasattr(method_settings, "window_size"):
        names = ("train.timestep_fraction", *SDE_WINDOW_FIELDS)
        yield names, f"{method}, which has its own moving window"
    elif sample.sde_window_size:
        yield ("train.timestep_fraction",), f"sample.sde_window_size={sample.sde_window_size}"
    else:
        yield SDE_WINDOW_FIELDS, "sample.sde_window_size=0"
    if getattr(method_settings, "anchor_beta", None) == 0:
        yield (f"{name}.anchor",), f"{name}.anchor_beta=0.0"
    if settings.pretrained.base_precision == UNQUANTIZED:
        yield ("sample.eval_precision",), f"pretrained.base_precision={UNQUANTIZED!r}"
    if not settings.train.keep_best_worst:
        yield ("sample.explore_steps",), "train.keep_best_worst=0"
    if getattr(algorithm, "shares_group_noise", False):
        yield (f"{name}.noise_per",), f"{method}, which compares samples at the same noise"
    samples_ode = advantage == "remax" or settings.train.keep_best_worst > 0
    if len(noisy) == sample.num_steps - 1 and not samples_ode:
        yield ("sample.solver",), "noise on all steps but the last"
    if algorithm.overrides_credit:
        yield ("sample.global_std",), f"{method}, which computes its own credit"
    elif advantage not in ("grpo", "grpo_passk", "pairwise"):
        yield ("sample.global_std",), f"train.advantage={advantage!r}"
    if not algorithm.needs_reference:
        yield (f"{name}.kl_type", f"{name}.kl_guidance"), "a KL weight of 0"
    if not settings.anchors.data:
        yield ("anchors.data_weight",), "anchors.data=''"
    sides = [f"{name}.clip_range_{side}" for side in ("low", "high")]
    if all(getattr(method_settings, side.rpartition(".")[2], None) is not None for side in sides):
        yield (f"{name}.clip_range",), f"both {sides[0]} and {sides[1]}"
    names = ("old_max_decay", "old_rate", "old_start", "old_after")
    present = [n for n in names if hasattr(method_settings, n)]
    if zero := [n for n in present[:2] if getattr(method_settings, n) == 0]:
        others = [n for n in present if getattr(method_settings, n) or n == "old_after"]
        yield [f"{name}.{n}" for n in others], f"{name}.{zero[0]}=0.0"
    if settings.height and settings.width and settings.resolution:  # 0 means unset
        yield ("resolution",), f"height={settings.height} and width={settings.width}"
    if settings.eval_height and settings.eval_width:
        size = f"eval_height={settings.eval_height} and eval_width={settings.eval_width}"
        yield ("eval_resolution",), size
