"""Named presets: --config config/grpo.py:general_ocr_sd3_8gpu

A preset of a full-size model takes the number of GPUs from its name (_1gpu, _4gpu, _8gpu,
_32gpu, any that divides), or without one from the launcher.
"""

import os
import re

import torch
from ml_collections import ConfigDict

from flow_grpo.errors import UserError
from flow_grpo.run.fields import get_config as base_config


def per_gpu_batches(
    config: ConfigDict, *, gpus: int, groups: int, group_size: int, max_batch: int, updates: int = 2
) -> None:
    """Set the batch numbers of `config` for an epoch of `groups` x `group_size` samples.

    Per GPU: the largest batch up to `max_batch` that leaves whole batches, and as many of them
    for each of the `updates` of an epoch. The result is the same epoch on any number of GPUs.
    """
    samples = groups * group_size
    if samples % (gpus * updates):
        raise UserError(
            f"{groups} groups x {group_size} images = {samples} samples do not divide over "
            f"{gpus} GPUs x {updates} updates per epoch; use a number of GPUs that does"
        )
    per_update = samples // (gpus * updates)
    batch = max(b for b in range(1, max_batch + 1) if per_update % b == 0)
    config.sample.num_image_per_prompt = group_size
    config.sample.train_batch_size = config.train.batch_size = batch
    config.sample.num_batches_per_epoch = per_update * updates // batch
    config.train.gradient_accumulation_steps = per_update // batch


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
    # Its detector wants packages that fit nothing else: it lives in a server of its own.
    config.reward_servers.geneval = "http://127.0.0.1:18085"
    return config


def pickscore_sd3(gpus: int) -> ConfigDict:
    config = _sd3(gpus)
    config.dataset = "dataset/pickscore"
    config.reward_fn = ConfigDict({"pickscore": 1.0})
    # A preference model is hacked later than OCR, and a strong leash keeps it from improving.
    config.train.beta = 0.01
    return config


def benchmark_sd3(gpus: int) -> ConfigDict:
    """What docs/performance.md times: a random SD3.5-medium, four batches of 9, two updates."""
    config = _sd3(gpus)
    config.pretrained.model = "sd3.5-medium"  # scripts/benchmark.py makes it up
    config.mixed_precision = "bf16" if torch.cuda.is_available() else "no"
    config.dataset = "dataset/ocr"
    per_gpu_batches(config, gpus=gpus, groups=4 * gpus, group_size=9, max_batch=9)
    return config


def tiny_ocr(gpus: int) -> ConfigDict:
    """The small model that ships with the repo learns to draw signs that OCR can read."""
    config = base_config()
    config.pretrained.model = "assets/tiny-sd3"
    config.height, config.width = 32, 96
    config.max_sequence_length = 8  # it was trained to ignore how many T5 tokens there are
    config.log_images = 24
    config.dataset = "dataset/ocr"
    config.reward_fn = ConfigDict({"ocr": 1.0})
    config.sample.eval_num_steps = 10
    config.sample.test_batch_size = 32
    # Guidance would double the cost, and what it mends here RL mends too.
    config.sample.guidance_scale = 1.0
    # The log-probability is a mean over 1,536 numbers, not 65,536 as at 512 px: it moves further.
    config.train.clip_range = 1e-3
    config.train.beta = 0.0
    config.train.ema_update_interval = 1
    config.compile = False  # it would take about as long as the training itself
    if torch.cuda.is_available():
        # 1e-3 learns in three epochs and then hacks the reward: all signs dark on pale, torn.
        config.train.learning_rate = 3e-4
        config.num_epochs = 30
        config.eval_freq = 3
        per_gpu_batches(config, gpus=gpus, groups=32, group_size=16, max_batch=256)
    else:
        # Twice the step, and an end to it before anything can be hacked. About 15 s per epoch on
        # two slow cores, a quarter of it training: three noisy steps, not nine.
        config.train.learning_rate = 6e-4
        config.num_epochs = 6
        config.eval_freq = 2
        config.sample.num_steps = 8
        config.sample.sde_window_size = 3
        per_gpu_batches(config, gpus=gpus, groups=16, group_size=12, max_batch=48)
    return config


PRESETS = {
    preset.__name__: preset
    for preset in (tiny_ocr, general_ocr_sd3, geneval_sd3, pickscore_sd3, benchmark_sd3)
}


def get_config(name: str = "") -> ConfigDict:
    preset, gpus = re.fullmatch(r"(.*?)(?:_(\d+)gpu)?", name).groups()
    if preset not in PRESETS:
        raise UserError(f"unknown preset {name!r}; config/grpo.py has {', '.join(PRESETS)}")
    launched = os.environ.get("WORLD_SIZE", gpus)
    if gpus is not None and gpus != launched:
        raise UserError(f"preset {name!r} is for {gpus} GPUs but {launched} processes were started")
    return PRESETS[preset](int(launched or 1))
