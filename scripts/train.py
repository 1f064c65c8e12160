"""Train a flow-matching model with online reinforcement learning.

    python scripts/train.py --config config/grpo.py:PRESET [--config.sample.num_steps=8 ...]
    accelerate launch scripts/train.py --config ... [--dry_run [--world_size=N]]

One epoch: sample a group of images per prompt, score them, turn scores into credit for each sample,
and update the weights. What differs between algorithms is in flow_grpo/draw/algorithms.
"""

if __name__ == "__main__":
    import flow_grpo.config.early  # noqa: F401  first: the others take seconds
    from flow_grpo.config import command_line
    from flow_grpo.draw.fields import DRAW

    command_line.look(DRAW, dry_run=True)

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate.utils import gather_object
from ml_collections import ConfigDict

from flow_grpo.advantages import keep_best_worst
from flow_grpo.config import command_line
from flow_grpo.data.prompts import Draw, Prompt, epoch_draws
from flow_grpo.data.seeding import Stream, numpy_rng, sample_generators
from flow_grpo.draw import dry
from flow_grpo.draw.algorithms import Batch
from flow_grpo.draw.algorithms.anchors import nearest, thumbnails
from flow_grpo.draw.algorithms.base import with_gradient
from flow_grpo.draw.data_anchor import DataBatch
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
    steps_taken,
)
from flow_grpo.draw.session import Session, build_dynamics, build_session, image_size
from flow_grpo.draw.sources import reward_metadata
from flow_grpo.rewards import TOTAL, PendingScores
from flow_grpo.run.building import advice_when_short
from flow_grpo.run.distributed import accumulated, gather_rows, gather_scores
from flow_grpo.run.finite import backward
from flow_grpo.run.metrics import Scored, Timer, TrainingStats, peak_memory_gb, reward_metrics
from flow_grpo.run.session import (
    carry_out,
    evaluation_metrics,
    finish_epoch,
    is_due,
    set_learning_rates,
    stop_at_outage,
    take_update,
    training_metrics,
    write_samples,
)
from flow_grpo.speed.transfer import send

logger = logging.getLogger("flow_grpo")
GRADIENTS = 8  # pictures that are differentiated together: the VAE keeps its activations
BASELINE = f"{TOTAL}/baseline"  # a name that no reward can have


@dataclass
class SampledBatch:
    draw: Draw
    trajectory: Trajectory
    images: torch.Tensor | None  # (B, 3, H, W) or (B, F, 3, H, W), of the first group, to show
    scores: PendingScores  # {reward name: (B,)}, computed in the background
    distance: torch.Tensor  # (2,), of pictures within a group: see group_distance
    thumbnails: torch.Tensor | None  # (B, numbers), where anchors.diversity compares them
    step: int  # optimizer updates of the weights that sampled it
    steps: int  # of single samples, that it took


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
        session.policy.count(sum(s.steps for s in samples))
        stop_at_outage(session, done, scored.rewards)
        if ahead is None:  # else they are at work
            session.reward.rest()
        credit = session.algorithm.anchors.shape(session.algorithm.credit(scored), scored)
        if not session.algorithm.old_is_behaviour:
            session.remember_behaviour()
        with timer("train"):
            training = train_epoch(session, epoch, samples, credit)
            if session.algorithm.old_is_behaviour:  # the old weights, which change only now
                session.remember_behaviour()
            session.algorithm.after_epoch(session.policy, progress.step)
            training |= session.algorithm.adapt(training)
            training |= session.algorithm.anchors.renew_reference(session.policy, training)
            progress.algorithm = session.algorithm.state_dict()

        metrics = {
            **reward_metrics(scored.rewards, scored.groups),
            **training,
            **diversity(session, samples),
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
    seeds, explored = explore(session, epoch, without_noise)
    if session.gradients is not None:
        session.gradients.begin()
    for draw in session.bar(draws, f"epoch {epoch + 1} sample"):
        session.stop.check()
        session.reward.end_if_broken()
        chosen = prompts_of(session, [draw])
        # a sample's own generator draws its first noise and then that of its steps
        generators = sample_generators(config.seed, epoch, seeds[draw.index].tolist())
        same = config.sample.same_latent
        first = group_generators(config.seed, epoch, draw.row.tolist()) if same else generators
        alike = draw.row if same else draw.index
        noisy = session.noisy_steps(epoch, int(draw.index[0]))
        trajectory = policy.denoiser.sample(
            first_noise(session, first),
            policy.denoiser.encode(chosen),
            steps=noisy,
            generators=generators,
            without_noise=without_noise,
            alike=alike,
            keep_means=algorithm.keeps_means,
            keep_states=algorithm.needs_reward_gradient,
            noisy_step=None if session.gradients is None else session.gradients.step,
        )
        if session.gradients is not None:
            session.gradients.keep(draw.index)
        if algorithm.needs_reward_gradient:
            trajectory = replace(trajectory, pull=reward_gradient(session, trajectory, chosen))
        images, scores = decode_and_score(session, trajectory, chosen)
        distance = group_distance(images, draw.row)
        small = thumbnails(images) if config.anchors.diversity else None
        shown = None if len(samples) * len(images) >= session.plan.group_size else images
        steps = steps_taken(config.sample.num_steps, noisy, alike) + explored
        explored = 0
        samples.append(SampledBatch(draw, trajectory, shown, scores, distance, small, step, steps))
    # while a GPU is still at the last batch, unless the encoders would have to join it there
    if epoch + 1 < config.num_epochs and not config.offload_idle:
        policy.denoiser.encode_ahead(prompts_of(session, draw_epoch(session, epoch + 1)))
    return samples


def explore(
    session: Session, epoch: int, without_noise: Callable[[], AbstractContextManager]
) -> tuple[np.ndarray, int]:
    """The numbers that seed the samples of an epoch, and the steps of single samples that it took
    to choose them: with `train.keep_best_worst` more are drawn, by fewer steps and without noise,
    and those that score best and worst in their group are drawn again."""
    config, plan, scores = session.config, session.plan, []
    if plan.explored == 1:
        return np.arange(plan.samples), 0
    sample, draws = config.sample, draw_epoch(session, epoch, plan.explored)
    walk = {"guidance_scale": sample.guidance_scale, "solver": sample.solver}
    dynamics = build_dynamics(config, session.adapter, sample.explore_steps, **walk)
    for draw in session.bar(draws, f"epoch {epoch + 1} explore"):
        session.stop.check()
        session.reward.end_if_broken()
        chosen = prompts_of(session, [draw])
        generators = sample_generators(config.seed, epoch, draw.index.tolist())
        trajectory = Denoiser(session.adapter, session.policy.module, dynamics).sample(
            first_noise(session, generators),
            session.policy.denoiser.encode(chosen),
            without_noise=without_noise,
        )
        scores.append(decode_and_score(session, trajectory, chosen)[1])
    scored = gather(session, draws, [s.result() for s in scores], plan.explored)
    kept = keep_best_worst(scored.total, scored.groups, config.train.keep_best_worst)
    return kept, sum(len(draw.index) for draw in draws) * sample.explore_steps


def first_noise(session: Session, generators: list[torch.Generator]) -> torch.Tensor:
    shape = session.adapter.latent_shape(*image_size(session.config))
    return initial_noise(generators, shape, session.accelerator.device)


def decode_and_score(
    session: Session, trajectory: Trajectory, chosen: list[Prompt]
) -> tuple[torch.Tensor, PendingScores]:
    images = session.adapter.decode(trajectory.final)
    told = reward_metadata(chosen, session.adapter)
    return images, session.reward.submit(images, [p.prompt for p in chosen], told)


def reward_gradient(session: Session, trajectory: Trajectory, chosen: list[Prompt]) -> torch.Tensor:
    """In the final latents, like these; 0 where it is no number."""
    gradients = []
    for i, latents in enumerate(trajectory.final.split(GRADIENTS)):
        texts = [p.prompt for p in chosen[i * GRADIENTS : (i + 1) * GRADIENTS]]
        latents = latents.detach().requires_grad_()
        images = session.adapter.decode_with_gradient(latents)
        total = session.reward.score_pixels(images, texts).sum().to(latents.device)
        gradients += torch.autograd.grad(total, latents)
    return torch.cat(gradients).nan_to_num(0.0, 0.0, 0.0)


def draw_epoch(session: Session, epoch: int, times: int = 1) -> list[Draw]:
    """What this process samples in an epoch, or explores: `times` as many of each prompt."""
    plan, accelerator = session.plan, session.accelerator
    return epoch_draws(
        rows=len(session.prompts),
        groups=plan.groups,
        group_size=plan.group_size * times,
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
    draws = [s.draw for s in samples]
    scored = gather(session, draws, scores)
    if not session.config.anchors.diversity:
        return scored
    index = torch.from_numpy(np.concatenate([draw.index for draw in draws]))
    small = {"small": torch.cat([s.thumbnails for s in samples])}
    _, gathered = gather_rows(session.accelerator, index, small)
    return replace(scored, apart=nearest(gathered["small"].numpy(), scored.groups))


def gather(
    session: Session, draws: list[Draw], scores: list[dict[str, np.ndarray]], times: int = 1
) -> Scored:
    """The scores of all processes; `times` as in `draw_epoch`."""
    index = np.concatenate([draw.index for draw in draws])
    rewards = gather_scores(session.accelerator, index, scores)
    groups = np.arange(len(rewards[TOTAL])) // (session.plan.group_size * times)
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
    losses, applied_before = algorithm.losses_per_sample, session.progress.applied
    staleness = session.progress.step - samples[0].step
    updates = in_updates(session, samples, credit)
    for inner in range(plan.inner_epochs):
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner).permutation(len(updates))
        for n, u in enumerate(order, 1):
            set_learning_rates(session)
            batches = algorithm.batches(updates[u], plan.train_batch_size)
            kept = with_gradient(algorithm, batches, **session.may_leave_out())
            stats.leave_out((algorithm.trained_samples - sum(map(len, kept))) * losses)
            share = len(batches) / algorithm.trained_samples
            seed, device = (config.seed, epoch, inner), accelerator.device
            if session.gradients is not None:  # they are here already
                for loss in session.gradients.weigh(kept):
                    stats.add(loss, on_policy=True)
                kept = []
            kept = [replace(b, credit=send(b.credit, device), seed=seed) for b in kept]
            prepared = algorithm.prepared(policy, kept)
            name = f"epoch {epoch + 1} train {n}/{len(order)}"
            bar = session.bar(prepared, name, len(kept))
            steps = ((batch, fixed, j) for batch, fixed in bar for j in range(losses))
            pictures = data_batches(session, (*seed, int(u)), len(batches))
            count = len(kept) * losses + len(pictures)
            for batch, fixed, j in accumulated(accelerator, policy.module, steps, count):
                loss = algorithm.loss(policy, batch, fixed, j)
                # accelerate divides it by the number of losses, also of those left out
                backward(accelerator, loss.per_sample.sum() * share)
                unchanged = session.progress.applied == applied_before
                stats.add(loss, on_policy=unchanged and not staleness)
            for batch in accumulated(accelerator, policy.module, pictures, len(pictures)):
                error = session.data.loss(batch)
                weight = session.data.weight * losses / plan.train_batch_size
                backward(accelerator, error.sum() * weight)
                stats.add_columns({"data_loss": error})
            take_update(session, stats)
    metrics = training_metrics(session, stats)
    if algorithm.trust:
        metrics["train/clip_range"] = algorithm.trust
    if starts := [s.trajectory.steps[0] for s in samples if s.trajectory.steps]:
        metrics["train/noisy_from"] = min(starts)
    if session.stale is not None:
        metrics["train/staleness"] = staleness
    return metrics


def data_batches(session: Session, seed: tuple[int, ...], count: int) -> list[DataBatch]:
    """The pictures of `anchors.data` that an update trains on this process: as many micro-batches
    as it has of samples."""
    if session.data is None:
        return []
    place = session.accelerator.process_index, session.accelerator.num_processes
    return list(session.data.batches(seed, session.plan.train_batch_size, count, *place))


def in_updates(
    session: Session, samples: list[SampledBatch], credit: np.ndarray
) -> list[list[Batch]]:
    """The micro-batches of each update, on this process."""
    plan = session.plan
    size, per_update = plan.train_batch_size, plan.accumulation_steps
    micro_batches = [
        Batch(
            s.trajectory[part],
            own.to(s.trajectory.final.dtype),
            index,
            index // plan.group_size,
            tasks=session.tasks(s.draw.row[part]),
        )
        for s in samples
        for part in (slice(i, i + size) for i in range(0, len(s.trajectory), size))
        for index in (s.draw.index[part],)
        for own in (torch.from_numpy(credit[index]),)
    ]
    return [micro_batches[i : i + per_update] for i in range(0, len(micro_batches), per_update)]


def diversity(session: Session, samples: list[SampledBatch]) -> dict[str, float]:
    """How far apart pictures of a group are; of no use where all are edits, which should agree."""
    if all(prompt.images for prompt in session.prompts):
        return {}
    total, count = session.accelerator.reduce(torch.stack([s.distance for s in samples]).sum(0))
    return {"reward/diversity": float(total / count) if count else math.nan}


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
    full = session.adapter.at_full_precision()
    with session.averaged(), full, advice_when_short(lighter_evaluation(config)):
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
    shown = (result.images, result.sources)
    write_samples(session, "eval", epoch, *shown, prompt=prompts, **result.scores)
    session.eval_reward.rest()
    return evaluation_metrics(session, epoch, result.scores, session.test_sets())


if __name__ == "__main__":
    loop = dry.Loop(sample_behind, collect_rewards, train_epoch, run_evaluation)
    command_line.run(main, DRAW, dry_run=loop.dry_run)
