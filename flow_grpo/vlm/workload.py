"""Work and communication of a process per epoch, for flow_grpo/training/scaling.py; no torch."""

import math
from pathlib import Path

from flow_grpo.data.early_checks import is_small
from flow_grpo.data.mixing import parse_sources
from flow_grpo.errors import UserError
from flow_grpo.training.measurements import (
    PARAMETERS,
    VLM_SLOTS,
    Line,
    sample_seconds,
    shape_of,
)
from flow_grpo.training.scaling import (
    Collective,
    Workload,
    checkpoint_bytes,
    sharded_collectives,
    trained_collectives,
)
from flow_grpo.training.time_estimate import MeasuredTimes, RemainingWork, count_evaluations
from flow_grpo.vlm.fields import BRADLEY_TERRY, VlmConfig
from flow_grpo.vlm.losses import GIVEN_LOSSES
from flow_grpo.vlm.plan import VlmBatchPlan, build_plan
from flow_grpo.vlm.questions import build_questions


def plan_run(config: VlmConfig, num_processes: int) -> VlmBatchPlan:
    """Return the batch plan of a run that samples responses.

    Raises:
        UserError: If something does not divide, or for a run on given responses.
    """
    if config.train.loss in (*GIVEN_LOSSES, BRADLEY_TERRY):
        raise UserError(
            "is not supported by plan, which plans runs that sample responses",
            field="train.loss",
            value=config.train.loss,
            hint=f"use flow-grpo train-vlm --dry_run --world_size={num_processes}",
        )
    return build_plan(config.sample, config.train, num_processes)


def count_tests(config: VlmConfig, plan: VlmBatchPlan) -> int:
    """Return the number of questions of an evaluation; 0 if the dataset is not here.

    Raises:
        UserError: If the dataset has too few questions for an epoch.
    """
    sources = parse_sources(config.dataset)
    if not config.eval_dataset and all(is_small(Path(source.path)) for source in sources):
        return len(build_questions(config, plan).test)
    return config.eval_questions


def build_workload(
    config: VlmConfig,
    plan: VlmBatchPlan,
    line: Line,
    *,
    tests: int,
    reward_seconds: float = 0.0,
    sharded: bool = False,
) -> Workload:
    """Return the work of a process.

    A batch with fewer responses than the measured one takes as long as that one: decoding is
    limited by reading the weights. The lengths of prompts and responses are the measured ones.

    Args:
        config: The settings.
        plan: The batch plan.
        line: The measurement.
        tests: Questions of an evaluation.
        reward_seconds: Seconds to score a batch.
        sharded: Whether the weights are sharded (FSDP2, ZeRO-3).
    """
    sampling, training = sample_seconds(line, config, 1)
    slots = line.get("answers", VLM_SLOTS)
    own_tests = math.ceil(tests / plan.num_processes)
    batch = config.sample.batch_size
    evaluation = sampling * max(slots, min(batch, own_tests))
    trained = count_trained_parameters(config)
    evaluations = count_evaluations(
        -1, config.num_epochs, config.eval_freq, before=config.eval_before_training
    )
    return Workload(
        samples=plan.samples,
        seconds_per_sample=sampling + training * plan.inner_epochs,
        work=RemainingWork(
            batches=plan.batches,
            micro_batches=plan.samples_per_process * plan.inner_epochs,  # responses
            eval_batches=math.ceil(own_tests / batch),
            epochs=config.num_epochs,
            evaluations=evaluations if tests else 0,
        ),
        times=MeasuredTimes(
            sample=sampling * max(slots, plan.batch_size),
            reward=reward_seconds,
            train=training,
            first_eval=evaluation,
            next_eval=evaluation,
            warm_up=0.0,
        ),
        collectives=_collectives(config, plan, line, trained, sharded=sharded),
        checkpoint_bytes=checkpoint_bytes(trained, ema=config.train.ema),
        save_every=config.state_freq or config.save_freq,
        writes_in_background=config.use_lora,
    )


def count_trained_parameters(config: VlmConfig) -> int:
    """Return the number of trained parameters; 0 if it is unknown.

    Without LoRA, a frozen vision tower is counted too: it has less than a tenth of them.
    """
    known, train = PARAMETERS.get(shape_of(config.pretrained.model)), config.train
    if known is None or train.lora_target_modules or train.lora_path:
        return 0
    return known.lora_per_rank * train.lora_rank if config.use_lora else known.all


def _collectives(
    config: VlmConfig, plan: VlmBatchPlan, line: Line, trained: int, *, sharded: bool
) -> list[Collective]:
    """Return the communication of an epoch.

    Sharded weights are gathered once for each phase without gradients, and twice per micro-batch,
    whose gradients are reduced at once (docs/vlm/scaling.md).
    """
    if not trained:
        return []
    if not sharded:
        return trained_collectives(trained, plan.updates)
    response = line["sampling_tokens_per_s"] * line["sampling_s_per_answer"]  # tokens
    tokens = (line["prompt_tokens"] + response) * plan.samples_per_process / plan.updates_per_pass
    per_update = math.ceil(tokens / config.train.tokens_per_batch)
    micro_batches = per_update * plan.updates
    phases = 1 + config.train.recompute_old
    return sharded_collectives(
        PARAMETERS[shape_of(config.pretrained.model)].all,
        trained,
        gathers=phases + 2 * micro_batches,
        reductions=micro_batches,
    )
