"""Named presets: --config config/grpo.py:tiny_ocr; flow_grpo/draw/presets.py lists them."""

from flow_grpo.draw.presets import get_config

__all__ = ["get_config"]
