"""Train a flow-matching model with online reinforcement learning, or offline on given images.

    python scripts/train.py --config config/grpo.py:PRESET [--config.sample.num_steps=8 ...]
    accelerate launch scripts/train.py --config ... [--dry_run [--world_size=N]]

One epoch: sample a group of images per prompt, score them, turn the scores into one weight per
sample (`credit`; for GRPO, the advantage) and update the weights of the model. What differs between
algorithms is in flow_grpo/diffusion/algorithms. Images given by `preferences` are trained besides
the samples, or, with `preferences.share=1`, instead of them.
"""

if __name__ == "__main__":
    import flow_grpo.config.early_exit  # noqa: F401  first: other imports take seconds
    from flow_grpo.config import command_line
    from flow_grpo.diffusion.fields import DIFFUSION_SPEC

    command_line.parse_command_line(DIFFUSION_SPEC, dry_run=True)

import logging
import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from accelerate.utils import gather_object
from ml_collections import ConfigDict

from flow_grpo.advantages import keep_best_worst
from flow_grpo.audio import Audio
from flow_grpo.config import command_line
from flow_grpo.data.epoch_batches import SampleBatch, build_epoch_batches
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, numpy_rng, sample_generators
from flow_grpo.diffusion import dry_run
from flow_grpo.diffusion.algorithms import Batch
from flow_grpo.diffusion.algorithms.anchors import downsample_images, nearest_distances
from flow_grpo.diffusion.algorithms.base import drop_zero_gradient
from flow_grpo.diffusion.builders import (
    build_dynamics,
    eval_image_size,
    evaluation_memory_options,
    image_size,
    training_memory_options,
)
from flow_grpo.diffusion.data_anchor import DataBatch
from flow_grpo.diffusion.evaluation import evaluate
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.results import write_training_samples
from flow_grpo.diffusion.rollout import (
    Denoiser,
    Trajectory,
    count_sample_steps,
    group_generators,
    initial_noise,
    within_group_distance,
)
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.diffusion.source_images import reward_metadata
from flow_grpo.perf.transfer import to_device
from flow_grpo.rewards import TOTAL, PendingScores
from flow_grpo.training.builder import suggest_on_oom
from flow_grpo.training.distributed import (
    accumulate_gradients,
    gather_rows,
    gather_scores,
    get_context_size,
    get_ranks,
    raise_on_all_ranks,
)
from flow_grpo.training.finite import backward
from flow_grpo.training.metrics import (
    ScoredSamples,
    Timer,
    TrainingStats,
    peak_memory_gb,
    reward_metrics,
)
from flow_grpo.training.session import (
    evaluation_metrics,
    finish_epoch,
    run_training,
    stop_on_outage,
    training_metrics,
    write_samples,
)
from flow_grpo.training.time_estimate import is_due
from flow_grpo.training.update import optimizer_step, set_learning_rates

logger = logging.getLogger("flow_grpo")
REWARD_GRADIENT_BATCH = 8  # images differentiated at once: the VAE keeps their activations
BASELINE = f"{TOTAL}/baseline"  # a name that no reward can have


@dataclass
class SampledBatch:
    """A batch of samples of this process, with rewards that may still be pending."""

    ids: SampleBatch  # index within the epoch and prompt row of each sample, (B,)
    trajectory: Trajectory
    # (B, 3, H, W) or (B, F, 3, H, W), of the first group of the main process, to log
    images: torch.Tensor | None
    audio: list[Audio] | None  # sound of `images`
    scores: PendingScores  # {reward name: (B,)}, computed in the background
    distance: torch.Tensor  # (2,), see `within_group_distance`
    thumbnails: torch.Tensor | None  # (B, features), with `anchors.diversity`
    policy_step: int  # optimizer updates of the weights that sampled the batch
    sample_steps: int  # denoising steps taken, summed over the samples


@dataclass
class Rollout:
    """The samples of an epoch; empty without rollouts (`preferences.share=1`)."""

    samples: list[SampledBatch] = field(default_factory=list)  # of this process
    scored: ScoredSamples | None = None
    credit: np.ndarray = field(default_factory=lambda: np.empty(0))  # (samples per epoch,)
    next_samples: list[SampledBatch] | None = None  # of the next epoch, if sampled ahead


def main(config: ConfigDict) -> Session:
    """Train with a config, from the start or a checkpoint, and return the finished session."""
    session = build_session(config)
    return run_training(session, train, training_memory_options(session.config, session.plan))


def train(session: Session) -> None:
    """Run the remaining epochs: sample, score, compute advantages, update, evaluate, save."""
    config, progress = session.config, session.progress
    algorithm = session.algorithm
    if session.adapter.compiled:
        logger.info("compiling the model during the first epoch; this takes a minute or two")
    if progress.epoch < 0 and config.eval_before_training:
        timer = Timer()
        with timer("eval"):
            metrics = run_evaluation(session, epoch=0)
        finish_epoch(session, 0, metrics, timer)
    progress.epoch = max(progress.epoch, 0)

    rollout = Rollout()
    for epoch in range(progress.epoch, config.num_epochs):
        done = epoch + 1
        timer = Timer()
        if not config.is_offline:
            rollout = roll_out(session, epoch, rollout.next_samples, timer)
        samples, credit = rollout.samples, rollout.credit
        session.stop.check()
        if not algorithm.old_is_behaviour:
            session.snapshot_behaviour_weights()
        with timer("train"):
            training = train_epoch(session, epoch, samples, credit)
            if algorithm.old_is_behaviour:  # the loss needed the previous snapshot
                session.snapshot_behaviour_weights()
            algorithm.after_epoch(session.policy, progress.step)
            training |= algorithm.update_kl_weight(training)
            training |= algorithm.anchors.maybe_reset_reference(session.policy, training)
            progress.algorithm = algorithm.state_dict()

        images = session.plan.samples + session.plan.given_samples_per_epoch
        metrics = {
            **rollout_metrics(session, rollout),
            **training,
            "perf/images_per_s": images / sum(timer.seconds.values()),
            "perf/peak_mem_gb": peak_memory_gb(session.accelerator.device),
            "perf/passes": reduce_pass_count(session),
        }
        if is_due(done, config.eval_freq, config.num_epochs):
            with timer("eval"):
                logged = [(s.ids, s.images, s.audio) for s in samples if s.images is not None]
                if rollout.scored is not None:
                    count = config.log_images
                    write_training_samples(session, done, logged, rollout.scored, credit, count)
                metrics |= run_evaluation(session, done)
        finish_epoch(session, done, metrics, timer)


def roll_out(
    session: Session, epoch: int, samples: list[SampledBatch] | None, timer: Timer
) -> Rollout:
    """Sample and score an epoch, and sample the next one if that runs ahead.

    Args:
        session: State of the run.
        epoch: The epoch, from 0.
        samples: Its samples, if it was sampled ahead.
        timer: Gets the seconds of sampling and of waiting for rewards.
    """
    with timer("sample"):
        samples = samples or sample_current_epoch(session, epoch)
        next_samples = sample_next_epoch(session, epoch + 1)
    with timer("reward_wait"):
        scored = collect_rewards(session, epoch, samples)
    session.stop.check(now=True)  # otherwise a stop while people vote looks like an outage
    session.policy.count_passes(sum(s.sample_steps for s in samples))
    stop_on_outage(session, epoch + 1, scored.rewards)
    if next_samples is None:  # otherwise the reward models are scoring the next epoch
        session.reward.release_memory()
    credit = session.algorithm.anchors.reweight(session.algorithm.credit(scored), scored)
    return Rollout(samples, scored, credit, next_samples)


def sample_current_epoch(session: Session, epoch: int) -> list[SampledBatch]:
    """Sample an epoch that was not sampled ahead: the first one after the start or a resume.

    A resumed run samples with the saved behaviour weights, so it gets the same samples again.
    """
    behind = session.plan.updates if session.behaviour_snapshot is not None and epoch > 0 else 0
    with session.use_behaviour_weights():
        return sample_epoch(session, epoch, session.progress.step - behind)


def sample_next_epoch(session: Session, epoch: int) -> list[SampledBatch] | None:
    """Sample `epoch` ahead, while the rewards of the previous one are still computed.

    Returns:
        This process's samples, or None without `sample.async_depth` and after the last epoch.
    """
    if session.behaviour_snapshot is None or epoch >= session.config.num_epochs:
        return None
    with session.use_sampling_weights():
        return sample_epoch(session, epoch, session.progress.step)


def sample_epoch(session: Session, epoch: int, policy_step: int = 0) -> list[SampledBatch]:
    """Sample this process's part of an epoch; each batch is scored while the next one is sampled.

    `policy_step` counts the optimizer updates that the current weights have received.
    """
    config, policy = session.config, session.policy
    epoch_batches = draw_epoch_prompts(session, epoch)
    policy.denoiser.precompute_embeddings(select_prompts(session, epoch_batches))
    seeds, explored_steps = select_seeds(session, epoch)
    if session.rollout_gradients is not None:
        session.rollout_gradients.reset()
    samples, is_main = [], session.accelerator.is_main_process
    for ids in session.bar(epoch_batches, f"epoch {epoch + 1} sample"):
        session.stop.check()
        stop_if_failing(session)
        prompts = select_prompts(session, [ids])
        trajectory, steps = sample_batch(session, epoch, ids, prompts, seeds)
        images, audio, scores = decode_and_score(session, trajectory, prompts)
        is_logged = is_main and len(samples) * len(images) < session.plan.group_size
        samples.append(
            SampledBatch(
                ids=ids,
                trajectory=trajectory,
                images=images if is_logged else None,
                audio=audio if is_logged else None,
                scores=scores,
                distance=within_group_distance(images, ids.row),
                thumbnails=downsample_images(images) if config.anchors.diversity else None,
                policy_step=policy_step,
                sample_steps=steps + explored_steps,
            )
        )
        explored_steps = 0  # counted once, with the first batch
    # Encode while the GPU works on the last batch, unless that would load the encoders next to it.
    if epoch + 1 < config.num_epochs and not config.offload_idle:
        next_batches = draw_epoch_prompts(session, epoch + 1)
        policy.denoiser.precompute_embeddings(select_prompts(session, next_batches))
    return samples


def sample_batch(
    session: Session,
    epoch: int,
    ids: SampleBatch,
    prompts: list[Prompt],
    seeds: np.ndarray,
) -> tuple[Trajectory, int]:
    """Sample a batch; `seeds` are those of all samples of the epoch, (samples per epoch,).

    Each sample has a generator, which draws its initial noise and then the noise of its stochastic
    steps. With `sample.same_latent`, the samples of a group share their initial noise.

    Returns:
        The trajectories and the number of denoising steps taken, summed over the samples.
    """
    config, algorithm, denoiser = session.config, session.algorithm, session.policy.denoiser
    rollout_gradients = session.rollout_gradients
    generators = sample_generators(config.seed, epoch, seeds[ids.index].tolist())
    initial_generators, noise_group_ids = generators, ids.index
    if config.sample.same_latent:
        initial_generators = group_generators(config.seed, epoch, ids.row.tolist())
        noise_group_ids = ids.row
    noisy = session.noisy_steps(epoch, int(ids.index[0]))
    trajectory = denoiser.sample(
        make_initial_noise(session, initial_generators),
        denoiser.encode(prompts),
        steps=noisy,
        generators=generators,
        noise_group_ids=noise_group_ids,
        keep_means=algorithm.records_step_means,
        keep_states=algorithm.needs_reward_gradient,
        stochastic_step_fn=None if rollout_gradients is None else rollout_gradients.step,
    )
    if rollout_gradients is not None:
        rollout_gradients.store(ids.index)
    if algorithm.needs_reward_gradient:
        gradient = compute_reward_gradient(session, trajectory, prompts)
        trajectory = replace(trajectory, reward_gradient=gradient)
    return trajectory, count_sample_steps(config.sample.num_steps, noisy, noise_group_ids)


def select_seeds(session: Session, epoch: int) -> tuple[np.ndarray, int]:
    """Choose the seeds of an epoch's samples.

    With `train.keep_best_worst`, each group explores more seeds than it trains: it samples them
    with fewer steps and without noise, and keeps those with the highest and lowest rewards, to be
    sampled again with all steps.

    Returns:
        The seeds, (samples per epoch,), and the number of denoising steps spent on exploration.
    """
    config, plan = session.config, session.plan
    if plan.exploration_factor == 1:
        return np.arange(plan.samples), 0
    sample = config.sample
    epoch_batches = draw_epoch_prompts(session, epoch, plan.exploration_factor)
    guidance = {"guidance_scale": sample.guidance_scale, "solver": sample.solver}
    size = image_size(config)
    dynamics = build_dynamics(config, session.adapter, sample.explore_steps, size=size, **guidance)
    pending = []
    for ids in session.bar(epoch_batches, f"epoch {epoch + 1} explore"):
        session.stop.check()
        stop_if_failing(session)
        prompts = select_prompts(session, [ids])
        generators = sample_generators(config.seed, epoch, ids.index.tolist())
        trajectory = Denoiser(session.adapter, session.policy.module, dynamics).sample(
            make_initial_noise(session, generators),
            session.policy.denoiser.encode(prompts),
        )
        pending.append(decode_and_score(session, trajectory, prompts)[-1])
    scores = [each.result() for each in pending]
    scored = gather_rewards(session, epoch_batches, scores, plan.exploration_factor)
    kept = keep_best_worst(scored.total, scored.groups, config.train.keep_best_worst)
    return kept, sum(len(ids.index) for ids in epoch_batches) * sample.explore_steps


def stop_if_failing(session: Session) -> None:
    """Raise `RewardOutage` if a reward fails on every batch.

    With context parallelism, on all processes: those that do not score would wait for the others.
    """
    check = session.reward.raise_if_failing
    if get_context_size(session.accelerator) > 1:
        raise_on_all_ranks(session.accelerator, check)
    else:
        check()


def make_initial_noise(session: Session, generators: list[torch.Generator]) -> torch.Tensor:
    """Draw the initial latents, (B, C, H, W) or with frames, one sample per generator."""
    shape = session.adapter.latent_shape(*image_size(session.config))
    return initial_noise(generators, shape, session.accelerator.device)


def decode_and_score(
    session: Session, trajectory: Trajectory, prompts: list[Prompt]
) -> tuple[torch.Tensor, list[Audio] | None, PendingScores]:
    """Decode the final latents, submit images and sound to the rewards; return all three."""
    images = session.adapter.decode(trajectory.final)
    audio = session.adapter.decode_audio(trajectory.final)
    metadata = reward_metadata(prompts, session.adapter)
    if not get_ranks(session.accelerator).is_leader:  # its context group scores the samples
        return images, audio, session.reward.missing(len(images))
    scores = session.reward.submit(images, [p.prompt for p in prompts], metadata, audio)
    return images, audio, scores


def compute_reward_gradient(
    session: Session, trajectory: Trajectory, prompts: list[Prompt]
) -> torch.Tensor:
    """Return the gradient of the reward with respect to the final latents, (B, C, H, W).

    Non-finite elements are set to 0.
    """
    gradients = []
    texts = [p.prompt for p in prompts]
    for i, latents in enumerate(trajectory.final.split(REWARD_GRADIENT_BATCH)):
        start = i * REWARD_GRADIENT_BATCH
        latents = latents.detach().requires_grad_()
        images = session.adapter.decode_with_gradient(latents)
        scores = session.reward.score_pixels(images, texts[start : start + REWARD_GRADIENT_BATCH])
        gradients += torch.autograd.grad(scores.sum().to(latents.device), latents)
    gradient = torch.cat(gradients).nan_to_num(0.0, 0.0, 0.0)
    return get_ranks(session.accelerator).copy_from_leader(gradient)


def draw_epoch_prompts(session: Session, epoch: int, num_repeats: int = 1) -> list[SampleBatch]:
    """Draw an epoch's prompts and return this process's batches of samples to generate.

    Args:
        session: The training session.
        epoch: Number of the epoch, which seeds the draw.
        num_repeats: Factor by which the groups are larger than in training.
    """
    plan, ranks = session.plan, get_ranks(session.accelerator)
    return build_epoch_batches(
        rows=len(session.prompts),
        groups=plan.groups,
        group_size=plan.group_size * num_repeats,
        batch_size=plan.sample_batch_size,
        updates=plan.updates_per_pass,
        process=ranks.data_rank,
        num_processes=ranks.data_size,
        rng=numpy_rng(session.config.seed, Stream.PROMPTS, epoch),
        sets=session.prompt_sets,
    )


def select_prompts(session: Session, batches: list[SampleBatch]) -> list[Prompt]:
    """Return the prompt of each sample of the batches."""
    return [session.prompts[row] for ids in batches for row in ids.row]


def collect_rewards(session: Session, epoch: int, samples: list[SampledBatch]) -> ScoredSamples:
    """Wait for the rewards of an epoch and gather those of all processes, in sample order."""
    scores = [s.scores.result() for s in session.bar(samples, "wait for rewards")]
    if session.config.train.advantage == "remax":
        baselines = compute_remax_baselines(session, epoch, samples)
        for baseline, score in zip(baselines, scores, strict=True):
            score[BASELINE] = baseline
    batches = [s.ids for s in samples]
    scored = gather_rewards(session, batches, scores)
    if not session.config.anchors.diversity:
        return scored
    index = torch.from_numpy(np.concatenate([ids.index for ids in batches]))
    thumbnails = {"small": torch.cat([s.thumbnails for s in samples])}
    _, gathered = gather_rows(session.accelerator, index, thumbnails)
    return replace(scored, apart=nearest_distances(gathered["small"].numpy(), scored.groups))


def gather_rewards(
    session: Session,
    batches: list[SampleBatch],
    scores: list[dict[str, np.ndarray]],
    num_repeats: int = 1,
) -> ScoredSamples:
    """Gather the rewards of all processes' samples; `num_repeats` as in `draw_epoch_prompts`."""
    index = np.concatenate([ids.index for ids in batches])
    rewards = gather_scores(session.accelerator, index, scores)
    groups = np.arange(len(rewards[TOTAL])) // (session.plan.group_size * num_repeats)
    baseline = rewards.pop(BASELINE, None)
    reward = session.reward
    return ScoredSamples(rewards, groups, reward.weights, baseline, reward.pairwise_rewards)


def compute_remax_baselines(
    session: Session, epoch: int, samples: list[SampledBatch]
) -> list[np.ndarray]:
    """Compute the ReMax baselines, (B,) for each batch.

    The baseline is the reward of one deterministic (ODE) sample per prompt, drawn with the weights
    that sampled the epoch, from the initial noise of the group.
    """
    config, denoiser = session.config, session.policy.denoiser
    size = len(samples[0].ids.row)
    rows = list(dict.fromkeys(row for s in samples for row in s.ids.row.tolist()))
    # sharded weights are gathered by all ranks together, so each runs the same number of batches
    most = max(gather_object([len(rows)]))
    pending = []
    for start in range(0, most, size):
        batch_rows = (rows[start : start + size] + rows[:1] * size)[:size]  # padded to full size
        prompts = [session.prompts[row] for row in batch_rows]
        noise = make_initial_noise(session, group_generators(config.seed, epoch, batch_rows))
        with session.use_behaviour_weights():
            trajectory = denoiser.sample(noise, denoiser.encode(prompts))
        session.policy.count_passes(len(trajectory) * config.sample.num_steps)
        pending.append(decode_and_score(session, trajectory, prompts)[-1])
    totals = np.concatenate([scores.result()[TOTAL] for scores in pending])
    by_row = dict(zip(rows, totals, strict=False))  # the padding at the end is dropped
    return [np.array([by_row[row] for row in s.ids.row.tolist()]) for s in samples]


def train_epoch(
    session: Session, epoch: int, samples: list[SampledBatch], credit: np.ndarray
) -> dict[str, float]:
    """Update the weights on the samples of an epoch, and on given images.

    Micro-batches are slices of the sampling batches, in the same order: with equal batch sizes the
    ratio before the first update is exactly 1, apart from rounding where zero-gradient samples are
    dropped. Each inner epoch shuffles the updates; the samples of an update stay the same.

    Args:
        session: State of the run.
        epoch: Number of the epoch, which seeds the order of the updates.
        samples: This process's sampling batches.
        credit: Weights of all samples of the epoch, (samples per epoch,).

    Returns:
        Metrics of the epoch.
    """
    config, plan, progress = session.config, session.plan, session.progress
    stats = TrainingStats()
    applied_before = progress.applied
    staleness = progress.step - samples[0].policy_step if samples else 0
    updates = split_into_updates(session, samples, credit)
    for inner in range(plan.inner_epochs):
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner).permutation(len(updates))
        for n, u in enumerate(order, 1):
            train_update(
                session,
                [*updates[u], *session.given_batches(epoch, int(u))],
                stats,
                seed=(config.seed, epoch, inner),
                index=int(u),
                on_policy=progress.applied == applied_before and not staleness,
                name=f"epoch {epoch + 1} train {n}/{len(order)}",
            )
    metrics = training_metrics(session, stats)
    if session.given is not None:
        metrics["data/given"] = session.algorithm.given_share
    if session.algorithm.trust_radius:
        metrics["train/clip_range"] = session.algorithm.trust_radius
    if starts := [s.trajectory.steps[0] for s in samples if s.trajectory.steps]:
        metrics["train/noisy_from"] = min(starts)
    if session.behaviour_snapshot is not None:
        metrics["train/staleness"] = staleness
    return metrics


def train_update(
    session: Session,
    micro_batches: list[Batch],
    stats: TrainingStats,
    *,
    seed: tuple[int, int, int],
    index: int,
    on_policy: bool,
    name: str,
) -> None:
    """Accumulate the gradients of an update and take an optimizer step.

    Args:
        micro_batches: This process's micro-batches of the update.
        stats: Statistics of the epoch, to which those of the update are added.
        seed: (run seed, epoch, inner epoch).
        index: Index of the update among those of the epoch.
        on_policy: Whether the weights are still those that sampled the micro-batches.
        name: Name of the progress bar.
    """
    accelerator, policy, plan = session.accelerator, session.policy, session.plan
    algorithm = session.algorithm
    losses = algorithm.losses_per_sample
    set_learning_rates(session)
    batches = algorithm.batches(micro_batches, plan.train_batch_size)
    kept = drop_zero_gradient(algorithm, batches, **session.allowed_skips())
    stats.count_zero_losses((algorithm.trained_samples - sum(map(len, kept))) * losses)
    loss_scale = len(batches) / algorithm.trained_samples
    if session.rollout_gradients is not None:  # computed while sampling
        for loss in session.rollout_gradients.assign_weighted_gradient(kept):
            stats.add(loss, on_policy=True)
        kept = []
    device = accelerator.device
    kept = [replace(b, credit=to_device(b.credit, device), seed=seed) for b in kept]
    bar = session.bar(algorithm.iter_prepared(policy, kept), name, len(kept))
    steps = ((batch, prepared, j) for batch, prepared in bar for j in range(losses))
    anchor_batches = sample_anchor_batches(session, (*seed, index), len(batches))
    count = len(kept) * losses + len(anchor_batches)
    for batch, prepared, j in accumulate_gradients(accelerator, policy.module, steps, count):
        loss = algorithm.loss(policy, batch, prepared, j)
        # accelerate divides by the number of losses, dropped ones included
        backward(accelerator, loss.per_sample.sum() * loss_scale)
        stats.add(loss, on_policy=on_policy)
    for batch in accumulate_gradients(
        accelerator, policy.module, anchor_batches, len(anchor_batches)
    ):
        error = session.data_anchor.loss(batch)
        weight = session.data_anchor.weight * losses / plan.train_batch_size
        backward(accelerator, error.sum() * weight)
        stats.add_columns({"data_loss": error})
    optimizer_step(session, stats)


def sample_anchor_batches(session: Session, seed: tuple[int, ...], count: int) -> list[DataBatch]:
    """Draw `count` micro-batches of `anchors.data` images for an update of this process."""
    if session.data_anchor is None:
        return []
    ranks, size = get_ranks(session.accelerator), session.plan.train_batch_size
    return list(session.data_anchor.batches(seed, size, count, ranks.data_rank, ranks.data_size))


def split_into_updates(
    session: Session, samples: list[SampledBatch], credit: np.ndarray
) -> list[list[Batch]]:
    """Slice the sampling batches into micro-batches and group them by update."""
    plan = session.plan
    size, per_update = plan.train_batch_size, plan.accumulation_steps
    micro_batches = []
    for s in samples:
        for start in range(0, len(s.trajectory), size):
            part = slice(start, start + size)
            index = s.ids.index[part]
            weights = torch.from_numpy(credit[index]).to(s.trajectory.final.dtype)
            tasks = session.tasks(s.ids.row[part])
            group = index // plan.group_size
            micro_batches.append(Batch(s.trajectory[part], weights, index, group, tasks=tasks))
    starts = [u * per_update for u in range(plan.updates_per_pass)]
    return [micro_batches[start : start + per_update] for start in starts]


def rollout_metrics(session: Session, rollout: Rollout) -> dict[str, float]:
    """Return the metrics of rewards and samples; {} without a rollout."""
    scored = rollout.scored
    if scored is None:
        return {}
    rewards = reward_metrics(scored.rewards, scored.groups)
    return rewards | diversity_metrics(session, rollout.samples)


def diversity_metrics(session: Session, samples: list[SampledBatch]) -> dict[str, float]:
    """Return the mean distance of images within a group; {} for edits, which should agree."""
    if all(prompt.images for prompt in session.prompts):
        return {}
    total, count = session.accelerator.reduce(torch.stack([s.distance for s in samples]).sum(0))
    return {"reward/diversity": float(total / count) if count else math.nan}


def reduce_pass_count(session: Session) -> int:
    """Return the transformer passes of the run so far: a forward pass is 1, with backward 3."""
    policy, progress = session.policy, session.progress
    passes = torch.tensor(float(policy.passes), device=session.accelerator.device)
    policy.passes = 0
    total = float(session.accelerator.reduce(passes))
    progress.passes += round(total / get_context_size(session.accelerator))
    return progress.passes


def run_evaluation(session: Session, epoch: int) -> dict[str, float]:
    """Score images of the test prompts, sampled by the EMA weights without noise, and log them."""
    config = session.config
    full_precision = session.adapter.at_full_precision()
    with session.ema_weights(), full_precision, suggest_on_oom(evaluation_memory_options(config)):
        dynamics = build_dynamics(config, session.adapter, config.sample.eval_num_steps)
        result = evaluate(
            Denoiser(session.adapter, session.policy.module, dynamics),
            session.eval_reward,
            session.test_prompts,
            accelerator=session.accelerator,
            size=eval_image_size(config),
            batch_size=config.sample.test_batch_size,
            seed=config.seed,
            keep_images=config.log_images,
            between_batches=session.stop.check,
        )
        held_out = session.measure_held_out()
    prompts = [p.prompt for p in session.test_prompts]
    write_samples(
        session, "eval", epoch, result.images, result.sources, prompt=prompts, **result.scores
    )
    session.eval_reward.release_memory()
    scores = evaluation_metrics(session, epoch, result.scores, session.test_set_names())
    return scores | held_out


if __name__ == "__main__":
    loop = dry_run.DiffusionDryRun(
        sample_current_epoch, collect_rewards, train_epoch, run_evaluation
    )
    command_line.run_with_config(main, DIFFUSION_SPEC, dry_run=loop.dry_run)
