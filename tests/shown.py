"""A run to look at, and rewards whose answers are no scores."""

import os
import re
import time
from pathlib import Path

import torch
from policies import policy_of
from sessions import short_config

from flow_grpo.draw.models import load_adapter
from flow_grpo.rewards.failure import NotAsked

# HTML that would run, both quotes, emoji and a lot of text
HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=2</script> 'a' 😀"
LONG = f"{HOSTILE} {'very ' * 400}"[:2000].strip()


class Words:
    """Asks for a word in double quotes."""

    def why_not(self, prompt: str, metadata: dict) -> str | None:
        return None if re.search('"[A-Z]+"', prompt) else "it has no word in double quotes"

    def __call__(self, images, prompts, metadata):
        return [NotAsked() if self.why_not(p, {}) else 0.5 for p in prompts]


def broken(images, prompts, metadata):
    raise ValueError("no <b>luck</b>\nat all")


def gated(images, prompts, metadata):
    """Takes its time, as long as there is a file of this name."""
    while os.path.exists(os.environ.get("GATE", "")):
        time.sleep(0.05)
    return [1.0] * len(images)


REWARDS = {"jpeg_compressibility": 1.0, "words": 1.0, "broken": 1.0}
CUSTOM = {"words": "shown:Words", "broken": "shown:broken", "gated": "shown:gated"}


def make_run(model: Path, folder: Path, *, steps: tuple[int, ...] = (8,), **fields) -> Path:
    """What training leaves: its config, and LoRA weights that moved away from the model."""
    config = short_config(folder.parent, folder.name)
    config.pretrained.model, config.max_sequence_length = str(model), 8
    config.update_from_flattened_dict(
        {"height": 32, "width": 32, "sample.eval_num_steps": 2, **fields}
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json_best_effort())
    policy = policy_of(load_adapter(str(model), max_sequence_length=8), rank=2)
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        for parameter in policy.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        place = folder / "checkpoints" / f"checkpoint-{step}"
        policy.save(place)
        (place / "lora").rename(place / "ema_lora")
        policy.save(place)
    (folder / "checkpoints/best").symlink_to(f"checkpoint-{steps[0]}")
    return folder
