"""Named presets: --config config/grpo.py:tiny_ocr; flow_grpo/run/presets lists them."""

from flow_grpo.run.presets import get_config

__all__ = ["get_config"]
