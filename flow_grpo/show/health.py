"""What a run's metrics say about its health, in sentences. docs/metrics.md explains each check.

Each check is one function over the rows of metrics.jsonl. It finds the first epoch in which
something is wrong, and looks at no row after it: what it says does not change as rows are added.
Thresholds are such that the healthy runs of docs/results pass.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from flow_grpo.rewards import TOTAL
from flow_grpo.show.console import Record

OFF_POLICY = 0.1  # of the clip range
RATIO = 0.01  # from 1, however wide the clip is, of pictures: log-ratios are means over pixels
CLIPPED = 0.5  # of the losses
FLAT, FLAT_EPOCHS = 0.95, 3  # share of groups that score alike, for that many epochs in a row
KL = 1.0  # of any kl_type: as far as the noise is wide, or the velocity long
KL_JUMP, KL_FLOOR = 10, 1e-4  # times the largest before; no jump below the floor
SPIKE, SPIKE_WINDOW, SPIKE_AFTER = 10, 20, 3  # times the median of up to 20 epochs, at least 3
LEAST_SCALE = 1.0  # fp16 loss scale; overflows at a larger one are the search for a scale
FAILED = 0.05  # of the samples
RISE = 0.5  # of the reward, in spreads within a group at the start
ALIKE = 0.5  # of the diversity at the start
# Of another reward, in spreads over samples; training draws new prompts each epoch
FALL = {"reward": 1.0, "eval": 0.5}
INFLATED = 1.5  # times the velocity norm at the start
LONGER = 1.15  # times the reference's velocity norm at the same states
RESETS = 3  # of the reference, in that many epochs in a row
LOST, LOST_EVALS = 1 / 3, 3  # of what evaluation had gained, in that many in a row
# Training reward below its first value, in standard deviations within a group, for that many epochs
# in a row. Of the runs in docs/results, only those that look bad or fail other checks do so.
DECLINE, DECLINE_EPOCHS = 0.25, 3

AVERAGE, SPREAD, SAME = f"reward/{TOTAL}", "reward/std_within_group", "reward/zero_std_ratio"
EVALUATED = f"eval/{TOTAL}"
Rows = Sequence[Record]
Told = tuple[int, str, str]  # epoch, text and advice of a finding


@dataclass(frozen=True)
class Finding:
    check: str  # one of CHECKS
    epoch: int  # when it first was so
    text: str  # what is wrong, with the numbers
    advice: str  # what to change


@dataclass(frozen=True)
class Check:
    """A health check.

    Attributes:
        find: Returns the first epoch in which the check fails, with a description and advice.
        applies: Returns whether the rows have the metrics that the check reads. A method that logs
            no ratio cannot pass a check of ratios.
    """

    find: Callable[[Rows], Told | None]
    applies: Callable[[Rows], bool]


def examine(rows: Rows) -> list[Finding]:
    """All that is wrong, in the order of CHECKS; rows are those of metrics.jsonl."""
    told = {name: check.find(rows) for name, check in CHECKS.items()}
    return [Finding(name, *found) for name, found in told.items() if found]


def summarize(rows: Rows) -> tuple[list[Finding], list[str], list[str]]:
    """Return what failed, and the names of the checks that passed and that do not apply."""
    failed = examine(rows)
    rest = {name: check.applies(rows) for name, check in CHECKS.items()}
    for finding in failed:
        del rest[finding.check]
    passed = [name for name, applies in rest.items() if applies]
    return failed, passed, [name for name, applies in rest.items() if not applies]


def on_policy(rows: Rows) -> Told | None:
    """Ratios before the first update are 1 but for rounding; near the clip range it matters."""
    for row in having(rows, "train/first_update_ratio_dev", "train/clip_range"):
        deviation, clip = row["train/first_update_ratio_dev"], row["train/clip_range"]
        if deviation > OFF_POLICY * clip:
            advice = "make train.batch_size equal to sample.train_batch_size, raise the clip range"
            if of_answers(row):
                advice = "set train.recompute_old=True"
            off, most = apart(deviation, OFF_POLICY * clip)
            return (
                row["epoch"],
                f"on-policy ratios are off 1 by {off}, more than {most}, a tenth of the clip "
                "range: rounding decides what is clipped",
                f"{advice}, or use mixed_precision=no",
            )
    return None


def apart(value: float, limit: float) -> tuple[str, str]:
    """Both as text, with as many digits as it takes to tell them apart."""
    texts = ((f"{value:.{digits}e}", f"{limit:.{digits}e}") for digits in range(1, 17))
    return next(pair for pair in texts if pair[0] != pair[1])


def of_answers(row: Record) -> bool:
    """A run of scripts/train_vlm.py, whose ratios are those of tokens."""
    return "answer/length" in row


def ratio_drift(rows: Rows) -> Told | None:
    for row in having(rows, "train/ratio_mean"):
        off = abs(row["train/ratio_mean"] - 1)
        clip = row.get("train/clip_range")
        most = RATIO if clip is None else clip if of_answers(row) else min(clip, RATIO)
        if off > most:
            told = "off 1 by {}, more than {}".format(*apart(off, most))
            return (
                row["epoch"],
                f"the mean ratio is {told}: an epoch takes the policy away from the one that "
                "sampled",
                "lower train.learning_rate or make fewer updates per epoch"
                if clip is None  # a method without one
                else "lower train.learning_rate, make fewer updates per epoch, or lower a clip "
                f"range above {most:g}",
            )
    return None


def clip_shares(rows: Rows) -> Told | None:
    """Losses on the clip's two sides, or without a gradient because they moved too far."""
    for row in rows:
        clipped = (row.get("train/clip_low") or 0) + (row.get("train/clip_high") or 0)
        share = max(clipped, row.get("train/masked") or 0)
        if share > CLIPPED:
            how, setting = ("clipped", "clip range") if share == clipped else ("masked", "delta")
            return (
                row["epoch"],
                f"{share:.0%} of the losses were {how}, which leaves them without a gradient: the "
                f"steps are too large for the {setting}",
                f"lower train.learning_rate, make fewer updates per epoch, or raise the {setting}",
            )
    return None


def flat_groups(rows: Rows) -> Told | None:
    """Groups that score alike teach nothing: the task is solved, or was never one."""
    trained, flat = list(having(rows, SAME, AVERAGE)), 0
    for row in trained:
        flat = flat + 1 if row[SAME] >= FLAT else 0
        if flat < FLAT_EPOCHS:
            continue
        first, last = trained[0][AVERAGE], row[AVERAGE]
        text = f"in {row[SAME]:.0%} of the groups all samples scored alike, for {flat} epochs now"
        if trained[0][SAME] < FLAT and risen(trained[0], row):
            text += f"; {AVERAGE} rose from {first:.4g} to {last:.4g}: the task is solved"
            advice = "stop here, or train on harder prompts"
        else:
            text += f", and {AVERAGE} went from {first:.4g} to {last:.4g}: there is nothing to "
            text += "learn from"
            advice = (
                "look at the pictures and their scores in samples/: the reward may be broken or "
                "the prompts too hard; else raise sample.num_image_per_prompt or the noise"
            )
        return row["epoch"], text, advice
    return None


def kl(rows: Rows) -> Told | None:
    most, seen = 0.0, 0
    for row in having(rows, "train/kl"):
        now = row["train/kl"]
        jumped = seen >= SPIKE_AFTER and now > KL_JUMP * most > 0 and now > KL_FLOOR
        if now > KL or jumped:
            what = f"jumped from {most:.2g} to {now:.2g}" if jumped else f"is {now:.2g}"
            return (
                row["epoch"],
                f"the KL to the reference {what}: the model has left the one it came from",
                "look for damage in samples/; go on from an earlier checkpoint with a larger "
                "weight of the KL (beta, kl_beta) or a smaller train.learning_rate",
            )
        most, seen = max(most, now), seen + 1
    return None


def gradient_norm(rows: Rows) -> Told | None:
    before: list[float] = []
    for row in having(rows, "train/grad_norm"):
        now = row["train/grad_norm"]
        usual = median(before[-SPIKE_WINDOW:]) if len(before) >= SPIKE_AFTER else 0.0
        clipped = now > (row.get("train/max_grad_norm") or 0)  # older logs do not tell
        if clipped and now > SPIKE * usual > 0:
            return (
                row["epoch"],
                f"the gradient norm is {now:.2g}, {now / usual:.3g} times its median so far",
                "a spike precedes collapse: lower train.learning_rate or train.max_grad_norm",
            )
        if now == 0 and (row.get(SAME) or 0) < FLAT:  # else the flat groups say it
            return (
                row["epoch"],
                f"the gradient is 0 though rewards differ ({SPREAD} {row.get(SPREAD) or 0:.1e}): "
                "nothing is learned",
                "scale the reward up: spreads far below 1e-4 give no advantage",
            )
        before.append(now)
    return None


def skipped_updates(rows: Rows) -> Told | None:
    """Skipped updates; with fp16 only if a lower loss scale does not help any more."""
    for row in having(rows, "train/skipped_updates"):
        scale = row.get("train/loss_scale")
        if row["train/skipped_updates"] and (scale is None or scale < LEAST_SCALE):
            return (
                row["epoch"],
                f"{row['train/skipped_updates']} updates of the epoch were skipped because their "
                "gradients were NaN or infinite",
                "lower train.learning_rate or use mixed_precision=no; the console shows whether "
                "the loss was finite",
            )
    return None


def failed_rewards(rows: Rows) -> Told | None:
    for row in having(rows, "reward/failed", "reward/samples"):
        failed, samples = row["reward/failed"], row["reward/samples"]
        if failed > FAILED * samples:
            each = {k: n for k, n in row.items() if re.fullmatch("reward/[^/]+/failed", k) and n}
            worst = max(each, key=each.get, default="reward/?").removesuffix("/failed")
            return (
                row["epoch"],
                f"{failed} of {samples} samples could not be scored, most of them by {worst}; "
                "they are left out of training",
                "look at the warnings of the reward on the console, or at its server's log",
            )
    return None


def diversity(rows: Rows) -> Told | None:
    """Reward that rises while the pictures of a group become alike is often hacked."""
    for start, row in since_start(rows, "reward/diversity", AVERAGE):
        first, now = start["reward/diversity"], row["reward/diversity"]
        if now < ALIKE * first and risen(start, row):
            return (
                row["epoch"],
                f"{AVERAGE} rose from {start[AVERAGE]:.4g} to {row[AVERAGE]:.4g} while the "
                f"distance of pictures of a group fell from {first:.2g} to {now:.2g}: the reward "
                "may be hacked",
                "look at samples/: if all pictures look alike, take an earlier checkpoint, fewer "
                "epochs, a smaller train.learning_rate, a larger weight of the KL or "
                "anchors.diversity=True",
            )
    return None


def second_reward(rows: Rows) -> Told | None:
    """One reward that rises while another falls, in training or evaluation, twice in a row."""
    start: dict[str, Record] = {}
    fallen: dict[str, int] = {}
    for row in rows:
        trained = start.setdefault(AVERAGE, row) if row.get(AVERAGE) is not None else None
        for part, name in ((p, f"{p}/{name}") for p in FALL for name in rewards(row, p)):
            first = start.setdefault(name, row)
            spread = max(first.get(f"{name}/std") or 0, row.get(f"{name}/std") or 0)
            far = first[name] - row[name] > FALL[part] * spread > 0
            falls = far and trained is not None and risen(trained, row)
            fallen[name] = fallen.get(name, 0) + 1 if falls else 0
            if fallen[name] == 2:
                return (
                    row["epoch"],
                    f"{AVERAGE} rose from {trained[AVERAGE]:.4g} to {row[AVERAGE]:.4g} while "
                    f"{name} fell from {first[name]:.4g} to {row[name]:.4g}: one is paid for by "
                    "the other",
                    "give the one that falls more weight in reward_fn, or take a larger weight of "
                    "the KL or an earlier checkpoint",
                )
    return None


def past_the_best(rows: Rows) -> Told | None:
    """The score of evaluation, well below its best for several evaluations in a row."""
    evaluated, below = list(having(rows, EVALUATED)), 0
    best = evaluated[0] if evaluated else {}
    for row in evaluated:
        best = max(best, row, key=lambda each: each[EVALUATED])
        gained = best[EVALUATED] - evaluated[0][EVALUATED]
        below = below + 1 if best[EVALUATED] - row[EVALUATED] > LOST * gained > 0 else 0
        if below == LOST_EVALS:
            return (
                row["epoch"],
                f"{EVALUATED} was {best[EVALUATED]:.4g} in epoch {best['epoch']} and is "
                f"{row[EVALUATED]:.4g} now, the third evaluation in a row with over a third of "
                "the gain lost",
                "take checkpoints/best; stop sooner, or train with a smaller train.learning_rate "
                "or a larger weight of the KL",
            )
    return None


def falling_reward(rows: Rows) -> Told | None:
    """The training reward stays well below where it started."""
    trained, below = list(having(rows, AVERAGE, SPREAD)), 0
    for row in trained:
        first = trained[0]
        fallen = first[AVERAGE] - row[AVERAGE] > DECLINE * first[SPREAD] > 0
        below = below + 1 if fallen else 0
        if below == DECLINE_EPOCHS:
            return (
                row["epoch"],
                f"{AVERAGE} fell from {first[AVERAGE]:.4g} to {row[AVERAGE]:.4g} and has been "
                f"below its first value for {DECLINE_EPOCHS} epochs: training makes the model "
                "worse",
                "look at samples/; start again with a smaller train.learning_rate or a larger "
                "weight of the KL",
            )
    return None


def velocity_norm(rows: Rows) -> Told | None:
    for start, row in since_start(rows, "train/velocity_norm"):
        first, now = start["train/velocity_norm"], row["train/velocity_norm"]
        if now > INFLATED * first:
            return (
                row["epoch"],
                f"the norm of the velocity grew from {first:.3g} to {now:.3g}: pictures get harsh "
                "and overexposed",
                "go on from an earlier checkpoint with a smaller train.learning_rate, a larger "
                "weight of the KL or anchors.norm_guard",
            )
    return None


def norm_ratio(rows: Rows) -> Told | None:
    """Against the first epoch too, as the reference may be guided in another way."""
    for start, row in since_start(rows, "train/norm_ratio"):
        now = row["train/norm_ratio"]
        if now > LONGER * max(1.0, start["train/norm_ratio"]):
            return (
                row["epoch"],
                f"velocities are {now:.3g} times as long as the reference's: pictures get harsh",
                "set anchors.norm_guard, or a larger one; look for damage in samples/",
            )
    return None


def reference_resets(rows: Rows) -> Told | None:
    """A reference that always is the policy holds nothing."""
    in_a_row = 0
    for row in having(rows, "train/reference_reset"):
        in_a_row = in_a_row + 1 if row["train/reference_reset"] else 0
        if in_a_row == RESETS:
            return (
                row["epoch"],
                f"the reference was reset in {RESETS} epochs in a row: the KL holds nothing",
                "raise anchors.reset_kl or anchors.reset_epochs",
            )
    return None


def logs(*names: str) -> Callable[[Rows], bool]:
    """Return a predicate: some row has a value for each of these metrics."""
    return lambda rows: any(True for _ in having(rows, *names))


def logs_any(*names: str) -> Callable[[Rows], bool]:
    """Return a predicate: some row has a value for at least one of these metrics."""
    return lambda rows: any(logs(name)(rows) for name in names)


def logs_several_rewards(rows: Rows) -> bool:
    return any(len({*rewards(row, part)} - {TOTAL}) > 1 for row in rows for part in FALL)


CHECKS: dict[str, Check] = {
    "on-policy ratios": Check(on_policy, logs("train/first_update_ratio_dev", "train/clip_range")),
    "ratio drift": Check(ratio_drift, logs("train/ratio_mean")),
    "clip shares": Check(
        clip_shares, logs_any("train/clip_low", "train/clip_high", "train/masked")
    ),
    "flat groups": Check(flat_groups, logs(SAME, AVERAGE)),
    "KL": Check(kl, logs("train/kl")),
    "gradient norm": Check(gradient_norm, logs("train/grad_norm")),
    "skipped updates": Check(skipped_updates, logs("train/skipped_updates")),
    "failed rewards": Check(failed_rewards, logs("reward/failed", "reward/samples")),
    "falling reward": Check(falling_reward, logs(AVERAGE, SPREAD)),
    "diversity": Check(diversity, logs("reward/diversity", AVERAGE)),
    "second reward": Check(second_reward, logs_several_rewards),
    "past the best": Check(past_the_best, logs(EVALUATED)),
    "velocity norm": Check(velocity_norm, logs("train/velocity_norm")),
    "norm against the reference": Check(norm_ratio, logs("train/norm_ratio")),
    "reference resets": Check(reference_resets, logs("train/reference_reset")),
}


def having(rows: Rows, *names: str) -> Iterator[Record]:
    """Rows with a value for each of the names."""
    return (row for row in rows if all(row.get(name) is not None for name in names))


def since_start(rows: Rows, *names: str) -> Iterator[tuple[Record, Record]]:
    """Each of these rows after the first whose noise began at the same step: a window that moves
    changes how far samples are apart, and the norm of the velocity."""
    starts: dict[float | None, Record] = {}
    for row in having(rows, *names):
        yield starts.setdefault(row.get("train/noisy_from"), row), row


def rewards(row: Record, part: str) -> list[str]:
    """Names of the rewards that have a mean in the row: those with a spread."""
    names = [key.split("/")[1] for key in row if key.startswith(part) and key.endswith("/std")]
    return [name for name in names if row.get(f"{part}/{name}") is not None]


def risen(first: Record, now: Record) -> bool:
    """By much more than chance."""
    return now[AVERAGE] - first[AVERAGE] > RISE * (first.get(SPREAD) or 0)
