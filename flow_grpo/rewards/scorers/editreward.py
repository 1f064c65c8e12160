"""EditReward (arXiv 2509.26346): human preference for an edited image, its source and instruction.

The model is Qwen2.5-VL-7B, or MiMo-VL-7B of the same architecture. It is called twice, with the
criteria of instruction following and of visual quality; each has its own head, of the shape of
HPSv3's. The score is the mean of the two (TIGER-AI-Lab/EditReward:
EditReward/model/qwen2_5_vl_trainer.py, EditReward/inference_edit.py).
"""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn

from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.frozen_model import SCORE, Values
from flow_grpo.rewards.loading import Weights, build_linear_head
from flow_grpo.rewards.protocol import images_in_metadata
from flow_grpo.rewards.qwen_vl_regression import (
    PROMPT,
    QwenVlRegression,
    read_template,
    select_prefix,
)
from flow_grpo.rewards.qwen_vl_visuals import Visual

TOKENS = 256  # of each image
OUTPUTS = 2  # mean and logarithm of the standard deviation
CRITERIA = ("following", "quality")


@dataclass(kw_only=True, eq=False)
class EditReward(QwenVlRegression):
    """EditReward: the mean of instruction following and visual quality, which are logged too.

    It applies to prompts with a source image; of several, the first is used.
    """

    model: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    processor: str = "Qwen/Qwen2.5-VL-7B-Instruct"

    checkpoint = "an EditReward checkpoint"
    files = ("model.safetensors", "model.pth")
    templates = tuple(read_template(f"editreward_{criterion}") for criterion in CRITERIA)

    def build_head(self, weights: Weights, width: int) -> nn.Module:
        return nn.ModuleList(
            build_linear_head(
                select_prefix(f"rm_heads.head_{i}.", weights), width, OUTPUTS, nn.ReLU
            )
            for i in range(len(CRITERIA))
        )

    def prepare_sample(self, sample: Image.Image, row: dict) -> list[Visual] | NotApplicable:
        sources = images_in_metadata(row)
        if not sources:
            return NotApplicable()
        return [self.patcher.image(image, TOKENS) for image in (sources[0], sample)]

    def skip_reason(self, prompt: str, metadata: dict) -> str | None:
        return None if images_in_metadata(metadata) else "it has no source image"

    def score_batch(self, visuals: list[list[Visual]], prompts: list[str]) -> Values:
        features = self.encode_visuals(visuals)
        values = {}
        for criterion, template, head in zip(
            CRITERIA, self.templates, self.network.head, strict=True
        ):
            texts = [template.replace(PROMPT, prompt) for prompt in prompts]
            states = self.reward_states(texts, visuals, features)
            values[criterion] = head(states[:, 0])[:, 0]
        return {SCORE: torch.stack([*values.values()]).mean(dim=0), **values}
