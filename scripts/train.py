"""Train a flow-matching model with Flow-GRPO.

    python scripts/train.py --config config/grpo.py:PRESET [--config.sample.num_steps=8 ...]
    accelerate launch scripts/train.py --config ...

One epoch: sample a group of images per prompt along stochastic trajectories, score them, turn
scores into per-prompt advantages, and update the weights with the clipped policy objective.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType
from ml_collections import ConfigDict

from flow_grpo.advantages import compute_advantages
from flow_grpo.algorithms.grpo import grpo_step_loss, reference_velocities, with_gradient
from flow_grpo.errors import RewardOutage, Stopped, UserError
from flow_grpo.rewards import TOTAL, PendingScores
from flow_grpo.rewards.pictures import to_pil
from flow_grpo.run import cli, tracking
from flow_grpo.run.checkpoint import STATE, save_checkpoint
from flow_grpo.run.gpu import lighter_evaluation, lighter_training
from flow_grpo.run.memory import advice_when_short
from flow_grpo.run.outage import describe_outage
from flow_grpo.run.session import (
    Session,
    build_session,
    draw_steps,
    grpo_settings,
    image_size,
)
from flow_grpo.run.stopping import StopRequested
from flow_grpo.sampling.data import Batch, Prompt, epoch_batches
from flow_grpo.sampling.rollout import (
    Trajectory,
    encode_ahead,
    encode_prompts,
    group_generators,
    initial_noise,
    sample_generators,
    sample_trajectory,
)
from flow_grpo.sampling.seeding import Stream, numpy_rng
from flow_grpo.training.distributed import gather_rows, gather_scores
from flow_grpo.training.evaluation import evaluate
from flow_grpo.training.metrics import (
    TrainingStats,
    off_policy_warning,
    reward_metrics,
    score_metrics,
)

logger = logging.getLogger("flow_grpo")


@dataclass
class SampledBatch:
    batch: Batch
    trajectory: Trajectory
    images: torch.Tensor | None  # (B, 3, H, W), of the first batch, to show
    scores: PendingScores  # {reward name: (B,)}, computed in the background


def main(config: ConfigDict) -> Session:
    session = build_session(config)
    logger.info("run directory         %s", session.folder)
    logger.info(session.plan.describe())
    if session.adapter.compiled:
        logger.info("the first epoch compiles the model, which takes a minute or two")
    try:
        with session.stop, advice_when_short(lighter_training(session.config, session.plan)):
            train(session)
    except StopRequested as request:
        if session.progress.record.get("step") == session.progress.step:  # else it is redone
            save(session)
        where = f"in epoch {session.progress.epoch + 1}"
        raise Stopped(f"stopped {where}; {session.how_to_go_on()}") from request
    finally:
        session.close()
    session.accelerator.wait_for_everyone()
    session.accelerator.end_training()
    logger.info("finished: %s/checkpoints/latest, pictures in samples/", session.folder)
    return session


def train(session: Session) -> None:
    config, progress = session.config, session.progress
    if progress.epoch < 0:
        timer = tracking.Timer()
        with timer("eval"):
            metrics = run_evaluation(session, epoch=0)
        finish_epoch(session, 0, metrics, timer)

    for epoch in range(progress.epoch, config.num_epochs):
        done, timer = epoch + 1, tracking.Timer()
        with timer("sample"):
            samples = sample_epoch(session, epoch)
        with timer("reward_wait"):
            rewards, groups, index = collect_rewards(session, samples)
        session.stop.check()
        if outage := describe_outage(
            session.accelerator, session.reward, rewards, config.max_failed_fraction
        ):
            raise RewardOutage(
                f"epoch {done}: {outage}; saved {save(session)}; {session.how_to_go_on()}"
            )
        session.reward.rest()
        advantages = compute_advantages(
            {name: rewards[name] for name in session.reward.weights},
            groups,
            estimator=config.train.advantage,
            scale="batch" if config.sample.global_std else "group",
            weights=session.reward.weights,
        )
        own = [advantages[np.searchsorted(index, s.batch.index)] for s in samples]
        with timer("train"):
            training = train_epoch(session, epoch, [s.trajectory for s in samples], own)

        metrics = {
            **reward_metrics(rewards, groups),
            **training,
            "perf/images_per_s": session.plan.samples / sum(timer.seconds.values()),
            "perf/peak_mem_gb": tracking.peak_memory_gb(session.accelerator.device),
        }
        if is_due(done, config.eval_freq, config.num_epochs):
            with timer("eval"):
                save_training_samples(session, done, samples[0], own[0])
                metrics |= run_evaluation(session, done)
        finish_epoch(session, done, metrics, timer)


def is_due(epoch: int, every: int, last: int) -> bool:
    return epoch == last or (every > 0 and epoch % every == 0)


def sample_epoch(session: Session, epoch: int) -> list[SampledBatch]:
    """Draw this process's trajectories; each batch is scored while the next one is sampled."""
    config, adapter, device = session.config, session.adapter, session.accelerator.device
    dynamics = session.dynamics(config.sample.num_steps)
    shape = adapter.latent_shape(*image_size(config))
    steps = draw_steps(config, epoch)
    batches = draw_batches(session, epoch)
    encode_ahead(adapter, prompts_of(session, batches), dynamics)
    samples, without_noise = [], session.without_noise(epoch)
    for batch in session.bar(batches, f"epoch {epoch + 1} sample"):
        session.stop.check()
        chosen = [session.prompts[row] for row in batch.row]
        generators = sample_generators(config.seed, epoch, batch.index.tolist())
        same = config.sample.same_latent
        first = group_generators(config.seed, epoch, batch.row.tolist()) if same else generators
        latents, trajectory = sample_trajectory(
            adapter,
            session.policy.module,
            dynamics,
            initial_noise(first, shape, device),
            encode_prompts(adapter, chosen, dynamics),
            steps=steps,
            generators=generators,
            without_noise=without_noise,
        )
        images = adapter.decode(latents)
        scores = session.reward.submit(
            images, [p.prompt for p in chosen], [p.metadata for p in chosen]
        )
        samples.append(SampledBatch(batch, trajectory, None if samples else images, scores))
    # while a GPU is still at the last batch, unless the encoders would have to join it there
    if epoch + 1 < config.num_epochs and not config.offload_idle:
        encode_ahead(adapter, prompts_of(session, draw_batches(session, epoch + 1)), dynamics)
    return samples


def draw_batches(session: Session, epoch: int) -> list[Batch]:
    """What this process samples in an epoch."""
    plan, accelerator = session.plan, session.accelerator
    return epoch_batches(
        rows=len(session.prompts),
        groups=plan.groups,
        group_size=plan.group_size,
        batch_size=plan.sample_batch_size,
        updates=plan.updates_per_pass,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
        rng=numpy_rng(session.config.seed, Stream.PROMPTS, epoch),
    )


def prompts_of(session: Session, batches: list[Batch]) -> list[Prompt]:
    return [session.prompts[row] for batch in batches for row in batch.row]


def collect_rewards(
    session: Session, samples: list[SampledBatch]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rewards of all processes, their group ids and sample indices, in the samples' order."""
    scores = [s.scores.result() for s in session.bar(samples, "wait for rewards")]
    groups = np.concatenate([s.batch.row for s in samples])
    index = np.concatenate([s.batch.index for s in samples])
    rewards = gather_scores(session.accelerator, index, scores)
    all_index, columns = gather_rows(
        session.accelerator, torch.from_numpy(index), {"group": torch.from_numpy(groups)}
    )
    return rewards, columns["group"].numpy(), all_index.numpy()


def train_epoch(
    session: Session, epoch: int, trajectories: list[Trajectory], advantages: list[np.ndarray]
) -> dict[str, float]:
    """Update the weights on the epoch's trajectories.

    Micro-batches are slices of the sampling batches, in their order: with equal batches the ratio
    before the first update is exactly 1, but for rounding where samples are left out. Each pass
    takes the updates in an order of its own, their samples stay the same.
    """
    config, accelerator, policy = session.config, session.accelerator, session.policy
    dynamics = session.dynamics(config.sample.num_steps)
    settings = grpo_settings(config)
    size, per_update = session.plan.train_batch_size, session.plan.accumulation_steps
    micro_batches = [
        (trajectory[i : i + size], torch.from_numpy(advantage[i : i + size]).to(trajectory.latents))
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        for i in range(0, len(trajectory), size)
    ]
    # Not in half precision or on a GPU, where batches of another size round too differently.
    on_cpu = accelerator.device.type == "cpu"
    if settings.beta == 0 and config.mixed_precision == "no" and on_cpu:
        micro_batches = [with_gradient(*micro_batch) for micro_batch in micro_batches]
    stats, updates_before = TrainingStats(), session.progress.step
    for inner in range(session.plan.inner_epochs):
        updates = np.arange(len(micro_batches)).reshape(-1, per_update)
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner).permutation(updates)
        for m in session.bar(order.flatten(), f"epoch {epoch + 1} train"):
            trajectory, advantage = micro_batches[m]
            references = None
            if settings.beta > 0:
                references = reference_velocities(policy, dynamics, trajectory)
            for j in range(len(trajectory.steps)):
                on_policy = session.progress.step == updates_before
                with accelerator.accumulate(policy.module):
                    loss = grpo_step_loss(
                        policy,
                        dynamics,
                        trajectory,
                        j,
                        advantage,
                        settings,
                        reference=None if references is None else references[:, j],
                    )
                    accelerator.backward(loss.per_sample.sum() / size)
                    stats.add(loss, on_policy=on_policy, left_out=size - len(advantage))
                    if accelerator.sync_gradients:
                        stats.add_grad_norm(
                            accelerator.clip_grad_norm_(
                                policy.parameters(), config.train.max_grad_norm
                            )
                        )
                    session.optimizer.step()
                    session.optimizer.zero_grad()
                if accelerator.sync_gradients:
                    session.progress.step += 1
                    if session.ema is not None and not accelerator.optimizer_step_was_skipped:
                        session.ema.update(session.progress.step)
                    session.stop.check()
    metrics = {**stats.metrics(accelerator), "train/lr": session.optimizer.param_groups[0]["lr"]}
    if not math.isfinite(metrics["train/loss"]):
        raise UserError(
            f"the loss is not finite after step {session.progress.step}; lower "
            "train.learning_rate or use mixed_precision=no; the last checkpoint is intact"
        )
    clip = min(settings.clip_low, settings.clip_high)
    if warning := off_policy_warning(metrics["train/first_update_ratio_dev"], clip):
        logger.warning(warning)
    return metrics


def run_evaluation(session: Session, epoch: int) -> dict[str, float]:
    """Rewards on the test prompts: moving-average weights, no noise, a fixed seed per prompt."""
    config = session.config
    with session.averaged(), advice_when_short(lighter_evaluation(config)):
        result = evaluate(
            session.adapter,
            session.policy.module,
            session.eval_reward,
            session.test_prompts,
            session.dynamics(config.sample.eval_num_steps),
            accelerator=session.accelerator,
            size=image_size(config),
            batch_size=config.sample.test_batch_size,
            seed=config.seed,
            keep_images=config.log_images,
            between_batches=session.stop.check,
        )
    if session.accelerator.is_main_process:
        folder = session.folder / "samples" / f"eval-{epoch:05d}"
        prompts = [p.prompt for p in session.test_prompts]
        tracking.save_samples(folder, result.images, prompt=prompts, **result.scores)
    session.eval_reward.rest()
    outage = describe_outage(
        session.accelerator, session.eval_reward, result.scores, config.max_failed_fraction
    )
    if outage and epoch == 0:
        raise RewardOutage(f"evaluation before training: {outage}")
    metrics = score_metrics("eval", result.scores)
    if outage:
        logger.warning("evaluation after epoch %d: %s", epoch, outage)
        metrics[f"eval/{TOTAL}"] = math.nan  # what is left is no measure of the model
    return metrics


def save_training_samples(
    session: Session, epoch: int, sampled: SampledBatch, advantages: np.ndarray
) -> None:
    if session.accelerator.is_main_process:
        tracking.save_samples(
            session.folder / "samples" / f"train-{epoch:05d}",
            to_pil(sampled.images[: session.config.log_images]),
            prompt=[session.prompts[row].prompt for row in sampled.batch.row],
            **sampled.scores.result(),
            advantage=advantages,
        )


def finish_epoch(
    session: Session, epoch: int, metrics: dict[str, float], timer: tracking.Timer
) -> None:
    """Write down what the epoch did, so that a run that is killed goes on from here."""
    config, progress = session.config, session.progress
    session.check_lock()
    score = metrics.get(f"eval/{TOTAL}", math.nan)
    is_best = score > (-math.inf if progress.best is None else progress.best)  # NaN never is
    progress.epoch = epoch
    progress.best = score if is_best else progress.best
    progress.kept = epoch > 0 and (is_best or is_due(epoch, config.save_freq, config.num_epochs))
    progress.record = tracking.record(epoch, progress.step, metrics, timer)
    if progress.kept or (epoch % config.state_freq == 0 and can_save(session)):
        with timer("save"):
            save(session, best=is_best)
    log(session, tracking.record(epoch, progress.step, metrics, timer))


def can_save(session: Session) -> bool:
    """Torch takes an empty step of Adam to collect the state of an FSDP optimizer that has taken
    none, which changes its first real one."""
    fsdp = session.accelerator.distributed_type == DistributedType.FSDP
    return session.progress.step > 0 or not fsdp


def save(session: Session, *, best: bool = False) -> Path:
    """Write a checkpoint of everything as it is now; returns its folder."""
    accelerator, policy = session.accelerator, session.policy
    session.check_lock()

    def write(folder: Path) -> None:
        accelerator.save_state(str(folder / STATE), exclude_frozen_parameters=True)
        policy.save(folder)
        if session.ema is not None:
            with session.ema.applied():
                policy.save(folder, prefix="ema_")
        if accelerator.is_main_process:
            session.progress.write(folder)

    return save_checkpoint(
        accelerator,
        session.folder / "checkpoints",
        session.progress.step,
        write,
        keep=session.config.num_checkpoint_limit,
        best=best,
    )


def log(session: Session, record: dict[str, float | None]) -> None:
    if session.accelerator.is_main_process:
        tracking.append_metrics(session.folder / "metrics.jsonl", record)
    session.accelerator.log(record, step=record["step"])
    shown = {k: v for k, v in record.items() if k == "reward/avg" or is_eval_mean(k)}
    line = "  ".join(f"{name} {value:.4f}" for name, value in shown.items() if value is not None)
    logger.info("epoch %d/%d  %s", record["epoch"], session.config.num_epochs, line)


def is_eval_mean(name: str) -> bool:
    return name.startswith("eval/") and name.count("/") == 1 and name != "eval/failed"


if __name__ == "__main__":
    cli.run(main)
