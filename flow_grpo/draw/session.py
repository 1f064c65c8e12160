"""Turn a config into the objects of a run. The library itself never reads a config."""

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from ml_collections import ConfigDict

from flow_grpo.config.places import find_files
from flow_grpo.data.hub import download_revision
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm, Setup
from flow_grpo.draw.check import check, check_gradient, check_void, unusual
from flow_grpo.draw.gpu import can_compile, can_replay, lighter_settings
from flow_grpo.draw.models import ModelAdapter, Size, check_model, find_adapter, load_adapter
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.draw.policy import Policy
from flow_grpo.draw.prompts import build_prompts
from flow_grpo.draw.rollout import Dynamics
from flow_grpo.errors import UserError
from flow_grpo.files import dotted
from flow_grpo.rewards import close_scorers
from flow_grpo.run import trackers
from flow_grpo.run.accelerator import advice_when_short, build_accelerator
from flow_grpo.run.base import Run
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.run.lock import RunLock
from flow_grpo.run.optimizer import adam_settings, build_optimizer
from flow_grpo.run.resume import Start, find_start, load_progress, prepare_folder
from flow_grpo.run.scoring import build_both_rewards
from flow_grpo.run.shards import is_sharded, runs_in_step
from flow_grpo.run.snapshot import Ema, Reference, Snapshot
from flow_grpo.run.stopping import StopSignals
from flow_grpo.sde import Solver
from flow_grpo.speed.lora import MergedLora, is_plain

logger = logging.getLogger("flow_grpo")

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Session(Run):
    """Of a model that draws."""

    plan: BatchPlan
    prompts: list[Prompt]
    prompt_sets: list[tuple[int, int]]  # rows and groups of an epoch, of each
    test_prompts: list[Prompt]
    adapter: ModelAdapter
    algorithm: Algorithm
    policy: Policy
    merged: MergedLora | None
    stale: Snapshot | None  # the weights that sampled the epoch to be trained next

    def noisy_steps(self, epoch: int, first: int) -> range:
        """Of the batch whose first sample is `first`."""
        per_batch = [first] if self.config.sample.sde_window_per == "batch" else []
        rng = numpy_rng(self.config.seed, Stream.WINDOW, epoch, *per_batch)
        return self.algorithm.noisy_steps(rng, epoch)

    def test_sets(self) -> list[str]:
        """Of which prompt set each test prompt is, where there are several."""
        several = len(self.prompt_sets) > 1
        return [p.metadata["dataset"] for p in self.test_prompts] if several else []

    def behaviour(self) -> AbstractContextManager:
        """The weights to sample with."""
        old = self.algorithm.samples_with_old(self.progress.step)
        return self.policy.old.applied() if old else nullcontext()

    def sampled_by(self) -> AbstractContextManager:
        """The weights that sampled the epoch to be trained next."""
        return self.behaviour() if self.stale is None else self.stale.applied()

    def remember_behaviour(self) -> None:
        """Before training: the weights that sampled ahead, or would have. Not sooner, so that a run
        that is stopped until then still has those of the samples it was about to train."""
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
        """Of what has no gradient: whole batches where processes need not run equally many
        forwards, single samples not in half precision or on a GPU, where batches of another size
        round too differently."""
        exact = self.config.mixed_precision == "no" and self.accelerator.device.type == "cpu"
        return {"batch": not runs_in_step(self.accelerator), "sample": exact}


def build_session(
    config: ConfigDict,
    load: Callable[[ConfigDict, Accelerator], ModelAdapter] | None = None,
    begin: Callable[..., tuple[Start, RunLock | None]] = find_start,
) -> Session:
    """Everything the run needs; whatever is cheap to check is checked before weights load.

    `load` stands in for `build_adapter`, where the model is none that was saved; `begin` for what
    finds and locks the run folder, which without a lock is left alone.
    """
    with ExitStack() as until_built:
        session = _build_session(config, load or build_adapter, begin, until_built)
        until_built.pop_all()  # the session holds its folder until it is closed
    return session


def _build_session(
    config: ConfigDict,
    load: Callable[[ConfigDict, Accelerator], ModelAdapter],
    begin: Callable[..., tuple[Start, RunLock | None]],
    until_built: ExitStack,
) -> Session:
    check(config)
    find_files(config)
    algorithm = build_algorithm(config)
    batches = algorithm.batch_count(config.train.batch_size)
    accelerator = build_accelerator(
        config,
        accumulation_steps=batches * algorithm.losses_per_sample,
        log_with=trackers.parse(config.log_with) or None,
        project_dir=config.logdir,
    )
    if accelerator.is_main_process:
        for line in unusual(config):
            logger.warning(line)
    plan = BatchPlan(
        num_processes=accelerator.num_processes,
        sample_batch_size=config.sample.train_batch_size,
        batches_per_epoch=config.sample.num_batches_per_epoch,
        group_size=config.sample.num_image_per_prompt,
        train_batch_size=config.train.batch_size,
        accumulation_steps=config.train.gradient_accumulation_steps,
        inner_epochs=config.train.num_inner_epochs,
        trained_steps=algorithm.losses_per_sample,
    )
    if algorithm.whole_groups:
        plan.check_whole_groups(algorithm.name)
    if config.sample.merge_lora and is_sharded(accelerator):
        raise UserError("sample.merge_lora=True does not go with ZeRO-3 or FSDP")
    as_json = json.loads(config.to_json_best_effort())
    start, lock = begin(accelerator, as_json, until_built)
    data = build_prompts(config, plan)
    size = image_size(config)
    reward, eval_reward = on_all_or_none(
        accelerator,
        lambda: build_both_rewards(config, accelerator, plan, data.train, data.test, size),
    )
    until_built.callback(close_scorers, reward, eval_reward)

    with advice_when_short(lighter_settings(config)):
        adapter = load(config, accelerator)
    train = config.train
    dynamics = build_dynamics(
        config,
        adapter,
        config.sample.num_steps,
        guidance_scale=config.sample.guidance_scale,
        solver=config.sample.solver,
    )
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
    if config.sample.merge_lora and not all(map(is_plain, policy.lora_layers)):
        raise UserError(f"sample.merge_lora=True: {train.lora_path} has more than plain LoRA")
    optimizer = policy.prepare(accelerator, build_optimizer(config, accelerator, policy))
    merged = MergedLora(policy.lora_layers) if config.sample.merge_lora else None
    if can_compile(config, accelerator):
        adapter.compile()
    if adapter.can_replay and can_replay(config, accelerator):
        adapter.replay()
    if algorithm.needs_reference:  # before a checkpoint is loaded, and so the same after a resume
        policy.reference = Reference(policy.trained())
        if config.use_lora:
            policy.reference.prepare(accelerator)
    if algorithm.keeps_old:
        policy.old = Snapshot(policy.trained(), "old")
        policy.old.prepare(accelerator)
    stale = None
    if config.sample.async_depth:
        stale = Snapshot(policy.trained(), "stale")
        stale.prepare(accelerator)
    ema = None
    if train.ema:
        ema = Ema(policy.trained(), train.ema_decay, train.ema_update_interval)
        ema.prepare(accelerator)
    progress = load_progress(accelerator, start.checkpoint, optimizer, adam_settings(config))
    algorithm.load_state_dict(progress.algorithm)
    if config.log_with:
        on_all_or_none(
            accelerator,
            lambda: trackers.start(accelerator, config.project_name, start.folder, as_json),
        )
    on_all_or_none(accelerator, lambda: lock and prepare_folder(start, as_json))
    return Session(
        config=config,
        accelerator=accelerator,
        plan=plan,
        prompts=data.train,
        prompt_sets=data.sets,
        test_prompts=data.test,
        reward=reward,
        eval_reward=eval_reward,
        adapter=adapter,
        algorithm=algorithm,
        policy=policy,
        optimizer=optimizer,
        ema=ema,
        merged=merged,
        stale=stale,
        folder=start.folder,
        progress=progress,
        stop=StopSignals(accelerator),
        lock=lock,
    )


def build_adapter(config: ConfigDict, accelerator: Accelerator) -> ModelAdapter:
    model = download_revision(config.pretrained.model, config.pretrained.revision)
    fewest_steps = min(config.sample.num_steps, config.sample.eval_num_steps)
    own = (f"{config.algorithm}.{name}" for name in ("train_guidance", "kl_guidance"))
    names = ("sample.guidance_scale", "sample.eval_guidance_scale", *own)
    guidance = {n: v for n, v in dotted(config.to_dict()) if n in names and v is not None}
    check_model(model, image_size(config), guidance, fewest_steps)
    check_gradient(config, find_adapter(model))
    return load_adapter(
        model,
        device=accelerator.device,
        dtype=DTYPES[config.mixed_precision],
        max_sequence_length=config.max_sequence_length,
        prompt_cache=config.prompt_cache,
        offload_idle=config.offload_idle,
    )


def build_dynamics(
    config: ConfigDict,
    adapter: ModelAdapter,
    num_steps: int,
    *,
    guidance_scale: float | None = None,
    solver: Solver = "euler",
) -> Dynamics:
    """Those of an evaluation, unless told otherwise."""
    return Dynamics(
        adapter.schedule(num_steps, *image_size(config)),
        kind=config.sample.sde_type,
        noise_level=config.sample.noise_level,
        guidance_scale=eval_guidance(config) if guidance_scale is None else guidance_scale,
        guidance_gradient=config.train.guidance_gradient,
        solver=solver,
    )


def eval_guidance(config: ConfigDict) -> float:
    scale = config.sample.eval_guidance_scale
    return config.sample.guidance_scale if scale is None else scale


def image_size(config: ConfigDict) -> Size:
    return Size(
        config.height or config.resolution, config.width or config.resolution, config.frames
    )


def build_algorithm(config: ConfigDict) -> Algorithm:
    """With all that can be wrong with its settings told."""
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
        group_size=sample.num_image_per_prompt,
        update_samples=train.batch_size * train.gradient_accumulation_steps,
    )
    try:
        algorithm = chosen(chosen.Settings(**config[config.algorithm].to_dict()), setup)
        algorithm.check()
    except ValueError as error:
        raise UserError(str(error)) from error
    check_void(config, algorithm)
    return algorithm
