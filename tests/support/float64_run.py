"""Runs of the trainer in float64, so that equivalent runs agree to the last digits.

    torchrun --nproc_per_node 2 tests/support/float64_run.py \\
        '[{"logdir": ..., "sample.train_batch_size": 6}]'

In float32 the order of a sum changes the last bits, and Adam amplifies such differences where a
gradient is close to zero. The reward is smooth, because a pixel may be rounded differently.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ml_collections import ConfigDict
from train import train
from untrained import small

from flow_grpo.diffusion import evaluation, results
from flow_grpo.diffusion.builders import image_size
from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.models import ADAPTERS, ModelAdapter
from flow_grpo.diffusion.session import build_session

FIELDS = {
    "device": "cpu",
    "run_name": "run",
    "resolution": 16,
    "max_sequence_length": 4,
    "eval_freq": 0,
    "eval_prompts": 1,
    "log_images": 0,
    "num_checkpoint_limit": 0,
    "sample.num_steps": 3,
    "sample.eval_num_steps": 2,
    "sample.guidance_scale": 2.0,
    "sample.num_image_per_prompt": 6,
    "train.learning_rate": 1e-3,
    "train.ema_update_interval": 1,
}


def load(family: str, config: ConfigDict) -> ModelAdapter:
    settings = {"qk_norm": None} if family == "sd3" else {}  # diffusers' RMSNorm is in float32
    pipeline = small.build(family, **settings)
    adapter = ADAPTERS[type(pipeline).__name__]
    return adapter(
        pipeline,
        dtype=torch.float64,
        max_sequence_length=config.max_sequence_length,
        source_size=image_size(config),
    )


def run(family: str = "sd3", **fields: Any) -> None:
    config = get_config()
    config.update_from_flattened_dict({**FIELDS, **fields})
    config.custom_rewards = ConfigDict({"light": "brightness_reward:score"})
    config.reward_fn = ConfigDict({"light": 1.0})
    session = build_session(config, load=lambda config, accelerator: load(family, config))
    try:
        train(session)
    finally:
        session.close()


def record_conversions(module: Any, name: str, counts: list[int]) -> None:
    """Append the number of logged images to `counts` whenever the module converts some to PIL."""
    convert: Callable = getattr(module, name)
    setattr(module, name, lambda images: counts.append(len(images)) or convert(images))


if __name__ == "__main__":
    counts: list[int] = []
    record_conversions(evaluation, "uint8_to_pil", counts)
    record_conversions(results, "to_pil", counts)
    for fields in json.loads(sys.argv[1]):
        counts.clear()
        run(**fields)
        path = Path(fields["logdir"], fields["run_name"], f"converted-{os.environ['RANK']}.json")
        path.write_text(json.dumps(counts))
