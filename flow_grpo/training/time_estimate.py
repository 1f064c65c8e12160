"""Estimate the time of a run from measured units of work.

Each batch is scored while the next one is sampled, so scoring costs time only where it is slower
than sampling, and after the last batch.
"""

from dataclasses import dataclass

from flow_grpo.report.console import format_duration


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds per unit of work on one process."""

    sample: float  # per batch
    reward: float  # per batch, overlapping with sampling
    train: float  # per micro-batch, over all its timesteps
    first_eval: float  # evaluation of one batch
    next_eval: float  # each further batch
    warm_up: float  # once per run


@dataclass(frozen=True)
class RemainingWork:
    """Work per process, and the epochs and evaluations that are left."""

    batches: int  # sampled per epoch
    micro_batches: int  # trained per epoch, each pass counted
    eval_batches: int
    epochs: int
    evaluations: int
    ahead: bool = False  # the next epoch is sampled while rewards are computed (sample.async_depth)


def estimate_reward_seconds(sampling: float, waiting: float, batches: int) -> float:
    """Return the seconds to score a batch.

    Args:
        sampling: Seconds to sample all batches; each is scored while the next one is sampled.
        waiting: Seconds of waiting for scores after the last batch was sampled.
        batches: Number of batches.
    """
    sample = sampling / batches
    return waiting if waiting <= sample else (waiting + (batches - 1) * sample) / batches


def epoch_seconds(measured: MeasuredTimes, work: RemainingWork) -> dict[str, float]:
    """Return the seconds of each phase of an epoch."""
    sample, reward, batches = measured.sample, measured.reward, work.batches
    sampling = sample * batches
    waiting = reward + (batches - 1) * max(0.0, reward - sample)
    if work.ahead:
        waiting = max(0.0, waiting - sampling)
    return {
        "sampling": sampling,
        "waiting for rewards": waiting,
        "training": measured.train * work.micro_batches,
    }


def eval_seconds(measured: MeasuredTimes, work: RemainingWork) -> float:
    """Return the seconds of one evaluation."""
    return measured.first_eval + measured.next_eval * (work.eval_batches - 1)


def run_seconds(measured: MeasuredTimes, work: RemainingWork) -> float:
    """Return the seconds of the rest of the run: epochs, evaluations and warm-up."""
    epoch = sum(epoch_seconds(measured, work).values())
    evaluations = work.evaluations * eval_seconds(measured, work)
    return measured.warm_up + work.epochs * epoch + evaluations


def is_due(epoch: int, every: int, last: int) -> bool:
    """Return whether an action is due that runs every `every` epochs (0: never) and at the end."""
    return epoch == last or (every > 0 and epoch % every == 0)


def count_evaluations(done: int, last: int, every: int, *, before: bool = True) -> int:
    """Return the number of evaluations after `done` epochs.

    Args:
        done: Finished epochs; -1 for a run that has not started.
        last: Epochs of the run.
        every: Value of `eval_freq`.
        before: Whether one is due before the first epoch.
    """
    epochs = range(max(done, 0) + 1, last + 1)
    return (before and done < 0) + sum(is_due(epoch, every, last) for epoch in epochs)


def describe_times(measured: MeasuredTimes, work: RemainingWork) -> str:
    """Return the estimated times of an epoch, an evaluation and the run, one per line."""
    epoch, run = epoch_seconds(measured, work), run_seconds(measured, work)
    parts = " + ".join(f"{name} {format_duration(s)}" for name, s in epoch.items())
    evaluation = eval_seconds(measured, work)
    fraction = work.evaluations * evaluation / run if run else 0.0
    return (
        f"time per epoch        {format_duration(sum(epoch.values()))} = {parts}\n"
        f"time per evaluation   {format_duration(evaluation)}\n"
        f"time of the run       {format_duration(run)}: {pluralize(work.epochs, 'epoch')} and "
        f"{pluralize(work.evaluations, 'evaluation')}, {fraction:.0%} of the time; without "
        "checkpoints"
    )


def pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
