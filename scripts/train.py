"""Train a flow-matching model with online reinforcement learning.

    python scripts/train.py --config config/grpo.py:PRESET [--config.sample.num_steps=8 ...]
    accelerate launch scripts/train.py --config ... [--dry_run]

One epoch: sample a group of images per prompt, score them, turn scores into credit for each sample,
and update the weights. What differs between algorithms is in flow_grpo/draw/algorithms.
"""

if __name__ == "__main__":
    import flow_grpo.config.early  # noqa: F401  first: the others take seconds

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate.utils import gather_object
from ml_collections import ConfigDict

from flow_grpo.config import command_line
from flow_grpo.data.prompts import Draw, Prompt, epoch_draws
from flow_grpo.data.seeding import Stream, numpy_rng, sample_generators
from flow_grpo.draw import dry
from flow_grpo.draw.algorithms import Batch
from flow_grpo.draw.algorithms.base import with_gradient
from flow_grpo.draw.evaluation import evaluate
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.plan import lighter_evaluation, lighter_training
from flow_grpo.draw.results import write_training_samples
from flow_grpo.draw.rollout import (
    Denoiser,
    Trajectory,
    group_distance,
    group_generators,
    initial_noise,
)
from flow_grpo.draw.session import Session, build_dynamics, build_session, image_size
from flow_grpo.rewards import TOTAL, PendingScores
from flow_grpo.run.building import advice_when_short
from flow_grpo.run.distributed import accumulated, gather_scores
from flow_grpo.run.metrics import Scored, Timer, TrainingStats, peak_memory_gb, reward_metrics
from flow_grpo.run.session import (
    carry_out,
    evaluation_metrics,
    finish_epoch,
    is_due,
    stop_at_outage,
    take_update,
    training_metrics,
    write_samples,
)
from flow_grpo.speed.transfer import send

logger = logging.getLogger("flow_grpo")
BASELINE = f"{TOTAL}/baseline"  # a name that no reward can have


@dataclass
class SampledBatch:
    draw: Draw
    trajectory: Trajectory
    images: torch.Tensor | None  # (B, 3, H, W) or (B, F, 3, H, W), of the first group, to show
    scores: PendingScores  # {reward name: (B,)}, computed in the background
    distance: torch.Tensor  # (2,), of pictures within a group: see group_distance
    step: int  # optimizer updates of the weights that sampled it


def main(config: ConfigDict) -> Session:
    session = build_session(config)
    return carry_out(session, train, lighter_training(config, session.plan))


def train(session: Session) -> None:
    config, progress = session.config, session.progress
    if session.adapter.compiled:
        logger.info("the first epoch compiles the model, which takes a minute or two")
    if progress.epoch < 0:
        timer = Timer()
        with timer("eval"):
            metrics = run_evaluation(session, epoch=0)
        finish_epoch(session, 0, metrics, timer)

    ahead = None
    for epoch in range(progress.epoch, config.num_epochs):
        done, timer = epoch + 1, Timer()
        with timer("sample"):
            samples = ahead or sample_behind(session, epoch)
            ahead = sample_ahead(session, done)
        with timer("reward_wait"):
            scored = collect_rewards(session, epoch, samples)
        session.stop.check()
        drawn = sum(len(s.trajectory) for s in samples)
        session.policy.count(drawn * config.sample.num_steps)
        stop_at_outage(session, done, scored.rewards)
        if ahead is None:  # else they are at work
            session.reward.rest()
        credit = session.algorithm.credit(scored)
        session.remember_behaviour()
        with timer("train"):
            training = train_epoch(session, epoch, samples, credit)
            session.algorithm.after_epoch(session.policy, progress.step)
            training |= session.algorithm.adapt(training)
            progress.algorithm = session.algorithm.state_dict()

        metrics = {
            **reward_metrics(scored.rewards, scored.groups),
            **training,
            "reward/diversity": mean_distance(session, samples),
            "perf/images_per_s": session.plan.samples / sum(timer.seconds.values()),
            "perf/peak_mem_gb": peak_memory_gb(session.accelerator.device),
            "perf/passes": count_passes(session),
        }
        if is_due(done, config.eval_freq, config.num_epochs):
            with timer("eval"):
                shown = [(s.draw, s.images) for s in samples if s.images is not None]
                write_training_samples(session, done, shown, scored, credit)
                metrics |= run_evaluation(session, done)
        finish_epoch(session, done, metrics, timer)


def sample_behind(session: Session, epoch: int) -> list[SampledBatch]:
    """An epoch that was not sampled ahead: the first, or the first of a resumed run, whose stale
    weights sample it again as they did."""
    behind = session.plan.updates if session.stale is not None and epoch > 0 else 0
    with session.sampled_by():
        return sample_epoch(session, epoch, session.progress.step - behind)


def sample_ahead(session: Session, epoch: int) -> list[SampledBatch] | None:
    """With `sample.async_depth`: the next epoch, while rewards of this one are computed."""
    if session.stale is None or epoch >= session.config.num_epochs:
        return None
    with session.behaviour():
        return sample_epoch(session, epoch, session.progress.step)


def sample_epoch(session: Session, epoch: int, step: int = 0) -> list[SampledBatch]:
    """Draw this process's samples; each batch is scored while the next one is sampled.

    `step`: optimizer updates of the weights that sample.
    """
    config, policy, algorithm = session.config, session.policy, session.algorithm
    draws, samples, without_noise = draw_epoch(session, epoch), [], session.without_noise(epoch)
    policy.denoiser.encode_ahead(prompts_of(session, draws))
    for draw in session.bar(draws, f"epoch {epoch + 1} sample"):
        session.stop.check()
        session.reward.end_if_broken()
        chosen = prompts_of(session, [draw])
        # a sample's own generator draws its first noise and then that of its steps
        generators = sample_generators(config.seed, epoch, draw.index.tolist())
        same = config.sample.same_latent
        first = group_generators(config.seed, epoch, draw.row.tolist()) if same else generators
        trajectory = policy.denoiser.sample(
            first_noise(session, first),
            policy.denoiser.encode(chosen),
            steps=session.noisy_steps(epoch, int(draw.index[0])),
            generators=generators,
            without_noise=without_noise,
            keep_means=algorithm.keeps_means,
        )
        images, scores = decode_and_score(session, trajectory, chosen)
        distance = group_distance(images, draw.row)
        shown = None if len(samples) * len(images) >= session.plan.group_size else images
        samples.append(SampledBatch(draw, trajectory, shown, scores, distance, step))
    # while a GPU is still at the last batch, unless the encoders would have to join it there
    if epoch + 1 < config.num_epochs and not config.offload_idle:
        policy.denoiser.encode_ahead(prompts_of(session, draw_epoch(session, epoch + 1)))
    return samples


def first_noise(session: Session, generators: list[torch.Generator]) -> torch.Tensor:
    shape = session.adapter.latent_shape(*image_size(session.config))
    return initial_noise(generators, shape, session.accelerator.device)


def decode_and_score(
    session: Session, trajectory: Trajectory, chosen: list[Prompt]
) -> tuple[torch.Tensor, PendingScores]:
    images = session.adapter.decode(trajectory.final)
    return images, session.reward.submit(
        images, [p.prompt for p in chosen], [p.metadata for p in chosen]
    )


def draw_epoch(session: Session, epoch: int) -> list[Draw]:
    """What this process samples in an epoch."""
    plan, accelerator = session.plan, session.accelerator
    return epoch_draws(
        rows=len(session.prompts),
        groups=plan.groups,
        group_size=plan.group_size,
        batch_size=plan.sample_batch_size,
        updates=plan.updates_per_pass,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
        rng=numpy_rng(session.config.seed, Stream.PROMPTS, epoch),
        sets=session.prompt_sets,
    )


def prompts_of(session: Session, draws: list[Draw]) -> list[Prompt]:
    return [session.prompts[row] for draw in draws for row in draw.row]


def collect_rewards(session: Session, epoch: int, samples: list[SampledBatch]) -> Scored:
    """The scores of all processes, in the samples' order."""
    scores = [s.scores.result() for s in session.bar(samples, "wait for rewards")]
    if session.config.train.advantage == "remax":
        for column, score in zip(baselines(session, epoch, samples), scores, strict=True):
            score[BASELINE] = column
    index = np.concatenate([s.draw.index for s in samples])
    rewards = gather_scores(session.accelerator, index, scores)
    groups = np.arange(len(rewards[TOTAL])) // session.plan.group_size
    baseline = rewards.pop(BASELINE, None)
    reward = session.reward
    return Scored(rewards, groups, reward.weights, baseline, reward.judges)


def baselines(session: Session, epoch: int, samples: list[SampledBatch]) -> list[np.ndarray]:
    """For each sample the reward of one without noise of the same prompt and weights, which
    starts from a noise that its group shares."""
    config, denoiser, size = session.config, session.policy.denoiser, len(samples[0].draw.row)
    rows = list(dict.fromkeys(row for s in samples for row in s.draw.row.tolist()))
    # weights that are shared out are run by all processes together: equally often on each
    most, pending = max(gather_object([len(rows)])), []
    for start in range(0, most, size):
        part = (rows[start : start + size] + rows[:1] * size)[:size]  # batches of one size
        chosen = [session.prompts[row] for row in part]
        noise = first_noise(session, group_generators(config.seed, epoch, part))
        with session.sampled_by():
            trajectory = denoiser.sample(noise, denoiser.encode(chosen))
        session.policy.count(len(trajectory) * config.sample.num_steps)
        pending.append(decode_and_score(session, trajectory, chosen)[1])
    totals = np.concatenate([scores.result()[TOTAL] for scores in pending])
    by_row = dict(zip(rows, totals, strict=False))
    return [np.array([by_row[row] for row in s.draw.row.tolist()]) for s in samples]


def train_epoch(
    session: Session, epoch: int, samples: list[SampledBatch], credit: np.ndarray
) -> dict[str, float]:
    """Update the weights on the epoch's samples.

    Micro-batches are slices of the sampling batches, in their order: with equal batches the ratio
    before the first update is exactly 1, but for rounding where samples are left out. Each pass
    takes the updates in an order of its own, their samples stay the same.
    """
    config, accelerator, policy = session.config, session.accelerator, session.policy
    algorithm, plan, stats = session.algorithm, session.plan, TrainingStats()
    sampled_at, losses = samples[0].step, algorithm.losses_per_sample
    staleness = session.progress.step - sampled_at
    updates = in_updates(session, samples, credit)
    for inner in range(plan.inner_epochs):
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner).permutation(len(updates))
        for n, u in enumerate(order, 1):
            batches = algorithm.batches(updates[u], plan.train_batch_size)
            kept = with_gradient(algorithm, batches, **session.may_leave_out())
            stats.leave_out((algorithm.trained_samples - sum(map(len, kept))) * losses)
            share = len(batches) / algorithm.trained_samples
            seed, device = (config.seed, epoch, inner), accelerator.device
            kept = [replace(b, credit=send(b.credit, device), seed=seed) for b in kept]
            prepared = algorithm.prepared(policy, kept)
            name = f"epoch {epoch + 1} train {n}/{len(order)}"
            bar = session.bar(prepared, name, len(kept))
            steps = ((batch, fixed, j) for batch, fixed in bar for j in range(losses))
            count = len(kept) * losses
            for batch, fixed, j in accumulated(accelerator, policy.module, steps, count):
                loss = algorithm.loss(policy, batch, fixed, j)
                # accelerate divides it by the number of losses, also of those left out
                accelerator.backward(loss.per_sample.sum() * share)
                stats.add(loss, on_policy=session.progress.step == sampled_at)
            take_update(session, stats)
    metrics = training_metrics(session, stats)
    if algorithm.trust:
        metrics["train/clip_range"] = algorithm.trust
    if starts := [s.trajectory.steps[0] for s in samples if s.trajectory.steps]:
        metrics["train/noisy_from"] = min(starts)
    if session.stale is not None:
        metrics["train/staleness"] = staleness
    return metrics


def in_updates(
    session: Session, samples: list[SampledBatch], credit: np.ndarray
) -> list[list[Batch]]:
    """The micro-batches of each update, on this process."""
    plan = session.plan
    size, per_update = plan.train_batch_size, plan.accumulation_steps
    micro_batches = [
        Batch(s.trajectory[part], own.to(s.trajectory.final.dtype), index, index // plan.group_size)
        for s in samples
        for part in (slice(i, i + size) for i in range(0, len(s.trajectory), size))
        for index in (s.draw.index[part],)
        for own in (torch.from_numpy(credit[index]),)
    ]
    return [micro_batches[i : i + per_update] for i in range(0, len(micro_batches), per_update)]


def mean_distance(session: Session, samples: list[SampledBatch]) -> float:
    total, count = session.accelerator.reduce(torch.stack([s.distance for s in samples]).sum(0))
    return float(total / count) if count else math.nan


def count_passes(session: Session) -> int:
    """Passes of the transformer over samples so far: 1 forward, 3 forward and backward."""
    policy, progress = session.policy, session.progress
    passes = torch.tensor(float(policy.passes), device=session.accelerator.device)
    policy.passes = 0
    progress.passes += round(float(session.accelerator.reduce(passes)))
    return progress.passes


def run_evaluation(session: Session, epoch: int) -> dict[str, float]:
    """Rewards on the test prompts: moving-average weights, no noise, a fixed seed per prompt."""
    config = session.config
    with session.averaged(), advice_when_short(lighter_evaluation(config)):
        dynamics = build_dynamics(config, session.adapter, config.sample.eval_num_steps)
        result = evaluate(
            Denoiser(session.adapter, session.policy.module, dynamics),
            session.eval_reward,
            session.test_prompts,
            accelerator=session.accelerator,
            size=image_size(config),
            batch_size=config.sample.test_batch_size,
            seed=config.seed,
            keep_images=config.log_images,
            between_batches=session.stop.check,
        )
    prompts = [p.prompt for p in session.test_prompts]
    write_samples(session, "eval", epoch, result.images, prompt=prompts, **result.scores)
    session.eval_reward.rest()
    return evaluation_metrics(session, epoch, result.scores, session.test_sets())


if __name__ == "__main__":
    loop = dry.Loop(sample_behind, collect_rewards, train_epoch, run_evaluation)
    command_line.run(main, DRAW, dry_run=loop.dry_run)
