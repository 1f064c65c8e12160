"""Presets of config/grpo.py with algorithm=sft, under the name of Flow-GRPO's config file."""

from ml_collections import ConfigDict

from flow_grpo.diffusion import presets


def get_config(name: str = "") -> ConfigDict:
    """Return the config of a preset, trained with SFT."""
    config = presets.get_config(name)
    config.algorithm = "sft"
    config.sample.sde_window_size = 0  # samples without noise
    return config
