"""What a final answer says, as far as text alone tells: without styles and units, as a number, or
as something that no library should be asked to compute."""

import re
from fractions import Fraction
from itertools import accumulate

MAX_LENGTH = 400  # characters of a formula; the library takes long over more
MAX_DEPTH = 8  # brackets in brackets
MAX_POWERS = 24
MAX_BITS = 10**6  # of a number that a formula may stand for, and of the exponents in it
MAX_EXPONENT = 10**4
LOOSE = Fraction(1, 10**6)  # how far a decimal may be off, relative

TRIGONOMETRIC = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS = (*TRIGONOMETRIC, "log", "ln", "exp", "sqrt", "min", "max")
_KNOWN = re.compile(
    rf"{'|'.join(_FUNCTIONS)}|frac|binom|cdot|times|div|pm|mp|leq?|geq?|neq?|overline|approx"
    r"|pi|infty|alpha|beta|gamma|[dD]elta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi|omega|ell"
    r"|cup|cap|setminus|in|emptyset|mathbb|begin|end|[lr](?:floor|ceil|brace)"
)
_MATRIX, _BEGUN = re.compile(r"\\(?:begin|end)\{[pbB]?matrix\}"), re.compile(r"\\(?:begin|end)")

_DROPPED = ("\\$", "$", "\\(", "\\)", "\\[", "\\]", "\\!", "{,}", "€", "£")
_SIZES = ("\\left", "\\right", "\\displaystyle", "\\bigl", "\\bigr", "\\big", "\\Big")
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
    **{"≥": "\\ge ", "±": "\\pm ", "∪": "\\cup ", "\\langle": "(", "\\rangle": ")"},
}
_WHOLE = {each: r"(?![A-Za-z])" for each in _REPLACED if re.fullmatch(r"\\[A-Za-z]+", each)}
_REPLACE = re.compile(
    "|".join(re.escape(each) + _WHOLE.get(each, "") for each in sorted(_REPLACED, key=len)[::-1])
)
_STYLED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_LEAD = re.compile(r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s+", re.IGNORECASE)
_BARE = re.compile(rf"(?<![\\A-Za-z])({'|'.join((*_FUNCTIONS, 'pi', 'infty'))})(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z]),?\s*(?:and|or)(?![A-Za-z])")
_SHORT = re.compile(r"\\(frac|binom)\s*(\\pi|[0-9A-Za-z])")
_SHORT_SECOND = re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\\pi|[0-9A-Za-z])")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)°")
_THOUSANDS = re.compile(r"(?<![\d,.(\[{])\d{1,3}(?:,\d{3})+(?![\d,)\]}])")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(_SCALES)})\b")
_UNITS = "cm|mm|km|dm|nm|ft|in|yd|mi|kg|mg|lbs?|oz|hrs?|min|secs?|ml|mph|kph|kmh|pm|am|deg|rad|usd"
_UNIT = re.compile(
    rf"(?:(?<=[\d)}}])|(?<=\\pi))(?:\s*(?:{_UNITS})|\s+(?:[mgsLh]|[A-Za-z]{{3,}}|sq))"
    rf"(?:[\s./]+(?:{_UNITS}|[mgsLh]|of|an?|[A-Za-z]{{3,}}))*\.?\s*(?:\^\s*\{{?[23]\}}?)?$"
)
_AREA = re.compile(r"^(?:square|cubic|sq\.?)\s+")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(rf"([-+]?)\s*({_DIGITS}?(?:\.\d+)?)(?:[eE]([-+]?\d{{1,3}}))?\s*(%?)")
_FRACTION = re.compile(
    r"([-+]?)\s*(?:(\d+)\s*(?=\\)|(\d+)\s+)?"
    r"(?:\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(\d+))"
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
BASE = re.compile(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?")
_LETTERS = re.compile(r"[A-Za-z][A-Za-z .,'-]*")
_FACTORIAL = re.compile(
    r"(?<![\w^.}])(?:\d{1,3}|[A-Za-z]|\((?:[A-Za-z+\- ]|\d{1,3}(?!\d))+\))!(?!!)"
)
_CHOSEN = r"\s*\{(?:[A-Za-df-z+\- ]|\d{1,3}(?!\d))+\}"
_BINOMIAL = re.compile(rf"\\binom{_CHOSEN}{_CHOSEN}")
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+|\\.|.", re.DOTALL)


class Unreadable(ValueError):
    """Not a formula, or none that is known here."""


def plain(text: str) -> tuple[str, str]:
    """The text as the library likes it, and its unit."""
    text = _AND.sub(",", _LEAD.sub("", unstyled(text)))
    text = _ROOT.sub(r"\\sqrt{\1}", text).replace("√", "sqrt")
    text = _BARE.sub(r"\\\1 ", text).replace("infinity", "\\infty ").replace("\\log_e", "\\ln")
    for _ in range(MAX_POWERS):
        if found := re.search(r"\\sqrt\s*\(", text):
            end = group_end(text, found.end() - 1)
            text = f"{text[: found.start()]}\\sqrt{{{text[found.end() : end - 1]}}}{text[end:]}"
    text = _SHORT_SECOND.sub(r"\1{\2}", _SHORT.sub(r"\\\1{\2}", text))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _SCALE.sub(lambda match: f"\\cdot 10^{{{_SCALES[match[1]]}}}", text)
    if any(f"\\{name}" in text for name in TRIGONOMETRIC):
        text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    text = text.replace("°", "").strip()
    unit = _UNIT.search(text)
    said = text[: unit.start()].strip() if unit else text
    if unit is None or (len(unit[0].strip()) == 1 and number(said) is None):  # r^2 h
        return text, ""
    return said, _AREA.sub("", unit[0].strip()).partition("^")[0].lower()


def unstyled(text: str) -> str:
    """Without what does not matter: spaces at the ends, dollar signs, sizes, styles."""
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text).replace("**", "")
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    return _STYLED.sub(r" \1 ", text).strip().rstrip(".").strip()


def same_unit(one: str, other: str) -> bool:
    """cm and centimetres, not cm and m; a missing one is any."""
    short = max(len(one), len(other)) <= 2
    return not one or not other or (one == other if short else one[0] == other[0])


def number(text: str) -> Fraction | None:
    """The value of a decimal, a fraction or a mixed number; 50% is 1/2."""
    if (found := _NUMBER.fullmatch(text)) and found[2]:
        sign, digits, power, percent = found.groups()
        value = Fraction(digits.replace(",", "")) * Fraction(10) ** int(power or 0)
        value = value / 100 if percent else value
    elif found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        whole, (top, bottom) = parts[0] or parts[1] or 0, parts[2:4] if parts[2] else parts[4:]
        if not int(bottom):
            return None
        value = int(whole) + Fraction(int(top), int(bottom))
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
