"""Assertions about `UserError` that do not depend on the wording of messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flow_grpo.errors import NO_VALUE, UserError


@contextmanager
def raises_user_error(
    *shown: object,
    field: str | None = None,
    value: Any = NO_VALUE,
    kind: type[UserError] = UserError,
) -> Iterator[pytest.ExceptionInfo]:
    """Expect a one-line `UserError`.

    Args:
        *shown: What the message has to contain: values, field names, paths.
        field: The error's `field`.
        value: The error's `value`.
        kind: The expected class.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert "\n" not in str(error)
    for each in shown:
        assert str(each) in str(error)
    if field is not None:
        assert error.field == field, str(error)
    if value is not NO_VALUE:
        assert error.value == value, str(error)
