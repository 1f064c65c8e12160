r"""Parsing of what a final answer states: names, values and hedges.

`AB = 12`, `m\angle 1 = 65` and `the area is 12` assign a value to a name; `5 maybe` does not commit
to an answer. All functions take text without LaTeX styles (`math_parsing.strip_styles`).
"""

import re

# Words that retract an answer, offer another one or bound it. None is a unit or part of a name.
_HEDGES = (
    "maybe perhaps possibly probably likely presumably supposedly apparently hopefully guess "
    "guessing guessed unsure uncertain unknown undecided think believe suppose assume might could "
    "should would may either neither nor otherwise alternatively versus vs unless if but except "
    "not no never none wrong incorrect false invalid than least most between within under "
    "above below beyond nearly almost up until"
)
_HEDGE = re.compile(rf"(?<![\\A-Za-z])(?:{'|'.join(_HEDGES.split())})(?![A-Za-z])|n't\b|\?", re.I)
# words after a number that are not units: 5 plus, 5 or so, 5 six, 5 xyz
_NOT_A_UNIT = re.compile(
    r"(?<![A-Za-z])(?:or|and|plus|minus|mod(?:ulo)?|over|divided|choose|to|from|is|are|was|be"
    r"|less|times(?=\s+\w)|one|two|three|four|five|six|seven|eight|nine|ten|\w+teen|\w+ty|half"
    r"|hundred|thousand|million|abcd?|bcd|xyz|pqr|rst)(?![A-Za-z])"
)
_GREEK = (
    r"\\(?:alpha|beta|gamma|[dD]elta|epsilon|varepsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi"
    r"|psi|omega|ell|eta|zeta|kappa|nu|xi|chi|Phi|Theta|Gamma|Lambda|Sigma)(?![A-Za-z])"
)
_DECORATION = re.compile(
    r"\\(?:overline|widehat|overarc|vec|overrightarrow|bar|hat|angle|measuredangle|triangle|odot"
    r"|Vert|left|right)(?![A-Za-z])|\\overset\s*\{\s*\\frown\s*\}|\\\||[{}|°]"
)
_MEASURE = re.compile(r"^m\s*(?=\\(?:angle|measuredangle|widehat|overarc|overline)(?![A-Za-z]))")
# statements that are compared as text
_GEOMETRY = re.compile(
    r"\\(?:parallel|nparallel|perp|sim|cong|angle|triangle|odot|square|overline|overrightarrow)"
    r"(?![A-Za-z])"
)
_SUBSCRIPT = r"(?:_\s*[\w\\, +-]+)?"
_SYMBOL = rf"(?:[A-Za-z]|{_GREEK})\s*'*{_SUBSCRIPT}'*"
_ONE_SYMBOL = re.compile(_SYMBOL)
_POINTS = re.compile(r"(?:[A-Z]'*(?:_?\d)?\s*){2,6}")
_FUNCTION = re.compile(
    rf"(?:[A-Za-z]{{1,3}}|{_GREEK}){_SUBSCRIPT}'*(?:\^-1)?\s*\([^()]*\)"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\(?[^()=+*/^]*\)?)"
)
_ABSOLUTE = re.compile(r"\|\s*[k-nptxy]\s*\|")  # |x| = 8 has two solutions; |z| is a length
_OPERATION = re.compile(r"\\(?:lim|sum|prod|int|det|gcd)(?![A-Za-z])")
_TUPLE = re.compile(r"\(\s*[A-Za-z](?:_\w)?(?:\s*,\s*[A-Za-z](?:_\w)?)+\s*\)")
_PRODUCT = re.compile(r"[a-z](?:\s*[a-z]){1,2}")
_QUOTIENT = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*|\d{1,2}")
# words that do not distinguish a name from others
_FILLER = re.compile(
    "the|an?|of|is|are|value|length|measure|size|side|segment|line|angle|arc|triangle|m|answer|final"
    "|result|total|there|it|we|he|she|they|have|number|amount|its|in|so|thus|then|hence|therefore",
    re.IGNORECASE,
)
_MAX_WORDS = 12
MAX_NAME = 80  # characters
_STATED = re.compile(
    r"^(?P<name>[A-Za-z\\][^=<>]*?)\s+(?:is|are|was|were|equals|will\s+be|has|have|had|makes|earns"
    r"|costs|needs|takes|weighs|spends|pays|gets)"
    r"(?:\s+(?:equal\s+to|exactly))?\s+(?P<value>\S.*)$",
    re.DOTALL,
)
_COLON = re.compile(r"^(?P<name>[A-Za-z][A-Za-z ]{2,60}):\s+(?P<value>\S.*)$", re.DOTALL)
_POINT = re.compile(r"^[A-Z]'?\s*(?P<value>\(.*,.*\))$", re.DOTALL)


def is_hedged(text: str) -> bool:
    """Return whether a text has words that make an answer conditional, negative or ambiguous."""
    return bool(_HEDGE.search(text))


def is_geometric(text: str) -> bool:
    r"""Return whether a text relates geometric figures, as AB \parallel CD does."""
    return bool(_GEOMETRY.search(text))


def is_unit_phrase(text: str) -> bool:
    """Return whether words after a number can be its unit: `apples`, not `or so`."""
    return not _HEDGE.search(text) and not _NOT_A_UNIT.search(text)


def insert_equals_sign(text: str) -> str:
    """Rewrite `the area is 12`, `Area: 12` and `P(3,4)` with an equals sign."""
    for pattern in (_STATED, _COLON):
        found = pattern.match(text)
        if found and normalize_name(found["name"]) is not None:
            return f"{found['name']} = {found['value']}"
    if found := _POINT.match(text):
        return f"{text[: found.start('value')]} = {found['value']}"
    return text


def normalize_name(text: str) -> str | None:
    r"""Return the normalized name, "" for a generic one (`the answer`), None if it is not a name.

    Decorations do not matter: `\overline{AB}`, `BA` and `the length of AB` are the same name. A
    formula of one variable, such as `2x`, is not a name: `2x = 10` and `x = 10` differ.
    """
    bare = _MEASURE.sub("", text.strip())
    if _ABSOLUTE.fullmatch(bare):
        return None
    if _OPERATION.match(bare) and len(bare) <= MAX_NAME:
        return bare.replace(" ", "")
    is_angle = "angle" in bare
    bare = re.sub(r"\s+", " ", _DECORATION.sub(" ", bare)).strip()
    bare = re.sub(r"^\[([A-Z]{3,6})\]$|(?<=[a-z]{3})\s*_(?=\s*[A-Za-z])", r"\1 ", bare).strip()
    if not bare or len(bare) > MAX_NAME or _HEDGE.search(bare):
        return None
    if _ONE_SYMBOL.fullmatch(bare) or _FUNCTION.fullmatch(bare) or _TUPLE.fullmatch(bare):
        bare = re.sub(r"\\(sin|cos|tan|cot|sec|csc)\s*\(([^()]*)\)", r"\\\1\2", bare)
        return bare.replace(" ", "")
    if _POINTS.fullmatch(bare):
        return _normalize_points(bare)
    if is_angle and bare.isdigit():
        return bare
    return _normalize_phrase(bare)


def _normalize_points(points: str) -> str:
    """Return AB for BA and ABC for the angle CBA; the order of a polygon's points is kept."""
    points = points.replace(" ", "")
    return min(points, points[::-1]) if points.isalpha() and len(points) < 4 else points


def _normalize_phrase(text: str) -> str | None:
    """Return a phrase without fillers and in lower case, or None if it is not a few words.

    A single point label has its points in canonical order; "" stands for a phrase of fillers.
    """
    words = text.split()
    if len(words) > _MAX_WORDS or not all(_WORD.fullmatch(word) for word in words):
        return None
    kept = [word for word in words if not _FILLER.fullmatch(word)]
    if not kept:
        return ""
    if not any(len(word) > 2 and word.isalpha() for word in words):
        return None
    if len(kept) == 1 and (kept[0].isupper() or len(kept[0]) == 1):
        return _normalize_points(kept[0])
    return " ".join(word if word.isupper() else word.lower() for word in kept)


def is_compound(text: str) -> bool:
    """Return whether a text is a sum, product or ratio of several names: `x+y`, `AB:BC`."""
    parts = re.split(r"\\cdot|\\times|[-+*/:]", _QUOTIENT.sub(r"\1/\2", text))
    if len(parts) == 1:
        return bool(_PRODUCT.fullmatch(parts[0].strip())) and len({*parts[0]} - {" "}) > 1
    names = [normalize_name(part) for part in parts]
    symbols = [name for name in names if name and " " not in name]
    return len(symbols) == len(parts) and len({*symbols}) > 1


def names_match(one: str, other: str) -> bool:
    """Return whether two normalized names can denote the same thing. A missing name matches any."""
    if one == other or not one or not other:
        return True
    short, long = sorted((one, other), key=len)
    if len(short) == 1 and len(long.split()[0]) > 2 and long.replace(" ", "").isalpha():
        return long[0].lower() == short.lower()  # A and area
    words, others = set(short.split()), set(long.split())
    return any(len(word) > 2 for word in words) and words <= others  # area, and area of ABC
