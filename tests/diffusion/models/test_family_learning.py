"""Kinds of model families learn with a forward-process algorithm, and SD3 also with GRPO.

All weights of a small random pipeline are trained for images that compress well with JPEG, at a
learning rate that only suits random weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, Family, save_images, save_small_pipeline
from sessions import short_config
from train import train

from flow_grpo.diffusion.presets import set_batches_per_gpu
from flow_grpo.diffusion.session import build_session

METHODS = {
    "grpo": {"train.clip_range": 0.05},
    "nft": {"nft.times": 3, "nft.kl_beta": 0.0, "nft.old_max_decay": 0.0},
}


def save_texts(folder: Path, sources: int) -> Path:
    """Write 16 prompts per split with this number of source images."""
    folder.mkdir()
    for split in ("train", "test"):
        texts = [f"{split} text number {i}" for i in range(16)]
        rows = [{"prompt": t, "images": save_images(folder, t, sources)} for t in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def held_out_rewards(family: Family, method: str, tmp: Path) -> list:
    """Return the reward of 16 prompts before and after training."""
    config = short_config(tmp, "run")
    set_batches_per_gpu(config, gpus=1, groups=8, group_size=8, max_batch=64, updates=1)
    config.update_from_flattened_dict(
        {
            "pretrained.model": str(save_small_pipeline(family, tmp / "model")),
            # without source images, as one would replace a video of one frame
            "dataset": str(
                save_texts(tmp / "dataset", 0 if family.image_pipeline else family.num_sources)
            ),
            "height": 32,
            "width": 32,
            "max_sequence_length": 32,
            "use_lora": False,
            "seed": 1,
            "num_epochs": 6,
            "eval_freq": 0,
            "log_images": 16,
            "algorithm": method,
            "sample.eval_num_steps": 3,
            "sample.guidance_scale": family.unguided_scale,
            "train.ema": False,
            "train.learning_rate": 0.02,
            "train.adam_epsilon": 1e-12,  # gradients of random weights are tiny
            **METHODS[method],
        }
    )
    session = build_session(config)
    train(session)
    session.close()
    return [
        [json.loads(line)["avg"] for line in path.open()]
        for path in sorted(session.folder.glob("samples/eval-*/samples.jsonl"))
    ]


# One family of each kind: images, packed images, editing, two experts, video.
LEARNERS = ("sd3", "flux", "qwen_image_edit", "wan22_a14b", "wan")
TRAINED = [family for family in FAMILIES if family.name in LEARNERS]
ROWS = [(f, m) for f in TRAINED for m in METHODS if f.name == "sd3" or m == "nft"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), ROWS, ids=str)
def test_rewards_rise(family, method, tmp_path):
    before, after = held_out_rewards(family, method, tmp_path)
    change = np.subtract(after, before)
    assert change.mean() > 3 * change.std(ddof=1) / len(change) ** 0.5
