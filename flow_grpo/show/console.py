"""What a run prints: a bar or a line now and then while it works, and one after each epoch."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tqdm import tqdm

from flow_grpo.rewards import TOTAL

T = TypeVar("T")
EVERY = 30.0  # seconds between two lines of progress
logger = logging.getLogger("flow_grpo")
Record = dict[str, float | None]


def table(rows: list[list[str]]) -> str:
    """The first row is the head; the first column is aligned to the left, all others to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


def shown_rewards(names: Iterable[str]) -> list[str]:
    """The rewards among scores, and their sum where there are several. Parts of one have a / in
    their names."""
    rewards = [name for name in names if name != TOTAL and "/" not in name]
    return rewards if len(rewards) == 1 else [*rewards, TOTAL]


@dataclass
class Pace:
    """How fast the epochs since this process started went."""

    epochs: int = 0
    seconds: float = 0.0

    def left(self, record: Record, last: int) -> float:
        """Seconds until the last epoch is done, if all take as long; 0 where nothing is known."""
        if record["epoch"] > 0:
            self.epochs += 1
            self.seconds += sum(seconds_of_parts(record).values())
        return (last - record["epoch"]) * self.seconds / max(1, self.epochs)


def epoch_line(
    record: Record, rewards: Iterable[str], eval_rewards: Iterable[str], last: int, left: float
) -> str:
    """Every reward, where the time went, and how much is `left`."""
    names = [f"reward/{name}" for name in shown_rewards(rewards)]
    names += [f"eval/{name}" for name in shown_rewards(eval_rewards)]
    parts = [f"epoch {record['epoch']}/{last}"]
    parts += [f"{n} {_number(record[n])}" for n in names if record.get(n) is not None]
    seconds = seconds_of_parts(record)
    total = sum(seconds.values())
    shares = [f"{n} {s / total:.0%}" for n, s in seconds.items() if s >= 0.01 * total > 0]
    parts.append(f"{duration(total)} ({', '.join(shares)})" if shares else duration(total))
    if left > 0:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def seconds_of_parts(record: Record) -> dict[str, float]:
    return {k.removeprefix("time/"): v for k, v in record.items() if k.startswith("time/")}


def duration(seconds: float) -> str:
    """In two units at most."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} days {hours} h"


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


class Bar(tqdm):
    monitor_interval = 0  # no thread that watches it and outlives the run


@dataclass
class Lines:
    """What stands for a bar in a file: a line now and then, whatever is at work."""

    last: float = field(default_factory=lambda: time.monotonic())  # when there was one

    def follow(self, items: Iterable[T], name: str, total: int | None = None) -> Iterator[T]:
        start = time.monotonic()
        total = len(items) if total is None else total
        for done, item in enumerate(items):
            now = time.monotonic()
            left = (total - done) * (now - start) / done if done else 0.0
            if now - self.last >= EVERY and left >= 1:  # else it will be done at once
                logger.info("%s: %d of %d, %s left", name, done, total, duration(left))
                self.last = now
            yield item


def progress_bar(
    items: Iterable[T],
    name: str,
    total: int | None = None,
    *,
    shown: bool = True,
    lines: Lines | None = None,
) -> Iterable[T]:
    """On one process: a bar where somebody can look at it, `lines` in a file."""
    if not shown:
        return items
    if not sys.stderr.isatty():
        return (lines or Lines()).follow(items, name, total)
    return Bar(items, desc=name, leave=False, total=total, miniters=1)
