"""Presets of full-size models, with the settings that were published for them: docs/published.toml
has each value with its source, and what differs here with the reason."""

from collections.abc import Callable

import torch
from ml_collections import ConfigDict

from flow_grpo.draw.fields import get_config as base_config
from flow_grpo.draw.presets.common import per_gpu_batches


def _sd3(gpus: int) -> ConfigDict:
    """What is known to work for SD3.5-medium at 512 px: 48 groups of 24, two updates an epoch."""
    config = base_config()
    config.mixed_precision = "fp16"
    config.num_epochs = 1000
    config.eval_freq = config.save_freq = 30
    per_gpu_batches(config, gpus=gpus, groups=48, group_size=24, max_batch=9)
    config.sample.test_batch_size = config.sample.train_batch_size
    return config


def general_ocr_sd3(gpus: int) -> ConfigDict:
    config = _sd3(gpus)
    config.dataset = "dataset/ocr_full"
    config.reward_fn = ConfigDict({"ocr": 1.0})
    return config


def geneval_sd3(gpus: int) -> ConfigDict:
    config = _sd3(gpus)
    config.dataset = "dataset/geneval"
    config.prompt_fn = "metadata"
    config.reward_fn = ConfigDict({"geneval": 1.0})
    return config


def pickscore_sd3(gpus: int) -> ConfigDict:
    config = _sd3(gpus)
    config.dataset = "dataset/pickscore"
    config.reward_fn = ConfigDict({"pickscore": 1.0})
    # A preference model is hacked later than OCR, and a strong leash keeps it from improving.
    config.train.beta = 0.01
    return config


def clipscore_sd3(gpus: int) -> ConfigDict:
    config = _sd3(gpus)
    config.dataset = "dataset/pickscore"
    config.reward_fn = ConfigDict({"clipscore": 1.0})
    config.train.beta = 0.02
    config.sample.same_latent = True
    return config


SD3 = (general_ocr_sd3, geneval_sd3, pickscore_sd3, clipscore_sd3)


def _large(gpus: int, model: str, *, groups: int, group_size: int, max_batch: int) -> ConfigDict:
    """In bf16, without a leash to the first weights, as published for models above SD3's size."""
    config = base_config()
    config.pretrained.model = model
    config.mixed_precision = "bf16"
    config.num_epochs = 1000
    config.eval_freq = config.save_freq = 30
    config.max_sequence_length = 512
    config.train.beta = 0.0
    config.train.lora_rank, config.train.lora_alpha = 64, 128
    per_gpu_batches(config, gpus=gpus, groups=groups, group_size=group_size, max_batch=max_batch)
    config.sample.test_batch_size = config.sample.train_batch_size
    return config


def _flux(gpus: int) -> ConfigDict:
    """48 groups of 24, six steps, which FLUX.1-dev needs no more of to show what it will draw."""
    model = "black-forest-labs/FLUX.1-dev"
    config = _large(gpus, model, groups=48, group_size=24, max_batch=3)
    config.sample.num_steps, config.sample.eval_num_steps = 6, 28
    config.max_sequence_length = 128
    config.sample.guidance_scale = 3.5  # embedded: it costs no second pass
    config.sample.noise_level = 0.9
    return config


def _qwen_image(gpus: int) -> ConfigDict:
    config = _large(gpus, "Qwen/Qwen-Image", groups=32, group_size=16, max_batch=4)
    config.sample.num_steps, config.sample.eval_num_steps = 10, 50
    config.sample.guidance_scale = 4.0
    config.sample.noise_level = 1.2
    config.sample.sde_window_size, config.sample.sde_window_range = 2, (0, 5)
    config.train.gradient_checkpointing = True
    config.train.ema = False
    return config


def _z_image(gpus: int) -> ConfigDict:
    """Z-Image-Turbo as Flow-Factory trains it: one noisy step, the second, third or fourth."""
    config = _large(gpus, "Tongyi-MAI/Z-Image-Turbo", groups=48, group_size=16, max_batch=6)
    config.sample.num_steps, config.sample.eval_num_steps = 6, 10
    config.sample.guidance_scale = 0.0  # its scale counts from 0
    config.sample.sde_window_size, config.sample.sde_window_range = 1, (1, 4)
    config.train.advantage = "gdpo"
    return config


def _wan(gpus: int, size: str) -> ConfigDict:
    model = f"Wan-AI/Wan2.1-T2V-{size}-Diffusers"
    config = _large(gpus, model, groups=16, group_size=4, max_batch=2)
    config.height, config.width, config.frames = 240, 416, 33
    config.sample.num_steps, config.sample.eval_num_steps = 20, 50
    config.sample.guidance_scale = 4.5
    config.sample.global_std = False
    config.train.learning_rate, config.train.clip_range, config.train.beta = 1e-4, 1e-3, 0.004
    config.train.lora_rank, config.train.lora_alpha = 32, 64
    config.train.gradient_checkpointing = True
    return config


def _rewarded(config: ConfigDict, reward: str, dataset: str) -> ConfigDict:
    config.reward_fn, config.dataset = ConfigDict({reward: 1.0}), f"dataset/{dataset}"
    return config


def general_ocr_flux(gpus: int) -> ConfigDict:
    return _rewarded(_flux(gpus), "ocr", "ocr_full")


def pickscore_flux(gpus: int) -> ConfigDict:
    return _rewarded(_flux(gpus), "pickscore", "pickscore")


def general_ocr_qwen_image(gpus: int) -> ConfigDict:
    return _rewarded(_qwen_image(gpus), "ocr", "ocr_full")


def pickscore_qwen_image(gpus: int) -> ConfigDict:
    return _rewarded(_qwen_image(gpus), "pickscore", "pickscore")


def pickscore_z_image(gpus: int) -> ConfigDict:
    return _rewarded(_z_image(gpus), "pickscore", "pickscore")


def wan_ocr(gpus: int) -> ConfigDict:
    return _rewarded(_wan(gpus, "1.3B"), "ocr", "ocr_full")


def wan_pickscore(gpus: int) -> ConfigDict:
    return _rewarded(_wan(gpus, "1.3B"), "pickscore", "pickscore")


def wan_14b_ocr(gpus: int) -> ConfigDict:
    return _rewarded(_wan(gpus, "14B"), "ocr", "ocr_full")


LARGE = (
    *(general_ocr_flux, pickscore_flux, general_ocr_qwen_image, pickscore_qwen_image),
    *(pickscore_z_image, wan_ocr, wan_pickscore, wan_14b_ocr),
)


def _benchmark(
    family: Callable[[int], ConfigDict], model: str, batch: int, batches: int = 4
) -> Callable[[int], ConfigDict]:
    """What docs/performance.md and docs/models.md time: random weights, which
    scripts/benchmark.py makes up, and as many samples as `batches` hold, in two updates."""

    def preset(gpus: int) -> ConfigDict:
        config = family(gpus)
        config.pretrained.model = model
        config.mixed_precision = "bf16" if torch.cuda.is_available() else "no"
        config.dataset = "dataset/ocr"
        per_gpu_batches(config, gpus=gpus, groups=batches * gpus, group_size=batch, max_batch=batch)
        return config

    return preset


def _timed_flux(gpus: int) -> ConfigDict:
    """With as many tokens as when it was timed."""
    config = _flux(gpus)
    config.max_sequence_length = 512
    return config


def _timed_z_image(gpus: int) -> ConfigDict:
    """With as many steps as when it was timed."""
    config = _z_image(gpus)
    config.sample.num_steps = 8
    config.sample.sde_window_size, config.sample.sde_window_range = 2, (0, 4)
    return config


BENCHMARKS = {
    "benchmark_sd3": _benchmark(_sd3, "sd3.5-medium", 9),
    "benchmark_flux": _benchmark(_timed_flux, "flux.1-dev", 4, 2),
    "benchmark_qwen_image": _benchmark(_qwen_image, "qwen-image", 4, 2),
    "benchmark_z_image": _benchmark(_timed_z_image, "z-image", 6, 2),
    "benchmark_wan": _benchmark(lambda gpus: _wan(gpus, "1.3B"), "wan2.1-1.3b", 1, 2),
    "benchmark_wan_14b": _benchmark(lambda gpus: _wan(gpus, "14B"), "wan2.1-14b", 1, 2),
}
