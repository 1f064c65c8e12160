"""Presets of the small model that ships with the repo, one for each method."""

import torch
from ml_collections import ConfigDict

from flow_grpo.draw.fields import get_config as base_config
from flow_grpo.draw.presets.common import per_gpu_batches, without_grpo

# The log-probability is a mean over 1,536 numbers, not 65,536 as at 512 px: it moves further.
TINY_CLIP = 1e-3
# What docs/results has of awm and dgpo was measured without a cut of their advantages.
UNCUT = 1e3


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
    without_grpo(config)
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
    config.awm.adv_clip_max = UNCUT
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
    config.dgpo.adv_clip_max, config.dgpo.old_most = UNCUT, 0.0
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
    without_grpo(config)
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


def tiny_geneval(gpus: int) -> ConfigDict:
    """The second task: scenes with the right shapes, numbers, colours and places."""
    config = tiny_nft(gpus)
    config.dataset = "dataset/scenes"
    config.reward_fn = ConfigDict({"geneval": 1.0})
    config.reward_options = ConfigDict({"geneval": {"detector": "shapes"}})
    config.train.learning_rate = 5e-4
    # Without a leash all grounds turn pale within 30 epochs, and one seed of three falls to .69.
    config.nft.kl_beta = 0.3
    config.num_epochs, config.eval_freq = (36, 3) if torch.cuda.is_available() else (16, 4)
    return config


def tiny_mixed(gpus: int) -> ConfigDict:
    """Signs and scenes in one run; each prompt asks for the reward that fits it."""
    config = tiny_geneval(gpus)
    config.dataset = "dataset/ocr:0.5,dataset/scenes:0.5"
    config.reward_fn = ConfigDict({"ocr": 1.0, "geneval": 1.0})
    config.nft.kl_beta = 0.1
    return config


TINY = (
    *(tiny_ocr, tiny_grpo_guard, tiny_dppo, tiny_mix),
    *(tiny_nft, tiny_awm, tiny_dgpo, tiny_dpo, tiny_sft, tiny_rwr),
    *(tiny_geneval, tiny_mixed),
)
