"""Named presets: --config config/grpo.py:general_ocr_sd3_8gpu

A preset of a full-size model takes the number of GPUs from its name (_1gpu, _4gpu, _8gpu,
_32gpu, any that divides), or without one from the launcher.
"""

import os
import re
from collections.abc import Callable

import torch
from ml_collections import ConfigDict

from flow_grpo.errors import UserError
from flow_grpo.run.fields import get_config as base_config

Preset = Callable[[int], ConfigDict]
# The log-probability is a mean over 1,536 numbers, not 65,536 as at 512 px: it moves further.
TINY_CLIP = 1e-3


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


def clipscore_sd3(gpus: int) -> ConfigDict:
    config = _sd3(gpus)
    config.dataset = "dataset/pickscore"
    config.reward_fn = ConfigDict({"clipscore": 1.0})
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
    config.train.clip_range = TINY_CLIP
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


def _tiny_forward(gpus: int, algorithm: str, epochs: int) -> ConfigDict:
    """Three noise levels of each sample, drawn without noise; no leash to the first weights."""
    config = tiny_ocr(gpus)
    config.algorithm = algorithm
    _without_grpo(config)
    config.sample.sde_window_size = 0
    config.num_epochs, config.eval_freq = epochs, 1
    config[algorithm].times, config[algorithm].kl_beta = 3, 0.0
    return config


def tiny_awm(gpus: int) -> ConfigDict:
    """What the quickstart takes: of all methods it learns the fastest here."""
    # It has learnt all by then; twice as long, and all signs are dark, or all are pale.
    config = _tiny_forward(gpus, "awm", epochs=4)
    config.train.learning_rate = 1e-3
    # The weights of an epoch ago hold it well enough, and weakly: 1.0 needs three times as long.
    config.awm.old_beta, config.awm.old_most = 0.1, 0.0
    if not torch.cuda.is_available():
        # Two epochs of 10 s on two slow cores; two updates an epoch leave some seeds at .92.
        config.num_epochs, config.eval_freq = 2, 0
        config.sample.num_steps, config.sample.solver = 6, "dpm2"
        config.awm.times = 2
        per_gpu_batches(config, gpus=gpus, groups=16, group_size=8, max_batch=32, updates=4)
    return config


def tiny_nft(gpus: int) -> ConfigDict:
    config = _tiny_forward(gpus, "nft", epochs=9)
    config.train.learning_rate = 3e-4
    config.nft.beta, config.nft.old_most = 0.1, 0.0
    return config


def tiny_dgpo(gpus: int) -> ConfigDict:
    config = _tiny_forward(gpus, "dgpo", epochs=9)
    config.train.learning_rate = 1e-3
    return config


def tiny_dpo(gpus: int) -> ConfigDict:
    config = _tiny_forward(gpus, "dpo", epochs=9)
    config.train.learning_rate = 1e-3
    return config


def tiny_sft(gpus: int) -> ConfigDict:
    config = _tiny_forward(gpus, "sft", epochs=9)
    config.train.learning_rate = 1e-3
    return config


def tiny_rwr(gpus: int) -> ConfigDict:
    config = _tiny_forward(gpus, "rwr", epochs=9)
    config.train.learning_rate = 1e-3
    return config


def _tiny_trajectory(gpus: int, algorithm: str) -> ConfigDict:
    config = tiny_ocr(gpus)
    config.algorithm = algorithm
    _without_grpo(config)
    config[algorithm].beta = 0.0
    return config


def tiny_grpo_guard(gpus: int) -> ConfigDict:
    config = _tiny_trajectory(gpus, "grpo_guard")
    config.grpo_guard.clip_range = TINY_CLIP / 50  # as 2e-6 is of 1e-4
    config.sample.global_std = False
    return config


def tiny_dppo(gpus: int) -> ConfigDict:
    config = _tiny_trajectory(gpus, "dppo")
    config.dppo.delta = 1e-4
    return config


def tiny_mix(gpus: int) -> ConfigDict:
    config = _tiny_trajectory(gpus, "mix")
    config.mix.clip_range = TINY_CLIP
    config.mix.window_size, config.mix.every = 3, 2
    config.sample.sde_window_size = 0
    config.sample.same_latent = True
    return config


def fast(config: ConfigDict) -> None:
    """Noise and training on two steps only."""
    config.sample.sde_window_size, config.sample.sde_window_range = 2, (0, 5)


def fast_nocfg(config: ConfigDict) -> None:
    """Flow-GRPO-Fast without guidance, and so at a quarter of the cost."""
    config.sample.guidance_scale = 1.0
    config.sample.sde_type, config.sample.noise_level = "cps", 0.8
    config.sample.sde_window_size, config.sample.sde_window_range = 3, (0, 5)
    config.train.clip_range, config.train.beta = 1e-5, 0.0


def guard(config: ConfigDict) -> None:
    config.algorithm = "grpo_guard"
    config.grpo_guard.clip_range = 4e-6 if "pickscore" in config.reward_fn else 2e-6
    config.train.learning_rate = 1e-4
    config.sample.global_std = False
    _without_grpo(config)


def mix(config: ConfigDict) -> None:
    config.algorithm = "mix"
    config.sample.num_steps = 25
    config.sample.same_latent = True
    config.mix.beta = config.grpo.beta
    _without_grpo(config)


def _forward(config: ConfigDict, algorithm: str) -> None:
    """No guidance in the rollouts: the weights learn what it would add."""
    config.algorithm = algorithm
    config.sample.guidance_scale = 1.0
    config.sample.solver = "dpm2"
    _without_grpo(config)


def nft(config: ConfigDict) -> None:
    _forward(config, "nft")
    config.nft.beta = 0.1 if "ocr" in config.reward_fn else 1.0


def awm(config: ConfigDict) -> None:
    _forward(config, "awm")
    _one_update(config)


def dgpo(config: ConfigDict) -> None:
    _forward(config, "dgpo")


def _without_grpo(config: ConfigDict) -> None:
    """Its fields back at their defaults: they would have no effect."""
    config.grpo.update(base_config().grpo.to_dict())


def _one_update(config: ConfigDict) -> None:
    """Per epoch, in place of two."""
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch


SD3 = (general_ocr_sd3, geneval_sd3, pickscore_sd3, clipscore_sd3)
VARIANTS = (fast, fast_nocfg, guard, mix, nft, awm, dgpo)
TINY = (
    *(tiny_ocr, tiny_grpo_guard, tiny_dppo, tiny_mix),
    *(tiny_nft, tiny_awm, tiny_dgpo, tiny_dpo, tiny_sft, tiny_rwr),
)


def _varied(preset: Callable[[int], ConfigDict], change: Callable[[ConfigDict], None]) -> Preset:
    def varied(gpus: int) -> ConfigDict:
        config = preset(gpus)
        change(config)
        return config

    return varied


PRESETS: dict[str, Preset] = {
    **{preset.__name__: preset for preset in (*TINY, *SD3, benchmark_sd3)},
    **{f"{p.__name__}_{v.__name__}": _varied(p, v) for p in SD3 for v in VARIANTS},
}


def get_config(name: str = "") -> ConfigDict:
    preset, gpus = re.fullmatch(r"(.*?)(?:_(\d+)gpu)?", name).groups()
    if preset not in PRESETS:
        raise UserError(f"unknown preset {name!r}; config/grpo.py has {', '.join(PRESETS)}")
    launched = os.environ.get("WORLD_SIZE", gpus)
    if gpus is not None and gpus != launched:
        raise UserError(f"preset {name!r} is for {gpus} GPUs but {launched} processes were started")
    return PRESETS[preset](int(launched or 1))
