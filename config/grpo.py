"""Named presets: --config config/grpo.py:tiny_ocr; flow_grpo/diffusion/presets.py lists them."""

from flow_grpo.diffusion.presets import get_config

__all__ = ["get_config"]
