"""Comparison of a final answer with the ground truth, as far as possible without algebra.

Labels, names, units and plain numbers are compared here, exactly and in microseconds. Only pairs of
formulas that need a computer algebra system are returned for formula_equality.py, which is slow and
runs in worker processes (sympy_checker.py).
"""

import re
from fractions import Fraction

from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.text.answer_parsing import is_geometric, names_match
from flow_grpo.rewards.text.choices import choice_letters, split_label
from flow_grpo.rewards.text.formula_limits import reject_costly_formula
from flow_grpo.rewards.text.math_parsing import (
    DECIMAL_TOLERANCE,
    NUMBER_IN_BASE,
    AnswerItem,
    UnparsableFormula,
    has_variables,
    is_prose,
    parse_items,
    parse_number,
    strip_lead_in,
    strip_styles,
)
from flow_grpo.rewards.text.units import conversion_factor, is_angle

_LABEL_ALONE = re.compile(r"\(?[A-J]\)?")
_MONEY = re.compile(r"\\\$|[€£¥₹]")
_DEPENDENT = re.compile(r"y|[A-Za-z]\([A-Za-z]\)")  # y = 2x equals f(x) = 2x


def compare_without_algebra(answer: str, truth: str) -> float | tuple[str, str]:
    """Return 1 or 0 if that is decided without algebra, else the two formulas to compare.

    Raises:
        UnparsableFormula: If the answer is not a formula, but the ground truth is.
    """
    if _strip_spaces(answer) == _strip_spaces(truth):  # before units are parsed: 2A is 2 A
        return 1.0
    plain_answer, plain_truth = strip_lead_in(strip_styles(answer)), strip_styles(truth)
    has_currency = _MONEY.search(answer + truth)
    if not has_currency and _strip_spaces(plain_answer) == _strip_spaces(plain_truth):
        return 1.0
    if _LABEL_ALONE.fullmatch(plain_truth):
        return float(choice_letters(plain_answer) == choice_letters(plain_truth))
    answer_label, answer_rest = split_label(plain_answer)
    truth_label, truth_rest = split_label(plain_truth)
    if truth_label and truth_rest:  # for "B. 12", the letter, the value or both are correct
        if choice_letters(plain_answer) == {truth_label} and not (answer_label and answer_rest):
            return 1.0
        if answer_label not in ("", truth_label):
            return 0.0
        return compare_without_algebra(answer_rest, truth_rest)
    if answer_label and answer_rest:
        return compare_without_algebra(answer_rest, truth)
    return _compare(answer, truth)


def _compare(answer: str, truth: str) -> float | tuple[str, str]:
    """Compare two final answers without lead-in or label; see `compare_without_algebra`."""
    try:
        truth_items = parse_items(truth)
    except UnparsableFormula:  # a ground truth such as "not enough information"
        return 0.0
    answer_items = parse_items(answer)
    texts = _match_names(answer_items, truth_items)
    units = _common_unit(answer_items), _common_unit(truth_items)
    if texts is None or None in units or _percent_with_unit(texts, units):
        return 0.0
    if _strip_spaces(texts[0]) == _strip_spaces(texts[1]):
        return float(conversion_factor(*units) == 1)
    if is_prose(texts[1]) or is_geometric(texts[1]):
        return 0.0
    factor = _unit_factor(units, texts)
    return 0.0 if factor is None else _compare_values(*texts, factor)


def _compare_values(answer: str, truth: str, factor: Fraction | str) -> float | tuple[str, str]:
    """Compare `answer` times the factor with the ground truth."""
    answer_in_base = NUMBER_IN_BASE.fullmatch(answer)
    truth_in_base = NUMBER_IN_BASE.fullmatch(truth)
    if answer_in_base or truth_in_base:  # the base may be left out: 17 for 17_8
        answer_digits, answer_base = answer_in_base.groups() if answer_in_base else (answer, None)
        truth_digits, truth_base = truth_in_base.groups() if truth_in_base else (truth, None)
        return float(answer_digits == truth_digits and answer_base in (None, truth_base))
    left, right = parse_number(answer), parse_number(truth)
    if left is not None and right is not None and isinstance(factor, Fraction):
        left *= factor
        tolerance = DECIMAL_TOLERANCE * abs(right) if "." in answer or "." in truth else 0
        if abs(left - right) <= tolerance:
            return 1.0
        # 50 and 0.5 both count as 50%, but 0.5 does not count as 0.5%
        percent = ("%" in answer) - ("%" in truth)
        if percent == 0 or abs(left if percent < 0 else right) < 1:
            return 0.0
        return float(left * Fraction(100) ** percent == right)
    try:
        reject_costly_formula(truth)
    except UnparsableFormula as error:
        return Failed(f"its ground truth {truth[:60]!r} cannot be checked: {error}")
    if is_prose(answer):
        raise UnparsableFormula("it is prose")
    reject_costly_formula(answer)
    if isinstance(factor, Fraction):
        factor = f"\\frac{{{factor.numerator}}}{{{factor.denominator}}}" if factor != 1 else ""
    return (f"{factor}({answer})" if factor else answer, truth)


def _match_names(answer: list[AnswerItem], truth: list[AnswerItem]) -> tuple[str, str] | None:
    """Return the two values without their names, or None if the names denote different things.

    Names are optional in both: a missing one matches any.
    """
    if len(answer) == len(truth) == 1:
        return _match_single_name(answer[0], truth[0])
    answer_names, truth_names = _item_names(answer), _item_names(truth)
    answer_text, truth_text = _join_values(answer), _join_values(truth)
    if len(truth_names) > 1:
        if len(answer_names) > 1:  # compare values of the same name
            same = {*answer_names} == {*truth_names} and len(answer) == len(truth)
            return (_join_sorted(answer), _join_sorted(truth)) if same else None
        ordered = f"({truth_text})"
        if len(answer) == 1:
            tuple_name = f"({','.join(truth_names)})"
            return (answer_text, ordered) if answer[0].name in ("", tuple_name) else None
        return None if answer_names else (f"({answer_text})", ordered)
    if len(answer_names) > 1:
        is_tuple = len(truth) == 1
        return (_join_sorted(answer) if is_tuple else answer_text), truth_text
    if not all(names_match(one, other) for one in answer_names for other in truth_names):
        return None
    return answer_text, truth_text


def _match_single_name(answer: AnswerItem, truth: AnswerItem) -> tuple[str, str] | None:
    """Return the values to compare, with names that restrict them; None for different names.

    A value that is an equation, or names of different things, turn the other into `name=value`.
    """
    if not answer.name and _is_equation(answer.value) and len(truth.name) == 1:
        return answer.value, f"{truth.name}={truth.value}"
    if not truth.name and _is_equation(truth.value) and len(answer.name) == 1:
        return f"{answer.name}={answer.value}", truth.value
    if names_match(answer.name, truth.name):
        return answer.value, truth.value
    if not has_variables(truth.value):
        return None
    if _DEPENDENT.fullmatch(answer.name) and _DEPENDENT.fullmatch(truth.name):
        return answer.value, truth.value
    return f"{answer.name}={answer.value}", f"{truth.name}={truth.value}"


def _is_equation(text: str) -> bool:
    return "=" in text and has_variables(text)


def _item_names(items: list[AnswerItem]) -> list[str]:
    return list(dict.fromkeys(item.name for item in items if item.name))


def _join_values(items: list[AnswerItem]) -> str:
    return ", ".join(item.value for item in items)


def _join_sorted(items: list[AnswerItem]) -> str:
    return f"({_join_values(sorted(items))})"


def _common_unit(items: list[AnswerItem]) -> str | None:
    """Return the unit of all items (some may have none), or None if units differ."""
    units = {item.unit for item in items if item.unit}
    return next(iter(units), "") if len(units) < 2 else None


def _percent_with_unit(texts: tuple[str, str], units: tuple[str, str]) -> bool:
    """Return whether one is a percentage and the other has a unit: 14% is not 14 cm."""
    return any("%" in texts[one] and units[1 - one] for one in (0, 1))


def _unit_factor(units: tuple[str, str], texts: tuple[str, str]) -> Fraction | str | None:
    """Return the factor from the answer's unit to the truth's, or None for different quantities.

    It is a number, or LaTeX between degrees and radians. An angle with pi needs no unit.
    """
    radians = [
        is_angle(unit, "rad") or (not unit and "\\pi" in text)
        for unit, text in zip(units, texts, strict=True)
    ]
    if is_angle(units[0], "deg") and radians[1]:
        return r"\frac{\pi}{180}"
    if is_angle(units[1], "deg") and radians[0]:
        return r"\frac{180}{\pi}"
    return conversion_factor(*units)


def _strip_spaces(text: str) -> str:
    """Remove spaces except between digits (1 1/2 is not 11/2) and in lists (1, 200)."""
    text = re.sub(r"(?<=\d),\s+(?=\d{3}(?!\d))", ";", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return text if "=" in text else text.casefold()
