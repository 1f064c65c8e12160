"""Render chat templates with bounds on steps and sizes.

A chat template is a Jinja program that comes with a model. transformers runs it in a sandbox, which
prevents it from reading files, but not from looping for hours or building a string of many
gigabytes. Both are bounded here: `render_chat_template` counts the lines that a template executes,
and `BoundedEnvironment` checks the size of a result before it is computed.

The environment replaces the one in `transformers.utils.chat_template_utils`, which has no public
hook for it; `install_bounded_environment` is the only function that modifies that module.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sized
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

MAX_TEMPLATE_STEPS = 2_000_000  # per prompt; published templates take some hundreds
MAX_CHARACTERS = 10**8  # of any value that a template computes
MAX_INTEGER_BITS = 10**6


class BoundedCodeGenerator(CodeGenerator):
    """Compile `a ~ b` to a call of the environment: a sandbox cannot intercept it otherwise."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Compile `a ~ b ~ ...` to `environment.concat(...)`."""
        self.write("environment.concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")


class BoundedFilters(dict):
    """Filters by name. Every filter checks its arguments, including those added later."""

    def __setitem__(self, name: str, function: Callable) -> None:
        super().__setitem__(name, _bound_filter(function))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox in which no value has more than `MAX_CHARACTERS` characters or elements."""

    code_generator_class = BoundedCodeGenerator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filters, self.filters = self.filters, BoundedFilters()
        for name, function in filters.items():
            self.filters[name] = function
        self.globals.pop("lipsum", None)  # returns text of any length

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result of +, *, ** or % before it is computed."""
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(right, 0), MAX_INTEGER_BITS, "bits")
        elif operator == "%" and isinstance(left, str):
            _check_arguments(left, right if isinstance(right, tuple) else [right])
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments of str and list methods (such as str.ljust) before the call.

        This keeps the result bounded.
        """
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | list):
            _check_arguments(owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        parts = list(parts)
        _check_size(sum(map(len, parts)))
        return "".join(parts)


def _bound_filter(function: Callable) -> Callable:
    """Wrap a filter so that it checks its arguments; keep markers such as `pass_context`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Check the arguments, and call the filter."""
        plain = [each for each in (*args, *kwargs.values()) if isinstance(each, str | int | list)]
        owner = plain[0] if plain and not isinstance(plain[0], int) else None
        _check_arguments(owner, plain if owner is None else plain[1:])
        return function(*args, **kwargs)

    return call


def _check_arguments(owner: Any, arguments: Iterable[Any]) -> None:
    """Raise MemoryError if a method or filter of `owner` could return too large a value.

    None of the built-in ones returns more than its text times its largest argument, or the sum of
    what it joins.
    """
    numbers = [1]
    for each in arguments:
        if isinstance(each, int):
            numbers.append(abs(each))
        elif isinstance(each, str):
            numbers.append(len(each))
        elif isinstance(each, list | tuple):
            _check_size(len(each) * _size(owner) + sum(map(_size, each)))
    if isinstance(owner, str):
        numbers += map(int, re.findall(r"\d{1,18}", owner) if "%" in owner or "{" in owner else ())
        _check_size(max(len(owner), 1) * max(numbers))
    elif isinstance(owner, list):
        _check_size(max(sum(map(_size, owner)), 1) + max(len(owner), 1) * max(numbers))
    else:
        _check_size(max(numbers))


def _check_product(left: Any, right: Any) -> None:
    """Raise MemoryError if a product of a sequence and an integer, or of integers, is too large."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Sized) and isinstance(other, int):
            _check_size(len(one) * other)
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length(), MAX_INTEGER_BITS, "bits")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 1


def _check_size(size: int, most: int = MAX_CHARACTERS, unit: str = "characters") -> None:
    if size > most:
        raise MemoryError(f"a value of {size:,} {unit} exceeds the limit of {most:,}")


def install_bounded_environment() -> None:
    """Make transformers compile chat templates in a `BoundedEnvironment`."""
    if (
        getattr(chat_template_utils, "ImmutableSandboxedEnvironment", None)
        is not BoundedEnvironment
    ):
        chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
        clear = getattr(chat_template_utils._compile_jinja_template, "cache_clear", None)
        if clear is not None:  # drop templates that were compiled without bounds
            clear()


def render_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render the chat template with a limit on executed lines.

    The limit counts steps instead of seconds, so that it does not depend on the machine's load.
    """
    install_bounded_environment()
    steps, before = itertools.count(), sys.gettrace()

    def watch(frame: FrameType, event: str, _: Any) -> Callable | None:
        if next(steps) > MAX_TEMPLATE_STEPS:
            raise TimeoutError(f"the template does not end within {MAX_TEMPLATE_STEPS:,} steps")
        return watch if frame.f_code.co_filename == "<template>" else None

    sys.settrace(watch)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    finally:
        sys.settrace(before)
