r"""Text-level parsing of final answers: styles, names, units and numbers.

`parse_items` normalizes an answer ("the area is $12\text{ cm}^2$") to items of name, value and
unit, with the value in LaTeX that sympy can parse. `parse_number` evaluates plain numbers
exactly, as fractions.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from flow_grpo.rewards.text.answer_parsing import (
    insert_equals_sign,
    is_compound,
    is_hedged,
    is_unit_phrase,
    normalize_name,
)
from flow_grpo.rewards.text.brackets import bracket_depths, find_group_end, split_top_level
from flow_grpo.rewards.text.units import CURRENCY_SYMBOLS, parse_quantity

MAX_ROOTS = 24
MAX_SIGNS = 8  # equality signs in one statement
MAX_DIGITS = 2_000  # of a number; Python's limit is 4,300
DECIMAL_TOLERANCE = Fraction(1, 10**6)  # relative

TRIGONOMETRIC = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = (*TRIGONOMETRIC, "log", "ln", "lg", "exp", "sqrt", "min", "max")

# Normalized LaTeX, and the spellings that it replaces.
_SPELLINGS = {
    "": "$ € £ ¥ ₹ ` ✓ \\$ \\( \\) \\[ \\] \\! {,} \\Large \\large \\checkmark \\left \\right"
    " \\displaystyle \\bigl \\bigr \\big \\Big",
    "-": "− –",
    "/": "÷",
    "=": "==",
    "<": "\\lt",
    ">": "\\gt",
    "(": "\\langle",
    ")": "\\rangle",
    ":": "\\colon",
    "|": "\\lvert \\rvert \\vert \\mid \\|",
    "%": "\\%",
    "°": "^\\circ ^{\\circ} \\degree",
    "°C": "℃",
    "°F": "℉",
    "^2": "²",
    "^3": "³",
    " ohm": "Ω \\Omega",
    "\\\\": "\\\\",  # separates matrix rows: kept, and its second backslash starts no command
    "\\frac": "\\dfrac \\tfrac \\cfrac",
    "\\frac{1}{2}": "½",
    "\\frac{1}{3}": "⅓",
    "\\frac{2}{3}": "⅔",
    "\\frac{1}{4}": "¼",
    "\\frac{3}{4}": "¾",
    "\\binom": "\\dbinom \\tbinom",
    "\\cdot ": "× ·",
    "\\pm ": "±",
    "\\le ": "≤ <= \\leqslant",
    "\\ge ": "≥ >= \\geqslant",
    "\\neq ": "≠",
    "\\approx ": "≈ \\simeq \\doteq",
    "\\in ": "∈",
    "\\cap ": "∩",
    "\\cup ": "∪",
    "\\emptyset ": "∅ \\varnothing \\{\\}",
    "\\mathbb{R}": "ℝ",
    "\\pi ": "π",
    "\\infty ": "∞",
    "\\alpha ": "α",
    "\\beta ": "β",
    "\\theta ": "θ",
    "\\angle ": "∠",
    "\\triangle ": "△",
}
_SPACES = ("\\,", "\\;", "\\:", "\\ ", "~", "\\quad", "\\qquad", "\n", "\t", "\u00a0")
_REPLACED = dict.fromkeys(_SPACES, " ") | {
    spelling: latex for latex, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
_COMMAND_BOUNDARY = {
    each: r"(?![A-Za-z])" for each in _REPLACED if re.fullmatch(r"\\[A-Za-z]+", each)
}
_REPLACE = re.compile(
    "|".join(
        re.escape(each) + _COMMAND_BOUNDARY.get(each, "")
        for each in sorted(_REPLACED, key=len)[::-1]
    )
)
_STYLED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|underline"
    r"|emph|boldsymbol|bm|textnormal|textsf|mathsf)\s*\{([^{}]*)\}|\\color\s*\{[^{}]*\}"
)
_DEGREE_COMMAND = re.compile(r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?")
_INCHES, _FEET = re.compile(r"(?<=\d)\s*(?:''|\")"), re.compile(r"(?<=\d)\s*'(?!')")
_LEAD_IN = re.compile(
    r"^(?:(?:(?:so|thus|hence|therefore)\b,?|\\(?:therefore|Rightarrow|implies)(?![A-Za-z])|∴|⇒)"
    r"\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?"
    r"(?:answer|ans)(?:\s+is)?\s*[:=.]?\s+)?",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"^(?:US|USD|EUR|GBP|INR|CNY|RMB|Rs\.?)\s*(?=\d)")
_BARE_FUNCTION = re.compile(
    rf"(?<![\\A-Za-z])({'|'.join((*FUNCTIONS, 'pi', 'infty'))})(?![A-Za-z])"
)
_AND = re.compile(r"(?<![A-Za-z]),?\s*(?:and|or)(?![A-Za-z])")
_UNBRACED_FIRST = re.compile(r"\\(frac|binom)\s*(\\pi|[0-9A-Za-z])")
_UNBRACED_SECOND = re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\\pi|[0-9A-Za-z])")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)°")
_THOUSANDS = re.compile(r"(?<![\d,.(\[{])\d{1,3}(?:,\d{3})+(?![\d)\]}]|,\d)")
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ORDINALS = ["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_FRACTION_WORDS = {word: number for number, word in enumerate(_ORDINALS, 3)}
_FRACTION_WORDS |= {"half": 2, "halve": 2, "hundredth": 100, "thousandth": 1000}
_SCALES = {word: f"10^{{{power}}}" for word, power in _POWERS_OF_TEN.items()} | {"dozen": "12"}
_SCALES |= {word: f"\\frac{{1}}{{{number}}}" for word, number in _FRACTION_WORDS.items()}
_SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(sorted(_SCALES)[::-1])})s?\b")
_SUFFIX_WORDS = {"percent": "%", "per cent": "%", "squared": "^2", "cubed": "^3"}  # after a number
_SUFFIX_WORD = re.compile(rf"(?<=[\d)}}])\s*({'|'.join(_SUFFIX_WORDS)})\b")
_DIGIT_GROUPS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_UNITS = "cm|mm|km|dm|nm|ft|in|yd|mi|ha|kg|mg|lbs?|oz|hrs?|min|secs?|ms|ml|mL|cl|cL|dl|dL"
_UNITS += "|mph|kph|kmh|kN|kW|kJ|kV|mV|mA|pm|am|deg|rad|usd"
_UNIT_WORD = rf"(?:{_UNITS}|Hz|Pa|US|sq|cu|[mgsLhNKWJVACF]|[A-Za-z]{{3,}})"
_UNIT_POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
_UNIT = re.compile(
    rf"(?:(?<=[\d)}}])|(?<=\\pi))(?:\s*(?:{_UNITS})(?![A-Za-z])|\s+(?:{_UNIT_WORD}|of)(?![A-Za-z])){_UNIT_POWER}"
    rf"(?:[\s./]+(?:{_UNIT_WORD}|of|an?)(?![A-Za-z]){_UNIT_POWER})*\.?$"
)
_COMPOUND_PART = rf"(\d+(?:\.\d+)?)\s*({_UNITS}|[mshL]|[A-Za-z]{{3,}})(?![A-Za-z])\.?"
_COMPOUND = re.compile(
    rf"{_COMPOUND_PART}(?:(?:\s+|\s*,\s*|\s*,?\s+and\s+){_COMPOUND_PART}){{1,3}}"
)
# a one-letter unit in text style, which is not a variable
_STYLED_UNIT = re.compile(
    r"([\d})]|\\pi)((?:\\[,;: ]|~|\s)*)\\(?:text|textrm|mathrm|mbox)\s*\{[\s~]*([mgsLhNKWJVA])\s*\}"
)
_ONE_LETTER = {"m": "meter", "g": "gram", "s": "second", "L": "liter", "h": "hour", "N": "newton"}
_ONE_LETTER |= {"K": "kelvin", "W": "watt", "J": "joule", "V": "volt", "A": "ampere"}
_SCIENTIFIC = re.compile(r"[-+]?[\d.]*\s*(?:\\(?:cdot|times)\s*)?10\s*\^\s*\{?-?\d+\}?")
_ALL_REAL = re.compile(r"(?:all|any|every)\s+real\s+numbers?", re.IGNORECASE)
_SIGN_WORD = re.compile(r"^(?:negative|minus)\s+(?=[\d\\])", re.IGNORECASE)
_UNIT_IN_BRACKETS = re.compile(r"(?<=[\d}])\s*\(\s*([A-Za-z][A-Za-z .]*)\)$")
_TEMPERATURE_SCALE = re.compile(r"°\s*([CF])(?![A-Za-z])")
_TEMPERATURE_UNITS = {"C": " celsius", "F": " fahrenheit"}
_MONEY = re.compile(r"\s*[-+−]?\s*(?:\\(\$)|(\$)(?=[^$]*$)|([€£]))")
_APPROXIMATELY = re.compile(
    r"^(?:\\approx|\\sim|~|(?:approximately|approx\.?|about|around|roughly|exactly)(?=[\s\d\\]))\s*",
    re.I,
)
_ROUNDING = (
    r"(?:approx(?:imately|\.)?|roughly|exact(?:ly)?(?: value)?|estimated|simplified"
    r"|(?:rounded\s+)?(?:to|correct to)\s+(?:the\s+)?(?:nearest\s+[A-Za-z]+(?:\s+[A-Za-z]+)?"
    r"|(?:\d|one|two|three|four)\s+(?:decimal(?:\s+places?|s)?|d\.?p|s\.?f"
    r"|significant\s+(?:figures|digits)))"
    r"|rounded)\.?"
)
_ROUNDED = re.compile(rf"[\s,]*(?:\(\s*{_ROUNDING}\s*\)|(?<=[\s,]){_ROUNDING})$", re.I)
_PARENTHESIZED_VALUE = re.compile(
    r"\s*\(\s*(?:\\approx|=|approx(?:imately|\.)?|about)\s*([^()]*[\d\\][^()]*)\)$", re.I
)
_INEQUALITY = re.compile(r"[<>]|\\(?:leq?|geq?|neq?)(?![A-Za-z])")
_SIGN = re.compile(r"=|\\approx(?![A-Za-z])|\\in(?![A-Za-z])")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*[|:]\s*(.*)\\\}")
_OVER = re.compile(r"\{([^{}]*)\\over\s([^{}]*)\}")
_RATIO = re.compile(r"([\d.]+)\s+(?:to|out\s+of)\s+([\d.]+)")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(rf"([-+]?)\s*({_DIGITS}?(?:\.\d+)?)(?:[eE]([-+]?\d{{1,3}}))?\s*(%?)")
_FRACTION = re.compile(
    r"([-+]?)\s*(?:(\d+)\s*(?=\\)|(\d+)\s+)?"
    r"(?:\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(\d+))"
    r"\s*(%?)"
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
NUMBER_IN_BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_LETTERS = re.compile(r"[A-Za-z][A-Za-z .,'-]*")
_VARIABLE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:[ei](?![A-Za-z])))[A-Za-z]|\\(?:alpha|beta|gamma|[dD]elta|epsilon|theta|lambda"
    r"|mu|rho|sigma|tau|phi|varphi|omega|ell)(?![A-Za-z])"
)


class UnparsableFormula(ValueError):
    """A text that is not a formula, or not a supported one."""


class AnswerItem(NamedTuple):
    """One of the values that an answer lists."""

    name: str  # as returned by `answer_parsing.normalize_name`; "" without one
    value: str  # LaTeX
    unit: str


def parse_items(text: str) -> list[AnswerItem]:
    """Return the values that an answer lists, usually one, with their names and units.

    Raises:
        UnparsableFormula: If the answer hedges.
    """
    text = _STYLED_UNIT.sub(lambda found: f"{found[1]} {_ONE_LETTER[found[3]]} ", text.strip())
    money = _MONEY.match(strip_lead_in(text))
    currency = CURRENCY_SYMBOLS[money[money.lastindex]] if money else ""
    text = _CURRENCY.sub("", " ".join(strip_lead_in(strip_styles(text)).split()))
    if is_hedged(text):
        raise UnparsableFormula("it does not commit to one answer")
    text = _ROUNDED.sub("", _PARENTHESIZED_VALUE.sub(r" \\approx \1", text))
    text = _APPROXIMATELY.sub("", text.removeprefix("=").strip())
    text = insert_equals_sign(_SIGN_WORD.sub("-", text))
    text = "\\mathbb{R}" if _ALL_REAL.fullmatch(text) else text
    text = _RATIO.sub(r"\1:\2", _OVER.sub(r"\\frac{\1}{\2}", text))
    text = _FEET.sub(" ft ", _INCHES.sub(" in ", text)).strip()
    text = _merge_compound_quantity(_UNIT_IN_BRACKETS.sub(r" \1", text))
    text = _AND.sub(",", _join_inequalities(text))
    text = _ROOT.sub(r"\\sqrt{\1}", text).replace("√", "sqrt")
    text = _BARE_FUNCTION.sub(_to_latex_command, text).replace("infinity", "\\infty ")
    text = text.replace("\\log_e", "\\ln")
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    for _ in range(MAX_ROOTS):
        if found := re.search(r"\\sqrt\s*\(", text):
            end = find_group_end(text, found.end() - 1)
            text = f"{text[: found.start()]}\\sqrt{{{text[found.end() : end - 1]}}}{text[end:]}"
    text = _UNBRACED_SECOND.sub(r"\1{\2}", _UNBRACED_FIRST.sub(r"\\\1{\2}", text))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _SCALE.sub(lambda match: f"\\cdot {_SCALES[match[1]]}", text)
    text = _SUFFIX_WORD.sub(lambda match: _SUFFIX_WORDS[match[1]], text)
    parts = [text] if _INEQUALITY.search(text) else split_top_level(text, ",;")
    return [_parse_item(part, currency) for part in parts]


def _parse_item(text: str, currency: str) -> AnswerItem:
    """Split one value of an answer into name, value and unit, by default the unit `currency`."""
    name, value = _split_name(text)
    if any(f"\\{function}" in value for function in TRIGONOMETRIC):
        value = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", value)
    value = _TEMPERATURE_SCALE.sub(lambda match: _TEMPERATURE_UNITS[match[1]], value)
    angle = "deg" if value.rstrip().endswith("°") else ""
    value = value.replace("°", "").strip()
    found = _UNIT.search(value)
    if found is None or not is_unit_phrase(found[0]):
        unit = currency or angle
    else:
        amount, unit = value[: found.start()].strip(), found[0].strip()
        is_number = parse_number(amount) is not None or _SCIENTIFIC.fullmatch(amount)
        if len(unit) == 1 and not is_number:  # r^2 h: a variable, not hours
            unit = currency
        else:
            value, unit = amount, f"{currency} {unit}".strip()
    return AnswerItem(name, _ratio_to_fraction(_join_digit_groups(value)), unit)


def _split_name(text: str) -> tuple[str, str]:
    """Return the name and the value of x = 3, or ("", text) for an equation or a text without name.

    Of A = bh = 12, the value is 12.
    """
    if _INEQUALITY.search(text):
        return "", text
    depths = [depth for _, depth in bracket_depths(text)]
    signs = [found for found in _SIGN.finditer(text) if depths[found.start()] == 0]
    if not 0 < len(signs) <= MAX_SIGNS:
        return "", text
    starts = [0, *(sign.end() for sign in signs)]
    ends = [*(sign.start() for sign in signs), len(text)]
    members = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    names = [normalize_name(member) for member in members]
    if names[0] is None and is_compound(members[0]) and not has_variables(members[-1]):
        names[0] = members[0]
    if names[0] is None:
        reversed_ = len(members) == 2 and names[1] and not has_variables(members[0])
        return (names[1], members[0]) if reversed_ else ("", text)
    first = 1  # index of the first member that is a value
    while (
        first < len(members) - 1
        and has_variables(members[first])
        and not has_variables(members[-1])
    ):
        first += 1
    return names[0], text[starts[first] :].strip()


def has_variables(text: str) -> bool:
    """Return whether a formula has letters other than e, i and those in commands."""
    text = re.sub(r"\\(?:begin|end)\{[A-Za-z]+\}|\\mathbb\{[A-Z]\}", "", text)
    return bool(_VARIABLE.search(text))


def _ratio_to_fraction(text: str) -> str:
    """Convert a ratio: 3:4 to the LaTeX fraction 3/4, and 2:3:4 to (3/2, 4/2).

    The parts of a longer ratio are relative to the first. Other text is returned unchanged.
    """
    parts = split_top_level(text, ":")
    if len(parts) < 2 or not all(parts) or _SIGN.search(text):
        return text
    if len(parts) == 2:
        return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    return "(" + ",".join(f"\\frac{{{part}}}{{{parts[0]}}}" for part in parts[1:]) + ")"


def _merge_compound_quantity(text: str) -> str:
    """Convert 2 hours 30 minutes to 150 minutes."""
    if not _COMPOUND.fullmatch(text):
        return text
    parts = re.findall(_COMPOUND_PART, text)
    quantities = [parse_quantity(unit) for _, unit in parts]
    if None in quantities:
        return text
    sizes = [size for _, size in quantities]
    if any(kind != quantities[0][0] for kind, _ in quantities) or sizes != sorted(set(sizes))[::-1]:
        return text
    total = sum(Fraction(amount) * size for (amount, _), size in zip(parts, sizes, strict=True))
    total /= sizes[-1]
    whole = total.denominator == 1
    value = total.numerator if whole else f"\\frac{{{total.numerator}}}{{{total.denominator}}}"
    return f"{value} {parts[-1][1]}"


def _to_latex_command(bare: re.Match) -> str:
    r"""Convert sin to \sin, but leave the minutes of 12 min."""
    minutes = bare[1] == "min" and re.search(r"[\d}]\s*$", bare.string[: bare.start()])
    return bare[0] if minutes else f"\\{bare[1]} "


def _join_inequalities(text: str) -> str:
    r"""Convert x < 2 or x > 3 to x < 2 \lor x > 3, and the set {x | x < 2} to x < 2."""
    if found := _BUILDER.fullmatch(text):
        text = found[2]
    parts = re.split(r",?\s+(and|or)\s+", text)
    if len(parts) == 1 or not all(_INEQUALITY.search(part) for part in parts[::2]):
        return text
    signs = {"and": " \\land ", "or": " \\lor "}
    return "".join(signs.get(part, part) for part in parts)


def strip_lead_in(text: str) -> str:
    """Remove a lead-in such as "the answer is"."""
    return _LEAD_IN.sub("", text)


def _join_digit_groups(text: str) -> str:
    """Convert 1 000 000 to 1000000."""
    return text.replace(" ", "") if _DIGIT_GROUPS.fullmatch(text) else text


def strip_styles(text: str) -> str:
    """Remove LaTeX styles, sizes and delimiters, and normalize Unicode symbols to LaTeX."""
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text).replace("**", "")
    text = _DEGREE_COMMAND.sub("°", text)
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    return _STYLED.sub(lambda found: f" {found[1] or ''} ", text).strip().rstrip(".,;").strip()


def parse_number(text: str) -> Fraction | None:
    """Return the value of a decimal, fraction, mixed number or percentage; None for other text."""
    if len(text) > MAX_DIGITS:
        return None
    if (found := _NUMBER.fullmatch(text)) and found[2]:
        sign, digits, power, percent = found.groups()
        value = Fraction(digits.replace(",", "")) * Fraction(10) ** int(power or 0)
        value = value / 100 if percent else value
    elif found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        whole = parts[0] or parts[1] or 0
        top, bottom = parts[2:4] if parts[2] else parts[4:6]
        if not int(bottom):
            return None
        value = (int(whole) + Fraction(int(top), int(bottom))) / (100 if found[8] else 1)
    elif found := _REPEATING.fullmatch(text):
        sign, whole, start, period = found.groups()
        value = Fraction(f"{whole or 0}.{start}0")
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(start))
    else:
        return None
    return -value if sign == "-" else value


def is_prose(text: str) -> bool:
    """Return whether a text is words (`east`, `Tom and Anna`) and not a product (`xy`)."""
    letters = _LETTERS.fullmatch(text)
    return bool(letters) and max(map(len, re.findall("[A-Za-z]+", text))) > 2
