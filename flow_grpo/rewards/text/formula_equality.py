"""Equality of two formulas, with math-verify's LaTeX parser and sympy.

Lists, tuples, intervals and matrices are split here, because the parser takes (1,2) for an
interval. Expressions with variables are compared numerically, at a few points with 30 digits, which
takes milliseconds where `sympy.simplify` may take minutes to find that two expressions differ.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from flow_grpo.rewards.text.brackets import find_group_end, split_top_level
from flow_grpo.rewards.text.math_parsing import DECIMAL_TOLERANCE, has_variables, parse_number

EVAL_DIGITS = 30  # precision of the comparison of exact expressions
# Values of variables.
EVAL_POINTS = ("0.7310585786", "-1.3247179572", "0.0000000013", "3.29036")
FAR_POINT = "1009.7"  # used only without powers, whose values would be large
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_SETS = re.compile(
    r"[<>]|\\(?:leq?|geq?|neq?|in|cup|cap|setminus|mathbb|emptyset|lor|land)(?![a-z])"
)
# functions of a variable, with which an inequality may take long to solve
_FUNCTION = re.compile(r"\\(?:log|ln|exp|sin|cos|tan)|\\sqrt\{[^{}]*[A-Za-z]|\^\{?[^23]")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_BINOMIAL = re.compile(r"\\binom\s*\{[^{}]*\}\s*\{[^{}]*\}")
_PRODUCT = re.compile(
    r"(?<![\w.^])(\d+(?:\.\d+)?)\s*(?=[({])|(\)|\\pi)\s*(?=\()|(\))\s*(?=\d|\\(?:frac|sqrt))"
)
LIST, BARE, MATRIX = "{}", ",", "matrix"  # kinds of sequences, besides "()", "[)", ...
_CHAIN = re.compile(r"(=|\\approx(?![A-Za-z]))")

Tree = str | tuple  # a formula, or (kind of sequence, *items)


def answers_equal(answer: str, truth: str) -> bool | None:
    """Return whether an answer equals the ground truth, or None if the answer cannot be parsed.

    Args:
        answer: The final answer, in LaTeX.
        truth: The ground truth, in LaTeX.
    """
    truth_tree = parse_structure(truth)
    loose = "." in answer or "." in truth
    try:
        answer_tree = parse_structure(answer)
        parse_all(answer_tree)
        return _structures_equal(answer_tree, truth_tree, loose) or _sets_equal(answer, truth)
    except Exception:
        return None


def parse_structure(text: str) -> Tree:
    """Split lists, tuples, intervals and matrices into a tree of formulas.

    A node is (kind, *children), with its brackets or another marker as the kind; a leaf is LaTeX.
    """
    items = _split_items(text)
    if len(items) > 1:
        return (BARE, *map(parse_structure, items))
    text = items[0]
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in matrix[2].split("\\\\") if row.strip()]
        return (MATRIX, *((MATRIX, *map(parse_structure, row.split("&"))) for row in rows))
    start = int(text.startswith("\\{"))
    if text[start : start + 1] in ("(", "[", "{") and find_group_end(text, start) == len(text):
        inner = text[start + 1 : -1 - start]
        kind = LIST if text[start] == "{" else text[start] + text[-1]
        items = _split_items(inner)
        if len(items) > 1:
            return (kind, *map(parse_structure, items))
        if kind in (LIST, "()", "[]"):
            return parse_structure(inner)
    return text


def _split_items(text: str) -> list[str]:
    r"""Split at top-level commas and semicolons, and expand a \pm b to both of its values."""
    items = []
    for part in split_top_level(text, ",;"):
        items.append(part.replace("\\pm", "+").replace("\\mp", "-"))
        if "\\pm" in part:
            items.append(part.replace("\\pm", "-").replace("\\mp", "+"))
    return items


def parse_all(tree: Tree) -> None:
    """Parse all formulas of a tree; raises if one cannot be parsed."""
    if isinstance(tree, str):
        for member in _split_chain(tree)[::2]:
            parse_formula(member)
    else:
        for item in tree[1:]:
            parse_all(item)


@lru_cache(maxsize=4096)
def parse_formula(text: str) -> sympy.Basic:
    """Parse one formula in LaTeX."""
    value = parse_number(text.strip())
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    for sign, operation in (("\\lor", sympy.Or), ("\\land", sympy.And)):
        if sign in text:
            return operation(*map(parse_formula, text.split(sign)))
    formula = latex2sympy(_insert_products(text), is_real=True, normalization_config=_NORMALIZATION)
    return formula.replace(_is_odd_root, _real_root) if "^" in text or "[" in text else formula


def _insert_products(text: str) -> str:
    """Write products explicitly: the parser adds adjacent numbers and reads 5(4) as 9."""
    text = _BINOMIAL.sub(r"(\g<0>)", text)
    return _PRODUCT.sub(lambda found: f"{found[1] or found[2] or found[3]}\\cdot ", text)


def _is_odd_root(formula: sympy.Basic) -> bool:
    power = formula.exp if isinstance(formula, sympy.Pow) else None
    return isinstance(power, sympy.Rational) and power.q > 1 and power.q % 2 == 1


def _real_root(power: sympy.Pow) -> sympy.Expr:
    """Return the real root: the cube root of -8 is -2, not the complex principal value."""
    base, exponent = power.args
    return sympy.sign(base) ** exponent.p * sympy.Abs(base) ** exponent


def _split_chain(text: str) -> list[str]:
    r"""Split 12\pi = 37.7 into values and signs; an equation with variables is not split."""
    if has_variables(text):
        return [text]
    return [part.strip() for part in _CHAIN.split(text)]


def _structures_equal(answer: Tree, truth: Tree, loose: bool) -> bool:
    """Return whether two trees are equal; items of plain lists may be in any order.

    `loose` allows rounding in decimals.
    """
    if isinstance(answer, str) and isinstance(truth, str):
        return _formulas_equal(answer, truth, loose)
    if isinstance(answer, str) or isinstance(truth, str) or len(answer) != len(truth):
        return False
    kinds = {answer[0], truth[0]}
    items, others = answer[1:], truth[1:]
    if kinds <= {LIST, BARE}:
        return _equal_in_any_order(items, others, lambda a, b: _structures_equal(a, b, loose))
    if len(kinds) > 1 and kinds != {BARE, "()"}:
        return False
    return all(_structures_equal(a, b, loose) for a, b in zip(items, others, strict=True))


def _equal_in_any_order(items: Sequence, others: Sequence, same: Callable[..., bool]) -> bool:
    """Return whether `items` are a permutation of `others` under the relation `same`."""
    left = list(others)
    for item in items:
        found = next((other for other in left if same(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _formulas_equal(answer: str, truth: str, loose: bool) -> bool:
    r"""Return whether two formulas are equal at sample points.

    Either may be a chain such as 12\pi = 37.7: one value of each must match, and all links of the
    answer's chain must hold. `loose` allows rounding in decimals.
    """
    truth_chain, answer_chain = _split_chain(truth), _split_chain(answer)
    if len(truth_chain) > 1:  # 12\\pi \\approx 37.7: either is correct
        return any(_formulas_equal(answer, value, loose) for value in truth_chain[::2])
    if len(answer_chain) > 1:
        links = zip(answer_chain[:-2:2], answer_chain[1::2], answer_chain[2::2], strict=True)
        consistent = all(_link_holds(*link) for link in links)
        return consistent and any(
            _formulas_equal(value, truth, loose) for value in answer_chain[::2]
        )
    left, right = parse_formula(answer), parse_formula(truth)
    if left == right:
        return True
    points = EVAL_POINTS if re.search(r"\^|\\exp", answer + truth) else (*EVAL_POINTS, FAR_POINT)
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        values = _evaluate_at_points(left, right, points)
        return bool(values) and all(_is_close(a, b, loose) for a, b in values)
    parts = [list(getattr(each, "_unsorted_args", [each])) for each in (left, right)]  # 1 < x < 2
    if not all(isinstance(each, Relational) for part in parts for each in part):
        return False
    return _equal_in_any_order(*parts, lambda a, b: _relations_equal(a, b, points, loose))


def _link_holds(left: str, sign: str, right: str) -> bool:
    r"""Return whether the sides of = or \approx are equal, or one is the other's rounded value."""
    if _formulas_equal(left, right, "." in left + right):
        return True
    digits = r"[-+]?\d*\.\d+" if sign == "=" else r"[-+]?\d*\.?\d+"
    rounded = [each for each in (left, right) if re.fullmatch(digits, each)]
    return any(_rounds_to(right if each == left else left, each) for each in rounded)


def _rounds_to(formula: str, rounded: str) -> bool:
    """Return whether a formula's value rounds to the decimal `rounded`."""
    places = len(re.sub(r"\D", "", rounded.partition(".")[2]))
    half = Fraction(51, 100 * 10**places)
    [(value, near)] = _evaluate_at_points(
        parse_formula(formula), parse_formula(rounded), EVAL_POINTS[:1]
    ) or [(0, 1)]
    return bool(abs(value - near) <= sympy.Rational(half.numerator, half.denominator))


def _relations_equal(left: Relational, right: Relational, points: tuple, loose: bool) -> bool:
    """Return whether two equations or inequalities are equivalent.

    The differences of their sides must have the same ratio at all points; that of inequalities must
    be positive.
    """
    left_kind, left_difference = _difference_of_sides(left)
    right_kind, right_difference = _difference_of_sides(right)
    values = _evaluate_at_points(left_difference, right_difference, points)
    if left_kind != right_kind or not values or 0 in values[0]:
        return False
    a0, b0 = values[0]
    if left_kind not in (sympy.Eq, sympy.Ne) and not (a0 / b0).is_positive:
        return False
    return all(_is_close(a * b0, b * a0, loose) for a, b in values)


def _difference_of_sides(relation: Relational) -> tuple[type, sympy.Expr]:
    """Return the kind of a relation and its left minus right side.

    < and <= are first turned into > and >=.
    """
    if isinstance(relation, sympy.LessThan | sympy.StrictLessThan):
        relation = relation.reversed
    minus = sympy.Mul(-1, relation.rhs, evaluate=False)
    return relation.func, sympy.Add(relation.lhs, minus, evaluate=False)


def _is_close(one: sympy.Expr, other: sympy.Expr, loose: bool) -> bool:
    size = abs(other)
    tolerance = float(DECIMAL_TOLERANCE) * size if loose else 1e-20 * max(1, size)
    return bool(abs(one - other) <= tolerance)


def _evaluate_at_points(left: sympy.Expr, right: sympy.Expr, points: tuple) -> list[tuple]:
    """Return pairs of values at the points where both are finite.

    Each variable gets a different value near the point; i is the imaginary unit.
    """
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    pairs = []
    for point in points:
        start = sympy.Float(point, EVAL_DIGITS)
        values = {name: start * (1 + sympy.Rational(k, 29)) for k, name in enumerate(names)}
        values |= {name: sympy.I for name in names if str(name) == "i"}
        pair = tuple(formula.evalf(EVAL_DIGITS, subs=values) for formula in (left, right))
        if all(value.is_number and value.is_finite for value in pair):
            pairs.append(pair)
    return pairs


def _sets_equal(answer: str, truth: str) -> bool:
    """Return whether two inequalities, intervals or unions are the same set of real numbers."""
    both = answer + " " + truth
    if not _SETS.search(both) or _FUNCTION.search(both):
        return False
    answer_set, answer_variable = _solution_set(answer)
    truth_set, truth_variable = _solution_set(truth)
    if answer_set is None or truth_set is None:
        return False
    if answer_variable and truth_variable and answer_variable != truth_variable:
        return False
    return answer_set == truth_set or answer_set.symmetric_difference(truth_set) is sympy.S.EmptySet


@lru_cache(maxsize=1024)
def _solution_set(text: str) -> tuple[sympy.Set | None, sympy.Symbol | None]:
    """Return the solution set of an inequality or interval, and the variable.

    Either is None if the text has none.
    """
    if not re.search(r"[\[(]", text):  # commas separate inequalities, not the ends of an interval
        text = " \\land ".join(split_top_level(text, ",;"))
    formula = parse_formula(text)
    decimals = {each: sympy.Rational(str(each)) for each in formula.atoms(sympy.Float)}
    formula = formula.xreplace(decimals)
    if isinstance(formula, sympy.Set):
        return formula, None
    if not isinstance(formula, Boolean) or len(formula.free_symbols) > 1:
        return None, None
    return formula.as_set(), next(iter(formula.free_symbols), None)
