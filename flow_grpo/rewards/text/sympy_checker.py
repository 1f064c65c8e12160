"""The engine of the worker processes that compare formulas with sympy.

Parsing and simplification may take unbounded time and memory, so a worker limits both.
"""

import contextlib
import logging
import re
import resource
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import sympy
from sympy.parsing import sympy_parser

from flow_grpo.rewards.text.formula_equality import (
    answers_equal,
    parse_all,
    parse_formula,
    parse_structure,
)
from flow_grpo.rewards.text.math_parsing import UnparsableFormula

_SAFE_LITERAL = re.compile(r"\w+|[-+]?[\d.]+(?:[eE][-+]?\d+)?")
_WARM_UP_FORMULAS = (r"\frac{1}{2}", r"3\sqrt{2}", "x^2+2x+1", "(x+1)(x-2)", r"2\sin x", "x+y=1")


class CheckRequest(NamedTuple):
    """A request to a worker. Without an answer, it checks if the ground truth can be parsed."""

    answer: str | None
    truth: str  # the ground truth
    seconds: float  # CPU time limit for each of `answer` and `truth`


class CpuTimeExceeded(BaseException):
    """The CPU time limit is exceeded. Not an `Exception`, because libraries catch these."""


def build_math_checker(memory_gib: float) -> Callable[[CheckRequest], bool | None]:
    """Limit the memory of this worker process, warm up the parser and return the check function."""
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sympy_parser.parse_expr = restrict_parse_expr(sympy_parser.parse_expr)
    for text in _WARM_UP_FORMULAS:  # the first formulas take seconds
        parse_formula(text)
    answers_equal("x>1", r"(1,\infty)")
    answers_equal("|x|<1", "-1<x<1")
    return lambda check: check_pair(*check)


def check_pair(answer: str | None, truth: str, seconds: float) -> bool | None:
    """Return whether the two are equal, or None if the answer cannot be parsed in time.

    Raises:
        UnparsableFormula: If the ground truth itself cannot be parsed in time.
    """
    try:
        with cpu_limit(seconds):
            parse_all(parse_structure(truth))
    except (CpuTimeExceeded, Exception) as error:
        raise UnparsableFormula(f"its ground truth {truth[:60]!r} cannot be parsed") from error
    if answer is None:
        return None
    try:
        with cpu_limit(seconds):
            return answers_equal(answer, truth)
    except CpuTimeExceeded:
        return None


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `CpuTimeExceeded` in the main thread after this much CPU time of the process.

    CPU time is used so that the machine's load does not change scores. The signal is repeated in
    case the first exception is swallowed.
    """

    def stop(*_: object) -> None:
        raise CpuTimeExceeded

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def restrict_parse_expr(parse_expr: Callable) -> Callable:
    """Wrap `parse_expr`, which evaluates its argument as Python code, to accept only literals."""

    def guarded(text: str, *rest: object, **options: object) -> sympy.Basic:
        if not _SAFE_LITERAL.fullmatch(text):
            raise UnparsableFormula(f"{text[:60]!r} is not a number or name")
        return parse_expr(text, *rest, **options)

    return guarded
