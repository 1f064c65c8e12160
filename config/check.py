"""Hold a config against the rules that no single field can state, before anything is loaded."""

import importlib.util

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS
from flow_grpo.errors import UserError
from flow_grpo.objectives import KLS
from flow_grpo.sde import KINDS

CHOICES = {
    "sample.sde_type": [kind for kind in KINDS if kind != "ode"],
    "train.kl_type": list(KLS),
    # remax needs a deterministic sample per prompt, which the loop does not draw
    "train.advantage": [estimator for estimator in ESTIMATORS if estimator != "remax"],
    "mixed_precision": ["no", "bf16", "fp16"],
    "device": ["auto", "cpu"],
    "log_with": ["", "wandb", "tensorboard"],
}
AT_LEAST = {
    "seed": 0,
    "num_epochs": 1,
    "eval_freq": 0,
    "save_freq": 0,
    "state_freq": 1,
    "distributed_timeout": 1,
    "num_checkpoint_limit": 0,
    "log_images": 0,
    "eval_prompts": 0,
    "reward_retries": 0,
    "max_failed_fraction": 0,
    "max_sequence_length": 1,
    "sample.eval_num_steps": 1,
    "sample.test_batch_size": 1,
    "sample.guidance_scale": 0,
    "train.beta": 0,
    "train.ema_update_interval": 1,
    "train.lora_rank": 1,
}
ABOVE_ZERO = [
    "reward_timeout",
    "sample.noise_level",
    *(f"train.{name}" for name in ("learning_rate", "adv_clip_max", "max_grad_norm")),
    *(f"train.{name}" for name in ("clip_range", "clip_range_low", "clip_range_high")),
    *(f"train.{name}" for name in ("adam_epsilon", "lora_alpha")),
]
BELOW_ONE = ["train.ema_decay", "train.adam_beta1", "train.adam_beta2"]


def check(config: ConfigDict) -> None:
    values = config.to_dict()

    def field(name: str):
        section, _, key = name.rpartition(".")
        return values[section][key] if section else values[key]

    for name, allowed in CHOICES.items():
        if field(name) not in allowed:
            known = ", ".join(map(repr, allowed))
            raise UserError(f"{name}={field(name)!r} must be one of {known}")
    for name, least in AT_LEAST.items():
        if field(name) < least:
            raise UserError(f"{name}={field(name)} must be at least {least}")
    for name in ABOVE_ZERO:
        if field(name) is not None and field(name) <= 0:
            raise UserError(f"{name}={field(name)} must be above 0")
    for name in BELOW_ONE:
        if not 0 <= field(name) < 1:
            raise UserError(f"{name}={field(name)} must be at least 0 and below 1")
    if config.log_with and importlib.util.find_spec(config.log_with) is None:
        # accelerate would go on without a word
        raise UserError(f"log_with={config.log_with!r} needs: pip install {config.log_with}")
    if config.sample.sde_type == "cps" and config.sample.noise_level > 1:
        raise UserError(
            f"sample.noise_level={config.sample.noise_level} must be at most 1 for sde_type='cps'"
        )
    if config.sample.merge_lora and not config.use_lora:
        raise UserError("sample.merge_lora=True needs use_lora=True")
    if config.sample.guidance_scale > 1 and not config.train.cfg:
        raise UserError(
            f"train.cfg=False with sample.guidance_scale={config.sample.guidance_scale} would "
            "train another velocity than was sampled; set guidance_scale=1 or train.cfg=True"
        )
