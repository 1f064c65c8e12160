"""Named presets: --config config/vlm.py:tiny_vlm; flow_grpo/answer/presets.py lists them."""

from flow_grpo.answer.presets import get_config

__all__ = ["get_config"]
