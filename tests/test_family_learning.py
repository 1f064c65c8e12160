"""Every model family learns, with GRPO and with a method of the forward process.

A small random pipeline of each is trained for pictures that JPEG makes small: all its weights, at
a rate that only random weights bear.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, Family, save_pictures, save_small
from sessions import short_config
from train import train

from flow_grpo.draw.presets import per_gpu_batches
from flow_grpo.draw.session import build_session

METHODS = {
    "grpo": {"train.clip_range": 0.05},
    "nft": {"nft.times": 3, "nft.kl_beta": 0.0, "nft.old_most": 0.0},
}


def save_texts(folder: Path, sources: int) -> Path:
    """16 of each split, with so many pictures."""
    folder.mkdir()
    for split in ("train", "test"):
        texts = [f"{split} text number {i}" for i in range(16)]
        rows = [{"prompt": t, "images": save_pictures(folder, t, sources)} for t in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def held_out_rewards(family: Family, method: str, tmp: Path) -> list:
    """Of 16 prompts, before and after training."""
    config = short_config(tmp, "run")
    per_gpu_batches(config, gpus=1, groups=8, group_size=8, max_batch=64, updates=1)
    config.update_from_flattened_dict(
        {
            "pretrained.model": str(save_small(family, tmp / "model")),
            # a picture that is given would be all of a clip of one frame
            "dataset": str(
                save_texts(tmp / "dataset", 0 if family.with_pictures else family.sources)
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
            "sample.guidance_scale": family.plain,
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


FIRST = ("sd3", "flux", "qwen_image", "z_image", "wan")  # the others are variants of these
LEARNT = [f for f in FAMILIES if f.with_pictures or not f.alone]
ROWS = [(f, m) for f in LEARNT for m in METHODS if f.name in FIRST or m == "nft"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), ROWS, ids=str)
def test_rewards_rise(family, method, tmp_path):
    before, after = held_out_rewards(family, method, tmp_path)
    change = np.subtract(after, before)
    assert change.mean() > 3 * change.std(ddof=1) / len(change) ** 0.5
