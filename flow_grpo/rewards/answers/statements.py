r"""What a final answer states: names and values, choice labels, hedges.

`AB = 12`, `m\angle 1 = 65` and `the area is 12` state the value of something that has a name;
`B. 12` and `(B) 12` carry the label of a choice; `5 maybe` and `B or C` do not commit to one
answer. All functions take text without LaTeX styles (`maths.unstyled`).
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
_NO_UNIT = re.compile(
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
    """Return whether words make the answer conditional, negative or one of several."""
    return bool(_HEDGE.search(text))


def is_geometric(text: str) -> bool:
    """Return whether a text is not a formula, but relates figures: AB \\parallel CD."""
    return bool(_GEOMETRY.search(text))


def is_unit_phrase(text: str) -> bool:
    """Return whether words after a number can be its unit: `apples`, not `or so`."""
    return not _HEDGE.search(text) and not _NO_UNIT.search(text)


def with_equals_sign(text: str) -> str:
    """Write `the area is 12`, `Area: 12` and `P(3,4)` with an equals sign."""
    for pattern in (_STATED, _COLON):
        found = pattern.match(text)
        if found and name_of(found["name"]) is not None:
            return f"{found['name']} = {found['value']}"
    if found := _POINT.match(text):
        return f"{text[: found.start('value')]} = {found['value']}"
    return text


def name_of(text: str) -> str | None:
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
        return re.sub(r"\\(sin|cos|tan|cot|sec|csc)\s*\(([^()]*)\)", r"\\\1\2", bare).replace(
            " ", ""
        )
    if _POINTS.fullmatch(bare):
        return _same_both_ways(bare)
    if is_angle and bare.isdigit():
        return bare
    return _phrase(bare)


def _same_both_ways(points: str) -> str:
    """AB is BA, and the angle ABC is CBA; of polygons the order matters."""
    points = points.replace(" ", "")
    return min(points, points[::-1]) if points.isalpha() and len(points) < 4 else points


def _phrase(text: str) -> str | None:
    words = text.split()
    if len(words) > _MAX_WORDS or not all(_WORD.fullmatch(word) for word in words):
        return None
    kept = [word for word in words if not _FILLER.fullmatch(word)]
    if not kept:
        return ""
    if not any(len(word) > 2 and word.isalpha() for word in words):
        return None
    if len(kept) == 1 and (kept[0].isupper() or len(kept[0]) == 1):
        return _same_both_ways(kept[0])
    return " ".join(word if word.isupper() else word.lower() for word in kept)


def is_compound(text: str) -> bool:
    """Return whether it is a sum, product or ratio of several names: `x+y`, `AB:BC`.

    The value of such an expression can be what a question asks for.
    """
    parts = re.split(r"\\cdot|\\times|[-+*/:]", _QUOTIENT.sub(r"\1/\2", text))
    if len(parts) == 1:
        return bool(_PRODUCT.fullmatch(parts[0].strip())) and len({*parts[0]} - {" "}) > 1
    names = [name_of(part) for part in parts]
    symbols = [name for name in names if name and " " not in name]
    return len(symbols) == len(parts) and len({*symbols}) > 1


def same_name(one: str, other: str) -> bool:
    """Return whether two normalized names can denote the same thing. A missing name matches any."""
    if one == other or not one or not other:
        return True
    short, long = sorted((one, other), key=len)
    if len(short) == 1 and len(long.split()[0]) > 2 and long.replace(" ", "").isalpha():
        return long[0].lower() == short.lower()  # A and area
    words, others = set(short.split()), set(long.split())
    return any(len(word) > 2 for word in words) and words <= others  # area, and area of ABC


_LABEL = re.compile(
    r"(?:\(\s*([A-J])\s*\)\s*[.:]?|([A-J])\s*\)|([A-J])[.:](?=\s|$))\s*(.*)", re.DOTALL
)
_ALONE = re.compile(r"(?:(?i:option|choice|answer)\s*:?\s*)?[(\[]?\s*([A-Ja-j])\s*[)\]]?[.:]?")
_LETTER = r"[(\[{'\"]*([A-J])[)\]}'\".:]*"
_SEVERAL = re.compile(
    rf"[\[{{(]?\s*{_LETTER}(?:(?:\s*[,;&+]\s*(?:and\s+)?|\s+and\s+|\s+){_LETTER})+"
)
_JOINED = re.compile(r"[A-J]{2,10}")
_LATER_LABEL = re.compile(r"(?:^|[\s,;])(?:\(([A-J])\)|([A-J])[).:](?=\s|$))")
_OTHER = re.compile(
    r"(?:\b(?i:or|either|neither|maybe|perhaps|possibly|probably|but|not|also)\b|/)"
    r"(?:\s+\w+){0,2}?\s*\(?[A-J]\)?(?![\w'])"
)
# I is a letter here, and a word in "the answer is, I think, B"
_SPOKEN = re.compile(
    r"\b(?i:answers?|options?|choices?)(?i:\s+(?:is|are))?:?\s*"
    r"((?:\(?(?:[A-HJ]|I(?!,? [a-z]))\)?(?![\w'])[\s,;&/]*(?:(?i:and|or)\b\s*)?)+)"
)


def split_label(text: str) -> tuple[str, str]:
    """Return the letter and the rest of `B. 12` or `(B) 12`; ("", text) without a label."""
    found = _LABEL.fullmatch(text)
    letter = found and (found[1] or found[2] or found[3])
    return (letter, found[4].strip()) if letter else ("", text)


def choice_letters(text: str) -> frozenset[str]:
    """Return the letters of the choices that an answer commits to; empty if to none.

    `B`, `(b)`, `B. a dog` and `Option B` name one, `A, C`, `AC` and `A. cat, C. dog` two. `B or C`
    names none: an answer has to commit to all of its letters.
    """
    if found := _ALONE.fullmatch(text):
        return frozenset(found[1].upper())
    if re.search(r"\bor\b|/|\?", text) and _SEVERAL.fullmatch(re.sub(r"\bor\b|/|\?", ",", text)):
        return frozenset()
    if _SEVERAL.fullmatch(text):
        return frozenset(re.findall(r"(?<![A-Za-z])[A-J](?![A-Za-z])", text))
    if _JOINED.fullmatch(text) and len(set(text)) == len(text):
        return frozenset(text)
    letter, rest = split_label(text)
    if not letter and (found := re.match(r"([A-J]),\s+(?![A-J]\b)", text)):
        letter, rest = found[1], text[found.end() :]
    if not letter or _OTHER.search(f" {rest}"):
        return frozenset()
    later = {one or other for one, other in _LATER_LABEL.findall(rest)}
    return frozenset({letter, *later})


def spoken_letters(text: str) -> frozenset[str]:
    """Return the letters in the last "the answer is B" of a text; empty without."""
    said = _SPOKEN.findall(text)
    if not said or re.search(r"\b(?i:or)\b|/", said[-1]):
        return frozenset()
    return frozenset(re.findall(r"[A-J]", said[-1]))
