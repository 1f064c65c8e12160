"""What can be made of a preset: other methods, fewer trained steps."""

from ml_collections import ConfigDict

from flow_grpo.run.presets.common import without_grpo


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
    without_grpo(config)


def mix(config: ConfigDict) -> None:
    config.algorithm = "mix"
    config.sample.num_steps = 25
    config.sample.same_latent = True
    config.mix.beta = config.grpo.beta
    without_grpo(config)


def _forward(config: ConfigDict, algorithm: str) -> None:
    """No guidance in the rollouts: the weights learn what it would add."""
    config.algorithm = algorithm
    config.sample.guidance_scale = 1.0
    config.sample.solver = "dpm2"
    without_grpo(config)


def nft(config: ConfigDict) -> None:
    _forward(config, "nft")
    config.nft.beta = 0.1 if "ocr" in config.reward_fn else 1.0


def awm(config: ConfigDict) -> None:
    _forward(config, "awm")
    _one_update(config)


def dgpo(config: ConfigDict) -> None:
    _forward(config, "dgpo")


def _one_update(config: ConfigDict) -> None:
    """Per epoch, in place of two."""
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch


VARIANTS = (fast, fast_nocfg, guard, mix, nft, awm, dgpo)
