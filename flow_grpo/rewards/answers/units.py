"""Units of measurement: their spellings and conversions."""

import re
from fractions import Fraction

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
    "ha": "hectare",
    "g": "gram",
    "kg": "kilogram kilo",
    "mg": "milligram",
    "lb": "pound",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "cl": "centiliter centilitre",
    "dl": "deciliter decilitre",
    "ms": "millisecond",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "usd": "dollar buck",
    "eur": "euro",
    "deg": "degree",
    "rad": "radian",
    "n": "newton",
    "kn": "kilonewton",
    "k": "kelvin",
    "w": "watt",
    "kw": "kilowatt",
    "j": "joule",
    "kj": "kilojoule",
    "v": "volt",
    "kv": "kilovolt",
    "mv": "millivolt",
    "a": "amp ampere",
    "ma": "milliamp milliampere",
    "hz": "hertz",
    "pa": "pascal",
    "mol": "mole",
}
_SYMBOLS = {each: symbol for symbol, words in _SPELLINGS.items() for each in words.split()}
# symbol: (powers of the base quantities, size in base units). Temperatures, and months and days, do
# not convert by a constant factor and are therefore absent.
_SIZES: dict[str, tuple[dict[str, int], Fraction]] = {
    symbol: ({base: power}, Fraction(size))
    for base, power, sizes in (
        ("length", 1, "nm 1/1000000000 mm 1/1000 cm 1/100 dm 1/10 m 1 km 1000"),
        ("length", 1, "in 0.0254 ft 0.3048 yd 0.9144 mi 1609.344"),
        ("length", 2, "ha 10000 acre 4046.8564224"),
        ("length", 3, "l 1/1000 ml 1/1000000 cl 1/100000 dl 1/10000"),
        ("mass", 1, "mg 1/1000 g 1 kg 1000 lb 453.59237 oz 28.349523125"),
        ("time", 1, "ms 1/1000 s 1 min 60 h 3600 day 86400 week 604800"),
        ("money", 1, "usd 1 cent 1/100"),
        ("force", 1, "n 1 kn 1000"),
        ("power", 1, "w 1 kw 1000"),
        ("energy", 1, "j 1 kj 1000"),
        ("voltage", 1, "v 1 kv 1000 mv 1/1000"),
        ("current", 1, "a 1 ma 1/1000"),
    )
    for symbol, size in zip(sizes.split()[::2], sizes.split()[1::2], strict=True)
}
_KNOWN = {*_SPELLINGS, *_SIZES, "month", "year", "celsius", "fahrenheit"}
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_PER = ("/", "per", "a", "an")
_TOKEN = re.compile(r"[a-z]+|/|(?<=\^)\s*\{?\s*[23]")
MONEY = {"$": "usd", "€": "eur", "£": "pound", "¥": "yen", "₹": "rupee"}

Parts = frozenset[tuple[str, int]]


def conversion(one: str, other: str) -> Fraction | None:
    """Return the factor that converts a value in the unit `one` to the unit `other`.

    None for units of different quantities, such as cm and cm^2. A missing unit matches any, and
    `fresh eggs` are `eggs`.
    """
    if not one or not other:
        return Fraction(1)
    first, second = _parts(one), _parts(other)
    if first == second:
        return Fraction(1)
    if all(name in _SIZES for name, _ in first | second):
        (quantity, size), (wanted, scale) = _in_base_units(first), _in_base_units(second)
        return size / scale if quantity == wanted else None
    words = any(name not in _KNOWN for name, _ in first | second)
    return Fraction(1) if words and (first <= second or second <= first) else None


def is_angle(unit: str, name: str) -> bool:
    """Whether the unit is `name`, "deg" or "rad"."""
    return _parts(unit) == {(name, 1)}


def quantity_of(unit: str) -> tuple[dict[str, int], Fraction] | None:
    """Return powers of the base quantities and the size in base units; None if unknown."""
    parts = _parts(unit)
    known = bool(parts) and all(name in _SIZES for name, _ in parts)
    return _in_base_units(parts) if known else None


def _in_base_units(parts: Parts) -> tuple[dict[str, int], Fraction]:
    total, size = {}, Fraction(1)
    for name, power in parts:
        bases, scale = _SIZES[name]
        size *= scale**power
        for base, exponent in bases.items():
            total[base] = total.get(base, 0) + exponent * power
    return {base: power for base, power in total.items() if power}, size


def _parts(unit: str) -> Parts:
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
