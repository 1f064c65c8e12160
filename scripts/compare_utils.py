"""Helpers of the scripts that compare training runs: `compare`, `compare_opd`, `hacking`."""

import math
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from flow_grpo.config.error_reporting import exit_on_user_error
from flow_grpo.errors import UserError


def run_comparison(compare: Callable[[], None]) -> None:
    """Run a comparison; SIGTERM stops its training processes first, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    exit_on_user_error(compare, debug=False)


def make_directories(*folders: Path) -> None:
    """Create directories with their parents; raise a UserError if that fails."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot be created: {error.strerror}", field=folder, hint="choose another"
            ) from error


def write_results(out: Path, *parts: str, without: Sequence[str] = ()) -> None:
    """Write OUT.md and print it.

    Args:
        out: Path of the file without its suffix.
        parts: Paragraphs, which are followed by the command line of this script.
        without: Options to omit from the command line.
    """
    words = [word for word in sys.argv[1:] if word not in without]
    command = shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *words])
    text = "\n\n".join([*parts, f"    {command}\n"])
    make_directories(out.parent)
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    print(text)


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def format_range(values: Sequence[float]) -> str:
    """Format mean and range with two decimals, or more for values of small scale."""
    largest = max(map(abs, values))
    decimals = 1 - math.floor(math.log10(largest)) if 0 < largest < 0.1 else 2
    middle, low, high = (f"{v:.{decimals}f}" for v in (fmean(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def format_change(before: Sequence[float], after: Sequence[float]) -> str:
    return f"{format_range(before)} -> {format_range(after)}"


def format_two_digits(value: float | None, note: str = "") -> str:
    """Format with two digits: crossings are only known to the nearest evaluation."""
    if value is None:
        return "-"
    value = float(f"{value:.2g}")
    size, unit = next((s for s in ((1e6, " M"), (1e3, " k")) if abs(value) >= s[0]), (1, ""))
    return f"{value / size:g}{unit}{note}"
