"""Units that stand after a number: how they are spelt, and which are the same."""

import re

_SPELLINGS = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "dm": "decimeter decimetre",
    "nm": "nanometer nanometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gram",
    "kg": "kilogram kilo",
    "mg": "milligram",
    "lb": "pound",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "usd": "dollar",
    "eur": "euro",
    "deg": "degree",
    "rad": "radian",
    "n": "newton",
    "k": "kelvin",
    "w": "watt",
    "j": "joule",
    "v": "volt",
    "a": "amp ampere",
    "hz": "hertz",
    "pa": "pascal",
    "mol": "mole",
}
_SYMBOLS = {each: symbol for symbol, words in _SPELLINGS.items() for each in words.split()}
_KNOWN = {*_SPELLINGS, "cent", "day", "week", "month", "year", "celsius", "fahrenheit"}
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_PER = ("/", "per", "a", "an")
_TOKEN = re.compile(r"[a-z]+|/|(?<=\^)\s*\{?\s*[23]")
MONEY = {"$": "usd", "€": "eur", "£": "pound"}


def same_unit(one: str, other: str) -> bool:
    """cm and centimetres, not cm and m or cm^2; fresh eggs and eggs. A missing one is any."""
    if not one or not other:
        return True
    first, second = _parts(one), _parts(other)
    if first == second:
        return True
    words = any(name not in _KNOWN for name, _ in first | second)
    return words and (first <= second or second <= first)


def _parts(unit: str) -> frozenset[tuple[str, int]]:
    """m/s^2 is m to the 1 and s to the -2."""
    for short, long in _SPEEDS.items():
        unit = re.sub(rf"\b{short}\b", long, unit.lower())
    found: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for token in _TOKEN.findall(unit):
        if token in _PER and last:  # not the ampere that stands alone
            sign = -1
        elif token in _POWERS and not token.endswith("d"):
            power = _POWERS[token]
        elif token in _POWERS or token[-1].isdigit():
            if last:
                found[last] = sign * (_POWERS.get(token) or int(token[-1]))
        elif token != "of":
            last = _symbol(token)
            found.setdefault(last, sign * power)
            power = 1
    return frozenset(found.items())


def _symbol(word: str) -> str:
    single = word[:-1] if len(word) > 2 and word.endswith("s") else word
    return _SYMBOLS.get(word) or _SYMBOLS.get(single) or single
