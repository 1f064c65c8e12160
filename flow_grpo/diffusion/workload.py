"""Work and communication of a process per epoch, for flow_grpo/training/scaling.py; no torch."""

import math
from pathlib import Path

from flow_grpo.data.early_checks import is_small
from flow_grpo.data.mixing import parse_sources
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.plan import BatchPlan, build_plan, count_trained_steps
from flow_grpo.diffusion.prompts import build_prompts
from flow_grpo.diffusion.video_memory import video_model
from flow_grpo.errors import UserError
from flow_grpo.training.measurements import PARAMETERS, Line, sample_seconds, shape_of
from flow_grpo.training.plan import check_divides
from flow_grpo.training.scaling import (
    Collective,
    Workload,
    checkpoint_bytes,
    sharded_collectives,
    trained_collectives,
)
from flow_grpo.training.time_estimate import MeasuredTimes, RemainingWork, count_evaluations


def plan_run(config: DiffusionConfig, num_processes: int) -> BatchPlan:
    """Return the batch plan of a run that trains samples with a built-in algorithm.

    Raises:
        UserError: If something does not divide, or for a run that needs its data or own code.
    """
    context, splits = config.sample.context_parallel, video_model(config) is not None
    for field, value in (
        ("sample.context_parallel", context if context > 1 and not splits else 0),
        ("preferences.data", config.preferences.data),
        ("algorithm", config.algorithm if config.algorithm in config.custom_algorithms else ""),
    ):
        if value:
            raise UserError(
                "is not supported by plan",
                field=field,
                value=value,
                hint=f"use flow-grpo train --dry_run --world_size={num_processes}",
            )
    check_divides(context, num_processes)
    return build_plan(config.sample, config.train, num_processes, count_trained_steps(config))


def count_tests(config: DiffusionConfig, plan: BatchPlan) -> int:
    """Return the number of prompts of an evaluation; 0 if the dataset is not here.

    Raises:
        UserError: If the dataset has too few prompts for an epoch.
    """
    sources = parse_sources(config.dataset)
    if not config.eval_dataset and all(is_small(Path(source.path)) for source in sources):
        return len(build_prompts(config, plan).test)
    return config.eval_prompts


def build_workload(
    config: DiffusionConfig,
    plan: BatchPlan,
    line: Line,
    *,
    tests: int,
    reward_seconds: float = 0.0,
    sharded: bool = False,
) -> Workload:
    """Return the work of a process.

    Args:
        config: The settings.
        plan: The batch plan.
        line: The measurement.
        tests: Prompts of an evaluation.
        reward_seconds: Seconds to score a batch.
        sharded: Whether the weights are sharded (FSDP2, ZeRO-3).
    """
    sample, train = config.sample, config.train
    sampling, training = sample_seconds(line, config, plan.trained_steps)
    step = sampling / sample.num_steps
    explored = plan.exploration_factor if plan.exploration_factor > 1 else 0
    rollout = sampling + explored * sample.explore_steps * step  # and the candidates' steps
    own_tests = math.ceil(tests / plan.num_processes)
    eval_batch = min(sample.test_batch_size, own_tests)
    eval_batches = math.ceil(own_tests / sample.test_batch_size)
    evaluation = step * sample.eval_num_steps * eval_batch
    trained = count_trained_parameters(config)
    evaluations = count_evaluations(
        -1, config.num_epochs, config.eval_freq, before=config.eval_before_training
    )
    return Workload(
        samples=plan.samples,
        seconds_per_sample=rollout + training * plan.inner_epochs,
        work=RemainingWork(
            batches=plan.batches_per_epoch,
            micro_batches=plan.micro_batches * plan.inner_epochs,
            eval_batches=eval_batches,
            epochs=config.num_epochs,
            evaluations=evaluations if tests else 0,
            ahead=bool(sample.async_depth),
        ),
        times=MeasuredTimes(
            sample=rollout * plan.sample_batch_size,
            reward=reward_seconds,
            train=training * plan.train_batch_size,
            first_eval=evaluation,
            next_eval=evaluation,
            warm_up=0.0,
        ),
        collectives=_collectives(config, plan, trained, sharded=sharded),
        checkpoint_bytes=checkpoint_bytes(trained, ema=train.ema),
        save_every=config.state_freq or config.save_freq,
        writes_in_background=config.use_lora,
    )


def count_trained_parameters(config: DiffusionConfig) -> int:
    """Return the number of trained parameters; 0 if it is unknown."""
    known = PARAMETERS.get(shape_of(config.pretrained.model))
    if known is None or config.train.lora_target_modules or config.train.lora_path:
        return 0
    return known.lora_per_rank * config.train.lora_rank if config.use_lora else known.all


def _collectives(
    config: DiffusionConfig, plan: BatchPlan, trained: int, *, sharded: bool
) -> list[Collective]:
    """Return the communication of an epoch; with sharded weights also that of sampling."""
    if not trained:
        return []
    if not sharded:
        return trained_collectives(trained, plan.updates)
    own = getattr(config, config.algorithm)
    with_kl = getattr(own, "kl_beta", getattr(own, "beta", 0.0)) > 0
    losses = plan.micro_batches * plan.inner_epochs * plan.trained_steps
    forward = plan.batches_per_epoch * config.sample.num_steps
    # a trained step gathers before its forward and backward pass, and for the reference
    return sharded_collectives(
        PARAMETERS[shape_of(config.pretrained.model)].all,
        trained,
        gathers=forward + losses * (2 + with_kl),
        reductions=plan.updates,
    )
