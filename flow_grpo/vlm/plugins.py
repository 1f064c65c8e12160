"""Registration of custom losses: classes that `custom_losses` of a config names."""

from dataclasses import fields
from typing import Any

from flow_grpo.config.custom import check_class, check_settings_class
from flow_grpo.errors import UserError
from flow_grpo.vlm.fields import BRADLEY_TERRY, VlmTrainConfig
from flow_grpo.vlm.losses import BUILT_IN_LOSSES, LOSSES
from flow_grpo.vlm.losses.base import VlmLoss


def register_loss(field: str, name: str, found: Any) -> None:
    """Add a custom loss; its dataclass fields become settings of `train`.

    Args:
        field: Setting that names it, for messages: "custom_losses.mine".
        name: Name of the loss.
        found: What was imported.

    Raises:
        UserError: If the name is taken or the class does not have the interface of `VlmLoss`.
    """
    if name in (*BUILT_IN_LOSSES, BRADLEY_TERRY):
        raise UserError("is the name of a built-in loss", field=field, hint="choose another")
    check_class(field, found, VlmLoss)
    check_settings_class(field, found, [each.name for each in fields(VlmTrainConfig)])
    LOSSES[name] = found
