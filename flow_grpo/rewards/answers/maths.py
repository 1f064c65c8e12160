"""What a final answer says, as far as text alone tells: without styles and units, as a number, or
as something that no library should be asked to compute."""

import re
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from flow_grpo.rewards.answers.statements import (
    is_compound,
    is_hedged,
    is_unit_phrase,
    name_of,
    with_equals_sign,
)
from flow_grpo.rewards.answers.units import MONEY, quantity_of

MAX_LENGTH = 400  # characters of a formula; the library takes long over more
MAX_DEPTH = 8  # brackets in brackets
MAX_POWERS = 24
MAX_SIGNS = 8  # of equality in one statement
MAX_BITS = 10**6  # of a number that a formula may stand for, and of the exponents in it
MAX_EXPONENT = 10**4
MAX_DIGITS = 2_000  # of a number; Python itself converts no more than 4,300
LOOSE = Fraction(1, 10**6)  # how far a decimal may be off, relative

TRIGONOMETRIC = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS = (*TRIGONOMETRIC, "log", "ln", "lg", "exp", "sqrt", "min", "max")
_KNOWN = re.compile(
    rf"{'|'.join(_FUNCTIONS)}|frac|binom|cdot|times|div|pm|mp|leq?|geq?|neq?|overline|approx"
    r"|pi|infty|alpha|beta|gamma|[dD]elta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi|omega|ell"
    r"|cup|cap|setminus|in|emptyset|mathbb|begin|end|[lr](?:floor|ceil|brace)|lor|land"
)
_MATRIX, _BEGUN = re.compile(r"\\(?:begin|end)\{[pbB]?matrix\}"), re.compile(r"\\(?:begin|end)")

_DROPPED = ("\\$", "$", "\\(", "\\)", "\\[", "\\]", "\\!", "{,}", "€", "£", "¥", "₹", "`")
_SIZES = (
    "\\Large",
    "\\large",
    "\\checkmark",
    "✓",
    "\\left",
    "\\right",
    "\\displaystyle",
    "\\bigl",
    "\\bigr",
    "\\big",
    "\\Big",
)
_SPACES = ("\\,", "\\;", "\\:", "\\ ", "~", "\\quad", "\\qquad", "\n", "\t", "\u00a0")
_REPLACED = {
    **dict.fromkeys((*_DROPPED, *_SIZES), ""),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys("−–", "-"),
    **{"\\\\": "\\\\"},  # between the rows of a matrix
    **dict.fromkeys("×·", "\\cdot "),
    **dict.fromkeys(("^\\circ", "^{\\circ}", "\\degree"), "°"),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\dbinom", "\\tbinom"), "\\binom"),
    **dict.fromkeys(("\\lvert", "\\rvert", "\\vert"), "|"),
    **dict.fromkeys(("\\varnothing", "∅"), "\\emptyset "),
    **{"÷": "/", "π": "\\pi ", "∞": "\\infty ", "\\%": "%", "≤": "\\le ", "²": "^2", "³": "^3"},
    **{"<=": "\\le ", ">=": "\\ge ", "==": "=", "\\lt": "<", "\\gt": ">"},
    **{"\\leqslant": "\\le ", "\\geqslant": "\\ge ", "\\mid": "|", "≈": "\\approx ", "∈": "\\in "},
    **{"∠": "\\angle ", "△": "\\triangle ", "\\|": "|", "\\simeq": "\\approx ", "θ": "\\theta "},
    **{"α": "\\alpha ", "β": "\\beta ", "\\colon": ":", "\\doteq": "\\approx ", "∩": "\\cap "},
    **{"℃": "°C", "℉": "°F", "ℝ": "\\mathbb{R}"},
    **{"≥": "\\ge ", "±": "\\pm ", "∪": "\\cup ", "\\langle": "(", "\\rangle": ")"},
    **{"≠": "\\neq ", "\\{\\}": "\\emptyset ", "Ω": " ohm", "\\Omega": " ohm"},
    **{
        mark: f"\\frac{{{top}}}{{{bottom}}}"
        for mark, top, bottom in ("½12", "⅓13", "⅔23", "¼14", "¾34")
    },
}
_WHOLE = {each: r"(?![A-Za-z])" for each in _REPLACED if re.fullmatch(r"\\[A-Za-z]+", each)}
_REPLACE = re.compile(
    "|".join(re.escape(each) + _WHOLE.get(each, "") for each in sorted(_REPLACED, key=len)[::-1])
)
_STYLED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|underline"
    r"|emph|boldsymbol|bm|textnormal|textsf|mathsf)\s*\{([^{}]*)\}|\\color\s*\{[^{}]*\}"
)
_CIRCLE = re.compile(r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?")
_INCHES, _FEET = re.compile(r"(?<=\d)\s*(?:''|\")"), re.compile(r"(?<=\d)\s*'(?!')")
_LEAD = re.compile(
    r"^(?:(?:(?:so|thus|hence|therefore)\b,?|\\(?:therefore|Rightarrow|implies)(?![A-Za-z])|∴|⇒)\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?"
    r"(?:answer|ans)(?:\s+is)?\s*[:=.]?\s+)?",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"^(?:US|USD|EUR|GBP|INR|CNY|RMB|Rs\.?)\s*(?=\d)")
_BARE = re.compile(rf"(?<![\\A-Za-z])({'|'.join((*_FUNCTIONS, 'pi', 'infty'))})(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z]),?\s*(?:and|or)(?![A-Za-z])")
_SHORT = re.compile(r"\\(frac|binom)\s*(\\pi|[0-9A-Za-z])")
_SHORT_SECOND = re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\\pi|[0-9A-Za-z])")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)°")
_THOUSANDS = re.compile(r"(?<![\d,.(\[{])\d{1,3}(?:,\d{3})+(?![\d)\]}]|,\d)")
_TENS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PARTS = {"half": 2, "halve": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
_PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000}
_SCALES = {word: f"10^{{{power}}}" for word, power in _TENS.items()} | {"dozen": "12"}
_SCALES |= {word: f"\\frac{{1}}{{{whole}}}" for word, whole in _PARTS.items()}
_SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(sorted(_SCALES)[::-1])})s?\b")
_WORDS = {"percent": "%", "per cent": "%", "squared": "^2", "cubed": "^3"}  # after a number
_WORD = re.compile(rf"(?<=[\d)}}])\s*({'|'.join(_WORDS)})\b")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_UNITS = "cm|mm|km|dm|nm|ft|in|yd|mi|ha|kg|mg|lbs?|oz|hrs?|min|secs?|ms|ml|mL|cl|cL|dl|dL"
_UNITS += "|mph|kph|kmh|kN|kW|kJ|kV|mV|mA|pm|am|deg|rad|usd"
_SOME = rf"(?:{_UNITS}|Hz|Pa|US|sq|cu|[mgsLhNKWJVACF]|[A-Za-z]{{3,}})"
_RAISED = r"(?:\s*\^\s*\{?[23]\}?)?"
_UNIT = re.compile(
    rf"(?:(?<=[\d)}}])|(?<=\\pi))(?:\s*(?:{_UNITS})(?![A-Za-z])|\s+(?:{_SOME}|of)(?![A-Za-z])){_RAISED}"
    rf"(?:[\s./]+(?:{_SOME}|of|an?)(?![A-Za-z]){_RAISED})*\.?$"
)
_COMPOUND_PART = rf"(\d+(?:\.\d+)?)\s*({_UNITS}|[mshL]|[A-Za-z]{{3,}})(?![A-Za-z])\.?"
_COMPOUND = re.compile(
    rf"{_COMPOUND_PART}(?:(?:\s+|\s*,\s*|\s*,?\s+and\s+){_COMPOUND_PART}){{1,3}}"
)
# a unit of one letter in text style, which is no variable
_STYLED_UNIT = re.compile(
    r"([\d})]|\\pi)((?:\\[,;: ]|~|\s)*)\\(?:text|textrm|mathrm|mbox)\s*\{[\s~]*([mgsLhNKWJVA])\s*\}"
)
_ONE_LETTER = {"m": "meter", "g": "gram", "s": "second", "L": "liter", "h": "hour", "N": "newton"}
_ONE_LETTER |= {"K": "kelvin", "W": "watt", "J": "joule", "V": "volt", "A": "ampere"}
_SCIENTIFIC = re.compile(r"[-+]?[\d.]*\s*(?:\\(?:cdot|times)\s*)?10\s*\^\s*\{?-?\d+\}?")
_ALL_REAL = re.compile(r"(?:all|any|every)\s+real\s+numbers?", re.IGNORECASE)
_SIGN_WORD = re.compile(r"^(?:negative|minus)\s+(?=[\d\\])", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"(?<=[\d}])\s*\(\s*([A-Za-z][A-Za-z .]*)\)$")
_SCALE_OF_HEAT = re.compile(r"°\s*([CF])(?![A-Za-z])")
_HEAT = {"C": " celsius", "F": " fahrenheit"}
_MONEY = re.compile(r"\s*[-+−]?\s*(?:\\(\$)|(\$)(?=[^$]*$)|([€£]))")
_ABOUT = re.compile(
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
_ALSO = re.compile(
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
BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_LETTERS = re.compile(r"[A-Za-z][A-Za-z .,'-]*")
_FACTORIAL = re.compile(
    r"(?:(?<![\w^.}])\d{1,3}|(?<![A-Za-z_^.}])[A-Za-z]"
    r"|(?<![\^.}])\((?:[A-Za-z+\- ]|\d{1,3}(?!\d))+\))!(?!!)"
)
_CHOSEN = r"\s*\{(?:[A-Za-df-z+\- ]|\d{1,3}(?!\d))+\}"
_BINOMIAL = re.compile(rf"\\binom{_CHOSEN}{_CHOSEN}")
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+|\\.|.", re.DOTALL)
_VARIABLE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:[ei](?![A-Za-z])))[A-Za-z]|\\(?:alpha|beta|gamma|[dD]elta|epsilon|theta|lambda"
    r"|mu|rho|sigma|tau|phi|varphi|omega|ell)(?![A-Za-z])"
)


class Unreadable(ValueError):
    """Not a formula, or none that is known here."""


class Item(NamedTuple):
    """One of the values that an answer lists."""

    name: str  # normalized (`statements.name_of`); "" without one
    value: str  # LaTeX that the checker reads
    unit: str


def read_items(text: str) -> list[Item]:
    """Return the values that an answer lists, each with its name and unit; most state one.

    Raises:
        Unreadable: the answer hedges.
    """
    text = _STYLED_UNIT.sub(lambda found: f"{found[1]} {_ONE_LETTER[found[3]]} ", text.strip())
    money = _MONEY.match(without_lead(text))
    paid = MONEY[money[money.lastindex]] if money else ""
    text = _CURRENCY.sub("", " ".join(without_lead(unstyled(text)).split()))
    if is_hedged(text):
        raise Unreadable("it does not commit to one answer")
    text = _ROUNDED.sub("", _ALSO.sub(r" \\approx \1", text))
    text = with_equals_sign(_SIGN_WORD.sub("-", _ABOUT.sub("", text.removeprefix("=").strip())))
    text = "\\mathbb{R}" if _ALL_REAL.fullmatch(text) else text
    text = _RATIO.sub(r"\1:\2", _OVER.sub(r"\\frac{\1}{\2}", text))
    text = _FEET.sub(" ft ", _INCHES.sub(" in ", text)).strip()
    text = _compound_quantity(_IN_BRACKETS.sub(r" \1", text))
    text = _AND.sub(",", _joined_inequalities(text))
    text = _ROOT.sub(r"\\sqrt{\1}", text).replace("√", "sqrt")
    text = _BARE.sub(_as_command, text).replace("infinity", "\\infty ").replace("\\log_e", "\\ln")
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    for _ in range(MAX_POWERS):
        if found := re.search(r"\\sqrt\s*\(", text):
            end = group_end(text, found.end() - 1)
            text = f"{text[: found.start()]}\\sqrt{{{text[found.end() : end - 1]}}}{text[end:]}"
    text = _SHORT_SECOND.sub(r"\1{\2}", _SHORT.sub(r"\\\1{\2}", text))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _SCALE.sub(lambda match: f"\\cdot {_SCALES[match[1]]}", text)
    text = _WORD.sub(lambda match: _WORDS[match[1]], text)
    parts = [text] if _INEQUALITY.search(text) else split_top_level(text, ",;")
    return [_item(part, paid) for part in parts]


def _item(text: str, paid: str) -> Item:
    name, value = _split_name(text)
    if any(f"\\{function}" in value for function in TRIGONOMETRIC):
        value = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", value)
    value = _SCALE_OF_HEAT.sub(lambda match: _HEAT[match[1]], value)
    value, angle = value.replace("°", "").strip(), "deg" * value.rstrip().endswith("°")
    unit = _UNIT.search(value)
    if unit is None or not is_unit_phrase(unit[0]):
        return Item(name, _as_ratio(_closed(value)), paid or angle)
    said = value[: unit.start()].strip()
    of_variable = number(said) is None and not _SCIENTIFIC.fullmatch(said)
    if len(unit[0].strip()) == 1 and of_variable:  # r^2 h
        return Item(name, _as_ratio(_closed(value)), paid)
    return Item(name, _as_ratio(_closed(said)), f"{paid} {unit[0].strip()}".strip())


def _split_name(text: str) -> tuple[str, str]:
    """Return ("x", "3") of x = 3, ("A", "12") of A = bh = 12, and ("", text) of an equation."""
    if _INEQUALITY.search(text):
        return "", text
    depths = [depth for _, depth in with_depth(text)]
    signs = [found for found in _SIGN.finditer(text) if depths[found.start()] == 0]
    if not 0 < len(signs) <= MAX_SIGNS:
        return "", text
    starts = [0, *(sign.end() for sign in signs)]
    ends = [*(sign.start() for sign in signs), len(text)]
    members = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    names = [name_of(member) for member in members]
    if names[0] is None and is_compound(members[0]) and not has_variables(members[-1]):
        names[0] = members[0]
    if names[0] is None:
        turned = len(members) == 2 and names[1] and not has_variables(members[0])
        return (names[1], members[0]) if turned else ("", text)
    first = 1  # of the members that are values
    while (
        first < len(members) - 1
        and has_variables(members[first])
        and not has_variables(members[-1])
    ):
        first += 1
    return names[0], text[starts[first] :].strip()


def has_variables(text: str) -> bool:
    """Return whether a formula has letters other than e, i and those of commands."""
    text = re.sub(r"\\(?:begin|end)\{[A-Za-z]+\}|\\mathbb\{[A-Z]\}", "", text)
    return bool(_VARIABLE.search(text))


def split_top_level(text: str, marks: str) -> list[str]:
    """Split at the marks that are outside of brackets."""
    places = [k for k, (mark, depth) in enumerate(with_depth(text)) if mark in marks and depth == 0]
    starts, ends = [0, *(k + 1 for k in places)], [*places, len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _as_ratio(text: str) -> str:
    """3:4 as a quotient, 2:3:4 as two of them."""
    parts = split_top_level(text, ":")
    if len(parts) < 2 or not all(parts) or _SIGN.search(text):
        return text
    if len(parts) == 2:
        return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    return "(" + ",".join(f"\\frac{{{part}}}{{{parts[0]}}}" for part in parts[1:]) + ")"


def _compound_quantity(text: str) -> str:
    """2 hours 30 minutes as 150 minutes."""
    if not _COMPOUND.fullmatch(text):
        return text
    parts = re.findall(_COMPOUND_PART, text)
    quantities = [quantity_of(unit) for _, unit in parts]
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


def _as_command(bare: re.Match) -> str:
    """sin as \\sin; but 12 min are minutes."""
    minutes = bare[1] == "min" and re.search(r"[\d}]\s*$", bare.string[: bare.start()])
    return bare[0] if minutes else f"\\{bare[1]} "


def _joined_inequalities(text: str) -> str:
    """x < 2 or x > 3 with the logical signs; the set {x | x < 2} as x < 2."""
    if found := _BUILDER.fullmatch(text):
        text = found[2]
    parts = re.split(r",?\s+(and|or)\s+", text)
    if len(parts) == 1 or not all(_INEQUALITY.search(part) for part in parts[::2]):
        return text
    signs = {"and": " \\land ", "or": " \\lor "}
    return "".join(signs.get(part, part) for part in parts)


def without_lead(text: str) -> str:
    """Remove "the answer is"."""
    return _LEAD.sub("", text)


def _closed(text: str) -> str:
    """1 000 000 as one number."""
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def unstyled(text: str) -> str:
    """Without what does not matter: spaces at the ends, dollar signs, sizes, styles."""
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text).replace("**", "")
    text = _CIRCLE.sub("°", text)
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    return _STYLED.sub(lambda found: f" {found[1] or ''} ", text).strip().rstrip(".,;").strip()


def number(text: str) -> Fraction | None:
    """The value of a decimal, a fraction or a mixed number; 50% is 1/2."""
    if len(text) > MAX_DIGITS:
        return None
    if (found := _NUMBER.fullmatch(text)) and found[2]:
        sign, digits, power, percent = found.groups()
        value = Fraction(digits.replace(",", "")) * Fraction(10) ** int(power or 0)
        value = value / 100 if percent else value
    elif found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        whole, (top, bottom) = parts[0] or parts[1] or 0, parts[2:4] if parts[2] else parts[4:6]
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


def are_words(text: str) -> bool:
    """As `east` or `Tom and Anna`; `xy` is a product."""
    letters = _LETTERS.fullmatch(text)
    return bool(letters) and max(map(len, re.findall("[A-Za-z]+", text))) > 2


def refuse_costly(text: str) -> None:
    """Raises `Unreadable`, at once, where the library could take for ever, or is not known to end:
    9^{9^{9^9}}, (10^9)!, brackets without end, sums and integrals."""
    depths = [depth for _, depth in with_depth(text)] or [0]
    if len(text) > MAX_LENGTH or max(depths) > MAX_DEPTH or text.count("|") > 2 * MAX_DEPTH:
        raise Unreadable("it is too long, or nested too deeply")
    if not text.isascii() or not re.search("[0-9A-Za-z]", text):
        raise Unreadable("it has no digits and letters, or others than LaTeX")
    commands = re.findall(r"\\([A-Za-z]+)", text)
    unknown = next((each for each in commands if not _KNOWN.fullmatch(each)), None)
    rules = {
        f"\\{unknown} is not known": unknown,
        "its brackets do not match": depths[-1] or min(depths) < 0,
        "of environments only matrices are known": _count(_BEGUN, text) != _count(_MATRIX, text),
        "a number follows another": re.search(r"(?<![_\d])\d+(?:\s+|\s*_\s*\{?)\d", text),
        "it has signs in a row": "--" in text.replace(" ", ""),
        "it has a factorial of something large": text.count("!") != _count(_FACTORIAL, text),
        "it has a binomial of something large": text.count("\\binom") != _count(_BINOMIAL, text),
        "its value could be too large": text.count("^") > MAX_POWERS or _bits(text) > MAX_BITS,
    }
    if reason := next((why for why, broken in rules.items() if broken), None):
        raise Unreadable(reason)


def _count(pattern: re.Pattern, text: str) -> int:
    return len(pattern.findall(text))


def _bits(text: str) -> int:
    """At least as many as its value has, with letters below 4."""
    bits, most, product, done, before = 0, 1, 1, 0, ""
    for found in _TOKEN.finditer(text):
        token = found[0]
        if found.start() < done:
            continue
        if token in ("^", "\\exp"):
            done = group_end(text, found.end())
            value = _exponent(text[found.end() : done])
            most = max(most, value)
            product *= value if before in (")", "}", "]", "|") else 1
            bits += 2 * (token != "^")
        elif token.isdigit():
            bits += int(token).bit_length()
        elif token.isalpha() or token == "\\pi":
            bits += 2
        before = before if token.isspace() else token
    return bits * most * product


def _exponent(text: str) -> int:
    """The most that it can be."""
    if "!" in text or "\\binom" in text:
        raise Unreadable("an exponent has a factorial")
    digits = text.strip(" {}()+-")
    value = int(digits) if digits.isdigit() else 2 ** min(_bits(text), 99)
    if value > MAX_EXPONENT:
        raise Unreadable("an exponent could be too large")
    return max(1, value)


def group_end(text: str, start: int) -> int:
    """Where the group ends that begins at `start`: brackets, a number, a command or a letter."""
    while start < len(text) and text[start] in " -+":
        start += 1
    if text[start : start + 1] not in ("(", "[", "{"):
        found = re.compile(r"\\[A-Za-z]+|\d+|.").match(text, start)
        return found.end() if found else len(text)
    ends = (place for place, (_, depth) in enumerate(with_depth(text[start:])) if depth == 0)
    return start + next(ends, len(text)) + 1


def with_depth(text: str) -> list[tuple[str, int]]:
    """Each character, with the number of brackets that are open after it."""
    steps = ((character in "([{") - (character in ")]}") for character in text)
    return list(zip(text, accumulate(steps), strict=True))
