"""All fields at their defaults; flow_grpo/run/fields.py says what each is for."""

from flow_grpo.run.fields import get_config

__all__ = ["get_config"]
