"""Whether two formulas are the same, by math-verify: in a process of its own, as it may never end.

Lists, tuples and intervals are taken apart here, and formulas with variables compared at points:
the library takes (1,2) for an interval, and minutes to simplify what differs.
"""

import contextlib
import logging
import re
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from sympy.parsing import sympy_parser

from flow_grpo.rewards.answers.maths import (
    LOOSE,
    Unreadable,
    group_end,
    has_variables,
    number,
    split_top_level,
)

DIGITS = 30  # that are compared of what is no decimal
# Where variables are put; far out only without powers, whose values would be large.
POINTS, FAR = ("0.7310585786", "-1.3247179572", "0.0000000013", "3.29036"), "1009.7"
_STYLE = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_SETS = re.compile(
    r"[<>]|\\(?:leq?|geq?|neq?|in|cup|cap|setminus|mathbb|emptyset|lor|land)(?![a-z])"
)
# of a variable: an inequality with one may take long to solve
_FUNCTION = re.compile(r"\\(?:log|ln|exp|sin|cos|tan)|\\sqrt\{[^{}]*[A-Za-z]|\^\{?[^23]")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_EVALUATED = re.compile(r"\w+|[-+]?[\d.]+(?:[eE][-+]?\d+)?")
_BINOMIAL = re.compile(r"\\binom\s*\{[^{}]*\}\s*\{[^{}]*\}")
_PRODUCT = re.compile(
    r"(?<![\w.^])(\d+(?:\.\d+)?)\s*(?=[({])|(\)|\\pi)\s*(?=\()|(\))\s*(?=\d|\\(?:frac|sqrt))"
)
LIST, BARE, MATRIX = "{}", ",", "matrix"  # kinds of sequences beside "()" and "[)"
_EQUAL, _CHAIN = "=", re.compile(r"(=|\\approx(?![A-Za-z]))")
_WARM = (r"\frac{1}{2}", r"3\sqrt{2}", "x^2+2x+1", "(x+1)(x-2)", r"2\sin x", "x+y=1")


class Check(NamedTuple):
    """A request to a worker. Without a response, it asks if the ground truth can be read."""

    answer: str | None
    truth: str
    seconds: float  # of CPU time for each of the two


class TimeLimit(BaseException):
    """The CPU time is used up. Not an `Exception`, because libraries catch these."""


def math_checker(memory_gib: float) -> Callable[[Check], bool | None]:
    """Called in a worker. What wants more memory fails, and the machine goes on."""
    most = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sympy_parser.parse_expr = names_and_numbers(sympy_parser.parse_expr)
    for text in _WARM:  # its first formulas take the library seconds
        _read(text)
    same("x>1", r"(1,\infty)")
    same("|x|<1", "-1<x<1")
    return lambda check: checked(*check)


def checked(answer: str | None, truth: str, seconds: float) -> bool | None:
    """Return whether the two are equal; None where the response cannot be read in time.

    Raises:
        Unreadable: the ground truth, by itself, cannot be read in time.
    """
    try:
        with cpu_limit(seconds):
            _read_all(_taken_apart(truth))
    except (TimeLimit, Exception) as error:
        raise Unreadable(f"its truth {truth[:60]!r} cannot be read") from error
    if answer is None:
        return None
    try:
        with cpu_limit(seconds):
            return same(answer, truth)
    except TimeLimit:
        return None


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimit` in the main thread after this much CPU time of the process.

    CPU time, so that the load of the machine does not change scores. The signal is repeated in case
    the first exception is swallowed.
    """

    def stop(*_: object) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def names_and_numbers(parse_expr: Callable) -> Callable:
    """sympy evaluates the text that it parses, as Python does."""

    def guarded(text: str, *rest: object, **options: object) -> sympy.Basic:
        if not _EVALUATED.fullmatch(text):
            raise Unreadable(f"{text[:60]!r} is not evaluated")
        return parse_expr(text, *rest, **options)

    return guarded


def same(answer: str, truth: str) -> bool | None:
    """Return whether two formulas are equal; None where `answer` cannot be read."""
    wanted = _taken_apart(truth)
    loose = "." in answer or "." in truth
    try:
        given = _taken_apart(answer)
        _read_all(given)
        return _same(given, wanted, loose) or _same_set(answer, truth)
    except Exception:
        return None


Tree = str | tuple  # a formula, or a kind of sequence and its items


def _taken_apart(text: str) -> Tree:
    """a \\pm b is both."""
    items = _split(text)
    if len(items) > 1:
        return (BARE, *map(_taken_apart, items))
    text = items[0]
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in matrix[2].split("\\\\") if row.strip()]
        return (MATRIX, *((MATRIX, *map(_taken_apart, row.split("&"))) for row in rows))
    start = int(text.startswith("\\{"))
    if text[start : start + 1] in ("(", "[", "{") and group_end(text, start) == len(text):
        inner = text[start + 1 : -1 - start]
        kind = LIST if text[start] == "{" else text[start] + text[-1]
        items = _split(inner)
        if len(items) > 1:
            return (kind, *map(_taken_apart, items))
        if kind in (LIST, "()", "[]"):
            return _taken_apart(inner)
    return text


def _split(text: str) -> list[str]:
    """At the commas and semicolons outside brackets, and in two at \\pm."""
    parts = split_top_level(text, ",;")
    signs = (("+", "-"), ("-", "+"))
    return [
        part.replace("\\pm", pm).replace("\\mp", mp)
        for part in parts
        for pm, mp in (signs if "\\pm" in part else signs[:1])
    ]


def _read_all(tree: Tree) -> None:
    for item in (tree,) if isinstance(tree, str) else tree[1:]:
        if isinstance(item, str):
            for member in _members(item)[::2]:
                _read(member)
        else:
            _read_all(item)


@lru_cache(maxsize=4096)
def _read(text: str) -> sympy.Basic:
    value = number(text.strip())
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    for sign, operation in (("\\lor", sympy.Or), ("\\land", sympy.And)):
        if sign in text:
            return operation(*map(_read, text.split(sign)))
    formula = latex2sympy(_with_products(text), is_real=True, normalization_config=_STYLE)
    return formula.replace(_is_odd_root, _real_root) if "^" in text or "[" in text else formula


def _with_products(text: str) -> str:
    """Write products explicitly: the library adds adjacent numbers and reads 5(4) as 9."""
    text = _BINOMIAL.sub(r"(\g<0>)", text)
    return _PRODUCT.sub(lambda found: f"{found[1] or found[2] or found[3]}\\cdot ", text)


def _is_odd_root(formula: sympy.Basic) -> bool:
    power = formula.exp if isinstance(formula, sympy.Pow) else None
    return isinstance(power, sympy.Rational) and power.q > 1 and power.q % 2 == 1


def _real_root(power: sympy.Pow) -> sympy.Expr:
    """Return the real root: the cube root of -8 is -2, not the complex principal value."""
    base, exponent = power.args
    return sympy.sign(base) ** exponent.p * sympy.Abs(base) ** exponent


def _members(text: str) -> list[str]:
    """Split 12\\pi = 37.7 at its signs, which stay in the list; not an equation with variables."""
    if has_variables(text):
        return [text]
    return [part.strip() for part in _CHAIN.split(text)]


def _same(answer: Tree, truth: Tree, loose: bool) -> bool:
    if isinstance(answer, str) and isinstance(truth, str):
        return _same_formula(answer, truth, loose)
    if isinstance(answer, str) or isinstance(truth, str) or len(answer) != len(truth):
        return False
    kinds = {answer[0], truth[0]}
    items, others = answer[1:], truth[1:]
    if kinds <= {LIST, BARE}:
        return _in_any_order(items, others, lambda a, b: _same(a, b, loose))
    if len(kinds) > 1 and kinds != {BARE, "()"}:
        return False
    return all(_same(a, b, loose) for a, b in zip(items, others, strict=True))


def _in_any_order(items: Sequence, others: Sequence, same: Callable[..., bool]) -> bool:
    left = list(others)
    for item in items:
        found = next((other for other in left if same(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_formula(answer: str, truth: str, loose: bool) -> bool:
    wanted, given = _members(truth), _members(answer)
    if len(wanted) > 1:  # 12\\pi \\approx 37.7: either will do
        return any(_same_formula(answer, value, loose) for value in wanted[::2])
    if len(given) > 1:
        links = zip(given[:-2:2], given[1::2], given[2::2], strict=True)
        consistent = all(_agree(*link) for link in links)
        return consistent and any(_same_formula(value, truth, loose) for value in given[::2])
    left, right = _read(answer), _read(truth)
    if left == right:
        return True
    points = POINTS if re.search(r"\^|\\exp", answer + truth) else (*POINTS, FAR)
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        told = _values(left, right, points)
        return bool(told) and all(_near(a, b, loose) for a, b in told)
    parts = [list(getattr(each, "_unsorted_args", [each])) for each in (left, right)]  # 1 < x < 2
    if not all(isinstance(each, Relational) for part in parts for each in part):
        return False
    return _in_any_order(*parts, lambda a, b: _same_relation(a, b, points, loose))


def _agree(left: str, sign: str, right: str) -> bool:
    """Whether one side of = or \\approx is the other, or its value rounded to some digits."""
    if _same_formula(left, right, "." in left + right):
        return True
    digits = r"[-+]?\d*\.\d+" if sign == _EQUAL else r"[-+]?\d*\.?\d+"
    rounded = [each for each in (left, right) if re.fullmatch(digits, each)]
    return any(_rounds_to(right if each == left else left, each) for each in rounded)


def _rounds_to(formula: str, rounded: str) -> bool:
    places = len(re.sub(r"\D", "", rounded.partition(".")[2]))
    half = Fraction(51, 100 * 10**places)
    [(value, near)] = _values(_read(formula), _read(rounded), POINTS[:1]) or [(0, 1)]
    return bool(abs(value - near) <= sympy.Rational(half.numerator, half.denominator))


def _same_relation(left: Relational, right: Relational, points: tuple, loose: bool) -> bool:
    """Where the difference of the sides is a multiple; of an inequality, a positive one."""
    (kind, one), (other, two) = _gap(left), _gap(right)
    told = _values(one, two, points)
    if kind != other or not told or 0 in told[0]:
        return False
    a0, b0 = told[0]
    turned = kind not in (sympy.Eq, sympy.Ne) and not (a0 / b0).is_positive
    return not turned and all(_near(a * b0, b * a0, loose) for a, b in told)


def _gap(relation: Relational) -> tuple[type, sympy.Expr]:
    if isinstance(relation, sympy.LessThan | sympy.StrictLessThan):
        relation = relation.reversed
    minus = sympy.Mul(-1, relation.rhs, evaluate=False)
    return relation.func, sympy.Add(relation.lhs, minus, evaluate=False)


def _near(one: sympy.Expr, other: sympy.Expr, loose: bool) -> bool:
    size = abs(other)
    return bool(abs(one - other) <= (float(LOOSE) * size if loose else 1e-20 * max(1, size)))


def _values(left: sympy.Expr, right: sympy.Expr, points: tuple) -> list[tuple]:
    """At each point where both have one, with each variable somewhere else around it; i is the
    imaginary unit."""
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    found = []
    for point in points:
        start = sympy.Float(point, DIGITS)
        place = {name: start * (1 + sympy.Rational(k, 29)) for k, name in enumerate(names)}
        place |= {name: sympy.I for name in names if str(name) == "i"}
        pair = tuple(formula.evalf(DIGITS, subs=place) for formula in (left, right))
        if all(value.is_number and value.is_finite for value in pair):
            found.append(pair)
    return found


def _same_set(answer: str, truth: str) -> bool:
    """Compare inequalities, intervals and unions as sets of real numbers."""
    both = answer + " " + truth
    if not _SETS.search(both) or _FUNCTION.search(both):
        return False
    (given, of), (wanted, variable) = _solutions(answer), _solutions(truth)
    if given is None or wanted is None or (of and variable and of != variable):
        return False
    return given == wanted or given.symmetric_difference(wanted) is sympy.S.EmptySet


@lru_cache(maxsize=1024)
def _solutions(text: str) -> tuple[sympy.Set | None, sympy.Symbol | None]:
    """Return the set and the variable that an inequality is about; None where there is none."""
    if not re.search(r"[\[(]", text):  # a comma between inequalities, not in an interval
        text = " \\land ".join(split_top_level(text, ",;"))
    formula = _read(text)
    decimals = {each: sympy.Rational(str(each)) for each in formula.atoms(sympy.Float)}
    formula = formula.xreplace(decimals)
    if isinstance(formula, sympy.Set):
        return formula, None
    if not isinstance(formula, Boolean) or len(formula.free_symbols) > 1:
        return None, None
    return formula.as_set(), next(iter(formula.free_symbols), None)
