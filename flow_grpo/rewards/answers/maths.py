"""Reads numbers, fractions and LaTeX into a tree, without evaluating anything.

A tree is a tuple: ("num", Fraction), ("name", "x"), (operator, operands...) or, for lists, sets and
intervals, ("seq", brackets, items...).
"""

import operator
import re
from fractions import Fraction

MAX_DEPTH = 60
MAX_TOKENS = 200  # a sum of as many terms is a tree as deep
MAX_BITS = 4096  # of a number that is computed here
LOOSE = Fraction(1, 10**6)  # how far a decimal may be off, relative
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan")
FUNCTIONS = (*TRIGONOMETRIC, "log", "ln", "exp")
CONSTANTS = ("pi", "infty", "oo")
GREEK = ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega", "sigma")
BARE = "{}"  # brackets of items that stand in no order
OPERATORS = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
    **{"neg": operator.neg, "%": lambda value: value / 100},
}
_TIMES, _OVER = ("*", "\\cdot", "\\times"), ("/", "\\div", ":")
_TOKEN = re.compile(r"\d+\.\d+|\.\d+|\d+|\\[A-Za-z]+|[A-Za-z]+|\S")

_DROPPED = ("$", "\\$", "\\(", "\\)", "\\[", "\\]", "\\!", "{,}")
_SIZES = ("\\left", "\\right", "\\displaystyle")
_DEGREES = ("^\\circ", "^{\\circ}", "°")
_SPACES = ("\\,", "\\;", "\\:", "\\ ", "~", "\\quad")
_REPLACED = {
    **dict.fromkeys((*_DROPPED, *_SIZES, *_DEGREES), ""),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys("−–", "-"),
    **dict.fromkeys("×·", "*"),
    **dict.fromkeys(("\\dfrac", "\\tfrac"), "\\frac"),
    **{"÷": "/", "**": "^", "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "\\%": "%"},
    **{"\\{": "\\lbrace ", "\\}": "\\rbrace "},
}
_REPLACE = re.compile("|".join(map(re.escape, sorted(_REPLACED, key=len, reverse=True))))
_STYLED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d)}])\s+[A-Za-z]{2}[A-Za-z ]*(?:\^\{?[23]\}?)?$")
_NAMED = re.compile(r"^[A-Za-z]\s*=(?!.*=)\s*")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})")
_MIXED = re.compile(r"(-?)(\d+)\s+(\d+)\s*/\s*(\d+)")


class Unreadable(ValueError):
    """Not a formula, or none that is known here."""


def plain(text: str) -> str:
    """Without what does not matter: spaces at the ends, dollar signs, styles, units, `x =`."""
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    text = _STYLED.sub(r" \1 ", text).strip().rstrip(".").strip()
    return _NAMED.sub("", _UNIT.sub("", text)).strip()


def read(text: str) -> tuple:
    """The tree of a text that `plain` returned."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if mixed := _MIXED.fullmatch(text):
        sign, whole, part, of = mixed.groups()
        text = f"{sign}({whole}+{part}/{of})"
    if scientific := _SCIENTIFIC.fullmatch(text):
        text = "{}*10^{{{}}}".format(*scientific.groups())
    tokens = _TOKEN.findall(text)
    if len(tokens) > MAX_TOKENS:
        raise Unreadable(f"it has {len(tokens)} tokens, more than {MAX_TOKENS}")
    reader = _Reader(tokens)
    tree = reader.items()
    if reader.tokens:
        raise Unreadable(f"{reader.tokens[-1]!r} is not expected")
    return tree


def computes_with_lists(tree: tuple) -> bool:
    """As in f(1,2) or (1,2)+t(3,4): it is read, and nothing here can compare it."""
    inner = [part for part in tree if isinstance(part, tuple)]
    operand = tree[0] != "seq" and any(part[0] == "seq" for part in inner)
    return operand or any(map(computes_with_lists, inner))


def exact(tree: tuple) -> Fraction | None:
    """Its value, where that is a fraction of numbers that are not too long."""
    kind, *parts = tree
    if kind == "num":
        return parts[0]
    if kind not in (*OPERATORS, "^"):
        return None
    values = [exact(part) for part in parts]
    if None in values or (kind == "/" and values[1] == 0):
        return None
    value = _power(*values) if kind == "^" else OPERATORS[kind](*values)
    return value if value is not None and _bits(value) <= MAX_BITS else None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or _bits(base) * abs(exponent) > MAX_BITS:
        return None
    return None if base == 0 and exponent <= 0 else base**exponent.numerator


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


class _Reader:
    """Recursive descent; tokens are taken from the end of a reversed list."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]
        self.depth = 0

    def next(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def take(self, *wanted: str) -> str:
        """The next token if it is one of these, else ""."""
        return self.tokens.pop() if self.next() in wanted and self.tokens else ""

    def expect(self, *wanted: str) -> str:
        if not (token := self.take(*wanted)):
            raise Unreadable(f"{self.next() or 'the end'!r} in the place of {wanted[0]!r}")
        return token

    def items(self) -> tuple:
        """One formula, or several with commas between."""
        found = [self.sum()]
        while self.take(","):
            found.append(self.sum())
        return found[0] if len(found) == 1 else ("seq", BARE, *found)

    def sum(self) -> tuple:
        value = self.product()
        while sign := self.take("+", "-", "\\pm"):
            value = (sign, value, self.product())
        return value

    def product(self) -> tuple:
        value = self.signed()
        while True:
            if self.take(*_TIMES):
                value = ("*", value, self.signed())
            elif self.take(*_OVER):
                value = ("/", value, self.signed())
            elif self._starts_factor():
                value = self._beside(value, self.power())
            else:
                return value

    def _beside(self, left: tuple, right: tuple) -> tuple:
        """`2x` is a product, 2\\frac{1}{2} a mixed number."""
        whole = left[0] == "num" and left[1].denominator == 1
        if whole and right[0] == "/" and all(part[0] == "num" for part in right[1:]):
            return ("+", left, right)
        if right[0] == "num":
            raise Unreadable("a number follows another value")
        return ("*", left, right)

    def _starts_factor(self) -> bool:
        token = self.next()
        command = token.startswith("\\") and token not in ("\\pm", "\\rbrace", *_TIMES, *_OVER)
        return bool(token) and (token in ("(", "[", "{") or token[0].isalnum() or command)

    def signed(self) -> tuple:
        """Signs in a row are counted, not nested."""
        negative = False
        while sign := self.take("+", "-"):
            negative ^= sign == "-"
        value = self.power()
        return ("neg", value) if negative else value

    def power(self) -> tuple:
        value = self.atom()
        while mark := self.take("!", "%"):
            value = (mark, value)
        if self.take("^"):
            value = ("^", value, self.group())
        return value

    def group(self) -> tuple:
        """What follows ^, \\frac and \\sqrt: in braces, or a single character."""
        if self.take("{"):
            value = self.sum()
            self.expect("}")
            return value
        if self.next()[:1].isdigit() and len(self.next()) > 1:
            digits = self.tokens.pop()
            self.tokens += [digits[1:], digits[0]]
        return self.signed() if self.next() == "-" else self.atom()

    def atom(self) -> tuple:
        """All that nests passes here."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        value = self._atom()
        self.depth -= 1
        return value

    def _atom(self) -> tuple:
        token = self.tokens.pop() if self.tokens else ""
        if token[:1].isdigit() or token.startswith("."):
            try:
                return ("num", Fraction(token))
            except ValueError as error:  # a lone dot, or digits of another script
                raise Unreadable(f"{token!r} is no number") from error
        if token in ("(", "[", "{"):
            return self._bracketed(token)
        if token == "\\lbrace":
            value = self.items()
            self.expect("\\rbrace")
            return ("seq", BARE, *(value[2:] if value[0] == "seq" else (value,)))
        if token == "|":
            value = self.sum()
            self.expect("|")
            return ("abs", value)
        if token == "\\frac":
            return ("/", self.group(), self.group())
        return self._named(token)

    def _bracketed(self, opened: str) -> tuple:
        value = self.items()
        if opened == "{":
            self.expect("}")
            return value
        closed = self.expect(")", "]")
        if value[0] == "seq" and value[1] == BARE:
            return ("seq", opened + closed, *value[2:])
        if opened + closed not in ("()", "[]"):
            raise Unreadable("its brackets do not match")
        return value

    def _named(self, token: str) -> tuple:
        name = token.removeprefix("\\")
        if name == "sqrt":
            root = ("num", Fraction(2))
            if self.take("["):
                root = self.sum()
                self.expect("]")
            return ("root", self.group(), root)
        if name in FUNCTIONS:
            exponent = self.group() if self.take("^") else None
            value = ("call", name, self.group() if self.next() == "{" else self.power())
            return value if exponent is None else ("^", value, exponent)
        if name in CONSTANTS or (token.startswith("\\") and name in GREEK):
            return ("name", "oo" if name == "infty" else name)
        if token.isascii() and token.isalpha() and len(token) <= 2:
            *others, last = token
            self.tokens += [last] if others else []
            return ("name", token[0])
        raise Unreadable(f"{token or 'the end'!r} is not known")
