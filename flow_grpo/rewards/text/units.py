"""Parsing and conversion of units of measurement."""

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
# symbol: (powers of the base quantities, size in base units). Temperatures and months are absent,
# because they do not convert by a constant factor.
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
CURRENCY_SYMBOLS = {"$": "usd", "€": "eur", "£": "pound", "¥": "yen", "₹": "rupee"}

UnitPowers = frozenset[tuple[str, int]]


def conversion_factor(one: str, other: str) -> Fraction | None:
    """Return the factor that converts a value in the unit `one` to the unit `other`.

    The result is None for different quantities, such as cm and cm^2. A missing unit matches any,
    and `fresh eggs` match `eggs`.
    """
    if not one or not other:
        return Fraction(1)
    first, second = _parse_unit(one), _parse_unit(other)
    if first == second:
        return Fraction(1)
    if all(name in _SIZES for name, _ in first | second):
        quantity, size = _to_base_units(first)
        other_quantity, other_size = _to_base_units(second)
        return size / other_size if quantity == other_quantity else None
    words = any(name not in _KNOWN for name, _ in first | second)
    return Fraction(1) if words and (first <= second or second <= first) else None


def is_angle(unit: str, name: str) -> bool:
    """Return whether a unit is the angle unit `name`, "deg" or "rad"."""
    return _parse_unit(unit) == {(name, 1)}


def parse_quantity(unit: str) -> tuple[dict[str, int], Fraction] | None:
    """Return a unit's powers of the base quantities and its size in base units; None if unknown."""
    parts = _parse_unit(unit)
    known = bool(parts) and all(name in _SIZES for name, _ in parts)
    return _to_base_units(parts) if known else None


def _to_base_units(parts: UnitPowers) -> tuple[dict[str, int], Fraction]:
    """Return powers of the base quantities, and the size of a unit in base units."""
    total, size = {}, Fraction(1)
    for name, power in parts:
        bases, scale = _SIZES[name]
        size *= scale**power
        for base, exponent in bases.items():
            total[base] = total.get(base, 0) + exponent * power
    return {base: power for base, power in total.items() if power}, size


def _parse_unit(unit: str) -> UnitPowers:
    """Return the power of each unit symbol: m/s^2 is {(m, 1), (s, -2)}."""
    for short, long in _SPEEDS.items():
        unit = re.sub(rf"\b{short}\b", long, unit.lower())
    found: dict[str, int] = {}
    sign, power = 1, 1
    last = ""  # symbol
    for token in _TOKEN.findall(unit):
        if token in _PER and last:  # a first "a" is ampere
            sign = -1
        elif token in _POWERS and not token.endswith("d"):
            power = _POWERS[token]
        elif token in _POWERS or token[-1].isdigit():
            if last:
                found[last] = sign * (_POWERS.get(token) or int(token[-1]))
        elif token != "of":
            last = _unit_symbol(token)
            found.setdefault(last, sign * power)
            power = 1
    return frozenset(found.items())


def _unit_symbol(word: str) -> str:
    single = word[:-1] if len(word) > 2 and word.endswith("s") else word
    return _SYMBOLS.get(word) or _SYMBOLS.get(single) or single
