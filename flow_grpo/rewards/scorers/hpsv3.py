"""HPSv3 (arXiv 2508.03789): human preference for an image given its prompt.

The model is Qwen2-VL-7B with the head 3584-1024-16-2, which returns the mean and the logarithm of
the standard deviation of the preference; the score is the mean (MizzenAI/HPSv3:
hpsv3/model/qwen2vl_trainer.py, hpsv3/inference.py and hpsv3/dataset/data_collator_qwen.py).
"""

from dataclasses import dataclass

from PIL import Image
from torch import nn

from flow_grpo.rewards.frozen_model import SCORE, Values
from flow_grpo.rewards.loading import Weights, build_linear_head
from flow_grpo.rewards.qwen_vl_regression import (
    PROMPT,
    QwenVlRegression,
    read_template,
    select_prefix,
)
from flow_grpo.rewards.qwen_vl_visuals import Visual

TOKENS = 256  # of an image, i.e. 256 * 28 * 28 pixels
OUTPUTS = 2  # mean and logarithm of the standard deviation


@dataclass(kw_only=True, eq=False)
class HpsV3(QwenVlRegression):
    """HPSv3: the predicted mean, about 0 to 15; also logs `sigma`."""

    model: str = "MizzenAI/HPSv3"
    processor: str = "Qwen/Qwen2-VL-7B-Instruct"

    checkpoint = "an HPSv3 checkpoint"
    files = ("HPSv3.safetensors",)
    template = read_template("hpsv3")

    def build_head(self, weights: Weights, width: int) -> nn.Module:
        return build_linear_head(select_prefix("rm_head.", weights), width, OUTPUTS, nn.ReLU)

    def prepare_sample(self, sample: Image.Image, row: dict) -> list[Visual]:
        return [self.patcher.image(sample, TOKENS)]

    def score_batch(self, visuals: list[list[Visual]], prompts: list[str]) -> Values:
        texts = [self.template.replace(PROMPT, prompt) for prompt in prompts]
        states = self.reward_states(texts, visuals, self.encode_visuals(visuals))
        outputs = self.network.head(states[:, 0])  # (N, 2)
        return {SCORE: outputs[:, 0], "sigma": outputs[:, 1].exp()}
