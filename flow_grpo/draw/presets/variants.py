"""What can be made of a preset: other methods, fewer trained steps. docs/published.toml has where
each value comes from; where nothing was published for CLIPScore, it takes PickScore's."""

from ml_collections import ConfigDict

from flow_grpo.draw.presets.common import per_gpu_batches, without_grpo


def _task(config: ConfigDict) -> str:
    """ "ocr", "geneval", or "preference" for PickScore and CLIPScore."""
    [reward] = config.reward_fn
    return reward if reward in ("ocr", "geneval") else "preference"


def fast(config: ConfigDict, gpus: int) -> None:
    """Noise and training on two steps only, after which a group goes separate ways."""
    per_gpu_batches(config, gpus=gpus, groups=64, group_size=18, max_batch=9)
    config.sample.same_latent = True
    config.sample.noise_level = 0.8
    config.sample.sde_window_size, config.sample.sde_window_range = 2, (0, 7)
    config.train.clip_range, config.train.beta = 1e-5, 0.0


def fast_nocfg(config: ConfigDict, gpus: int) -> None:
    """Flow-GRPO-Fast without guidance, and so at a quarter of the cost."""
    if _task(config) == "preference":
        per_gpu_batches(config, gpus=gpus, groups=64, group_size=18, max_batch=9)
    config.sample.same_latent = False
    config.sample.guidance_scale = 1.0
    config.sample.sde_type, config.sample.noise_level = "cps", 0.8
    config.sample.sde_window_size, config.sample.sde_window_range = 3, (0, 5)
    config.train.clip_range, config.train.beta = 1e-5, 0.0


def guard(config: ConfigDict, gpus: int) -> None:
    config.algorithm = "grpo_guard"
    config.grpo_guard.clip_range = 4e-6 if _task(config) == "preference" else 2e-6
    config.train.learning_rate = 1e-4
    config.sample.global_std = config.sample.same_latent = False
    without_grpo(config)


def mix(config: ConfigDict, gpus: int) -> None:
    config.algorithm = "mix"
    config.sample.num_steps = 25
    config.sample.same_latent = True
    config.mix.beta = 0.0
    without_grpo(config)


def _forward(config: ConfigDict, algorithm: str) -> None:
    config.algorithm = algorithm
    config.sample.solver = "dpm2"
    config.sample.same_latent = False
    without_grpo(config)


def nft(config: ConfigDict, gpus: int) -> None:
    """No guidance: the weights learn what it would add."""
    _forward(config, "nft")
    config.sample.guidance_scale = 1.0
    config.train.ema_update_interval = 1
    if _task(config) == "ocr":
        config.nft.beta = 0.1
        config.nft.old_rate, config.nft.old_start, config.nft.old_most = 0.0075, 75, 0.999
    else:
        per_gpu_batches(config, gpus=gpus, groups=48, group_size=24, max_batch=9, updates=1)


def awm(config: ConfigDict, gpus: int) -> None:
    """No guidance: the weights learn what it would add."""
    _forward(config, "awm")
    task = _task(config)
    config.sample.guidance_scale = 1.0
    config.sample.num_steps = 14
    config.train.ema_decay, config.train.ema_update_interval = 0.99, 1
    config.awm.kl_beta = {"ocr": 0.003, "geneval": 0.001, "preference": 0.0001}[task]
    config.awm.skip_first, config.awm.skip_last = int(task != "preference"), 2
    groups = 24 if task == "preference" else 72
    per_gpu_batches(config, gpus=gpus, groups=groups, group_size=24, max_batch=9, updates=1)


def dgpo(config: ConfigDict, gpus: int) -> None:
    """Guided rollouts, and training without guidance, which is the authors' choice."""
    _forward(config, "dgpo")
    task = _task(config)
    config.mixed_precision = "bf16"
    config.sample.eval_num_steps = 14
    config.sample.global_std = task != "geneval"
    config.train.lora_rank, config.train.lora_alpha = 64, 128
    config.dgpo.train_guidance = 1.0
    config.dgpo.times, config.dgpo.skip_last = 4, 5 if task == "geneval" else 3
    config.dgpo.old_after = 500 if task == "geneval" else 200
    if task == "preference":
        config.dgpo.beta, config.dgpo.kl_beta, config.dgpo.clip_range = 10.0, 0.001, 5e-2
    size = 24 if task == "preference" else 16
    per_gpu_batches(config, gpus=gpus, groups=8, group_size=size, max_batch=12, updates=1)


def dgpo_nocfg(config: ConfigDict, gpus: int) -> None:
    """Guidance of the reference alone: without it, it would hold back what replaces guidance."""
    dgpo(config, gpus)
    config.sample.guidance_scale, config.sample.eval_num_steps = 1.0, 10
    config.dgpo.kl_guidance, config.dgpo.clip_range = 4.5, 1e-3


VARIANTS = (fast, fast_nocfg, guard, mix, nft, awm, dgpo, dgpo_nocfg)
