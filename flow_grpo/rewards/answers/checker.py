"""Whether two formulas are the same, by sympy: in a process of its own, as it may never end."""

import operator
import resource
from collections.abc import Callable

import sympy

from flow_grpo.rewards.answers.maths import BARE, LOOSE, OPERATORS, TRIGONOMETRIC, plain, read

DIGITS = 30  # that are compared of what is no decimal
_NAMES = {"pi": sympy.pi, "oo": sympy.oo, "e": sympy.E, "i": sympy.I}
_CALLS = {
    **{name: getattr(sympy, name.replace("arc", "a")) for name in TRIGONOMETRIC},
    **{"exp": sympy.exp, "ln": sympy.log, "log": lambda value: sympy.log(value, 10)},
}
_OPERATORS = {
    **OPERATORS,
    **{"^": operator.pow, "root": lambda a, n: a ** (1 / n)},
    **{"!": sympy.factorial, "abs": sympy.Abs},
}


def sympy_checker(memory_gib: float) -> Callable[[tuple[str, str]], bool]:
    """Called in a worker. What wants more memory fails, and the machine goes on."""
    most = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return lambda pair: same(*pair)


def same(answer: str, truth: str) -> bool:
    """Both as `plain` returns them, and readable."""
    loose = "." in answer or "." in truth
    left, right = (_spread(read(plain(text))) for text in (answer, truth))
    return _same(left, right, loose)


def _spread(tree: tuple) -> tuple:
    """a \\pm b is both."""
    items = tree[2:] if tree[:2] == ("seq", BARE) else (tree,)
    both = [each for item in items for each in dict.fromkeys(_signed(item, sign) for sign in "+-")]
    return tree if len(both) == len(items) else ("seq", BARE, *both)


def _signed(tree: tuple, sign: str) -> tuple:
    parts = (_signed(part, sign) if isinstance(part, tuple) else part for part in tree)
    return tuple(sign if part == "\\pm" else part for part in parts)


def _same(left: tuple, right: tuple, loose: bool) -> bool:
    if "seq" not in (left[0], right[0]):
        return _equal(_built(left), _built(right), loose)
    if left[:2] != right[:2] or len(left) != len(right):
        return False
    if left[1] != BARE:
        return all(_same(a, b, loose) for a, b in zip(left[2:], right[2:], strict=True))
    others = list(right[2:])
    for item in left[2:]:
        found = next((other for other in others if _same(item, other, loose)), None)
        if found is None:
            return False
        others.remove(found)
    return True


def _built(tree: tuple) -> sympy.Expr:
    kind, *parts = tree
    if kind == "num":
        return sympy.Rational(parts[0].numerator, parts[0].denominator)
    if kind == "name":
        return _NAMES.get(parts[0]) or sympy.Symbol(parts[0])
    if kind == "call":
        return _CALLS[parts[0]](_built(parts[1]))
    return _OPERATORS[kind](*map(_built, parts))


def _equal(answer: sympy.Expr, truth: sympy.Expr, loose: bool) -> bool:
    if answer == truth:
        return True
    difference = answer - truth
    if difference.free_symbols:
        return sympy.simplify(difference) == 0
    # of x + 5, whose size depends on x, the 5
    constant, _ = truth.as_independent(*truth.free_symbols, as_Add=True)
    far, size = (abs(value.evalf(DIGITS)) for value in (difference, constant))
    if not (far.is_Float or far.is_Integer) or not far.is_finite:
        return False
    return bool(
        far <= float(LOOSE) * size if loose else far < sympy.Float(10) ** -20 * max(1, size)
    )
