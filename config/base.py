"""All fields at their defaults; flow_grpo/draw/fields.py says what each is for."""

from flow_grpo.draw.fields import get_config

__all__ = ["get_config"]
