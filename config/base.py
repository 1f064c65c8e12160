"""All settings at their defaults; flow_grpo/diffusion/fields.py documents them."""

from flow_grpo.diffusion.fields import get_config

__all__ = ["get_config"]
