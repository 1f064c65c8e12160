"""Health checks on a run's metrics; docs/metrics.md explains each of them.

A check is a generator over the rows of metrics.jsonl that yields a problem for each row in which
something is wrong. The first problem is reported. A check reads no later row, so a finding does not
change as rows are added. The thresholds are chosen such that the healthy runs of docs/results pass.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TypeVar

from flow_grpo.report.console import Record
from flow_grpo.rewards import TOTAL

MIN_RISE = 0.5  # of the reward, in initial standard deviations within a group
MAX_ON_POLICY_DEVIATION = 0.1  # as a fraction of the clip range
# Distance from 1, for any clip range. Diffusion log-ratios are means over latent values.
MAX_RATIO_DRIFT = 0.01
MAX_CLIPPED = 0.5  # fraction of the losses
FLAT_GROUP_RATIO = 0.95  # fraction of groups with equal scores, ...
FLAT_EPOCHS = 3  # ... for this many epochs in a row
MAX_KL = 1.0  # for any kl_type: as large as the noise's width or the velocity's length
KL_JUMP, KL_FLOOR = 10, 1e-4  # factor over the largest value before; ignored below the floor
SPIKE_FACTOR, SPIKE_WINDOW, SPIKE_MIN_EPOCHS = 10, 20, 3  # over the median of 3 to 20 epochs
MIN_LOSS_SCALE = 1.0  # fp16; overflows at a larger scale belong to the search for a scale
MAX_FAILED = 0.05  # fraction of the samples
# Training reward below its first value, in standard deviations within a group, for this many epochs
# in a row. Of the runs in docs/results, only those that look bad or fail other checks do so.
MAX_DECLINE, DECLINE_EPOCHS = 0.25, 3
MIN_DIVERSITY_RATIO = 0.5  # relative to the initial diversity
# Fall of another reward, in standard deviations over samples, for this many epochs in a row;
# training changes prompts every epoch.
MAX_FALL, FALL_EPOCHS = {"reward": 1.0, "eval": 0.5}, 2
MAX_LOST_GAIN, LOST_EVALS = 1 / 3, 3  # fraction of the gain, evaluations in a row
MAX_NORM_GROWTH = 1.5  # relative to the initial velocity norm
MAX_NORM_RATIO = 1.15  # relative to the reference's velocity norm at the same states
# Error of preferred images above the reference's, as a fraction of it, and epochs in a row
MAX_CHOSEN_RISE, CHOSEN_EPOCHS = 0.1, 2
MAX_RESETS_IN_A_ROW = 3  # epochs with a reset of the reference

REWARD_MEAN = f"reward/{TOTAL}"
REWARD_STD = "reward/std_within_group"
ZERO_STD_RATIO = "reward/zero_std_ratio"
EVAL_MEAN = f"eval/{TOTAL}"
T = TypeVar("T")
Rows = Sequence[Record]
Problem = tuple[Record, str, str]  # row, what is wrong, what to change


@dataclass(frozen=True)
class Finding:
    """A failed health check."""

    check: str  # key of CHECKS
    epoch: int  # first epoch in which it failed
    text: str  # what is wrong, with the numbers
    advice: str  # what to change


@dataclass(frozen=True)
class Check:
    """A registered health check; see `health_check` for its fields."""

    find: Callable[[Rows], Iterator[Problem]]
    metrics: tuple[str, ...]
    applies: Callable[[Rows], bool]


CHECKS: dict[str, Check] = {}


def health_check(
    name: str, *metrics: str, applies: Callable[[Rows], bool] = bool
) -> Callable[[Callable], Callable]:
    """Register a generator of problems as a check.

    Args:
        name: Key of CHECKS, shown in the report.
        metrics: Metrics that it reads; rows without a value for one of them are left out.
        applies: Returns whether the remaining rows are enough to pass. By default one is: a method
            that logs no ratio cannot pass a check of ratios.
    """

    def register(find: Callable[[Rows], Iterator[Problem]]) -> Callable:
        CHECKS[name] = Check(find, metrics, applies)
        return find

    return register


def run_checks(rows: Rows) -> list[Finding]:
    """Return what is wrong, in the order of CHECKS; `rows` are those of metrics.jsonl."""
    return summarize(rows)[0]


def summarize(rows: Rows) -> tuple[list[Finding], list[str], list[str]]:
    """Return the findings, and the names of checks that passed and that do not apply."""
    failed, passed, not_applicable = [], [], []
    for name, check in CHECKS.items():
        own = [row for row in rows if all(row.get(metric) is not None for metric in check.metrics)]
        problem = next(check.find(own), None)
        if problem:
            row, text, advice = problem
            failed.append(Finding(name, row["epoch"], text, advice))
        elif check.applies(own):
            passed.append(name)
        else:
            not_applicable.append(name)
    return failed, passed, not_applicable


def with_first_row(rows: Rows) -> Iterator[tuple[Record, Record]]:
    """Yield each row, preceded by the first one with the same noise window.

    A moving window changes the diversity and the norm of the velocity by itself.
    """
    starts: dict[float | None, Record] = {}
    for row in rows:
        yield starts.setdefault(row.get("train/noisy_from"), row), row


def streaks(items: Iterable[T], condition: Callable[[T], bool], length: int) -> Iterator[T]:
    """Yield each item for which, and for the `length` - 1 before it, `condition` is true."""
    count = 0
    for item in items:
        count = count + 1 if condition(item) else 0
        if count >= length:
            yield item


def is_vlm_row(row: Record) -> bool:
    """Return whether the row is of scripts/train_vlm.py, whose ratios are per token."""
    return "answer/length" in row


def has_risen(first: Record, now: Record) -> bool:
    """Return whether the reward rose by much more than chance."""
    return now[REWARD_MEAN] - first[REWARD_MEAN] > MIN_RISE * (first.get(REWARD_STD) or 0)


def format_change(first: Record, now: Record, name: str, verb: str) -> str:
    return f"{name} {verb} from {first[name]:.4g} to {now[name]:.4g}"


def format_distinct(value: float, limit: float) -> tuple[str, str]:
    """Format both with as many digits as are needed to make them differ."""
    texts = ((f"{value:.{digits}e}", f"{limit:.{digits}e}") for digits in range(1, 17))
    return next(pair for pair in texts if pair[0] != pair[1])


@health_check("on-policy ratios", "train/first_update_ratio_dev", "train/clip_range")
def check_on_policy_ratio(rows: Rows) -> Iterator[Problem]:
    """Check that ratios before the first update are 1 up to rounding well below the clip range."""
    for row in rows:
        deviation = row["train/first_update_ratio_dev"]
        limit = MAX_ON_POLICY_DEVIATION * row["train/clip_range"]
        if deviation > limit:
            shown, shown_limit = format_distinct(deviation, limit)
            advice = "make train.batch_size equal to sample.train_batch_size, raise the clip range"
            if is_vlm_row(row):
                advice = "set train.recompute_old=True"
            yield (
                row,
                f"on-policy ratios deviate from 1 by {shown}, more than {shown_limit}, a tenth of "
                "the clip range: rounding errors decide what is clipped",
                f"{advice}, or use mixed_precision=no",
            )


@health_check("ratio drift", "train/ratio_mean")
def check_ratio_drift(rows: Rows) -> Iterator[Problem]:
    """Check that the mean ratio stays close to 1."""
    for row in rows:
        drift, clip = abs(row["train/ratio_mean"] - 1), row.get("train/clip_range")
        limit = MAX_RATIO_DRIFT
        if clip is not None:
            limit = clip if is_vlm_row(row) else min(clip, MAX_RATIO_DRIFT)
        if drift > limit:
            shown, shown_limit = format_distinct(drift, limit)
            advice = "lower train.learning_rate or use fewer updates per epoch"
            if clip is not None:
                advice += f", or lower a clip range above {limit:g}"
            yield (
                row,
                f"the mean ratio deviates from 1 by {shown}, more than {shown_limit}: the policy "
                "moves away from the one that sampled within an epoch",
                advice,
            )


def logs_clipping(rows: Rows) -> bool:
    names = ("train/clip_low", "train/clip_high", "train/masked")
    return any(row.get(name) is not None for row in rows for name in names)


@health_check("clip shares", applies=logs_clipping)
def check_clip_fractions(rows: Rows) -> Iterator[Problem]:
    """Check the fraction of losses without a gradient because they were clipped or masked."""
    for row in rows:
        clipped = (row.get("train/clip_low") or 0) + (row.get("train/clip_high") or 0)
        share = max(clipped, row.get("train/masked") or 0)
        if share > MAX_CLIPPED:
            how, setting = ("clipped", "clip range") if share == clipped else ("masked", "delta")
            yield (
                row,
                f"{share:.0%} of the losses were {how}, so they have no gradient: the updates are "
                f"too large for the {setting}",
                f"lower train.learning_rate, use fewer updates per epoch, or raise the {setting}",
            )


def is_flat(row: Record) -> bool:
    return (row.get(ZERO_STD_RATIO) or 0) >= FLAT_GROUP_RATIO


@health_check("flat groups", ZERO_STD_RATIO, REWARD_MEAN)
def check_flat_groups(rows: Rows) -> Iterator[Problem]:
    """Check for groups with equal scores, which give no advantage: solved or unsolvable tasks."""
    for row in streaks(rows, is_flat, FLAT_EPOCHS):
        alike = (
            f"all samples scored alike in {row[ZERO_STD_RATIO]:.0%} of the groups, for "
            f"{FLAT_EPOCHS} epochs now"
        )
        if not is_flat(rows[0]) and has_risen(rows[0], row):
            change = format_change(rows[0], row, REWARD_MEAN, "rose")
            yield (
                row,
                f"{alike}; {change}: the task is solved",
                "stop here, or train on harder prompts",
            )
        else:
            change = format_change(rows[0], row, REWARD_MEAN, "went")
            yield (
                row,
                f"{alike}, and {change}: there is nothing to learn from",
                "look at the samples and their scores in samples/: the reward may be broken or the "
                "prompts too hard; otherwise raise sample.num_image_per_prompt or the noise",
            )


@health_check("KL", "train/kl")
def check_kl(rows: Rows) -> Iterator[Problem]:
    """Check that the KL divergence to the reference is small and does not jump."""
    largest = 0.0
    for index, row in enumerate(rows):
        now = row["train/kl"]
        jumped = index >= SPIKE_MIN_EPOCHS and now > KL_JUMP * largest > 0 and now > KL_FLOOR
        if now > MAX_KL or jumped:
            what = f"jumped from {largest:.2g} to {now:.2g}" if jumped else f"is {now:.2g}"
            yield (
                row,
                f"the KL to the reference {what}: the model has moved far from its start",
                "look for damage in samples/; resume from an earlier checkpoint with a larger KL "
                "weight (beta, kl_beta) or a smaller train.learning_rate",
            )
        largest = max(largest, now)


@health_check("gradient norm", "train/grad_norm")
def check_gradient_norm(rows: Rows) -> Iterator[Problem]:
    """Check that the gradient norm neither spikes nor vanishes."""
    before: list[float] = []
    for row in rows:
        now = row["train/grad_norm"]
        usual = median(before[-SPIKE_WINDOW:]) if len(before) >= SPIKE_MIN_EPOCHS else 0.0
        clipped = now > (row.get("train/max_grad_norm") or 0)  # missing in older logs
        if clipped and now > SPIKE_FACTOR * usual > 0:
            yield (
                row,
                f"the gradient norm is {now:.2g}, {now / usual:.3g} times its median so far",
                "a spike precedes collapse: lower train.learning_rate or train.max_grad_norm",
            )
        if now == 0 and ZERO_STD_RATIO not in row:  # trained on given data
            yield (
                row,
                f"the gradient is 0 at a margin of {row.get('train/margin') or 0:.2g}: nothing is "
                "learned",
                "the loss is saturated: lower train.learning_rate or beta",
            )
        elif now == 0 and not is_flat(row):  # otherwise the check of flat groups reports it
            yield (
                row,
                f"the gradient is 0 although rewards differ ({REWARD_STD} "
                f"{row.get(REWARD_STD) or 0:.1e}): nothing is learned",
                "scale the reward up: spreads far below 1e-4 give no advantage",
            )
        before.append(now)


@health_check("skipped updates", "train/skipped_updates")
def check_skipped_updates(rows: Rows) -> Iterator[Problem]:
    """Check for skipped updates; with fp16 only once lowering the loss scale no longer helps."""
    for row in rows:
        scale = row.get("train/loss_scale")
        if row["train/skipped_updates"] and (scale is None or scale < MIN_LOSS_SCALE):
            yield (
                row,
                f"{row['train/skipped_updates']} updates of the epoch were skipped because their "
                "gradients were NaN or infinite",
                "lower train.learning_rate or use mixed_precision=no; the console shows whether "
                "the loss was finite",
            )


@health_check("failed rewards", "reward/failed", "reward/samples")
def check_failed_rewards(rows: Rows) -> Iterator[Problem]:
    """Check the fraction of samples without a score."""
    for row in rows:
        failed, samples = row["reward/failed"], row["reward/samples"]
        if failed > MAX_FAILED * samples:
            each = {k: n for k, n in row.items() if re.fullmatch("reward/[^/]+/failed", k) and n}
            worst = max(each, key=each.get, default="reward/?").removesuffix("/failed")
            yield (
                row,
                f"{failed} of {samples} samples could not be scored, most of them by {worst}; "
                "they are excluded from training",
                "check the reward's warnings on the console, or its server's log",
            )


@health_check("falling reward", REWARD_MEAN, REWARD_STD)
def check_falling_reward(rows: Rows) -> Iterator[Problem]:
    """Check for a training reward that stays well below its initial value."""

    def has_fallen(row: Record) -> bool:
        first = rows[0]
        return first[REWARD_MEAN] - row[REWARD_MEAN] > MAX_DECLINE * first[REWARD_STD] > 0

    for row in streaks(rows, has_fallen, DECLINE_EPOCHS):
        yield (
            row,
            f"{format_change(rows[0], row, REWARD_MEAN, 'fell')} and has been below its first "
            f"value for {DECLINE_EPOCHS} epochs: training makes the model worse",
            "look at samples/; start again with a smaller train.learning_rate or a larger KL "
            "weight",
        )


@health_check("diversity", "reward/diversity", REWARD_MEAN)
def check_diversity(rows: Rows) -> Iterator[Problem]:
    """Check for a rising reward with falling diversity, a common sign of reward hacking."""
    for start, row in with_first_row(rows):
        first, now = start["reward/diversity"], row["reward/diversity"]
        if now < MIN_DIVERSITY_RATIO * first and has_risen(start, row):
            yield (
                row,
                f"{format_change(start, row, REWARD_MEAN, 'rose')} while the distance between "
                f"images of a group fell from {first:.2g} to {now:.2g}: the reward may be hacked",
                "look at samples/: if all images look alike, use an earlier checkpoint, fewer "
                "epochs, a smaller train.learning_rate, a larger KL weight or "
                "anchors.diversity=True",
            )


def reward_names(row: Record, part: str) -> list[str]:
    """Return the rewards that have a mean in the row: those with a standard deviation."""
    names = [key.split("/")[1] for key in row if key.startswith(part) and key.endswith("/std")]
    return [name for name in names if row.get(f"{part}/{name}") is not None]


def has_several_rewards(rows: Rows) -> bool:
    return any(len({*reward_names(row, part)} - {TOTAL}) > 1 for row in rows for part in MAX_FALL)


@health_check("second reward", applies=has_several_rewards)
def check_falling_second_reward(rows: Rows) -> Iterator[Problem]:
    """Check for a reward that falls while the total rises."""
    start: dict[str, Record] = {}
    fallen: dict[str, int] = {}
    for row in rows:
        trained = start.setdefault(REWARD_MEAN, row) if row.get(REWARD_MEAN) is not None else None
        for part, name in ((p, f"{p}/{name}") for p in MAX_FALL for name in reward_names(row, p)):
            first = start.setdefault(name, row)
            spread = max(first.get(f"{name}/std") or 0, row.get(f"{name}/std") or 0)
            far = first[name] - row[name] > MAX_FALL[part] * spread > 0
            falls = far and trained is not None and has_risen(trained, row)
            fallen[name] = fallen.get(name, 0) + 1 if falls else 0
            if fallen[name] == FALL_EPOCHS:
                yield (
                    row,
                    f"{format_change(trained, row, REWARD_MEAN, 'rose')} while "
                    f"{format_change(first, row, name, 'fell')}: one is traded for the other",
                    "give the falling one more weight in reward_fn, or use a larger KL weight or "
                    "an earlier checkpoint",
                )


@health_check("past the best", EVAL_MEAN)
def check_past_best(rows: Rows) -> Iterator[Problem]:
    """Check for an evaluation score well below its best, several times in a row."""

    def has_lost_gain(pair: tuple[Record, Record]) -> bool:
        now, best = (row[EVAL_MEAN] for row in pair)
        return best - now > MAX_LOST_GAIN * (best - rows[0][EVAL_MEAN]) > 0

    bests = accumulate(rows, lambda best, row: max(best, row, key=lambda each: each[EVAL_MEAN]))
    for row, best in streaks(zip(rows, bests, strict=True), has_lost_gain, LOST_EVALS):
        yield (
            row,
            f"{EVAL_MEAN} was {best[EVAL_MEAN]:.4g} in epoch {best['epoch']} and is "
            f"{row[EVAL_MEAN]:.4g} now, the third evaluation in a row with over a third of the "
            "gain lost",
            "use checkpoints/best; stop earlier, or train with a smaller train.learning_rate or a "
            "larger KL weight",
        )


@health_check("velocity norm", "train/velocity_norm")
def check_velocity_norm(rows: Rows) -> Iterator[Problem]:
    """Check for growing velocities, which oversaturate images."""
    for start, row in with_first_row(rows):
        first, now = start["train/velocity_norm"], row["train/velocity_norm"]
        if now > MAX_NORM_GROWTH * first:
            yield (
                row,
                f"the norm of the velocity grew from {first:.3g} to {now:.3g}: images become harsh "
                "and overexposed",
                "resume from an earlier checkpoint with a smaller train.learning_rate, a larger KL "
                "weight or anchors.norm_guard",
            )


@health_check("norm against the reference", "train/norm_ratio")
def check_norm_ratio(rows: Rows) -> Iterator[Problem]:
    """Check velocities against the reference, and the first epoch in case guidance differs."""
    for start, row in with_first_row(rows):
        now = row["train/norm_ratio"]
        if now > MAX_NORM_RATIO * max(1.0, start["train/norm_ratio"]):
            yield (
                row,
                f"velocities are {now:.3g} times as long as the reference's: images become harsh",
                "set anchors.norm_guard, or a larger one; look for damage in samples/",
            )


@health_check("preferred images", "train/chosen_change", "train/chosen_error")
def check_preferred_images(rows: Rows) -> Iterator[Problem]:
    """Check whether preferred images become less likely than under the reference policy."""

    def has_risen(row: Record) -> bool:
        change = row["train/chosen_change"]
        return change > MAX_CHOSEN_RISE * (row["train/chosen_error"] - change)

    for row in streaks(rows, has_risen, CHOSEN_EPOCHS):
        change = row["train/chosen_change"]
        rise = change / (row["train/chosen_error"] - change)
        yield (
            row,
            f"the error of preferred images is {100 * rise:.3g} % above the reference's: the model "
            "unlearns them, even if the margin grows",
            "raise `beta` of the algorithm or lower train.learning_rate, or use algorithm=ipo",
        )


@health_check("reference resets", "train/reference_reset")
def check_reference_resets(rows: Rows) -> Iterator[Problem]:
    """Check for constant resets of the reference, which make the KL penalty ineffective."""
    for row in streaks(rows, lambda row: bool(row["train/reference_reset"]), MAX_RESETS_IN_A_ROW):
        yield (
            row,
            f"the reference was reset in {MAX_RESETS_IN_A_ROW} epochs in a row, so the KL penalty "
            "has no effect",
            "raise anchors.reset_kl or anchors.reset_epochs",
        )
