"""Train a vision-language model with online reinforcement learning.

    python scripts/train_vlm.py --config config/vlm.py:PRESET [--config.sample.group_size=16 ...]
    torchrun --nproc_per_node 8 scripts/train_vlm.py --config ... [--dry_run [--world_size=N]]

One epoch: sample a group of responses to each question, score them, turn the scores into advantages
and update the weights with a policy-gradient loss on the response tokens. The losses are in
flow_grpo/vlm/losses. Some of them train on given responses: the samples of an epoch then come from
the data, without scores and advantages. With train.loss=bradley_terry, a reward model is trained
from pairs instead: flow_grpo/vlm/reward_models/training.py.
"""

if __name__ == "__main__":
    import flow_grpo.config.early_exit  # noqa: F401  first: the other imports take seconds
    from flow_grpo.config import command_line
    from flow_grpo.vlm.fields import VLM_SPEC

    command_line.parse_command_line(VLM_SPEC, dry_run=True)

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from accelerate.utils import gather_object
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.config import command_line
from flow_grpo.data.passes import restore_pass_states
from flow_grpo.data.seeding import Stream, numpy_rng, sample_generators
from flow_grpo.rewards import TOTAL
from flow_grpo.training.distributed import (
    accumulate_gradients,
    gather_scores,
    get_ranks,
    is_sharded,
    pad_micro_batches,
    raise_on_all_ranks,
)
from flow_grpo.training.finite import backward
from flow_grpo.training.metrics import Timer, TrainingStats, peak_memory_gb, reward_metrics
from flow_grpo.training.session import (
    BaseSession,
    evaluation_metrics,
    finish_epoch,
    run_training,
    stop_on_outage,
    training_metrics,
)
from flow_grpo.training.time_estimate import is_due
from flow_grpo.training.update import optimizer_step, set_learning_rates
from flow_grpo.vlm.adaptive_kl import current_kl_weight, update_kl_weight
from flow_grpo.vlm.advantages import (
    ResponseTensors,
    compute_kl_penalties,
    compute_response_advantages,
    compute_token_advantages,
    engine_deviation,
    set_old_log_probs,
)
from flow_grpo.vlm.builders import memory_saving_options
from flow_grpo.vlm.critic import set_lr_scales
from flow_grpo.vlm.dry_run import VlmDryRun
from flow_grpo.vlm.fields import BRADLEY_TERRY, ENVIRONMENT, GAE, VLM_SPEC, VlmConfig
from flow_grpo.vlm.given_responses import GivenObjective, estimate_mismatched_kl, given_rollout
from flow_grpo.vlm.losses import build_loss
from flow_grpo.vlm.losses.base import UpdateCounts
from flow_grpo.vlm.objective import Objective
from flow_grpo.vlm.packing import PackedBatch, Response, micro_batches, pack_responses
from flow_grpo.vlm.reward_models.training import train_reward_model
from flow_grpo.vlm.rollout import LENGTH, GenerationBatch, PendingResponses, Rollout
from flow_grpo.vlm.sample_exchange import share_rollout
from flow_grpo.vlm.sample_logging import write_response_samples
from flow_grpo.vlm.session import VlmSession, build_session

logger = logging.getLogger("flow_grpo")


def main(config: ConfigDict) -> BaseSession:
    """Train with a config, from the start or a checkpoint, and return the finished session."""
    if config.train.loss == BRADLEY_TERRY:
        return train_reward_model(config)
    session = build_session(config)
    return run_training(session, train, memory_saving_options(session.config))


def train(session: VlmSession) -> None:
    """Run the remaining epochs: sample, score, compute advantages, update, evaluate, save.

    Training ends early once all questions were drawn and no response has a nonzero advantage.
    """
    config, progress = session.config, session.progress
    if progress.epoch < 0 and config.eval_before_training:
        timer = Timer()
        with timer("eval"):
            metrics = run_evaluation(session, epoch=0)
        finish_epoch(session, 0, metrics, timer)
    progress.epoch = max(progress.epoch, 0)
    if progress.epoch > 0 and not restore_pass_states(session.sizes, progress.questions)[1]:
        logger.warning(
            "the checkpoint does not record which questions of this data set were used; starting "
            "a new pass over it"
        )

    for epoch in range(progress.epoch, config.num_epochs):
        done, timer = epoch + 1, Timer()
        rollout = sample_epoch(session, epoch, timer)
        metrics = rollout.metrics()
        if session.given is None:
            stop_on_outage(session, done, rollout.rewards)
            metrics |= reward_metrics(rollout.rewards, rollout.groups)
        session.reward.release_memory()
        has_advantages = rollout.is_trained.any()
        solved = not has_advantages and rollout.all_questions_drawn
        if config.train.mask_truncated:
            rollout.mask_truncated()
            has_advantages = rollout.is_trained.any()
        if has_advantages:
            with timer("train"):
                tensors = compute_rollout_log_probs(session, rollout)
                assign_advantages(session, rollout, tensors)
                metrics |= train_epoch(session, epoch, rollout, tensors)
                state = session.progress.algorithm
                metrics |= update_kl_weight(config.train, state, metrics, session.plan.samples)
        metrics["perf/answers_per_s"] = session.plan.samples / sum(timer.seconds.values())
        metrics["perf/peak_mem_gb"] = peak_memory_gb(session.accelerator.device)
        if solved or is_due(done, config.eval_freq, config.num_epochs):
            with timer("eval"):
                if has_advantages and session.given is None:
                    save_training_samples(session, done, rollout, tensors)
                metrics |= run_evaluation(session, done)
        session.progress.questions = [state.to_json() for state in rollout.passes]
        finish_epoch(session, done, metrics, timer, ends=solved)
        if not has_advantages:
            logger.info(
                "epoch %d: %s (mean reward %.3f); %s",
                done,
                excluded_reason(config),
                metrics[f"reward/{TOTAL}"],
                "all questions were drawn, so training ends" if solved else "no update was made",
            )
        if solved:
            return


def excluded_reason(config: VlmConfig) -> str:
    """Return why no response of an epoch is trained, for a log message."""
    reasons = ["has a zero advantage"]
    if config.sample.filter_reward:
        reasons.append("is excluded by sample.filter_reward")
    if config.train.mask_truncated:
        reasons.append("is truncated")
    return f"every sampled response {' or '.join(reasons)}"


def sample_epoch(session: VlmSession, epoch: int, timer: Timer) -> Rollout:
    """Sample and score the responses of an epoch, or take the given ones, which have no scores.

    With `sample.refills`, questions whose responses all have a zero advantage, not counting a KL
    penalty in the reward, are replaced by other questions.
    """
    config, plan, train = session.config, session.plan, session.config.train
    reward, accelerator = session.reward, session.accelerator
    if session.given is not None:
        with timer("data"):
            return raise_on_all_ranks(accelerator, lambda: given_rollout(session, epoch))
    rollout = Rollout.draw(plan, session.sets, config.seed, epoch, session.progress.questions)
    missing = np.arange(plan.samples)  # indices of the samples to draw
    for attempt in range(config.sample.refills + 1):
        own = rollout.process_indices(accelerator.process_index, missing)
        with timer("sample"):
            sample = partial(sample_responses, session, epoch, attempt, rollout, own)
            pending = session.run_with_engine(sample)
        with timer("reward_wait"):
            scores = [each.result() for each in pending]
        index = np.array(own, dtype=np.int64)
        rollout.store_scores(gather_scores(accelerator, index, scores), missing)
        session.stop.check()
        if config.sample.refills > 0:
            advantages = compute_response_advantages(
                accelerator,
                rollout,
                reward.weights,
                reward.pairwise_rewards,
                train.advantage,
                train.advantage_scale,
                kl_penalties={},
            )
            rollout.keep_groups_with_advantage(advantages)
            if name := config.sample.filter_reward:
                low, high = config.sample.filter_low, config.sample.filter_high
                rollout.keep_groups_within(name, low, high)
        missing = rollout.refill() if attempt < config.sample.refills else []
        if not len(missing):
            break
    return rollout


def sample_responses(
    session: VlmSession, epoch: int, attempt: int, rollout: Rollout, own: list[int]
) -> list[PendingResponses]:
    """Sample this process's responses, with the indices `own`, and submit them to the rewards.

    Each batch is scored while the next one is sampled. ReMax also needs a greedy response to each
    question of a batch.
    """
    config, questions, pending = session.config, session.questions, []
    size, with_greedy = session.plan.batch_size, config.train.advantage == "remax"
    batches = [own[i : i + size] for i in range(0, len(own), size)]

    def requests() -> Iterator[GenerationBatch]:
        """Yield the inputs of each batch and, for ReMax, of its greedy responses."""
        for batch in batches:
            rows = [rollout.row_of(index) for index in batch]
            new = [row for row in rows if row not in rollout.prompts]
            rollout.prompts |= session.rollout_engine.encode(questions, new)
            keys = [index + attempt * session.plan.samples for index in batch]
            yield rollout.prompts, rows, sample_generators(config.seed, epoch, keys)
            if with_greedy:
                yield rollout.prompts, list(dict.fromkeys(rows)), None

    generated = session.generate_batches(questions, requests())
    limit = session.max_response_tokens
    for batch in session.bar(batches, f"epoch {epoch + 1} sample"):
        session.reward.raise_if_failing()
        samples = next(generated)
        greedy = next(generated) if with_greedy else []
        rollout.samples |= dict(zip(batch, samples, strict=True))
        pending.append(PendingResponses.submit(session.reward, questions, limit, samples, greedy))
    return pending


def compute_rollout_log_probs(session: VlmSession, rollout: Rollout) -> dict[int, ResponseTensors]:
    """Compute what advantages and the loss need of the samples before the first update.

    The samples are those of this process or, with `train.sequence_parallel`, of its group, whose
    processes exchange them here. Computed are values, reference log-probabilities and, if
    advantages depend on them, recomputed old log-probabilities. Other old log-probabilities are
    recomputed by `train_epoch`. Without a value head and a reference policy, there is no forward
    pass.

    Returns:
        Per-token tensors by sample index.
    """
    train, policy, given = session.config.train, session.policy, session.given
    ranks = get_ranks(session.accelerator)
    share_rollout(ranks, rollout, session.rollout_engine, session.questions)
    recomputes = session.recomputes_old_log_probs
    tensors = {
        index: ResponseTensors(
            None if recomputes else sample.log_probs,
            liked=given is None or given.liked[sample.row],
        )
        for index, sample in rollout.samples.items()
    }
    needs_forward = train.advantage == GAE or (recomputes and session.advantages_need_log_probs)
    with_reference = train.beta > 0
    if not (needs_forward or with_reference):
        return tensors
    updates = rollout.updates()
    with policy.gathered_weights():
        # use the training micro-batches: another composition would round differently
        for members in (*updates, ~updates.any(0)):
            own = [index for index in sorted(tensors) if members[index]]
            for part, batch in packed_batches(session, rollout, own):
                scores = policy.forward_tokens_no_grad(batch) if needs_forward else {}
                if needs_forward:
                    store_old_log_probs(session, rollout, tensors, part, batch, scores["log_probs"])
                if with_reference:
                    reference = policy.reference_log_probs(batch, given=given is not None)
                    scores["reference_log_probs"] = reference
                for row, index in enumerate(part):
                    mask = batch.mask[row]
                    new = {name: column[row][mask].cpu() for name, column in scores.items()}
                    tensors[index].reference_log_probs = new.get("reference_log_probs")
                    tensors[index].values = new.get("values")
    return tensors


def store_old_log_probs(
    session: VlmSession,
    rollout: Rollout,
    tensors: dict[int, ResponseTensors],
    part: list[int],
    batch: PackedBatch,
    log_probs: Tensor,
) -> None:
    """Set the old log-probabilities of the samples of a micro-batch that have none yet.

    Args:
        session: State of the run.
        rollout: The samples of the epoch.
        tensors: Per-token tensors by sample index.
        part: The sample of each response of the micro-batch.
        batch: R packed responses.
        log_probs: Their log-probabilities under the weights that sampled them, (R, T).
    """
    if all(tensors[index].old_log_probs is not None for index in part):
        return
    samples = [rollout.samples[index] for index in part]
    lengths = [len(sample.tokens) for sample in samples]
    columns = log_probs.detach()[batch.mask].cpu().split(lengths)
    cap = None if session.rollout_engine.exact_log_probs else session.config.train.importance_cap
    for index, sample, own in zip(part, samples, columns, strict=True):
        if tensors[index].old_log_probs is None:
            set_old_log_probs(tensors[index], own, sample.log_probs, cap)


def assign_advantages(
    session: VlmSession, rollout: Rollout, tensors: dict[int, ResponseTensors]
) -> None:
    """Set the advantages in `tensors`; given responses have none."""
    if session.given is not None:
        return
    train, accelerator = session.config.train, session.accelerator
    kl_penalties = {}
    if train.beta > 0 and train.kl_in == "reward":
        weight = current_kl_weight(train, session.progress.algorithm)
        kl_penalties = compute_kl_penalties(tensors, train.kl, weight, clamp=train.clamp_log_ratios)
    if train.advantage == GAE:
        compute_token_advantages(
            accelerator,
            rollout,
            tensors,
            kl_penalties,
            discount=train.discount,
            decay=train.gae_decay,
            environment_weight=session.reward.weights.get(ENVIRONMENT, 0.0),
        )
        return
    advantages = compute_response_advantages(
        accelerator,
        rollout,
        session.reward.weights,
        session.reward.pairwise_rewards,
        train.advantage,
        train.advantage_scale,
        kl_penalties,
    )
    for index, own in tensors.items():
        own.advantages = torch.full_like(rollout.samples[index].log_probs, advantages[index])


def compute_old_log_probs(
    session: VlmSession,
    rollout: Rollout,
    tensors: dict[int, ResponseTensors],
    updates: Sequence[np.ndarray],
) -> None:
    """Recompute the old log-probabilities of `updates` before an earlier one changes the weights.

    The forward pass of an update that the weights still equal the behaviour policy in also yields
    its old log-probabilities, so the first update of an epoch need not be in `updates`. Samples
    without a gradient are left out.

    Args:
        session: State of the run.
        rollout: The samples of the epoch.
        tensors: Per-token tensors of this process's samples, by sample index.
        updates: Mask of the samples of each update, (samples per epoch,).
    """
    if (
        not session.recomputes_old_log_probs
        or session.advantages_need_log_probs
        or len(updates) == 0
    ):
        return
    objective = build_objective(session, critic_only=False)
    with session.policy.gathered_weights():
        for members in updates:
            own = [index for index in sorted(tensors) if members[index]]
            batches = batches_with_gradient(session, rollout, objective, tensors, own)
            for part, batch in batches if own else []:
                scores = session.policy.forward_tokens_no_grad(batch)
                store_old_log_probs(session, rollout, tensors, part, batch, scores["log_probs"])


def train_epoch(
    session: VlmSession, epoch: int, rollout: Rollout, tensors: dict[int, ResponseTensors]
) -> dict[str, float]:
    """Update the weights on the epoch's responses and return the training metrics.

    Each inner epoch shuffles the updates; the samples of an update stay the same.
    """
    config, plan, progress = session.config, session.plan, session.progress
    critic_only = epoch < config.train.critic_warmup
    objective = build_objective(session, critic_only=critic_only)
    if objective.uses_critic:
        set_lr_scales(session.optimizer, config.train, warmup=critic_only)
    stats = TrainingStats()
    applied_before = progress.applied
    updates = rollout.updates()
    for inner in range(plan.inner_epochs):
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner)
        numbered = enumerate(order.permutation(plan.updates_per_pass), 1)
        nonempty = [(n, updates[u]) for n, u in numbered if updates[u].any()]
        if inner == 0:
            later = [members for _, members in nonempty[1:]]
            compute_old_log_probs(session, rollout, tensors, later)
        for n, members in nonempty:
            train_update(
                session,
                rollout,
                objective,
                tensors,
                members,
                stats,
                on_policy=progress.applied == applied_before,
                name=f"epoch {epoch + 1} train {n}/{plan.updates_per_pass}",
            )
    metrics = training_metrics(session, stats)
    if objective.uses_critic:
        metrics["train/critic_lr"] = session.optimizer.param_groups[1]["lr"]
    if objective.importance_weighted:
        trained = {i: own for i, own in tensors.items() if objective.has_gradient(own)}
        metrics |= engine_deviation(session.accelerator, rollout, trained)
    return metrics | objective.derived_metrics(metrics)


def build_objective(session: VlmSession, *, critic_only: bool) -> Objective | GivenObjective:
    """Return the objective of sampled or of given responses."""
    train, max_new_tokens = session.config.train, session.max_response_tokens
    if session.given is not None:
        return GivenObjective(session.given, max_new_tokens)
    return Objective(
        build_loss(train.loss, train),
        train,
        max_new_tokens=max_new_tokens,
        kl_weight=current_kl_weight(train, session.progress.algorithm),
        importance_weighted=not session.rollout_engine.exact_log_probs,
        critic_only=critic_only,
    )


def train_update(
    session: VlmSession,
    rollout: Rollout,
    objective: Objective | GivenObjective,
    tensors: dict[int, ResponseTensors],
    members: np.ndarray,
    stats: TrainingStats,
    *,
    on_policy: bool,
    name: str,
) -> None:
    """Accumulate the gradients of an update and take an optimizer step.

    Args:
        session: State of the run.
        rollout: The samples of the epoch.
        objective: The loss.
        tensors: Per-token tensors of this process's samples, by sample index.
        members: Mask of the update's samples, over all processes, (samples per epoch,).
        stats: Statistics of the epoch, to which those of the update are added.
        on_policy: Whether the weights are still those that sampled the epoch.
        name: Name of the progress bar.
    """
    accelerator, lengths = session.accelerator, rollout.scores[LENGTH]
    counts = UpdateCounts(tokens=float(lengths[members].sum()), responses=float(members.sum()))
    given = session.given
    if given is not None and given.loss.needs_mismatched_kl:
        pack = partial(packed_responses, session)
        kl = estimate_mismatched_kl(session, rollout, members, pack)
        counts = replace(counts, mismatched_kl=kl)
    own = [index for index in sorted(tensors) if members[index]]
    batches = batches_with_gradient(session, rollout, objective, tensors, own)
    trained = [index for part, _ in batches for index in part]
    if own:
        stats.count_zero_losses(int(lengths[own].sum() - lengths[trained].sum()))
    batches = pad_micro_batches(accelerator, batches)
    steps = accumulate_gradients(
        accelerator,
        session.policy.module,
        session.bar(batches, name),
        len(batches),
        at_once=is_sharded(accelerator),
    )
    set_learning_rates(session)
    for (part, batch), counted in steps:
        # a rank without samples runs padding batches because the other ranks wait for it
        counted = counted and bool(own)
        scores = session.policy.forward_tokens(
            batch, critic_only=objective.critic_only, given=given is not None
        )
        store_old_log_probs(session, rollout, tensors, part, batch, scores["log_probs"])
        loss = objective.loss(batch, scores, [tensors[i] for i in part], counts)
        # gradients are averaged over groups of processes, so scale the loss by their number
        scale = get_ranks(accelerator).data_size * float(counted)
        backward(accelerator, loss.per_sample.sum() / objective.num_terms(counts) * scale)
        loss = loss if counted else loss.without_samples()
        stats.add(loss, on_policy=on_policy)
    if objective.critic_only:
        session.policy.drop_policy_gradients()
    optimizer_step(session, stats)


def batches_with_gradient(
    session: VlmSession,
    rollout: Rollout,
    objective: Objective | GivenObjective,
    tensors: dict[int, ResponseTensors],
    own: list[int],
) -> list[tuple[list[int], PackedBatch]]:
    """Return the micro-batches of this process's samples `own` that have a gradient.

    There is at least one, because other ranks wait for this one in collective operations.
    """
    nonzero = {i for i in own if objective.has_gradient(tensors[i])}
    # if old log-probabilities were recomputed before the advantages were known: as they were packed
    keep_all = session.recomputes_old_log_probs and session.advantages_need_log_probs
    kept = own if keep_all else [i for i in own if i in nonzero]
    batches = list(packed_batches(session, rollout, kept or own[:1] or [min(tensors)]))
    return [(part, batch) for part, batch in batches if nonzero & set(part)] or batches[:1]


def packed_batches(
    session: VlmSession, rollout: Rollout, index: list[int]
) -> Iterator[tuple[list[int], PackedBatch]]:
    """Yield the micro-batches of the samples `index`, in order, each with its sample indices."""
    network, budget = session.policy.network, session.config.train.tokens_per_batch
    shares_prompt, one_row = network.family.shares_prompt, network.packs_one_row
    responses = [rollout.response(i, shares_prompt=shares_prompt) for i in index]
    for part in micro_batches(responses, budget, session.plan.together, one_row=one_row):
        packed = pack_responses(responses[part], session.rollout_engine.pad, one_row=one_row)
        yield index[part], packed.to(session.accelerator.device)


def packed_responses(session: VlmSession, responses: list[Response]) -> Iterator[PackedBatch]:
    """Yield the micro-batches of responses, in order."""
    budget, one_row = session.config.train.tokens_per_batch, session.policy.network.packs_one_row
    for part in micro_batches(responses, budget, one_row=one_row):
        packed = pack_responses(responses[part], session.rollout_engine.pad, one_row=one_row)
        yield packed.to(session.accelerator.device)


def run_evaluation(session: VlmSession, epoch: int) -> dict[str, float]:
    """Score greedy responses to the test questions and return the evaluation metrics."""
    config, accelerator, questions = session.config, session.accelerator, session.test_questions
    rows = list(range(accelerator.process_index, len(questions), accelerator.num_processes))
    with session.ema_weights():
        pending = session.run_with_engine(lambda: greedy_responses(session, rows))
    session.stop.check()
    scores = gather_scores(accelerator, np.array(rows), [each.result() for each in pending])
    session.eval_reward.release_memory()
    shown = (s for each in pending for s in each.samples if s.row < config.log_images)
    logged = sorted(gather_object([(s.row, s.transcript) for s in shown]))
    rewards = {name: scores[name] for name in (*session.eval_reward.weights, TOTAL)}
    logged_questions = [questions[row] for row, _ in logged]
    logged_texts = [text for _, text in logged]
    write_response_samples(session, "eval", epoch, logged_questions, logged_texts, **rewards)
    lengths = {"eval/length": float(scores.pop(LENGTH).mean())}
    return {**evaluation_metrics(session, epoch, rewards, session.test_set_names()), **lengths}


def greedy_responses(session: VlmSession, rows: list[int]) -> list[PendingResponses]:
    """Decode greedy responses to the test questions `rows` and submit them to the rewards."""
    questions, pending = session.test_questions, []
    size, limit = session.config.sample.batch_size, session.max_response_tokens
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    requests = ((session.rollout_engine.encode(questions, batch), batch, None) for batch in batches)
    generated = session.generate_batches(questions, requests)
    for _ in session.bar(batches, "evaluate"):
        session.eval_reward.raise_if_failing()
        samples = next(generated)
        pending.append(PendingResponses.submit(session.eval_reward, questions, limit, samples))
    return pending


def save_training_samples(
    session: VlmSession, epoch: int, rollout: Rollout, tensors: dict[int, ResponseTensors]
) -> None:
    """Write the first `log_images` samples, but at least one whole group; none if it is 0.

    Call it on all processes; the main process writes its own samples.
    """
    count = session.config.log_images
    logged = sorted(tensors)[: max(count, session.plan.group_size) if count else 0]
    samples = [rollout.samples[index] for index in logged]
    columns = {name: rollout.scores[name][logged] for name in (*session.reward.weights, TOTAL)}
    columns["advantage"] = [float(tensors[index].advantages.mean()) for index in logged]
    columns["group"] = rollout.groups[logged]
    questions = [session.questions[sample.row] for sample in samples]
    write_response_samples(
        session, "train", epoch, questions, [sample.transcript for sample in samples], **columns
    )


if __name__ == "__main__":
    loop = VlmDryRun(
        sample_epoch,
        compute_rollout_log_probs,
        assign_advantages,
        compute_old_log_probs,
        train_epoch,
        run_evaluation,
    )
    command_line.run_with_config(main, VLM_SPEC, dry_run=loop.dry_run)
