"""Rules of a config that no single field can state, held before anything is loaded."""

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flow_grpo.config.fields import FULL
from flow_grpo.config.places import with_files
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.config.trade import Unchecked
from flow_grpo.data.early import read_early
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.prompts import check_there
from flow_grpo.draw.fields import DRAW, DrawFields
from flow_grpo.draw.plan import BatchPlan, build_plan, group_field, group_size
from flow_grpo.draw.prompts import build_prompts
from flow_grpo.errors import UserError
from flow_grpo.files import dotted
from flow_grpo.rewards import check_some_weight
from flow_grpo.run.plan import check_places, count_processes

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flow_grpo.draw.algorithms import Algorithm
    from flow_grpo.draw.models import ModelAdapter

CPS_CLIP = 1e-5  # of every published setting with sde_type="cps"
WIDE_FOR_CPS = 1e-4
STEPS = ("sample.sde_type", "sample.noise_level")
WINDOW = ("sample.sde_window_range", "sample.sde_window_per")
WITHOUT_REWARDS = ("opd",)  # methods that only log the rewards
WITHOUT_GROUPS = (*WITHOUT_REWARDS, "leap")  # methods that do not compare samples
ACROSS_GROUPS = ("reinforce_pp", "remax")  # estimators that compare beyond the group


def check(config: Unchecked | DrawFields) -> DrawFields:
    """The settings of a run, frozen, with files that come with the library found."""
    settings = DRAW.check(config)
    parse_trackers(settings.log_with)
    sample = settings.sample
    if sample.sde_type == "cps" and sample.noise_level > 1:
        raise UserError(
            f"sample.noise_level={sample.noise_level} must be at most 1 for sde_type='cps'"
        )
    _check_selection(settings)
    if not (settings.resolution or (settings.height and settings.width)):
        raise UserError(
            f"resolution=0 needs both height={settings.height} and width={settings.width} above 0; "
            "set resolution, or both of them"
        )
    if sample.merge_lora and not settings.use_lora:
        raise UserError("sample.merge_lora=True needs use_lora=True")
    precision = settings.pretrained.base_precision
    if sample.merge_lora and precision != FULL:
        raise UserError(
            "sample.merge_lora=True does not go with pretrained.base_precision="
            f"{precision!r}: so few bits have no room for LoRA"
        )
    if sample.guidance_scale > 1 and not settings.train.cfg:
        raise UserError(
            f"train.cfg=False with sample.guidance_scale={sample.guidance_scale} would "
            "train another velocity than was sampled; set guidance_scale=1 or train.cfg=True"
        )
    gate, group = settings.anchors.kl_gate, group_size(settings)
    if gate and 0 not in settings.reward_fn.values():
        raise UserError(
            f"anchors.kl_gate={gate} needs a second opinion on the pictures: add a reward of "
            "weight 0 to reward_fn, e.g. {'ocr': 1.0, 'pickscore': 0.0}"
        )
    if settings.anchors.diversity and group < 3:
        raise UserError(
            "anchors.diversity=True weights samples by the distance to the nearest one of their "
            f"group, which is the same for all in a group of {group_field(settings)}; use groups "
            "of 3 or more"
        )
    return with_files(settings)


def check_early(config: DrawFields) -> None:
    """Tell what can be told of a run before torch is imported."""
    settings = check(config)
    check_learning(settings)
    plan = build_plan(settings, count_processes())
    check_places(settings)
    sources = parse_sources(settings.dataset)
    for source in sources:
        check_there(source.path, settings.prompt_fn)
    read_early(sources, lambda: build_prompts(settings, plan))


def check_learning(settings: DrawFields) -> None:
    """Reject a run in which every advantage would be 0. Custom methods are not checked: they may
    assign credit in any way."""
    method, advantage = settings.algorithm, settings.train.advantage
    if method in settings.custom_algorithms:
        return
    if method not in WITHOUT_REWARDS:
        check_some_weight(settings)
    if (
        group_size(settings) == 1
        and method not in WITHOUT_GROUPS
        and advantage not in ACROSS_GROUPS
    ):
        raise UserError(
            "sample.num_image_per_prompt=1 leaves no other sample of a prompt to compare with, "
            f"which algorithm={method!r} with train.advantage={advantage!r} needs; use groups of 2 "
            "or more, or train.advantage='reinforce_pp'"
        )


def _check_selection(settings: DrawFields) -> None:
    sample, keep = settings.sample, settings.train.keep_best_worst
    name, drawn = f"train.keep_best_worst={keep}", sample.num_image_per_prompt
    if keep and (drawn % (2 * keep) or drawn == 2 * keep):
        raise UserError(
            f"{name} keeps {2 * keep} samples of a group, so sample.num_image_per_prompt={drawn} "
            f"must be 2, 3 or more times that; make it {4 * keep}, or keep fewer"
        )
    if keep and sample.same_latent:
        raise UserError(
            f"{name} does not go with sample.same_latent=True: it chooses by the first noise, and "
            "a group would have one; set one of them back"
        )
    if keep and sample.explore_steps > sample.num_steps:
        raise UserError(
            f"sample.explore_steps={sample.explore_steps} must be at most sample.num_steps="
            f"{sample.num_steps}: {name} explores to save steps"
        )


def check_kept(
    config: DrawFields, algorithm: "Algorithm", plan: BatchPlan, accelerator: "Accelerator"
) -> None:
    """Gradients kept from the rollout: refuse where they would not be those of the plain loop."""
    name, sample, method = "train.keep_gradients=True", config.sample, algorithm.name
    if not config.train.keep_gradients:
        return
    if not algorithm.linear_in_credit:
        raise UserError(
            f"{name} does not go with algorithm={method!r}: it needs a gradient that is the "
            "credit times one of the sample alone; use grpo, mix, grpo_guard or dppo"
        )
    if algorithm.settings.ratio != "step":
        raise UserError(
            f"{method}.ratio={algorithm.settings.ratio!r} has no effect with {name}, whose ratios "
            "are all 1; leave it at 'step'"
        )
    if plan.updates > 1:
        raise UserError(
            f"{name} needs one update an epoch, by the weights that sampled it, and here are "
            f"{plan.updates}; set train.num_inner_epochs=1 and "
            f"train.gradient_accumulation_steps={plan.micro_batches}"
        )
    if plan.sample_batch_size > 1:
        raise UserError(
            f"{name} takes the gradient of one sample at a time, so sample.train_batch_size="
            f"{plan.sample_batch_size} must be 1; where larger batches are faster, set it to False"
        )
    if sample.async_depth:
        raise UserError(
            f"{name} does not go with sample.async_depth={sample.async_depth}, whose samples are "
            "by older weights than those that train; set it to 0"
        )
    if config.anchors.kl_gate:
        raise UserError(
            f"{name} does not go with anchors.kl_gate={config.anchors.kl_gate}, which chooses "
            "whom the KL holds when all are drawn; set it to 0"
        )
    if not config.use_lora:
        raise UserError(f"{name} needs use_lora=True: it keeps a gradient of each sample")
    from flow_grpo.run.distributed import runs_in_step  # with torch

    if runs_in_step(accelerator):
        raise UserError(f"{name} does not go with DeepSpeed or FSDP; use plain data parallelism")


def check_judges(config: DrawFields, judges: set[str], plan: BatchPlan) -> None:
    """Rewards that compare the pictures of a group: each call has to have whole groups."""
    for name in sorted(judges):
        if plan.explored > 1:
            raise UserError(
                f"train.keep_best_worst={config.train.keep_best_worst} does not go with reward "
                f"{name!r}, which compares the pictures of a whole group; set it to 0"
            )
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


def unusual(config: Unchecked | DrawFields) -> list[str]:
    """What is allowed but hardly ever meant, one line each."""
    settings = DRAW.freeze(config)
    lines, own = [], settings.own
    for side in ("clip_range_low", "clip_range_high"):
        name = side if getattr(own, side, None) is not None else "clip_range"
        clip = getattr(own, name) if hasattr(own, side) else 0.0
        if settings.sample.sde_type == "cps" and clip >= WIDE_FOR_CPS:
            field = f"{settings.algorithm}.{name}"
            lines.append(
                f"{field}={clip} is wide for sample.sde_type='cps': all published "
                f"settings have {CPS_CLIP}; set --config.{field}={CPS_CLIP}"
            )
    if settings.train.keep_gradients and (getattr(own, "beta", 0) or settings.anchors.norm_guard):
        lines.append(
            "train.keep_gradients=True saves no time with a KL or anchors.norm_guard, whose "
            "gradient takes a backward pass of its own; set them to 0, or it to False"
        )
    for other in [name for name in DRAW.algorithms() if name != settings.algorithm]:
        values = asdict(getattr(settings, other))
        usual = asdict(type(getattr(settings, other))())
        # a field of the same name may be another thing, as nft.beta is
        alike = shared_fields(own, getattr(settings, other))
        for name in [name for name, value in values.items() if value != usual[name]]:
            line = f"{other}.{name}={values[name]} has no effect: algorithm={settings.algorithm!r}"
            meant = name in alike and getattr(own, name) != values[name]
            lines.append(f"{line}; set {settings.algorithm}.{name} instead" if meant else line)
    return list(dict.fromkeys(lines))


def shared_fields(one: Any, other: Any) -> set[str]:
    """Names of the fields that both settings have of the class they both inherit from."""
    common = next(kind for kind in type(one).__mro__ if isinstance(other, kind))
    return {each.name for each in fields(common)} if is_dataclass(common) else set()


def check_void(settings: DrawFields, algorithm: "Algorithm") -> None:
    """One line for settings that do not go with the method, or that were changed from their default
    and have no effect."""
    default, sample = DRAW.freeze(DRAW.get_config()), settings.sample
    if sample.same_latent and not algorithm.noisy_steps(np.random.default_rng(0), 0):
        raise UserError(
            f"sample.same_latent=True does not go with algorithm={algorithm.name!r}, which samples "
            "without noise: all samples of a group would be the same; set it to False"
        )
    if sample.sde_window_per == "group" and group_size(settings) % sample.train_batch_size:
        raise UserError(
            f"sample.sde_window_per='group' needs batches of one group: sample.train_batch_size="
            f"{sample.train_batch_size} must divide {group_field(settings)}"
        )
    if settings.frames > 1 and algorithm.needs_reward_gradient:
        raise UserError(
            f"frames={settings.frames} does not go with algorithm={algorithm.name!r}, which takes "
            "gradients of pictures; set it to 1"
        )
    given, usual = (dict(dotted(asdict(each))) for each in (settings, default))
    for names, why in _void(settings, algorithm):
        if changed := [name for name in names if given.get(name) != usual.get(name)]:
            told = ", ".join(f"{name}={given[name]!r}" for name in changed)
            values = ", ".join(repr(usual[name]) for name in changed)
            verb, them = ("have", "them") if changed[1:] else ("has", "it")
            raise UserError(f"{told} {verb} no effect with {why}; leave {them} at {values}")


def check_gradient(config: Unchecked | DrawFields, model: "type[ModelAdapter]") -> None:
    settings = DRAW.freeze(config)
    gradient = settings.train.guidance_gradient
    name, scale = "sample.guidance_scale", settings.sample.guidance_scale
    if (trained := getattr(settings.own, "train_guidance", None)) is not None:
        name, scale = f"{settings.algorithm}.train_guidance", trained
    if gradient != "both" and not model.is_guided(scale):
        raise UserError(
            f"train.guidance_gradient={gradient!r} has no effect with {name}={scale}, where this "
            "model has one pass; leave it at 'both'"
        )


def _void(settings: DrawFields, algorithm: "Algorithm") -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of settings, and what makes them void."""
    sample, advantage = settings.sample, settings.train.advantage
    name, own = algorithm.name, algorithm.settings
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
    if getattr(own, "anchor_beta", None) == 0:
        yield (f"{name}.anchor",), f"{name}.anchor_beta=0.0"
    if settings.pretrained.base_precision == FULL:
        yield ("sample.eval_precision",), f"pretrained.base_precision={FULL!r}"
    if not settings.train.keep_best_worst:
        yield ("sample.explore_steps",), "train.keep_best_worst=0"
    if getattr(algorithm, "shares_noise", False):
        yield (f"{name}.noise_per",), f"{method}, which compares samples at one noise"
    if len(noisy) == sample.num_steps - 1 and advantage != "remax":
        yield ("sample.solver",), "noise on all steps but the last"
    if algorithm.own_credit:
        yield ("sample.global_std",), f"{method}, which gives credit in a way of its own"
    elif advantage not in ("grpo", "pairwise"):
        yield ("sample.global_std",), f"train.advantage={advantage!r}"
    if not algorithm.needs_reference:
        yield (f"{name}.kl_type", f"{name}.kl_guidance"), "no KL: its weight is 0"
    if not settings.anchors.data:
        yield ("anchors.data_weight",), "anchors.data=''"
    sides = [f"{name}.clip_range_{side}" for side in ("low", "high")]
    if all(getattr(own, side.rpartition(".")[2], None) is not None for side in sides):
        yield (f"{name}.clip_range",), f"both {sides[0]} and {sides[1]}"
    names = ("old_most", "old_rate", "old_start", "old_after")
    averaged = [n for n in names if hasattr(own, n)]
    if zero := [n for n in averaged[:2] if getattr(own, n) == 0]:
        others = tuple(f"{name}.{n}" for n in averaged if getattr(own, n) or n == "old_after")
        yield others, f"{name}.{zero[0]}=0.0"
    if settings.height and settings.width and settings.resolution:  # 0 says that there is none
        yield ("resolution",), f"height={settings.height} and width={settings.width}"
