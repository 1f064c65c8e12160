"""Console output of a run: progress bars or lines, and one line per epoch."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tqdm import tqdm

from flow_grpo.rewards import TOTAL

T = TypeVar("T")
PROGRESS_INTERVAL = 30.0  # seconds between two progress lines
logger = logging.getLogger("flow_grpo")
Record = dict[str, float | None]


def markdown_table(rows: list[list[str]]) -> str:
    """Return a Markdown table without padding; the first row is the header."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def format_table(rows: list[list[str]]) -> str:
    """Return a Markdown table that is aligned as text, with its first column on the left.

    The first row is the header.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


def displayed_rewards(names: Iterable[str]) -> list[str]:
    """Return the rewards to show: without their components (`a/b`), with the total if several."""
    rewards = [name for name in names if name != TOTAL and "/" not in name]
    return rewards if len(rewards) == 1 else [*rewards, TOTAL]


@dataclass
class RemainingTime:
    """Estimate of the remaining time, from the epochs since this process started."""

    epochs: int = 0
    seconds: float = 0.0

    def left(self, record: Record, last: int) -> float:
        """Add an epoch to the estimate; return the seconds until epoch `last` is done.

        Call it once per epoch. The result is 0 if no epoch has been timed yet.
        """
        if record["epoch"] > 0:
            self.epochs += 1
            self.seconds += sum(seconds_by_phase(record).values())
        return (last - record["epoch"]) * self.seconds / max(1, self.epochs)


def format_epoch(
    record: Record, rewards: Iterable[str], eval_rewards: Iterable[str], last: int, left: float
) -> str:
    """Return the line of an epoch: rewards, time by phase, and the time `left` in seconds."""
    names = [f"reward/{name}" for name in displayed_rewards(rewards)]
    names += [f"eval/{name}" for name in displayed_rewards(eval_rewards)]
    parts = [f"epoch {record['epoch']}/{last}"]
    parts += [f"{n} {_format_number(record[n])}" for n in names if record.get(n) is not None]
    seconds = seconds_by_phase(record)
    total = sum(seconds.values())
    shares = [f"{n} {s / total:.0%}" for n, s in seconds.items() if s >= 0.01 * total > 0]
    parts.append(
        f"{format_duration(total)} ({', '.join(shares)})" if shares else format_duration(total)
    )
    if left > 0:
        parts.append(f"{format_duration(left)} left")
    return "  ".join(parts)


def seconds_by_phase(record: Record) -> dict[str, float]:
    return {k.removeprefix("time/"): v for k, v in record.items() if k.startswith("time/")}


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units."""
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


def _format_number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


class ProgressBar(tqdm):
    monitor_interval = 0  # no monitor thread that outlives the run


@dataclass
class ProgressLines:
    """Progress as lines in a log file, in place of a progress bar."""

    last: float = field(default_factory=lambda: time.monotonic())  # time of the last line

    def follow(self, items: Iterable[T], name: str, total: int | None = None) -> Iterator[T]:
        """Yield the items; log a line per `PROGRESS_INTERVAL` unless nearly done.

        Args:
            items: The items.
            name: Start of each line.
            total: Number of items, by default `len(items)`.
        """
        start = time.monotonic()
        total = len(items) if total is None else total
        for done, item in enumerate(items):
            now = time.monotonic()
            left = (total - done) * (now - start) / done if done else 0.0
            if now - self.last >= PROGRESS_INTERVAL and left >= 1:  # otherwise nearly done
                logger.info("%s: %d of %d, %s left", name, done, total, format_duration(left))
                self.last = now
            yield item


def progress_bar(
    items: Iterable[T],
    name: str,
    total: int | None = None,
    *,
    shown: bool = True,
    lines: ProgressLines | None = None,
) -> Iterable[T]:
    """Iterate with a progress bar on a terminal, or with `lines` in a log file."""
    if not shown:
        return items
    if not sys.stderr.isatty():
        return (lines or ProgressLines()).follow(items, name, total)
    return ProgressBar(items, desc=name, leave=False, total=total, miniters=1)
