"""Checks of the options of rewards."""

import math
from collections.abc import Iterable
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any, get_args

from flow_grpo.errors import UserError

TYPES = {bool: "True or False", int: "an integer", float: "a finite number", str: "a string"}


def check_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    choices = list(choices)  # not a set or dict: the value may be unhashable
    if value not in choices:
        raise UserError(f"must be one of {', '.join(choices)}", field=field, value=value)


def check_type(field: str, value: Any, annotation: Any) -> None:
    """Raise `UserError` unless `value` has the type of an option.

    Args:
        field: Full name of the option, for the message.
        value: Its value.
        annotation: bool, int, float, str, None or a union of these; others are not checked. An
            integer counts as a float.
    """
    kinds = get_args(annotation) or (annotation,)
    if not set(kinds) <= {*TYPES, type(None)} or (value is None and type(None) in kinds):
        return
    if not any(_has_type(value, kind) for kind in kinds):
        names = [TYPES.get(kind, "None") for kind in kinds]
        raise UserError(f"must be {' or '.join(names)}", field=field, value=value)


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, Real) and -math.inf < value < math.inf
    return isinstance(value, Integral if kind is int else kind)


def require_opencv(reward: str) -> None:
    """Raise `UserError` unless OpenCV is installed, which is optional."""
    if find_spec("cv2") is None:
        package = "opencv-python-headless"
        raise UserError(
            f"needs {package}", field="reward_fn", value=reward, hint=f"pip install {package}"
        )
