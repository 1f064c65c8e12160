"""Turn a config into the objects of a run. The library itself never reads a config."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType
from PIL import Image

from flow_grpo.config.custom import told_in_one_line
from flow_grpo.config.trade import Unchecked
from flow_grpo.data.hub import download_revision
from flow_grpo.data.mixing import held_out_share, parse_sources, set_of
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm, Setup
from flow_grpo.draw.check import (
    check,
    check_eval_judges,
    check_gradient,
    check_judges,
    check_kept,
    check_learning,
    check_void,
    unusual,
)
from flow_grpo.draw.data_anchor import DataAnchor, check_data, read_pictures
from flow_grpo.draw.fields import DRAW, DrawFields
from flow_grpo.draw.kept import KeptGradients
from flow_grpo.draw.models import (
    LATE_GUIDANCE,
    ModelAdapter,
    Size,
    check_model,
    check_size,
    find_adapter,
    load_adapter,
)
from flow_grpo.draw.models.experts import check_places, places_of_model
from flow_grpo.draw.plan import BatchPlan, build_plan, group_size, lighter_settings
from flow_grpo.draw.policy import Policy
from flow_grpo.draw.prompts import build_prompts
from flow_grpo.draw.rollout import Dynamics
from flow_grpo.draw.sources import check_sources, with_sources
from flow_grpo.draw.teachers import add_teachers, read_teachers
from flow_grpo.draw.trial import try_family, try_method
from flow_grpo.errors import UserError
from flow_grpo.files import dotted
from flow_grpo.rewards import WeightedReward
from flow_grpo.run.building import DTYPES, Begin, advice_when_short, building
from flow_grpo.run.distributed import is_sharded, on_all_or_none, runs_in_step
from flow_grpo.run.resume import check_goal, find_start
from flow_grpo.run.session import BaseSession
from flow_grpo.run.snapshot import Reference, Snapshot
from flow_grpo.sde import Solver
from flow_grpo.speed.compiler import missing_tool
from flow_grpo.speed.lora import MergedLora, is_sum
from flow_grpo.speed.low_bits import FULL, check_precision

logger = logging.getLogger("flow_grpo")


@dataclass(kw_only=True)
class Session(BaseSession):
    """A run of a model that draws."""

    plan: BatchPlan
    prompts: list[Prompt]
    prompt_sets: list[tuple[int, int]]  # rows and groups of an epoch, of each
    test_prompts: list[Prompt]
    adapter: ModelAdapter
    algorithm: Algorithm
    policy: Policy
    merged: MergedLora | None
    stale: Snapshot | None  # the weights that sampled the epoch to be trained next
    data: DataAnchor | None = None  # pictures that are trained beside samples
    gradients: KeptGradients | None = None  # where they are taken while samples are drawn

    def noisy_steps(self, epoch: int, first: int) -> range:
        """The steps that add noise, in the batch whose first sample is `first`."""
        keys = {"epoch": [], "group": [first // self.plan.group_size], "batch": [first]}
        key = keys[self.config.sample.sde_window_per]
        rng = numpy_rng(self.config.seed, Stream.WINDOW, epoch, *key)
        return self.algorithm.noisy_steps(rng, epoch)

    def test_sets(self) -> list[str]:
        """The prompt set that each test prompt is of, where there are several."""
        several = len(self.prompt_sets) > 1
        return [p.metadata["dataset"] for p in self.test_prompts] if several else []

    def held_out_share(self) -> float:
        return held_out_share(self.prompts, self.test_prompts, attrgetter("prompt", "images"))

    def tasks(self, rows: np.ndarray) -> np.ndarray:
        """The prompt set that each row is of."""
        sizes = [count for count, _ in self.prompt_sets]
        return np.array(self.algorithm.setup.tasks)[set_of(sizes, rows)]

    def behaviour(self) -> AbstractContextManager:
        """Context in which the policy has the weights to sample the next batch with."""
        old = self.algorithm.samples_with_old(self.progress.step)
        return self.policy.old.applied() if old else nullcontext()

    def sampled_by(self) -> AbstractContextManager:
        """Context in which the policy has the weights that sampled the epoch about to be
        trained."""
        return self.behaviour() if self.stale is None else self.stale.applied()

    def remember_behaviour(self) -> None:
        """Where samples are drawn ahead: copy the weights that drew the next epoch's, just before
        training changes them. Not sooner, so that a run that is stopped until then still has those
        of the samples it was about to train; and where the loss compares with those, after it."""
        if self.stale is not None:
            with self.behaviour():
                self.stale.blend(0)

    def without_noise(self, epoch: int) -> Callable[[], AbstractContextManager]:
        """The weights to take steps without noise with, merged with LoRA as it is now if wanted."""
        if self.merged is None:
            return nullcontext
        self.merged.renew(torch_generator(self.config.seed, Stream.MERGE, epoch).initial_seed())
        return self.merged.applied

    def may_leave_out(self) -> dict[str, bool]:
        """What may be skipped if it has no gradient: whole batches where processes need not run
        equally many forwards, single samples not in half precision or on a GPU, where batches of
        another size round too differently."""
        exact = self.config.mixed_precision == "no" and self.accelerator.device.type == "cpu"
        return {"batch": not runs_in_step(self.accelerator), "sample": exact}


def build_session(
    config: Unchecked | DrawFields,
    load: Callable[[DrawFields, Accelerator], ModelAdapter] | None = None,
    begin: Begin = find_start,
    num_processes: int | None = None,
) -> Session:
    """Everything the run needs; whatever is cheap to check is checked before weights load.

    `load` stands in for `build_adapter`, where the model is none that was saved; `begin` for what
    finds and locks the run folder, which without a lock is left alone. `num_processes` is the
    number of processes to plan for, if not the current one; such a session can only be measured.
    """
    check_goal(config)
    config = check(config)
    if load is None:  # a custom loader may only measure, for which groups of one are fine
        check_learning(config)
    algorithm = build_algorithm(config)
    if config.algorithm in config.custom_algorithms:
        try_method(algorithm, f"custom_algorithms.{config.algorithm}", config.reward_fn)
    micro_batches = algorithm.batch_count(config.train.batch_size)
    steps = micro_batches * algorithm.losses_per_sample
    with building(config, accumulation_steps=steps) as run:
        accelerator, sample, train = run.accelerator, config.sample, config.train
        if accelerator.is_main_process:
            for line in unusual(config):
                logger.warning(line)
        processes = num_processes or accelerator.num_processes
        plan = build_plan(config, processes, algorithm.losses_per_sample)
        if algorithm.whole_groups:
            plan.check_whole_groups(algorithm.name)
        check_kept(config, algorithm, plan, accelerator)
        encoders = config.pretrained.encoder_precision
        check_precision("pretrained.encoder_precision", encoders, accelerator.device)
        if sample.merge_lora and is_sharded(accelerator):
            raise UserError("sample.merge_lora=True does not go with ZeRO-3 or FSDP")
        run.open_folder(begin, plan.updates)
        data, size = build_prompts(config, plan), image_size(config)
        every, pictures = [*data.train, *data.test], read_pictures(config)
        named = model_and_family(config) if load is None else (config.pretrained.model, None)
        if named[1] is not None:  # before rewards are tried on images of this size
            check_size(model_at_revision(config), size)
        if load is None:
            check_sources(every, *named, size, accelerator)
        check_data(pictures, *named, accelerator)

        def check_rewards(reward: WeightedReward, eval_reward: WeightedReward) -> None:
            check_judges(config, reward.judges, plan)
            if algorithm.needs_reward_gradient:
                reward.check_differentiable(f"algorithm={algorithm.name!r}")
            check_eval_judges(eval_reward.judges)
            check_reward(reward, data.train, size)
            check_reward(eval_reward, data.test, size)

        if algorithm.loras and (is_sharded(accelerator) or not config.use_lora):
            raise UserError(
                f"algorithm={algorithm.name!r} swaps one LoRA for another: it needs use_lora=True, "
                "and neither ZeRO-3 nor FSDP"
            )
        if algorithm.start and train.lora_path:
            raise UserError(
                f"train.lora_path={train.lora_path!r} has no effect with "
                f"{algorithm.name}.start='merged'; set that to 'model'"
            )
        teachers = read_teachers(algorithm.loras, train, model_at_revision(config))
        run.add_rewards(check_rewards)
        with advice_when_short(lighter_settings(config)):
            adapter = (load or build_adapter)(config, accelerator)
        guidance = {"guidance_scale": sample.guidance_scale, "solver": sample.solver}
        if (family := type(adapter.pipeline).__name__) in config.custom_models:
            try_family(adapter, data.train[0], size, sample, f"custom_models.{family}")
        dynamics = build_dynamics(config, adapter, sample.num_steps, **guidance)
        policy = Policy(
            adapter,
            replace(dynamics, most_guidance=algorithm.most_guidance),
            use_lora=config.use_lora,
            rank=train.lora_rank,
            alpha=train.lora_alpha,
            lora_path=train.lora_path,
            gradient_checkpointing=train.gradient_checkpointing,
            seed=config.seed,
        )
        if sample.merge_lora and not all(map(is_sum, policy.lora_layers)):
            raise UserError(f"sample.merge_lora=True: {train.lora_path} has more than plain LoRA")
        add_teachers(policy, teachers, algorithm.start)
        run.add_policy(policy)
        merged = MergedLora(policy.lora_layers) if sample.merge_lora else None
        adapter.speed_up(
            fold=not is_sharded(accelerator),  # engines that shard gather weights layer by layer
            compiled=can_compile(config, accelerator),
            # a mask for those without a picture is nothing that a recording takes
            # nor does it give gradients of its inputs
            graphs=can_replay(config, accelerator)
            and len({len(p.images) for p in every}) == 1
            and not algorithm.needs_reward_gradient
            # nor does it go back twice
            and not (train.keep_gradients and algorithm.needs_reference),
        )
        # before a checkpoint is loaded, and so the same after a resume
        if algorithm.needs_reference:
            policy.reference = Reference(policy.trained())
            if config.use_lora or algorithm.anchors.resets:
                policy.reference.prepare(accelerator)
        if algorithm.keeps_old:
            policy.old = Snapshot(policy.trained(), "old").prepare(accelerator)
        gradients, stale = None, None
        if train.keep_gradients:
            gradients = KeptGradients(accelerator, policy, algorithm)
            own = plan.samples // plan.num_processes
            told = on_all_or_none(accelerator, lambda: gradients.describe(own))
            logger.info("%-21s %s", "kept gradients", told)
        if sample.async_depth:
            stale = Snapshot(policy.trained(), "stale").prepare(accelerator)
            policy.behaviour = stale if algorithm.old_is_behaviour else None
        session = Session(
            **run.finish(),
            plan=plan,
            prompts=data.train,
            prompt_sets=data.sets,
            test_prompts=data.test,
            adapter=adapter,
            algorithm=algorithm,
            merged=merged,
            stale=stale,
            data=DataAnchor(pictures, policy, config.anchors.data_weight) if pictures else None,
            gradients=gradients,
        )
        algorithm.load_state_dict(session.progress.algorithm)
    return session


def model_and_family(config: DrawFields) -> tuple[str, type[ModelAdapter] | None]:
    """The model's name and its family; None where that cannot be told yet."""
    name = config.pretrained.model
    try:
        return name, find_adapter(download_revision(name, config.pretrained.revision))
    except UserError:  # told when it is loaded
        return name, None


def model_at_revision(config: DrawFields) -> str:
    """Return the folder or hub id of the model; its name if the revision cannot be downloaded."""
    try:
        return download_revision(config.pretrained.model, config.pretrained.revision)
    except UserError:  # reported when the model is loaded
        return config.pretrained.model


def check_reward(reward: WeightedReward, prompts: list[Prompt], size: Size) -> None:
    """Tell whatever can be wrong with it, before the model loads."""
    grey = Image.new("RGB", (size.width, size.height), "grey")
    texts, metadata = (
        [p.prompt for p in prompts],
        [with_sources(p, lambda _: grey) for p in prompts],
    )
    reward.check(texts, metadata)
    for name, rows in reward.asked(texts, metadata).items():
        if len(rows) < len(prompts):
            logger.info("%-21s is asked for by %d of %d prompts", name, len(rows), len(prompts))
    reward.rehearse(texts, metadata, size.width, size.height, size.frames)


def can_compile(config: DrawFields, accelerator: Accelerator) -> bool:
    if not config.compile or accelerator.device.type != "cuda" or is_sharded(accelerator):
        return False
    if missing := missing_tool():
        logger.warning("nothing is compiled: %s is missing; this run will be slower", missing)
    return not missing


def can_replay(config: DrawFields, accelerator: Accelerator) -> bool:
    """Whether the transformer can be recorded: not what recomputes in the backward pass, nor
    gradients of all weights, which a recording would hold a second time, nor what gathers its
    weights layer by layer. DDP was tried with one GPU, see docs/performance.md."""
    wanted = config.cuda_graphs and accelerator.device.type == "cuda"
    whole = accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU)
    return wanted and whole and config.use_lora and not config.train.gradient_checkpointing


def build_adapter(config: DrawFields, accelerator: Accelerator) -> ModelAdapter:
    model = download_revision(config.pretrained.model, config.pretrained.revision)
    sample = config.sample
    explored = sample.explore_steps if config.train.keep_best_worst else sample.num_steps
    fewest_steps = min(sample.num_steps, sample.eval_num_steps, explored)
    own = (
        f"{config.algorithm}.{name}"
        for name in ("train_guidance", "kl_guidance", "teacher_guidance")
    )
    names = ("sample.guidance_scale", "sample.eval_guidance_scale", LATE_GUIDANCE, *own)
    guidance = {n: v for n, v in dotted(asdict(config)) if n in names and v is not None}
    sharded = is_sharded(accelerator)
    check_model(model, image_size(config), guidance, fewest_steps, sharded=sharded)
    check_gradient(config, find_adapter(model))
    if config.train.lora_path:  # the model may take minutes to load
        check_places(config.train.lora_path, places_of_model(model))
    adapter = load_adapter(
        model,
        device=accelerator.device,
        dtype=DTYPES[config.mixed_precision],
        max_sequence_length=config.max_sequence_length,
        prompt_cache=config.prompt_cache,
        offload_idle=config.offload_idle,
        source_size=image_size(config),
        base_precision=config.pretrained.base_precision,
        keep_full=config.sample.eval_precision == FULL,
        encoder_precision=config.pretrained.encoder_precision,
    )
    adapter.guidance_scale_2 = config.sample.guidance_scale_2
    return adapter


def build_dynamics(
    config: DrawFields,
    adapter: ModelAdapter,
    num_steps: int,
    *,
    guidance_scale: float | None = None,
    solver: Solver = "euler",
) -> Dynamics:
    """How an evaluation is walked, unless told otherwise."""
    return Dynamics(
        adapter.schedule(num_steps, *image_size(config)),
        kind=config.sample.sde_type,
        noise_level=config.sample.noise_level,
        guidance_scale=eval_guidance(config) if guidance_scale is None else guidance_scale,
        guidance_gradient=config.train.guidance_gradient,
        solver=solver,
    )


def eval_guidance(config: DrawFields) -> float:
    scale = config.sample.eval_guidance_scale
    return config.sample.guidance_scale if scale is None else scale


def image_size(config: DrawFields) -> Size:
    return Size(
        config.height or config.resolution, config.width or config.resolution, config.frames
    )


def build_algorithm(config: Unchecked | DrawFields) -> Algorithm:
    """The method of the config; tells all that can be wrong with its settings."""
    config = DRAW.freeze(config)
    sample, train = config.sample, config.train
    chosen = ALGORITHMS[config.algorithm]
    setup = Setup(
        num_steps=sample.num_steps,
        sde_type=sample.sde_type,
        window_size=sample.sde_window_size,
        window_range=tuple(sample.sde_window_range),
        timestep_fraction=train.timestep_fraction,
        estimator=train.advantage,
        scale="batch" if sample.global_std else "group",
        group_size=group_size(config),
        update_samples=train.batch_size * train.gradient_accumulation_steps,
        anchors=config.anchors,
        tasks=tuple(source.name for source in parse_sources(config.dataset)),
    )
    is_own, field = config.algorithm in config.custom_algorithms, f"custom_algorithms.{chosen.name}"
    with told_in_one_line(field, chosen) if is_own else nullcontext():
        try:
            algorithm = chosen(config.own, setup)
            algorithm.check()
        except ValueError as error:
            raise UserError(str(error)) from error
    check_void(config, algorithm)
    return algorithm
