"""Train a vision-language model with online reinforcement learning.

    python scripts/train_vlm.py --config config/vlm.py:PRESET [--config.sample.group_size=16 ...]
    torchrun --nproc_per_node 8 scripts/train_vlm.py --config ... [--dry_run [--world_size=N]]

One epoch: sample a group of answers to each question, score them, turn scores into advantages, and
update the weights with a clipped policy objective on the tokens of the answers.
"""

if __name__ == "__main__":
    import flow_grpo.config.early  # noqa: F401  first: the others take seconds
    from flow_grpo.answer.fields import ANSWER
    from flow_grpo.config import command_line

    command_line.look(ANSWER, dry_run=True)

import logging
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from accelerate.utils import gather_object
from ml_collections import ConfigDict

from flow_grpo.answer.batches import PackedBatch, micro_batches, packed
from flow_grpo.answer.credit import Fixed, answer_advantages, penalties, reweigh, token_advantages
from flow_grpo.answer.critic import is_warmup, scale_rates
from flow_grpo.answer.dry import AnswerLoop
from flow_grpo.answer.fields import ANSWER, GAE
from flow_grpo.answer.losses import build_loss
from flow_grpo.answer.losses.base import Counts
from flow_grpo.answer.objective import Objective
from flow_grpo.answer.rollout import LENGTH, PendingAnswers, Rollout, ToAnswer
from flow_grpo.answer.session import VlmSession, build_session, lighter_settings
from flow_grpo.answer.showing import write_answers
from flow_grpo.config import command_line
from flow_grpo.data.passes import pass_states
from flow_grpo.data.seeding import Stream, numpy_rng, sample_generators
from flow_grpo.rewards import TOTAL
from flow_grpo.run.distributed import (
    accumulated,
    gather_scores,
    in_step,
    is_sharded,
)
from flow_grpo.run.finite import backward
from flow_grpo.run.metrics import Timer, TrainingStats, peak_memory_gb, reward_metrics
from flow_grpo.run.session import (
    carry_out,
    evaluation_metrics,
    finish_epoch,
    is_due,
    set_learning_rates,
    stop_at_outage,
    take_update,
    training_metrics,
)

logger = logging.getLogger("flow_grpo")


def main(config: ConfigDict) -> VlmSession:
    return carry_out(build_session(config), train, lighter_settings(config))


def train(session: VlmSession) -> None:
    config, progress = session.config, session.progress
    if progress.epoch < 0:
        timer = Timer()
        with timer("eval"):
            metrics = run_evaluation(session, epoch=0)
        finish_epoch(session, 0, metrics, timer)
    if progress.epoch > 0 and not pass_states(session.sizes, progress.questions)[1]:
        logger.warning(
            "the checkpoint does not say which of these questions the run has used; a new pass "
            "over the data set begins"
        )

    for epoch in range(progress.epoch, config.num_epochs):
        done, timer = epoch + 1, Timer()
        rollout = sample_epoch(session, epoch, timer)
        stop_at_outage(session, done, rollout.rewards)
        session.reward.rest()
        alike = not rollout.learns.any()
        solved = alike and rollout.has_drawn_all  # which no question is left to disprove
        metrics = {**reward_metrics(rollout.rewards, rollout.groups), **rollout.metrics()}
        if not alike:
            with timer("train"):
                fixed = prepare(session, rollout)
                metrics |= give_credit(session, rollout, fixed)
                metrics |= train_epoch(session, epoch, rollout, fixed)
        metrics["perf/answers_per_s"] = session.plan.samples / sum(timer.seconds.values())
        metrics["perf/peak_mem_gb"] = peak_memory_gb(session.accelerator.device)
        if solved or is_due(done, config.eval_freq, config.num_epochs):
            with timer("eval"):
                if not alike:
                    save_training_samples(session, done, rollout, fixed)
                metrics |= run_evaluation(session, done)
        session.progress.questions = [state.to_json() for state in rollout.passes]
        finish_epoch(session, done, metrics, timer, ends=solved)
        if alike:
            end = "there is nothing left to learn from, so training ends here"
            logger.info(
                "epoch %d: no answer to any question drawn has an advantage (mean reward %.3f): %s",
                *(done, metrics[f"reward/{TOTAL}"], end if solved else "nothing was trained"),
            )
        if solved:
            return


def sample_epoch(session: VlmSession, epoch: int, timer: Timer) -> Rollout:
    """Answers to the questions of an epoch, scored; with `sample.refills`, questions whose answers
    have no advantage are replaced by others. A KL in the reward has no part in that decision."""
    config, plan, train = session.config, session.plan, session.config.train
    reward, accelerator = session.reward, session.accelerator
    rollout = Rollout.draw(plan, session.sets, config.seed, epoch, session.progress.questions)
    wanted = np.arange(plan.samples)
    for attempt in range(config.sample.refills + 1):
        own = rollout.own(accelerator.process_index, wanted)
        with timer("sample"):
            sample = partial(sample_answers, session, epoch, attempt, rollout, own)
            pending = session.while_awake(sample)
        with timer("reward_wait"):
            scores = [each.result() for each in pending]
        index = np.array(own, dtype=np.int64)
        rollout.store(gather_scores(accelerator, index, scores), wanted)
        session.stop.check()
        if config.sample.refills > 0:
            settings = train.advantage, train.advantage_scale
            advantages = answer_advantages(
                accelerator, rollout, reward.weights, reward.judges, *settings, lost={}
            )
            rollout.keep_groups_with(advantages)
        wanted = rollout.refill() if attempt < config.sample.refills else []
        if not len(wanted):
            break
    return rollout


def sample_answers(
    session: VlmSession, epoch: int, attempt: int, rollout: Rollout, own: list[int]
) -> list[PendingAnswers]:
    """Sample this process's answers; each batch is scored while the next one is sampled."""
    config, questions, pending = session.config, session.questions, []
    size, with_greedy = session.plan.batch_size, config.train.advantage == "remax"
    batches = [own[i : i + size] for i in range(0, len(own), size)]

    def asked() -> Iterator[ToAnswer]:
        for batch in batches:
            rows = [rollout.row_of(index) for index in batch]
            new = [row for row in rows if row not in rollout.prompts]
            rollout.prompts |= session.answerer.encode(questions, new)
            keys = [index + attempt * session.plan.samples for index in batch]
            yield rollout.prompts, rows, sample_generators(config.seed, epoch, keys)
            if with_greedy:
                yield rollout.prompts, list(dict.fromkeys(rows)), None

    answers = session.answers(questions, asked())
    for batch in session.bar(batches, f"epoch {epoch + 1} sample"):
        session.reward.end_if_broken()
        samples = next(answers)
        greedy = next(answers) if with_greedy else []
        rollout.samples |= dict(zip(batch, samples, strict=True))
        most = session.most_tokens
        pending.append(PendingAnswers.submit(session.reward, questions, most, samples, greedy))
    return pending


def prepare(session: VlmSession, rollout: Rollout) -> dict[int, Fixed]:
    """What this process's samples need that takes a forward without gradients, if anything does."""
    train, policy = session.config.train, session.policy
    fixed = {index: Fixed(sample.log_probs) for index, sample in rollout.samples.items()}
    again = session.recomputes_old or train.advantage == GAE
    with_reference = train.beta > 0
    if not (again or with_reference):
        return fixed
    updates = rollout.updates()
    with policy.gathered():
        # in the batches that they are trained in: others would round differently
        for members in (*updates, ~updates.any(0)):
            own = [index for index in sorted(fixed) if members[index]]
            for part, batch in packed_batches(session, rollout, own):
                scores = policy.fixed_scores(batch) if again else {}
                if with_reference:
                    scores["reference"] = policy.reference(batch)
                for row, index in enumerate(part):
                    there = batch.mask[row]
                    new = {name: column[row][there].cpu() for name, column in scores.items()}
                    old = new["log_probs"] if session.recomputes_old else fixed[index].old
                    fixed[index] = Fixed(old, new.get("reference"), new.get("values"))
    return fixed


def give_credit(session: VlmSession, rollout: Rollout, fixed: dict[int, Fixed]) -> dict[str, float]:
    """Advantages into `fixed`, and weights of tokens where the policy is not quite what sampled
    them; how far off that was."""
    train, accelerator = session.config.train, session.accelerator
    off = {}
    if not session.answerer.exact:
        off = reweigh(accelerator, rollout, fixed, train.importance_cap)
    in_reward = train.beta > 0 and train.kl_in == "reward"
    clamp = train.clamp_log_ratios
    lost = penalties(fixed, train.kl, train.beta, clamp=clamp) if in_reward else {}
    if train.advantage == GAE:
        settings = {"discount": train.discount, "decay": train.gae_decay}
        token_advantages(accelerator, rollout, fixed, lost, **settings)
        return off
    reward, scale = session.reward, train.advantage_scale
    credit = answer_advantages(
        accelerator, rollout, reward.weights, reward.judges, train.advantage, scale, lost
    )
    for index, own in fixed.items():
        own.advantages = torch.full_like(own.old, credit[index])
    return off


def train_epoch(
    session: VlmSession, epoch: int, rollout: Rollout, fixed: dict[int, Fixed]
) -> dict[str, float]:
    """Update the weights on the epoch's answers."""
    config, plan, accelerator = session.config, session.plan, session.accelerator
    critic_only = is_warmup(config.train, epoch)
    objective = Objective(
        build_loss(config.train.loss, config.train),
        config.train,
        max_new_tokens=session.most_tokens,
        reweighed=not session.answerer.exact,
        critic_only=critic_only,
    )
    if objective.with_values:
        scale_rates(session.optimizer, config.train, warmup=critic_only)
    stats, lengths = TrainingStats(), rollout.scores[LENGTH]
    applied_before = session.progress.applied
    updates = rollout.updates()
    for inner in range(plan.inner_epochs):
        order = numpy_rng(config.seed, Stream.SHUFFLE, epoch, inner)
        for n, u in enumerate(order.permutation(plan.updates_per_pass), 1):
            members = updates[u]
            if not members.any():
                continue
            counts = Counts(tokens=float(lengths[members].sum()), answers=float(members.sum()))
            own = [index for index in sorted(fixed) if members[index]]
            batches = training_batches(session, rollout, objective, fixed, own)
            trained = [index for part, _ in batches for index in part]
            if own:
                stats.leave_out(int(lengths[own].sum() - lengths[trained].sum()))
            batches = in_step(accelerator, batches)
            name = f"epoch {epoch + 1} train {n}/{plan.updates_per_pass}"
            bar = session.bar(batches, name)
            module, at_once = session.policy.module, is_sharded(accelerator)
            steps = accumulated(accelerator, module, bar, len(batches), at_once=at_once)
            set_learning_rates(session)
            for (part, batch), counted in steps:
                counted = counted and bool(own)  # or other processes wait for it
                scores = session.policy.scores(batch, critic_only=critic_only)
                loss = objective.loss(batch, scores, [fixed[i] for i in part], counts)
                # gradients are the mean over processes
                share = plan.num_processes * float(counted)
                backward(accelerator, loss.per_sample.sum() / counts.tokens * share)
                loss = loss if counted else loss.of_none()
                stats.add(loss, on_policy=session.progress.applied == applied_before)
            if critic_only:
                session.policy.drop_policy_gradients()
            take_update(session, stats)
    metrics = training_metrics(session, stats)
    if objective.with_values:
        metrics["train/critic_lr"] = session.optimizer.param_groups[1]["lr"]
    if objective.policy.trust is not None:
        metrics["train/clip_range"] = objective.policy.trust
    return metrics


def training_batches(
    session: VlmSession,
    rollout: Rollout,
    objective: Objective,
    fixed: dict[int, Fixed],
    own: list[int],
) -> list[tuple[list[int], PackedBatch]]:
    """Micro-batches of an update that have a gradient; one at least, as others wait for it."""
    learns = {i for i in own if objective.has_gradient(fixed[i])}
    kept = own if session.recomputes_old else [i for i in own if i in learns]
    batches = list(packed_batches(session, rollout, kept or own[:1] or [min(fixed)]))
    return [(part, batch) for part, batch in batches if learns & set(part)] or batches[:1]


def packed_batches(
    session: VlmSession, rollout: Rollout, index: list[int]
) -> Iterator[tuple[list[int], PackedBatch]]:
    """The micro-batches of these samples, in their order."""
    shares, pad = session.policy.network.family.shares_prompt, session.answerer.pad
    answers = [rollout.answer(i, shares_prompt=shares) for i in index]
    for part in micro_batches(answers, session.config.train.tokens_per_batch):
        yield index[part], packed(answers[part], pad).to(session.accelerator.device)


def run_evaluation(session: VlmSession, epoch: int) -> dict[str, float]:
    """Rewards of greedy answers to the test questions."""
    config, accelerator, questions = session.config, session.accelerator, session.test_questions
    rows = list(range(accelerator.process_index, len(questions), accelerator.num_processes))
    with session.averaged():
        pending = session.while_awake(lambda: greedy_answers(session, rows))
    session.stop.check()
    scores = gather_scores(accelerator, np.array(rows), [each.result() for each in pending])
    session.eval_reward.rest()
    said = gather_object([(s.row, s.shown) for each in pending for s in each.samples])
    shown = sorted(said)[: config.log_images]
    rewards = {name: scores[name] for name in (*session.eval_reward.weights, TOTAL)}
    asked, texts = [questions[row] for row, _ in shown], [text for _, text in shown]
    write_answers(session, "eval", epoch, asked, texts, **rewards)
    lengths = {"eval/length": float(scores.pop(LENGTH).mean())}
    return {**evaluation_metrics(session, epoch, rewards, session.test_sets()), **lengths}


def greedy_answers(session: VlmSession, rows: list[int]) -> list[PendingAnswers]:
    """To these test questions; each batch is scored while the next one is answered."""
    config, questions, pending = session.config, session.test_questions, []
    size = config.sample.batch_size
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    asked = ((session.answerer.encode(questions, batch), batch, None) for batch in batches)
    answers = session.answers(questions, asked)
    for _ in session.bar(batches, "evaluate"):
        session.eval_reward.end_if_broken()
        most = session.most_tokens
        pending.append(PendingAnswers.submit(session.eval_reward, questions, most, next(answers)))
    return pending


def save_training_samples(
    session: VlmSession, epoch: int, rollout: Rollout, fixed: dict[int, Fixed]
) -> None:
    """The first ones of this process, by their groups: one whole group at least."""
    most = session.config.log_images
    shown = sorted(fixed)[: max(most, session.plan.group_size) if most else 0]
    samples = [rollout.samples[index] for index in shown]
    columns = {name: rollout.scores[name][shown] for name in (*session.reward.weights, TOTAL)}
    columns["advantage"] = [float(fixed[index].advantages.mean()) for index in shown]
    columns["group"] = rollout.groups[shown]
    asked = [session.questions[sample.row] for sample in samples]
    write_answers(session, "train", epoch, asked, [sample.shown for sample in samples], **columns)


if __name__ == "__main__":
    loop = AnswerLoop(sample_epoch, prepare, give_credit, train_epoch, run_evaluation)
    command_line.run(main, ANSWER, dry_run=loop.dry_run)
