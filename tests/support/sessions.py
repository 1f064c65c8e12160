"""Configs of short runs in this process."""

from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.diffusion import presets
from flow_grpo.diffusion.presets import set_batches_per_gpu


def short_config(logdir: Path, run_name: str, **fields) -> ConfigDict:
    """Return a config of the tiny SD3: two groups of two samples and two updates per epoch."""
    config = presets.get_config("tiny_ocr_1gpu")
    config.device, config.logdir, config.log_with = "cpu", str(logdir), ""
    config.run_name = run_name
    config.reward_fn = ConfigDict({"jpeg_compressibility": 1.0})
    config.sample.guidance_scale = 2.0
    config.sample.num_steps, config.sample.sde_window_size = 3, 0
    set_batches_per_gpu(config, gpus=1, groups=2, group_size=2, max_batch=2, updates=2)
    config.update_from_flattened_dict(fields)
    return config
