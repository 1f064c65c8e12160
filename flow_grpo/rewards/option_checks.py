"""Checks of the options of rewards."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from flow_grpo.errors import UserError


def check_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    choices = list(choices)  # not a set or dict: the value may be unhashable
    if value not in choices:
        raise UserError(f"must be one of {', '.join(choices)}", field=field, value=value)


def require_opencv(reward: str) -> None:
    """Raise `UserError` unless OpenCV is installed, which is optional."""
    if find_spec("cv2") is None:
        package = "opencv-python-headless"
        raise UserError(
            f"needs {package}", field="reward_fn", value=reward, hint=f"pip install {package}"
        )
