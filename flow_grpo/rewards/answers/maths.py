"""What a final answer says, as far as text alone tells: without styles and units, as a number, or
as something that no library should be asked to compute."""

import re
from fractions import Fraction
from itertools import accumulate

from flow_grpo.rewards.answers.units import MONEY

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

_DROPPED = ("\\$", "$", "\\(", "\\)", "\\[", "\\]", "\\!", "{,}", "€", "£", "`")
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
_TENS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PARTS = {"half": 2, "halve": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
_PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000}
_SCALES = {word: f"10^{{{power}}}" for word, power in _TENS.items()} | {"dozen": "12"}
_SCALES |= {word: f"\\frac{{1}}{{{whole}}}" for word, whole in _PARTS.items()}
_SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(sorted(_SCALES)[::-1])})s?\b")
_WORDS = {"percent": "%", "per cent": "%", "squared": "^2", "cubed": "^3"}  # after a number
_WORD = re.compile(rf"(?<=[\d)}}])\s*({'|'.join(_WORDS)})\b")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_UNITS = "cm|mm|km|dm|nm|ft|in|yd|mi|kg|mg|lbs?|oz|hrs?|min|secs?|ml|mph|kph|kmh|pm|am|deg|rad|usd"
_SOME = rf"(?:{_UNITS}|Hz|Pa|sq|cu|[mgsLhNKWJVACF]|[A-Za-z]{{3,}})"
_RAISED = r"(?:\s*\^\s*\{?[23]\}?)?"
_UNIT = re.compile(
    rf"(?:(?<=[\d)}}])|(?<=\\pi))(?:\s*(?:{_UNITS})(?![A-Za-z])|\s+{_SOME}(?![A-Za-z])){_RAISED}"
    rf"(?:[\s./]+(?:{_SOME}|of|an?)(?![A-Za-z]){_RAISED})*\.?$"
)
# not units: 5 less than, 5 times two; but they came 5 times
_CHANGES = re.compile(r"(?:plus|minus|mod(?:ulo)?|over|divided|choose|not|less)\b|times\s+\w")
_SCALE_OF_HEAT = re.compile(r"°\s*([CF])(?![A-Za-z])")
_HEAT = {"C": " celsius", "F": " fahrenheit"}
_MONEY = re.compile(r"\s*[-+−]?\s*(?:\\(\$)|(\$)(?=[^$]*$)|([€£]))")
_ABOUT = re.compile(r"^(?:\\approx|≈)\s*")
_RAY = re.compile(r"\s*[A-Za-z]\s*(<|>|\\leq?|\\geq?)\s*(-?(?:[\d./]+|\\frac\{\d+\}\{\d+\}))\s*")

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
    money = _MONEY.match(_LEAD.sub("", text.strip()))
    paid = MONEY[money[money.lastindex]] if money else ""
    text = _ABOUT.sub("", _LEAD.sub("", unstyled(text)))
    text = _AND.sub(",", _united(text))
    text = _ROOT.sub(r"\\sqrt{\1}", text).replace("√", "sqrt")
    text = _BARE.sub(_as_command, text).replace("infinity", "\\infty ").replace("\\log_e", "\\ln")
    for _ in range(MAX_POWERS):
        if found := re.search(r"\\sqrt\s*\(", text):
            end = group_end(text, found.end() - 1)
            text = f"{text[: found.start()]}\\sqrt{{{text[found.end() : end - 1]}}}{text[end:]}"
    text = _SHORT_SECOND.sub(r"\1{\2}", _SHORT.sub(r"\\\1{\2}", text))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _SCALE.sub(lambda match: f"\\cdot {_SCALES[match[1]]}", text)
    text = _WORD.sub(lambda match: _WORDS[match[1]], text)
    if any(f"\\{name}" in text for name in TRIGONOMETRIC):
        text = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    text = _SCALE_OF_HEAT.sub(lambda match: _HEAT[match[1]], text).replace("°", "").strip()
    unit = _UNIT.search(text)
    said = text[: unit.start()].strip() if unit else text
    one_letter = unit is not None and len(unit[0].strip()) == 1
    if unit is None or _CHANGES.match(unit[0].strip()) or (one_letter and number(said) is None):
        return _closed(text), paid  # r^2 h
    return _closed(said), f"{paid} {unit[0].strip()}".strip()


def _as_command(bare: re.Match) -> str:
    """sin as \\sin; but 12 min are minutes."""
    minutes = bare[1] == "min" and bare.string[: bare.start()].rstrip()[-1:].isdigit()
    return bare[0] if minutes else f"\\{bare[1]} "


def _united(text: str) -> str:
    """x < 2 or x > 3, as intervals."""
    rays = [_RAY.fullmatch(part) for part in re.split(r"\s+or\s+", text)]
    if len(rays) < 2 or not all(rays):
        return text
    closed = {ray: ray[1].startswith("\\") for ray in rays}
    return "\\cup ".join(
        f"(-\\infty,{ray[2]}{']' if closed[ray] else ')'}"
        if ray[1][:2] in ("<", "\\l")
        else f"{'[' if closed[ray] else '('}{ray[2]},\\infty)"
        for ray in rays
    )


def _closed(text: str) -> str:
    """1 000 000 as one number."""
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def unstyled(text: str) -> str:
    """Without what does not matter: spaces at the ends, dollar signs, sizes, styles."""
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text).replace("**", "")
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    return _STYLED.sub(r" \1 ", text).strip().rstrip(".").strip()


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
