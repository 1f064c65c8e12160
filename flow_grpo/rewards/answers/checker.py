"""Whether two formulas are the same, by math-verify: in a process of its own, as it may never end.

Lists, tuples and intervals are taken apart here, and formulas with variables compared at points:
the library takes (1,2) for an interval, and minutes to simplify what differs.
"""

import logging
import re
import resource
from collections.abc import Callable, Sequence
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import verify
from sympy.core.relational import Relational
from sympy.parsing import sympy_parser

from flow_grpo.rewards.answers.maths import LOOSE, Unreadable, group_end, number, with_depth

DIGITS = 30  # that are compared of what is no decimal
# Where variables are put; far out only without powers, whose values would be large.
POINTS, FAR = ("0.7310585786", "-1.3247179572", "0.0000000013", "3.29036"), "1009.7"
_STYLE = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_NAMED = re.compile(r"^\s*[A-Za-z](?:_\{?\w+\}?|\([A-Za-z]\))?\s*(?:=|\\in(?![a-z]))(?!.*=)\s*")
_SETS = re.compile(r"[<>]|\\(?:leq?|geq?|neq?|in|cup|cap|setminus|mathbb|emptyset)(?![a-z])")
# of a variable: an inequality with one may take long to solve
_FUNCTION = re.compile(r"\\(?:log|ln|exp|sin|cos|tan)|\\sqrt\{[^{}]*[A-Za-z]|\^\{?[^23]")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_EVALUATED = re.compile(r"\w+|[-+]?[\d.]+(?:[eE][-+]?\d+)?")
LIST, BARE, MATRIX = "{}", ",", "matrix"  # kinds of sequences beside "()" and "[)"
_WARM = (r"\frac{1}{2}", r"3\sqrt{2}", "x^2+2x+1", "(x+1)(x-2)", r"2\sin x", "x+y=1")


def math_checker(memory_gib: float) -> Callable[[tuple[str, str]], bool | None]:
    """Called in a worker. What wants more memory fails, and the machine goes on."""
    most = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sympy_parser.parse_expr = names_and_numbers(sympy_parser.parse_expr)
    for text in _WARM:  # its first formulas take the library seconds
        _read(text)
    same("x>1", r"(1,\infty)")
    return lambda pair: same(*pair)


def names_and_numbers(parse_expr: Callable) -> Callable:
    """sympy evaluates the text that it parses, as Python does."""

    def guarded(text: str, *rest: object, **options: object) -> sympy.Basic:
        if not _EVALUATED.fullmatch(text):
            raise Unreadable(f"{text[:60]!r} is not evaluated")
        return parse_expr(text, *rest, **options)

    return guarded


def same(answer: str, truth: str) -> bool | None:
    """Both as `plain` returns them; None where the answer cannot be read."""
    wanted = _taken_apart(truth)
    try:
        _read_all(wanted)
    except Exception as error:
        raise Unreadable(f"its truth {truth[:60]!r} cannot be read") from error
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
        names = {found[0] for item in items if (found := _NAMED.match(item))}
        items = [_NAMED.sub("", item, count=1) if len(names) == 1 else item for item in items]
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
    commas = [k for k, (mark, depth) in enumerate(with_depth(text)) if mark in ",;" and depth == 0]
    starts, ends = [0, *(k + 1 for k in commas)], [*commas, len(text)]
    parts = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    signs = (("+", "-"), ("-", "+"))
    return [
        part.replace("\\pm", pm).replace("\\mp", mp)
        for part in parts
        for pm, mp in (signs if "\\pm" in part else signs[:1])
    ]


def _read_all(tree: Tree) -> None:
    for item in (tree,) if isinstance(tree, str) else tree[1:]:
        _read(item) if isinstance(item, str) else _read_all(item)


@lru_cache(maxsize=4096)
def _read(text: str) -> sympy.Basic:
    value = number(text.strip())
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    return latex2sympy(text, is_real=True, normalization_config=_STYLE)


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
    if not re.search("[<>=]", answer) or not re.search("[<>=]", truth):  # x = 5 for 5
        answer, truth = (_NAMED.sub("", text, count=1) for text in (answer, truth))
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
    """An inequality for an interval, unions, sets with a name: the library compares them."""
    both = answer + " " + truth
    if not _SETS.search(both) or _FUNCTION.search(both):
        return False
    wanted = [_read(truth), _read(_NAMED.sub("", truth))]
    return verify(wanted, _read(answer), timeout_seconds=None, allow_set_relation_comp=True)
