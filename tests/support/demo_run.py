"""A trained run for the demo, and rewards that return no score or block."""

import os
import re
import time
from pathlib import Path

import torch
from policies import make_policy
from sessions import short_config

from flow_grpo.diffusion.models import load_adapter
from flow_grpo.rewards.failure import NotApplicable

# HTML that would be executed if it were not escaped, both quotes, an emoji, and a long text
HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=2</script> 'a' 😀"
LONG = f"{HOSTILE} {'very ' * 400}"[:2000].strip()


class Words:
    """Reward that applies only to prompts with a word in double quotes."""

    def skip_reason(self, prompt: str, metadata: dict) -> str | None:
        return None if re.search('"[A-Z]+"', prompt) else "it has no word in double quotes"

    def __call__(self, images, prompts, metadata):
        return [NotApplicable() if self.skip_reason(p, {}) else 0.5 for p in prompts]


def broken(images, prompts, metadata):
    raise ValueError("no <b>luck</b>\nat all")


def gated(images, prompts, metadata):
    """Block while the file $GATE exists."""
    while os.path.exists(os.environ.get("GATE", "")):
        time.sleep(0.05)
    return [1.0] * len(images)


REWARDS = {"jpeg_compressibility": 1.0, "words": 1.0, "broken": 1.0}
CUSTOM = {"words": "demo_run:Words", "broken": "demo_run:broken", "gated": "demo_run:gated"}


def make_trained_run(model: Path, folder: Path, *, steps: tuple[int, ...] = (8,), **fields) -> Path:
    """Write a run directory: a config, and checkpoints with random LoRA weights at `steps`."""
    config = short_config(folder.parent, folder.name)
    config.pretrained.model, config.max_sequence_length = str(model), 8
    config.update_from_flattened_dict(
        {"height": 32, "width": 32, "sample.eval_num_steps": 2, **fields}
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json_best_effort())
    policy = make_policy(load_adapter(str(model), max_sequence_length=8), rank=2)
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        for parameter in policy.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        checkpoint = folder / "checkpoints" / f"checkpoint-{step}"
        policy.save(checkpoint)
        (checkpoint / "lora").rename(checkpoint / "ema_lora")
        policy.save(checkpoint)
    (folder / "checkpoints/best").symlink_to(f"checkpoint-{steps[0]}")
    return folder
