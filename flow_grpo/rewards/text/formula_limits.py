"""Limits on the cost of a formula, checked before sympy sees it.

Responses are adversarial input: evaluating 9^{9^{9^9}} or (10^9)! would never end.
"""

import re

from flow_grpo.rewards.text.brackets import bracket_depths, find_group_end
from flow_grpo.rewards.text.math_parsing import FUNCTIONS, UnparsableFormula

MAX_LENGTH = 400  # characters of a formula; longer ones take sympy too long
MAX_DEPTH = 8  # nesting of brackets
MAX_POWERS = 24
MAX_BITS = 10**6  # of a formula's value
MAX_EXPONENT = 10**4

_KNOWN_COMMANDS = re.compile(
    rf"{'|'.join(FUNCTIONS)}|frac|binom|cdot|times|div|pm|mp|leq?|geq?|neq?|overline|approx"
    r"|pi|infty|alpha|beta|gamma|[dD]elta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi|omega|ell"
    r"|cup|cap|setminus|in|emptyset|mathbb|begin|end|[lr](?:floor|ceil|brace)|lor|land"
)
_MATRIX = re.compile(r"\\(?:begin|end)\{[pbB]?matrix\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)")
_FACTORIAL = re.compile(
    r"(?:(?<![\w^.}])\d{1,3}|(?<![A-Za-z_^.}])[A-Za-z]"
    r"|(?<![\^.}])\((?:[A-Za-z+\- ]|\d{1,3}(?!\d))+\))!(?!!)"
)
_BINOMIAL_ARGUMENT = r"\s*\{(?:[A-Za-df-z+\- ]|\d{1,3}(?!\d))+\}"
_BINOMIAL = re.compile(rf"\\binom{_BINOMIAL_ARGUMENT}{_BINOMIAL_ARGUMENT}")
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+|\\.|.", re.DOTALL)


def reject_costly_formula(text: str) -> None:
    """Reject formulas that sympy might not finish: power towers, large factorials, sums, integrals.

    Raises:
        UnparsableFormula: If a limit is exceeded or a LaTeX command is not supported.
    """
    depths = [depth for _, depth in bracket_depths(text)] or [0]
    if len(text) > MAX_LENGTH or max(depths) > MAX_DEPTH or text.count("|") > 2 * MAX_DEPTH:
        raise UnparsableFormula("it is too long or nested too deeply")
    if not text.isascii() or not re.search("[0-9A-Za-z]", text):
        raise UnparsableFormula("it has no digits or letters, or characters beyond ASCII")
    commands = re.findall(r"\\([A-Za-z]+)", text)
    unknown = next((each for each in commands if not _KNOWN_COMMANDS.fullmatch(each)), None)
    has_other_environment = _count(_ENVIRONMENT, text) != _count(_MATRIX, text)
    problems = {
        f"\\{unknown} is not supported": unknown,
        "its brackets do not match": depths[-1] or min(depths) < 0,
        "it has an environment other than a matrix": has_other_environment,
        "it has adjacent numbers": re.search(r"(?<![_\d])\d+(?:\s+|\s*_\s*\{?)\d", text),
        "it has repeated signs": "--" in text.replace(" ", ""),
        "it has a large factorial": text.count("!") != _count(_FACTORIAL, text),
        "it has a large binomial": text.count("\\binom") != _count(_BINOMIAL, text),
        "its value could be too large": text.count("^") > MAX_POWERS or _max_bits(text) > MAX_BITS,
    }
    if reason := next((reason for reason, found in problems.items() if found), None):
        raise UnparsableFormula(reason)


def _count(pattern: re.Pattern, text: str) -> int:
    return len(pattern.findall(text))


def _max_bits(text: str) -> int:
    """Return an upper bound of the bits of a formula's value, with variables below 4.

    The bits of all numbers are multiplied by the largest exponent, and by every exponent of a
    group, because these may be nested.
    """
    bits = 0  # of all numbers
    largest = 1  # exponent
    product = 1  # of the exponents of groups
    group_end, previous = 0, ""
    for found in _TOKEN.finditer(text):
        token = found[0]
        if found.start() < group_end:
            continue
        if token in ("^", "\\exp"):
            group_end = find_group_end(text, found.end())
            exponent = _max_exponent(text[found.end() : group_end])
            largest = max(largest, exponent)
            if previous in (")", "}", "]", "|"):
                product *= exponent
            if token == "\\exp":
                bits += 2
        elif token.isdigit():
            bits += int(token).bit_length()
        elif token.isalpha() or token == "\\pi":
            bits += 2
        if not token.isspace():
            previous = token
    return bits * largest * product


def _max_exponent(text: str) -> int:
    """Return an upper bound of an exponent's value."""
    if "!" in text or "\\binom" in text:
        raise UnparsableFormula("an exponent has a factorial")
    digits = text.strip(" {}()+-")
    value = int(digits) if digits.isdigit() else 2 ** min(_max_bits(text), 99)
    if value > MAX_EXPONENT:
        raise UnparsableFormula("an exponent could be too large")
    return max(1, value)
