"""Build algorithms from configs with some fields changed, and return messages of rejections."""

import pytest

from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.errors import UserError


def build(**changed) -> None:
    """Check a config with changed fields and build its algorithm; `__` stands for a dot."""
    config = get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changed.items()})
    check_config(config)
    build_algorithm(config)


def rejection_message(**changed) -> str:
    """Return the message of the `UserError` that `build` raises."""
    with pytest.raises(UserError) as caught:
        build(**changed)
    return str(caught.value)
