"""Compare a response with the ground truth as far as possible without algebra."""

import re
from fractions import Fraction

from flow_grpo.rewards.answers.maths import (
    BASE,
    LOOSE,
    Item,
    Unreadable,
    are_words,
    has_variables,
    number,
    read_items,
    refuse_costly,
    unstyled,
    without_lead,
)
from flow_grpo.rewards.answers.statements import (
    choice_letters,
    is_geometric,
    same_name,
    split_label,
)
from flow_grpo.rewards.answers.units import conversion, is_angle
from flow_grpo.rewards.failure import Failed

_LABEL_ALONE = re.compile(r"\(?[A-J]\)?")
_MONEY = re.compile(r"\\\$|[€£¥₹]")
_DEPENDENT = re.compile(r"y|[A-Za-z]\([A-Za-z]\)")  # y = 2x is f(x) = 2x


def quick_check(answer: str, truth: str) -> float | tuple[str, str]:
    """Return 1 or 0 where that is known without algebra, else the two formulas to compare.

    Raises:
        Unreadable: The answer is not a formula, but the ground truth is.
    """
    if _squeezed(answer) == _squeezed(truth):  # before units are looked for: 2A is 2 A
        return 1.0
    given, wanted = without_lead(unstyled(answer)), unstyled(truth)
    if _squeezed(given) == _squeezed(wanted) and not _MONEY.search(answer + truth):
        return 1.0
    if _LABEL_ALONE.fullmatch(wanted):
        return float(choice_letters(given) == choice_letters(wanted))
    (given_label, given_rest), (label, rest) = split_label(given), split_label(wanted)
    if label and rest:  # B. 12 is answered by the letter, by the value, and by both
        if choice_letters(given) == {label} and not (given_label and given_rest):
            return 1.0
        return 0.0 if given_label not in ("", label) else quick_check(given_rest, rest)
    if given_label and given_rest:
        return quick_check(given_rest, truth)
    return _compare(answer, truth)


def _compare(answer: str, truth: str) -> float | tuple[str, str]:
    try:
        wanted = read_items(truth)
    except Unreadable:  # "not enough information" is no hedge in a ground truth
        return 0.0
    given = read_items(answer)
    texts = _without_names(given, wanted)
    units = _common_unit(given), _common_unit(wanted)
    if texts is None or None in units or _percent_with_unit(texts, units):
        return 0.0
    if _squeezed(texts[0]) == _squeezed(texts[1]):
        return float(conversion(*units) == 1)
    if are_words(texts[1]) or is_geometric(texts[1]):
        return 0.0
    factor = _factor(units, texts)
    return 0.0 if factor is None else _compare_values(*texts, factor)


def _compare_values(answer: str, truth: str, factor: Fraction | str) -> float | tuple[str, str]:
    """Compare `answer` times the factor with the ground truth."""
    if (given := BASE.fullmatch(answer)) or BASE.fullmatch(truth):  # 17 will do for 17_8
        given, asked = given or [0, answer, 0], BASE.fullmatch(truth) or [0, truth, 0]
        return float(given[1] == asked[1] and given[2] in (0, asked[2]))
    left, right = number(answer), number(truth)
    if left is not None and right is not None and isinstance(factor, Fraction):
        left *= factor
        percent = ("%" in answer) - ("%" in truth)  # 50 and 0.5 both count as 50%, 0.5 not as 0.5%
        percent *= abs(left if percent < 0 else right) >= 1
        loose = LOOSE * abs(right) if "." in answer or "." in truth else 0
        return float(
            abs(left - right) <= loose or (percent and left * Fraction(100) ** percent == right)
        )
    try:
        refuse_costly(truth)
    except Unreadable as error:
        return Failed(f"its truth {truth[:60]!r}: {error}")
    if are_words(answer):
        raise Unreadable("these are words")
    refuse_costly(answer)
    if isinstance(factor, Fraction):
        factor = f"\\frac{{{factor.numerator}}}{{{factor.denominator}}}" if factor != 1 else ""
    return (f"{factor}({answer})" if factor else answer, truth)


def _without_names(given: list[Item], wanted: list[Item]) -> tuple[str, str] | None:
    """Return the two values without their names; None if the names denote different things.

    A ground truth without names accepts any name, and a response needs none.
    """
    if len(given) == len(wanted) == 1:
        return _one_without_name(given[0], wanted[0])
    given_names, names = _names(given), _names(wanted)
    given_text, text = _listed(given), _listed(wanted)
    if len(names) > 1:
        if len(given_names) > 1:  # each by its name
            same = {*given_names} == {*names} and len(given) == len(wanted)
            return (_by_name(given), _by_name(wanted)) if same else None
        ordered = f"({text})"
        if len(given) == 1:
            tuple_name = f"({','.join(names)})"
            return (given_text, ordered) if given[0].name in ("", tuple_name) else None
        return None if given_names else (f"({given_text})", ordered)
    if len(given_names) > 1:
        is_tuple = len(wanted) == 1
        return (_by_name(given) if is_tuple else given_text), text
    if not all(same_name(one, other) for one in given_names for other in names):
        return None
    return given_text, text


def _one_without_name(given: Item, wanted: Item) -> tuple[str, str] | None:
    if not given.name and _is_equation(given.value) and len(wanted.name) == 1:
        return given.value, f"{wanted.name}={wanted.value}"
    if not wanted.name and _is_equation(wanted.value) and len(given.name) == 1:
        return f"{given.name}={given.value}", wanted.value
    if same_name(given.name, wanted.name):
        return given.value, wanted.value
    if not has_variables(wanted.value):
        return None
    if _DEPENDENT.fullmatch(given.name) and _DEPENDENT.fullmatch(wanted.name):
        return given.value, wanted.value
    return f"{given.name}={given.value}", f"{wanted.name}={wanted.value}"


def _is_equation(text: str) -> bool:
    return "=" in text and has_variables(text)


def _names(items: list[Item]) -> list[str]:
    return list(dict.fromkeys(item.name for item in items if item.name))


def _listed(items: list[Item]) -> str:
    return ", ".join(item.value for item in items)


def _by_name(items: list[Item]) -> str:
    return f"({_listed(sorted(items))})"


def _common_unit(items: list[Item]) -> str | None:
    """Return the common unit, which may follow the last item only; None if units differ."""
    units = {item.unit for item in items if item.unit}
    return next(iter(units), "") if len(units) < 2 else None


def _percent_with_unit(texts: tuple[str, str], units: tuple[str, str]) -> bool:
    """Return whether one is a percentage and the other has a unit: 14% is not 14 cm."""
    return any("%" in texts[one] and units[1 - one] for one in (0, 1))


def _factor(units: tuple[str, str], texts: tuple[str, str]) -> Fraction | str | None:
    """Return the factor that converts the answer to the unit of the ground truth, as a number or
    in LaTeX; None for different quantities. An angle with pi and no unit is in radians."""
    radians = [
        is_angle(unit, "rad") or (not unit and "\\pi" in text)
        for unit, text in zip(units, texts, strict=True)
    ]
    if is_angle(units[0], "deg") and radians[1]:
        return r"\frac{\pi}{180}"
    if is_angle(units[1], "deg") and radians[0]:
        return r"\frac{180}{\pi}"
    return conversion(*units)


def _squeezed(text: str) -> str:
    """Remove spaces, but for those between digits (1 1/2 is not 11/2) and in lists (1, 200)."""
    text = re.sub(r"(?<=\d),\s+(?=\d{3}(?!\d))", ";", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return text if "=" in text else text.casefold()
