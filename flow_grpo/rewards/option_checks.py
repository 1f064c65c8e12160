"""Checks of the options of rewards."""

from collections.abc import Iterable
from typing import Any

from flow_grpo.errors import UserError


def check_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    choices = list(choices)  # not a set or dict: the value may be unhashable
    if value not in choices:
        raise UserError(f"must be one of {', '.join(choices)}", field=field, value=value)
