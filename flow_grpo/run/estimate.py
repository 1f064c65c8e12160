"""What a run will take, from the times of a few batches."""

from dataclasses import dataclass

from flow_grpo.run.console import duration
from flow_grpo.run.writing import is_due


@dataclass(frozen=True)
class Measured:
    """Seconds, of one process."""

    sample: float  # of a batch
    reward: float  # of a batch, while others are sampled
    train: float  # of a micro-batch over all its steps
    first_eval: float  # of an evaluation of one batch
    next_eval: float  # of each further batch
    warm_up: float  # once


@dataclass(frozen=True)
class Work:
    """Of one process, but for the rounds of the run that are still to be done."""

    batches: int  # sampled in an epoch
    micro_batches: int  # trained in an epoch, each pass counted
    eval_batches: int
    epochs: int
    evaluations: int
    ahead: bool = False  # sample.async_depth


def reward_seconds(sampling: float, waiting: float, batches: int) -> float:
    """Of a batch, where `batches` were sampled, each scored while the next one was, and after the
    last of them `waiting` seconds were left."""
    sample = sampling / batches
    return waiting if waiting <= sample else (waiting + (batches - 1) * sample) / batches


def epoch_seconds(measured: Measured, work: Work) -> dict[str, float]:
    sample, reward, batches = measured.sample, measured.reward, work.batches
    sampling = sample * batches
    waiting = reward + (batches - 1) * max(0.0, reward - sample)
    if work.ahead:  # the next epoch is sampled meanwhile
        waiting = max(0.0, waiting - sampling)
    return {
        "sampling": sampling,
        "waiting for rewards": waiting,
        "training": measured.train * work.micro_batches,
    }


def eval_seconds(measured: Measured, work: Work) -> float:
    return measured.first_eval + measured.next_eval * (work.eval_batches - 1)


def run_seconds(measured: Measured, work: Work) -> float:
    epoch = sum(epoch_seconds(measured, work).values())
    evaluations = work.evaluations * eval_seconds(measured, work)
    return measured.warm_up + work.epochs * epoch + evaluations


def count_evaluations(done: int, last: int, every: int) -> int:
    """Those to come in a run that has `done` epochs: -1, not even the one before training."""
    epochs = range(max(done, 0) + 1, last + 1)
    return (done < 0) + sum(is_due(epoch, every, last) for epoch in epochs)


def describe(measured: Measured, work: Work) -> str:
    epoch, run = epoch_seconds(measured, work), run_seconds(measured, work)
    parts = " + ".join(f"{name} {duration(s)}" for name, s in epoch.items())
    evaluation = eval_seconds(measured, work)
    share = work.evaluations * evaluation / run if run else 0.0
    return "\n".join(
        [
            f"time per epoch        {duration(sum(epoch.values()))} = {parts}",
            f"time per evaluation   {duration(evaluation)}",
            f"time of the run       {duration(run)}: {count(work.epochs, 'epoch')} and "
            f"{count(work.evaluations, 'evaluation')}, {share:.0%} of the time; without "
            "checkpoints",
        ]
    )


def count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
