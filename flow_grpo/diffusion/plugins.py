"""Registration of custom algorithms: classes that `custom_algorithms` of a config names."""

from dataclasses import fields
from typing import Any

from flow_grpo.config.custom import check_class, check_settings_class
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.base import Algorithm
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.errors import UserError


def register_algorithm(field: str, name: str, found: Any) -> None:
    """Add a custom algorithm; its settings become the config section `name`.

    Args:
        field: Setting that names it, for messages: "custom_algorithms.mine".
        name: Name of the algorithm.
        found: What was imported.

    Raises:
        UserError: If the name is taken or the class does not have the interface of `Algorithm`.
    """
    taken = {"algorithm", *dir(DiffusionConfig), *(each.name for each in fields(DiffusionConfig))}
    if name in taken or name in ALGORITHMS.paths:
        raise UserError(
            "is the name of a built-in setting or algorithm",
            field=field,
            hint="choose another name",
        )
    check_class(field, found, Algorithm, name=name)
    check_settings_class(field, getattr(found, "Settings", None))
    ALGORITHMS[name] = found
