"""The state of a diffusion run, and how it is built from a config."""

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from accelerate import Accelerator
from PIL import Image

from flow_grpo.config.custom import as_user_error
from flow_grpo.config.settings import to_json
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.columns import parse_column_names
from flow_grpo.data.mixing import held_out_share, parse_sources, set_indices
from flow_grpo.data.preference_rows import PreferenceLayout
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.data.videos import is_video_source
from flow_grpo.diffusion.algorithms import ALGORITHMS, Algorithm, Batch, Setup
from flow_grpo.diffusion.builders import (
    build_adapter,
    build_dynamics,
    can_compile,
    can_use_cuda_graphs,
    check_sizes,
    eval_image_size,
    image_size,
    memory_saving_options,
    resolve_model_family,
    resolve_model_path,
)
from flow_grpo.diffusion.config_checks import (
    check_config,
    check_groupwise_rewards,
    check_ineffective_settings,
    check_interactive_rewards,
    check_nonzero_advantages,
    check_preferences,
    check_rollout_gradients,
    collect_config_warnings,
    reject_groupwise_eval_rewards,
)
from flow_grpo.diffusion.context_parallel import (
    check_context_sources,
    count_tokens,
    enable_context_parallel,
)
from flow_grpo.diffusion.data_anchor import DataAnchor, check_anchor_data, load_anchor_images
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, DiffusionConfig
from flow_grpo.diffusion.given_images import (
    GivenData,
    GivenImages,
    check_given_data,
    load_given_data,
    load_held_out_pairs,
)
from flow_grpo.diffusion.held_out_pairs import HeldOutPairs
from flow_grpo.diffusion.models import ModelAdapter, Size, check_size
from flow_grpo.diffusion.offline_plan import build_offline_plan, given_rows_per_update
from flow_grpo.diffusion.plan import BatchPlan, build_plan, group_size
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.prompts import (
    PromptSets,
    build_prompts,
    build_test_prompts,
    row_layout,
)
from flow_grpo.diffusion.rollout_gradients import RolloutGradients
from flow_grpo.diffusion.smoke_test import smoke_test_algorithm, smoke_test_family
from flow_grpo.diffusion.source_images import check_source_images, metadata_with_images
from flow_grpo.diffusion.teachers import TeacherFiles, add_teachers, load_teachers
from flow_grpo.errors import UserError
from flow_grpo.perf.quantization import check_precision
from flow_grpo.rewards import WeightedReward
from flow_grpo.training.builder import (
    SessionBuilder,
    StartFinder,
    suggest_on_oom,
)
from flow_grpo.training.config_changes import check_same_goal
from flow_grpo.training.distributed import (
    get_ranks,
    is_sharded,
    needs_equal_passes,
    raise_on_all_ranks,
)
from flow_grpo.training.plan import check_divides, context_size
from flow_grpo.training.resume import find_start
from flow_grpo.training.session import BaseSession
from flow_grpo.training.snapshot import Reference, Snapshot

logger = logging.getLogger("flow_grpo")
TRAINING_STEPS = 1000  # noise levels of given images: those of the models' pretraining


@dataclass(kw_only=True)
class Session(BaseSession):
    """State of a diffusion run: everything that the training loop reads and updates."""

    plan: BatchPlan
    prompts: list[Prompt]
    prompt_sets: list[tuple[int, int]]  # rows and groups per epoch of each prompt set
    test_prompts: list[Prompt]
    adapter: ModelAdapter
    algorithm: Algorithm
    policy: Policy
    behaviour_snapshot: Snapshot | None  # weights that sampled the epoch to be trained next
    given: GivenImages | None = None  # images trained besides the samples, or instead of them
    held_out: HeldOutPairs | None = None  # given pairs that are not trained
    data_anchor: DataAnchor | None = None  # images trained alongside the samples
    rollout_gradients: RolloutGradients | None = None  # gradients computed while sampling

    def noisy_steps(self, epoch: int, first: int) -> range:
        """Return the steps that add noise, for the batch whose first sample is `first`.

        `first` is a sample index within the epoch.
        """
        keys = {"epoch": [], "group": [first // self.plan.group_size], "batch": [first]}
        key = keys[self.config.sample.sde_window_per]
        rng = numpy_rng(self.config.seed, Stream.WINDOW, epoch, *key)
        return self.algorithm.noisy_steps(rng, epoch)

    def given_batches(self, epoch: int, update: int) -> list[Batch]:
        """Return this process's micro-batches of given images of an update of an epoch."""
        if self.given is None:
            return []
        rank = get_ranks(self.accelerator).data_rank
        return self.given.batches(self.plan, epoch, update, rank)

    def measure_held_out(self) -> dict[str, float]:
        """Return the metrics of the held-out pairs, if there are any. Call it on all processes."""
        if self.held_out is None:
            return {}
        return self.held_out.measure(self.algorithm, self.plan, self.accelerator, self.config.seed)

    def test_set_names(self) -> list[str]:
        """Return the prompt set of each test prompt; empty if there is only one set."""
        if len(parse_sources(self.config.eval_dataset or self.config.dataset)) < 2:
            return []
        return [p.metadata["dataset"] for p in self.test_prompts]

    def held_out_share(self) -> float:
        return held_out_share(self.prompts, self.test_prompts)

    def tasks(self, rows: np.ndarray) -> np.ndarray:
        """Return the name of the prompt set that each prompt row belongs to."""
        sizes = [count for count, _ in self.prompt_sets]
        return np.array(self.algorithm.setup.tasks)[set_indices(sizes, rows)]

    def use_sampling_weights(self) -> AbstractContextManager:
        """Return a context in which the policy has the weights that sample the next batch."""
        old = self.algorithm.samples_with_old_policy(self.progress.step)
        return self.policy.old.applied() if old else nullcontext()

    def use_behaviour_weights(self) -> AbstractContextManager:
        """Return a context in which the policy has the weights that sampled the current epoch."""
        if self.behaviour_snapshot is None:
            return self.use_sampling_weights()
        return self.behaviour_snapshot.applied()

    def snapshot_behaviour_weights(self) -> None:
        """Copy the weights that sampled the next epoch, with `sample.async_depth`.

        Call it right before training changes them, so that a run stopped earlier still has the
        weights of the samples it was about to train; or after training, if the loss compares with
        the previous snapshot.
        """
        if self.behaviour_snapshot is not None:
            with self.use_sampling_weights():
                self.behaviour_snapshot.blend(0)

    def allowed_skips(self) -> dict[str, bool]:
        """Return what may be skipped if its gradient is zero.

        Whole batches, unless all ranks must run the same number of forward passes; single samples
        in float32 on a CPU only, because elsewhere a different batch size rounds too differently.
        """
        exact = self.config.mixed_precision == "no" and self.accelerator.device.type == "cpu"
        return {"batch": not needs_equal_passes(self.accelerator), "sample": exact}


AdapterLoader = Callable[[DiffusionConfig, Accelerator], ModelAdapter]


@dataclass(frozen=True)
class RunData:
    """The prompts and images of a run, checked."""

    prompts: PromptSets
    given: GivenData
    held_out: GivenData  # pairs
    anchor_images: list[Prompt]
    size: Size
    eval_size: Size

    @property
    def all_prompts(self) -> list[Prompt]:
        given = [*self.given.prompts, *self.held_out.prompts]
        return [*self.prompts.train, *self.prompts.test, *given]


def build_session(
    config: UncheckedConfig | DiffusionConfig,
    load: AdapterLoader | None = None,
    begin: StartFinder = find_start,
    num_processes: int | None = None,
) -> Session:
    """Build everything a run needs; what is cheap to check is checked before weights load.

    Args:
        config: A config of this trainer; it is checked.
        load: Replacement for `build_adapter`, for models that were never saved.
        begin: Finds and locks the run directory; without a lock nothing is written to it.
        num_processes: Number of processes to plan for, if not the current one. Such a session can
            only be measured.
    """
    check_same_goal(to_json(config))
    config = check_config(config)
    if load is None:  # sessions with a loader are only measured, so groups of one are fine
        check_nonzero_advantages(config)
    algorithm = build_algorithm(config)
    if config.algorithm in config.custom_algorithms:
        smoke_test_algorithm(algorithm, f"custom_algorithms.{config.algorithm}", config.reward_fn)
    losses_per_update = algorithm.batch_count(config.train.batch_size) * algorithm.losses_per_sample
    engine = {"accumulation_steps": losses_per_update}
    engine["context_parallel"] = context_size(config.sample.context_parallel, num_processes)
    with SessionBuilder(config, **engine) as run:
        given = load_given_data(config.preferences.data, algorithm, _preference_layout(config))
        tokens = count_sample_tokens(config) if load is None else 0
        plan = _build_checked_plan(run, algorithm, num_processes, len(given.rows), tokens)
        run.open_folder(begin, plan.updates)
        data = _load_run_data(run, algorithm, plan, given, has_model_files=load is None)
        teachers = _load_checked_teachers(run, algorithm)
        run.add_rewards(partial(_check_rewards, config, algorithm, plan, data))
        policy = _build_policy(run, algorithm, data, load or build_adapter)
        add_teachers(policy, teachers, algorithm.initial_loras)
        enable_context_parallel(policy.adapter, get_ranks(run.accelerator))
        run.add_policy(policy)
        _optimize_adapter(run, policy.adapter, algorithm, data)
        # before a checkpoint is loaded, so that they are the same after a resume
        behaviour_snapshot = _add_snapshots(run, policy, algorithm)
        rollout_gradients = _build_rollout_gradients(run, policy, algorithm, plan)
        session = Session(
            **run.finish(),
            plan=plan,
            prompts=data.prompts.train,
            prompt_sets=data.prompts.sets,
            test_prompts=data.prompts.test,
            adapter=policy.adapter,
            algorithm=algorithm,
            behaviour_snapshot=behaviour_snapshot,
            rollout_gradients=rollout_gradients,
        )
        if given.rows:
            session.given = GivenImages(given.rows, policy, config.seed)
        if data.held_out.rows:
            session.held_out = HeldOutPairs(data.held_out.rows, session.given, policy)
        if data.anchor_images:
            weight = config.anchors.data_weight
            session.data_anchor = DataAnchor(data.anchor_images, policy, weight)
        algorithm.load_state_dict(session.progress.algorithm)
    return session


def _build_checked_plan(
    run: SessionBuilder,
    algorithm: Algorithm,
    num_processes: int | None,
    given: int,
    tokens: int,
) -> BatchPlan:
    """Plan the batches of an epoch and check the settings that depend on the hardware.

    Args:
        run: Builder of the session.
        algorithm: Determines what is trained.
        num_processes: World size to plan for, if not the current one.
        given: Number of given pairs or images.
        tokens: Transformer tokens of a sample; 0 if unknown.
    """
    config, accelerator = run.config, run.accelerator
    if accelerator.is_main_process:
        for line in collect_config_warnings(config):
            logger.warning(line)
    processes = num_processes or accelerator.num_processes
    context = config.sample.context_parallel
    check_divides(context, processes)
    steps, images_per_row = algorithm.losses_per_sample, 2 if algorithm.given == "pairs" else 1
    if config.is_offline:
        plan = build_offline_plan(
            config.train,
            config.preferences,
            processes // context,
            given,
            images_per_row=images_per_row,
            trained_steps=steps,
        )
        plan = replace(plan, context_parallel=context, tokens=tokens)
    else:
        rows = algorithm.setup.given_samples // images_per_row
        given_part = {"given_rows": rows, "images_per_row": images_per_row, "tokens": tokens}
        plan = build_plan(config.sample, config.train, processes, steps, **given_part)
    if algorithm.needs_whole_groups:
        plan.check_whole_groups(algorithm.name)
    check_rollout_gradients(config, algorithm, plan, accelerator)
    encoder_precision = config.pretrained.encoder_precision
    check_precision("pretrained.encoder_precision", encoder_precision, accelerator.device)
    return plan


def _load_run_data(
    run: SessionBuilder,
    algorithm: Algorithm,
    plan: BatchPlan,
    given: GivenData,
    *,
    has_model_files: bool,
) -> RunData:
    """Load prompts and anchor images and check that the model accepts them and `given` ones."""
    config, accelerator = run.config, run.accelerator
    data = RunData(
        load_run_prompts(config, plan, given.prompts),
        given,
        load_held_out_pairs(
            config.preferences.data, algorithm, _preference_layout(config), config.eval_prompts
        ),
        load_anchor_images(config.anchors.data, row_layout(config), config.prompt_fn),
        image_size(config),
        eval_image_size(config),
    )
    model = config.pretrained.model
    family = resolve_model_family(config.pretrained) if has_model_files else None
    if family is not None:  # before rewards are tried on images of this size
        check_sizes(config, resolve_model_path(config.pretrained))
    if has_model_files:
        check_source_images(data.all_prompts, model, family, data.size, accelerator)
    if family is not None:
        check_context_sources(config.sample.context_parallel, family, data.all_prompts)
    check_anchor_data(data.anchor_images, model, family, accelerator)
    unlike_sizes = config.preferences.unlike_sizes
    for each in (given, data.held_out):
        check_given_data(each, model, family, accelerator, unlike_sizes=unlike_sizes)
    return data


def count_sample_tokens(config: DiffusionConfig) -> int:
    """Return the transformer tokens of a sample; 0 if the model's config files are not known."""
    family = resolve_model_family(config.pretrained)
    if family is None or config.sample.context_parallel == 1:
        return 0
    parts = check_size(resolve_model_path(config.pretrained), image_size(config))
    return count_tokens(family, parts["transformer"], parts["vae"], image_size(config))


def _preference_layout(config: DiffusionConfig) -> PreferenceLayout:
    """Return the layout of preference files with the columns that a config names."""
    return PreferenceLayout(metadata=parse_column_names(config.metadata_columns))


def load_run_prompts(config: DiffusionConfig, plan: BatchPlan, given: list[Prompt]) -> PromptSets:
    """Load the prompts of rollouts and evaluations; without rollouts, those of the given images."""
    if not config.is_offline:
        return build_prompts(config, plan)
    return PromptSets(given, build_test_prompts(config), [(len(given), 0)])


def _load_checked_teachers(run: SessionBuilder, algorithm: Algorithm) -> TeacherFiles:
    """Read the LoRA files that the algorithm needs besides the trained one."""
    train = run.config.train
    if algorithm.loras and (is_sharded(run.accelerator) or not run.config.use_lora):
        raise UserError(
            "swaps LoRA weights, which needs use_lora=True and neither ZeRO-3 nor FSDP",
            field="algorithm",
            value=algorithm.name,
        )
    if algorithm.initial_loras and train.lora_path:
        raise UserError(
            f"has no effect with {algorithm.name}.start='merged'",
            field="train.lora_path",
            value=train.lora_path,
            hint=f"set {algorithm.name}.start='model'",
        )
    return load_teachers(algorithm.loras, train, resolve_model_path(run.config.pretrained))


def _check_rewards(
    config: DiffusionConfig,
    algorithm: Algorithm,
    plan: BatchPlan,
    data: RunData,
    reward: WeightedReward,
    eval_reward: WeightedReward,
) -> None:
    """Check the rewards of training and evaluation with the algorithm, the plan and the prompts."""
    family = resolve_model_family(config.pretrained)
    for each, size in ((reward, data.size), (eval_reward, data.eval_size)):
        check_audio_rewards(each.audio_rewards, config.pretrained.model, family, size)
    check_groupwise_rewards(config, reward.pairwise_rewards, plan)
    check_interactive_rewards(config, reward.interactive_scorers, plan, data.size.frames)
    if algorithm.needs_reward_gradient:
        reward.check_differentiable(f"algorithm={algorithm.name!r}")
    reject_groupwise_eval_rewards(eval_reward.pairwise_rewards)
    if not config.is_offline:
        check_reward(reward, data.prompts.train, data.size)
    check_reward(eval_reward, data.prompts.test, data.eval_size)


def _build_policy(
    run: SessionBuilder, algorithm: Algorithm, data: RunData, load: AdapterLoader
) -> Policy:
    """Load the model and add the trainable weights."""
    config, sample, train = run.config, run.config.sample, run.config.train
    with suggest_on_oom(memory_saving_options(config)):
        adapter = load(config, run.accelerator)
    family = type(adapter.pipeline).__name__
    if family in config.custom_models:
        prompt = data.prompts.train[0]
        smoke_test_family(adapter, prompt, data.size, sample, f"custom_models.{family}")
    steps = TRAINING_STEPS if config.is_offline else sample.num_steps
    scale = sample.guidance_scale
    if config.is_offline and adapter.is_guided(scale):  # unguided, as in pretraining
        scale = adapter.guidance_threshold
    guidance = {"guidance_scale": scale, "solver": sample.solver}
    dynamics = build_dynamics(config, adapter, steps, size=data.size, **guidance)
    return Policy(
        adapter,
        replace(dynamics, max_guidance=algorithm.max_guidance),
        use_lora=config.use_lora,
        rank=train.lora_rank,
        alpha=train.lora_alpha,
        target_modules=train.lora_target_modules,
        lora_path=train.lora_path,
        gradient_checkpointing=train.gradient_checkpointing,
        seed=config.seed,
    )


def _optimize_adapter(
    run: SessionBuilder, adapter: ModelAdapter, algorithm: Algorithm, data: RunData
) -> None:
    """Apply the enabled optimisations; CUDA graphs only where the replayed graph is valid."""
    config, accelerator = run.config, run.accelerator
    adapter.apply_optimizations(
        fold=not is_sharded(accelerator),  # sharded engines gather weights layer by layer
        compiled=can_compile(config, accelerator, adapter.blocks()),
        graphs=can_use_cuda_graphs(config, accelerator)
        # a captured graph has no mask for samples without a source image,
        and len({len(p.images) for p in data.all_prompts}) == 1
        # no gradients of its inputs,
        and not algorithm.needs_reward_gradient
        # and no second backward pass
        and not (config.train.keep_gradients and algorithm.needs_reference),
    )


def _add_snapshots(run: SessionBuilder, policy: Policy, algorithm: Algorithm) -> Snapshot | None:
    """Add the reference and old weights the algorithm needs; return the behaviour snapshot."""
    config, accelerator = run.config, run.accelerator
    if algorithm.needs_reference:
        policy.reference = Reference(policy.trained_parameters())
        if config.use_lora or algorithm.anchors.resets_reference:
            policy.add_snapshot(policy.reference, accelerator)
    if algorithm.keeps_old_policy:
        policy.old = Snapshot(policy.trained_parameters(), "old")
        policy.add_snapshot(policy.old, accelerator)
    if not config.sample.async_depth:
        return None
    snapshot = Snapshot(policy.trained_parameters(), "stale")
    policy.add_snapshot(snapshot, accelerator)
    policy.behaviour = snapshot if algorithm.old_is_behaviour else None
    return snapshot


def _build_rollout_gradients(
    run: SessionBuilder, policy: Policy, algorithm: Algorithm, plan: BatchPlan
) -> RolloutGradients | None:
    """Build the buffers of `train.keep_gradients`, None if it is off; log the memory they need."""
    if not run.config.train.keep_gradients:
        return None
    gradients = RolloutGradients(run.accelerator, policy, algorithm)
    samples = plan.samples // plan.num_processes
    memory = raise_on_all_ranks(run.accelerator, lambda: gradients.describe_memory(samples))
    logger.info("%-21s %s", "rollout gradients", memory)
    return gradients


def check_audio_rewards(
    names: Collection[str], model: str, family: type[ModelAdapter] | None, size: Size
) -> None:
    """Reject rewards of sound for a model, or a size, that generates none."""
    if not names or family is None or (family.generates_audio and size.frames > 1):
        return
    reason = "frames=1 is an image" if family.generates_audio else f"{model} generates no sound"
    raise UserError(
        f"scores sound, but {reason}",
        field=f"reward {min(names)!r}",
        hint="use a model such as LTX-2 with frames above 1, or remove the reward",
    )


def check_reward(reward: WeightedReward, prompts: list[Prompt], size: Size) -> None:
    """Check that a reward can score all prompts, and try it on noise, before the model loads."""
    grey = Image.new("RGB", (size.width, size.height), "grey")
    texts = [p.prompt for p in prompts]
    metadata = [
        metadata_with_images(
            p, lambda source: [grey] * (size.frames if is_video_source(source) else 1)
        )
        for p in prompts
    ]
    reward.check(texts, metadata)
    for name, rows in reward.applicable_rows(texts, metadata).items():
        if len(rows) < len(prompts):
            logger.info("%-21s applies to %d of %d prompts", name, len(rows), len(prompts))
    reward.smoke_test(texts, metadata, size.width, size.height, size.frames)


def build_algorithm(config: UncheckedConfig | DiffusionConfig) -> Algorithm:
    """Build the algorithm of the config and check its settings."""
    config = DIFFUSION_SPEC.freeze(config)
    sample, train = config.sample, config.train
    chosen = ALGORITHMS[config.algorithm]
    offline, update = config.is_offline, train.batch_size * train.gradient_accumulation_steps
    setup = Setup(
        num_steps=TRAINING_STEPS if offline else sample.num_steps,
        sde_type=sample.sde_type,
        window_size=0 if offline else sample.sde_window_size,
        window_range=tuple(sample.sde_window_range),
        timestep_fraction=train.timestep_fraction,
        estimator=train.advantage,
        scale="batch" if sample.global_std else "group",
        group_size=group_size(sample, train),
        update_samples=0 if offline else update,
        given_samples=update if offline else 0,
        density=config.preferences.density if offline else "",
        anchors=config.anchors,
        tasks=tuple(source.name for source in parse_sources(config.dataset)),
    )
    is_custom = config.algorithm in config.custom_algorithms
    field = f"custom_algorithms.{chosen.name}"
    with as_user_error(field, chosen) if is_custom else nullcontext():
        try:
            check_preferences(config, chosen)
            algorithm = chosen(config.algorithm_settings, setup)
            if config.preferences.data and not offline:
                algorithm = _add_given_samples(algorithm, config.preferences.share)
            algorithm.check()
        except ValueError as error:
            raise UserError(str(error)) from error
    check_ineffective_settings(config, algorithm)
    return algorithm


def _add_given_samples(algorithm: Algorithm, share: float) -> Algorithm:
    """Return the algorithm with given images as a `share` of what an update trains."""
    images_per_row = 2 if algorithm.given == "pairs" else 1
    if not algorithm.trained_samples:  # groups are larger than an update, which the plan rejects
        return algorithm
    rows = given_rows_per_update(share, algorithm.trained_samples, images_per_row)
    setup = replace(algorithm.setup, given_samples=rows * images_per_row)
    return type(algorithm)(algorithm.settings, setup)
