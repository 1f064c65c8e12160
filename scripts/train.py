"""Train a flow-matching model with Flow-GRPO.

    python scripts/train.py --config config/grpo.py:PRESET [--config.sample.num_steps=8 ...]
    accelerate launch scripts/train.py --config ...

One epoch: sample a group of images per prompt along stochastic trajectories, score them, turn
scores into per-prompt advantages, and update the weights with the clipped policy objective.
"""

import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ml_collections import ConfigDict

from config.build import Session, build_session, draw_steps, grpo_settings, image_size
from flow_grpo import cli, tracking
from flow_grpo.advantages import compute_advantages
from flow_grpo.checkpoint import save_checkpoint
from flow_grpo.data import Batch, epoch_batches
from flow_grpo.distributed import gather_rows
from flow_grpo.errors import UserError
from flow_grpo.evaluation import evaluate
from flow_grpo.grpo import grpo_step_loss
from flow_grpo.metrics import TrainingStats, off_policy_warning, reward_metrics
from flow_grpo.rewards import TOTAL, to_pil
from flow_grpo.rollout import (
    Trajectory,
    group_generators,
    initial_noise,
    sample_generators,
    sample_trajectory,
)
from flow_grpo.seeding import Stream, numpy_rng

logger = logging.getLogger("flow_grpo")


@dataclass
class SampledBatch:
    batch: Batch
    trajectory: Trajectory
    images: torch.Tensor | None  # (B, 3, H, W), of the first batch, to show
    scores: Future  # {reward name: (B,)}, computed in the background


def main(config: ConfigDict) -> None:
    session = build_session(config)
    logger.info("run directory         %s", session.folder)
    logger.info(session.plan.describe())
    timer = tracking.Timer()
    with timer("eval"):
        before = run_evaluation(session, epoch=0)
    log(session, 0, before, timer)

    for epoch in range(config.num_epochs):
        done, timer = epoch + 1, tracking.Timer()
        last = done == config.num_epochs
        show = last or (config.eval_freq > 0 and done % config.eval_freq == 0)

        with timer("sample"):
            samples = sample_epoch(session, epoch)
        with timer("reward_wait"):
            rewards, groups, index = collect_rewards(session, samples)
        if np.isnan(rewards[TOTAL]).all():
            raise UserError(f"none of the samples of epoch {done} could be scored")
        advantages = compute_advantages(
            {name: values for name, values in rewards.items() if name != TOTAL},
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
        if show:
            with timer("eval"):
                save_training_samples(session, done, samples[0], own[0])
                metrics |= run_evaluation(session, done)
        if last or (config.save_freq > 0 and done % config.save_freq == 0):
            with timer("save"):
                save(session)
        log(session, done, metrics, timer)

    session.reward.close()
    session.accelerator.wait_for_everyone()
    session.accelerator.end_training()


def sample_epoch(session: Session, epoch: int) -> list[SampledBatch]:
    """Draw this process's trajectories; each batch is scored while the next one is sampled."""
    config, plan, adapter = session.config, session.plan, session.adapter
    device = session.accelerator.device
    dynamics = session.dynamics(config.sample.num_steps)
    shape = adapter.latent_shape(*image_size(config))
    steps = draw_steps(config, epoch)
    batches = epoch_batches(
        rows=len(session.prompts),
        groups=plan.groups,
        group_size=plan.group_size,
        batch_size=plan.sample_batch_size,
        micro_batch_size=plan.train_batch_size,
        process=session.accelerator.process_index,
        num_processes=session.accelerator.num_processes,
        rng=numpy_rng(config.seed, Stream.PROMPTS, epoch),
    )
    samples = []
    background = ThreadPoolExecutor(1)
    for batch in session.progress(batches, f"epoch {epoch + 1} sample"):
        chosen = [session.prompts[row] for row in batch.row]
        prompts = [p.prompt for p in chosen]
        negative = [p.negative_prompt for p in chosen] if dynamics.guidance_scale > 1 else None
        generators = sample_generators(config.seed, epoch, batch.index.tolist())
        same = config.sample.same_latent
        first = group_generators(config.seed, epoch, batch.row.tolist()) if same else generators
        latents, trajectory = sample_trajectory(
            adapter,
            session.policy.module,
            dynamics,
            initial_noise(first, shape, device),
            adapter.encode(prompts, negative),
            steps=steps,
            generators=generators,
        )
        images = adapter.decode(latents)
        scores = background.submit(session.reward, images, prompts, [p.metadata for p in chosen])
        samples.append(SampledBatch(batch, trajectory, None if samples else images, scores))
    background.shutdown(wait=False)
    return samples


def collect_rewards(
    session: Session, samples: list[SampledBatch]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rewards of all processes, their group ids and sample indices, in the samples' order."""
    scores = [s.scores.result() for s in session.progress(samples, "wait for rewards")]
    columns = {
        name: torch.from_numpy(np.concatenate([s[name] for s in scores]))
        for name in session.reward.names
    }
    groups = torch.from_numpy(np.concatenate([s.batch.row for s in samples]))
    index = torch.from_numpy(np.concatenate([s.batch.index for s in samples]))
    index, columns = gather_rows(session.accelerator, index, {**columns, "group": groups})
    groups = columns.pop("group").numpy()
    return {name: values.numpy() for name, values in columns.items()}, groups, index.numpy()


def train_epoch(
    session: Session, epoch: int, trajectories: list[Trajectory], advantages: list[np.ndarray]
) -> dict[str, float]:
    """Update the weights on the epoch's trajectories.

    Whole micro-batches are shuffled, never their members: with the batches of sampling, the
    ratio before the first update is exactly 1.
    """
    config, accelerator, policy = session.config, session.accelerator, session.policy
    dynamics = session.dynamics(config.sample.num_steps)
    settings = grpo_settings(config)
    size = session.plan.train_batch_size
    micro_batches = [
        (trajectory[i : i + size], torch.from_numpy(advantage[i : i + size]).to(trajectory.latents))
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        for i in range(0, len(trajectory), size)
    ]
    stats, updates_before = TrainingStats(), session.step
    for inner in range(session.plan.inner_epochs):
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner).permutation(len(micro_batches))
        for m in session.progress(order, f"epoch {epoch + 1} train"):
            trajectory, advantage = micro_batches[m]
            for j in range(len(trajectory.steps)):
                with accelerator.accumulate(policy.module):
                    loss = grpo_step_loss(policy, dynamics, trajectory, j, advantage, settings)
                    accelerator.backward(loss.per_sample.mean())
                    stats.add(loss, on_policy=session.step == updates_before)
                    if accelerator.sync_gradients:
                        stats.add_grad_norm(
                            accelerator.clip_grad_norm_(
                                policy.parameters(), config.train.max_grad_norm
                            )
                        )
                    session.optimizer.step()
                    session.optimizer.zero_grad()
                if accelerator.sync_gradients:
                    session.step += 1
                    if session.ema is not None and not accelerator.optimizer_step_was_skipped:
                        session.ema.update(session.step)
    metrics = {**stats.metrics(accelerator), "train/lr": session.optimizer.param_groups[0]["lr"]}
    if not math.isfinite(metrics["train/loss"]):
        raise UserError(
            f"the loss is not finite after step {session.step}; lower train.learning_rate or use "
            "mixed_precision=no; the last checkpoint is intact"
        )
    clip = min(settings.clip_low, settings.clip_high)
    if warning := off_policy_warning(metrics["train/first_update_ratio_dev"], clip):
        logger.warning(warning)
    return metrics


def run_evaluation(session: Session, epoch: int) -> dict[str, float]:
    """Rewards on the test prompts: moving-average weights, no noise, a fixed seed per prompt."""
    config = session.config
    with session.averaged():
        result = evaluate(
            session.adapter,
            session.policy.module,
            session.reward,
            session.test_prompts,
            session.dynamics(config.sample.eval_num_steps),
            accelerator=session.accelerator,
            size=image_size(config),
            batch_size=config.sample.test_batch_size,
            seed=config.seed,
            keep_images=config.log_images,
        )
    if session.accelerator.is_main_process:
        folder = session.folder / "samples" / f"eval-{epoch:05d}"
        prompts = [p.prompt for p in session.test_prompts]
        tracking.save_samples(folder, result.images, prompt=prompts, **result.scores)
    return {f"eval/{name}": value for name, value in result.means().items()}


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


def save(session: Session) -> None:
    def write(folder: Path) -> None:
        session.policy.save(folder)
        if session.ema is not None:
            with session.ema.applied():
                session.policy.save(folder, prefix="ema_")

    if session.accelerator.is_main_process:
        root = session.folder / "checkpoints"
        save_checkpoint(root, session.step, write, session.config.num_checkpoint_limit)
    session.accelerator.wait_for_everyone()


def log(session: Session, epoch: int, metrics: dict[str, float], timer: tracking.Timer) -> None:
    values = {"epoch": epoch, "step": session.step, **metrics, **timer.metrics()}
    if session.accelerator.is_main_process:
        tracking.append_metrics(session.folder / "metrics.jsonl", values)
    session.accelerator.log(values, step=session.step)
    shown = {k: v for k, v in metrics.items() if k == "reward/avg" or k.startswith("eval/")}
    line = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
    logger.info("epoch %d/%d  %s", epoch, session.config.num_epochs, line)


if __name__ == "__main__":
    cli.run(main)
