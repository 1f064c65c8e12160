"""Train a reward model from pairs of responses (`train.loss="bradley_terry"`).

One epoch: draw pairs, score both responses of each, and update the weights so that the preferred
ones get the higher scores. The score is a linear function of the last hidden state of the whole
conversation, as in TRL and OpenRLHF. Evaluation measures on held-out pairs how often it is higher
for the preferred response.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.passes import restore_pass_states
from flow_grpo.data.responses import GivenResponse
from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.rewards import TOTAL
from flow_grpo.training.checkpoint import EMA_PREFIX
from flow_grpo.training.distributed import (
    accumulate_gradients,
    gather_scores,
    is_sharded,
    pad_micro_batches,
    raise_on_all_ranks,
)
from flow_grpo.training.finite import backward
from flow_grpo.training.metrics import Loss, Timer, TrainingStats, peak_memory_gb
from flow_grpo.training.session import finish_epoch, run_training, training_metrics
from flow_grpo.training.time_estimate import is_due
from flow_grpo.training.update import optimizer_step, set_learning_rates
from flow_grpo.vlm.builders import memory_saving_options
from flow_grpo.vlm.packing import PackedBatch, Response, micro_batches, pack_responses
from flow_grpo.vlm.reward_models.loss import bradley_terry_loss
from flow_grpo.vlm.reward_models.pairs import UNSEEN_TOKEN, as_responses
from flow_grpo.vlm.reward_models.session import RewardModelSession, build_session
from flow_grpo.vlm.rollout import Rollout
from flow_grpo.vlm.sample_logging import write_response_samples


def train_reward_model(config: UncheckedConfig) -> RewardModelSession:
    """Train with a config, from the start or a checkpoint, and return the finished session."""
    session = build_session(config)
    return run_training(session, train, memory_saving_options(session.config))


def train(session: RewardModelSession) -> None:
    """Run the remaining epochs: draw pairs, update, evaluate, save."""
    config, progress = session.config, session.progress
    if progress.epoch < 0 and config.eval_before_training:
        timer = Timer()
        with timer("eval"):
            metrics = run_evaluation(session, epoch=0)
        finish_epoch(session, 0, metrics, timer)
    progress.epoch = max(progress.epoch, 0)
    for epoch in range(progress.epoch, config.num_epochs):
        done, timer = epoch + 1, Timer()
        drawn = Rollout.draw(session.plan, session.sets, config.seed, epoch, saved_passes(session))
        with timer("train"):
            metrics = train_epoch(session, epoch, drawn.rows)
        metrics["perf/pairs_per_s"] = session.plan.samples / timer.seconds["train"]
        metrics["perf/peak_mem_gb"] = peak_memory_gb(session.accelerator.device)
        if is_due(done, config.eval_freq, config.num_epochs):
            with timer("eval"):
                metrics |= run_evaluation(session, done)
        progress.questions = [state.to_json() for state in drawn.passes]
        finish_epoch(session, done, metrics, timer)


def saved_passes(session: RewardModelSession) -> list[dict]:
    """Return the positions in the passes over the data sets, unless these have changed."""
    saved = session.progress.questions
    return saved if restore_pass_states(session.sizes, saved)[1] else []


def train_epoch(session: RewardModelSession, epoch: int, rows: np.ndarray) -> dict[str, float]:
    """Update the weights on the pairs `rows` of an epoch and return the training metrics."""
    plan, rank = session.plan, session.accelerator.process_index
    parts = rows.reshape(plan.updates_per_pass, plan.num_processes, -1)
    stats = TrainingStats()
    for inner in range(plan.inner_epochs):
        order = numpy_rng(session.config.seed, Stream.SHUFFLE, epoch, inner)
        for n, u in enumerate(order.permutation(plan.updates_per_pass), 1):
            pairs = [session.pairs[row] for row in parts[u, rank]]
            name = f"epoch {epoch + 1} train {n}/{plan.updates_per_pass}"
            train_update(session, pairs, parts[u].size, stats, name)
    return training_metrics(session, stats)


def train_update(
    session: RewardModelSession,
    pairs: Sequence[GivenResponse],
    total: int,
    stats: TrainingStats,
    name: str,
) -> None:
    """Accumulate the gradients of an update and take an optimizer step.

    Args:
        session: State of the run.
        pairs: This process's pairs of the update.
        total: Number of pairs of the update over all processes.
        stats: Statistics of the epoch, to which those of the update are added.
        name: Name of the progress bar.
    """
    accelerator, policy = session.accelerator, session.policy
    batches = pad_micro_batches(accelerator, list(packed_batches(session, pairs)))
    steps = accumulate_gradients(
        accelerator,
        policy.module,
        session.bar(batches, name),
        len(batches),
        at_once=is_sharded(accelerator),
    )
    set_learning_rates(session)
    for (part, batch), counted in steps:
        margin = torch.tensor([pairs[i].margin for i in part], device=accelerator.device)
        loss = pair_loss(policy.scores(batch), margin, session.config.train.center_scores)
        # gradients are averaged over processes, so scale the loss by their number
        scale = session.plan.num_processes * float(counted)
        backward(accelerator, loss.per_sample.sum() / total * scale)
        stats.add(loss if counted else loss.without_samples(), on_policy=False)
    optimizer_step(session, stats)


def pair_loss(scores: Tensor, margin: Tensor, center: float) -> Loss:
    """Return the loss of each pair from the scores of both responses in turn, (2 P,)."""
    chosen, rejected = scores.view(-1, 2).unbind(1)
    loss = bradley_terry_loss(chosen, rejected, margin, center)
    difference = (chosen - rejected).detach()
    columns = {
        "accuracy": (difference > 0).to(difference.dtype),
        "margin": difference,
        "chosen_score": chosen.detach(),
        "rejected_score": rejected.detach(),
    }
    return Loss(loss, columns)


def packed_batches(
    session: RewardModelSession, pairs: Sequence[GivenResponse]
) -> Iterator[tuple[list[int], PackedBatch]]:
    """Yield the micro-batches of whole pairs, each with the indices of its pairs."""
    shares_prompt = session.policy.network.family.shares_prompt
    responses: list[Response] = []  # the preferred one of each pair, then the rejected one
    for number, pair in enumerate(pairs):
        both = session.encoder.encode_conversations(pair, pair.responses)
        responses += as_responses(number, both, shares_prompt=shares_prompt)
    for part in micro_batches(responses, session.config.train.tokens_per_batch, together=2):
        batch = pack_responses(responses[part], UNSEEN_TOKEN).to(session.accelerator.device)
        yield list(range(part.start // 2, part.stop // 2)), batch


def run_evaluation(session: RewardModelSession, epoch: int) -> dict[str, float]:
    """Score the test pairs and return the evaluation metrics."""
    accelerator, pairs = session.accelerator, session.test_pairs
    rows = list(range(accelerator.process_index, len(pairs), accelerator.num_processes))

    def score() -> list[dict[str, np.ndarray]]:
        with session.policy.gathered_weights():
            return [
                score_pairs(session, batch)
                for _, batch in session.bar(
                    packed_batches(session, [pairs[row] for row in rows]), "evaluate", len(rows)
                )
            ]

    with session.ema_weights():
        found = raise_on_all_ranks(accelerator, score)
    session.stop.check()
    columns = gather_scores(accelerator, np.array(rows), found)
    write_scored_pairs(session, epoch, columns)
    scores = np.concatenate([columns["chosen_score"], columns["rejected_score"]])
    prefix = "" if session.ema is None else EMA_PREFIX
    session.policy.score_statistics = score_statistics(scores, prefix)
    difference = columns["chosen_score"] - columns["rejected_score"]
    margin = np.array([pair.margin for pair in pairs])
    accurate = difference > 0
    metrics = {
        TOTAL: accurate.mean(),  # selects the best checkpoint
        "accuracy": accurate.mean(),
        "margin": difference.mean(),
        "loss": np.logaddexp(0, margin - difference).mean(),
        **{name: values.mean() for name, values in columns.items()},
    }
    sets = np.array(session.test_set_names())
    metrics |= {f"{name}/accuracy": accurate[sets == name].mean() for name in np.unique(sets)}
    metrics = {f"eval/{name}": float(value) for name, value in metrics.items()}
    return {**metrics, "data/held_out": session.held_out_share()}


def score_statistics(scores: np.ndarray, prefix: str) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of scores by the prefix of the weights that gave them.

    There are none if a score is not finite.
    """
    if not np.isfinite(scores).all():
        return {}
    return {prefix: (float(scores.mean()), float(scores.std()))}


def score_pairs(session: RewardModelSession, batch: PackedBatch) -> dict[str, np.ndarray]:
    """Return the scores of the pairs of a micro-batch, (P,) each."""
    scores = session.policy.scores_no_grad(batch).double().cpu().view(-1, 2)
    chosen, rejected = scores.unbind(1)
    return {"chosen_score": chosen.numpy(), "rejected_score": rejected.numpy()}


def write_scored_pairs(
    session: RewardModelSession, epoch: int, columns: dict[str, np.ndarray]
) -> None:
    """Write the first test pairs with their scores to samples/; call it on all processes."""
    pairs = session.test_pairs[: session.config.log_images // 2]
    scores = zip(columns["chosen_score"], columns["rejected_score"], strict=True)
    write_response_samples(
        session,
        "eval",
        epoch,
        [pair for pair in pairs for _ in pair.responses],
        [response for pair in pairs for response in pair.responses],
        preferred=[each for _ in pairs for each in (True, False)],
        **{TOTAL: [float(score) for both in list(scores)[: len(pairs)] for score in both]},
    )
