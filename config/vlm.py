"""Named presets: --config config/vlm.py:tiny_vlm; flow_grpo/vlm/presets.py lists them."""

from flow_grpo.vlm.presets import get_config

__all__ = ["get_config"]
