"""Aesthetic Predictor V2.5: linear layers on SigLIP's image embedding, about 1 to 10.

The formula is that of discus0434/aesthetic-predictor-v2-5, src/aesthetic_predictor_v2_5/
siglip_v2_5.py (3125a9e); neither its code nor its weights are included.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import SiglipImageProcessorPil, SiglipModel

from flow_grpo.errors import UserError
from flow_grpo.rewards.frozen_model import SCORE, ModelScorer, Values
from flow_grpo.rewards.loading import (
    build_linear_head,
    explain_load_errors,
    find_file,
    load_network,
    load_weights_file,
)

KIND = "a SigLIP model"
HEAD_KIND = "a head of Aesthetic Predictor V2.5"
HEAD_FILES = ("aesthetic_predictor_v2_5.pth", "aesthetic_predictor_v2_5.safetensors")
REPOSITORY = "github.com/discus0434/aesthetic-predictor-v2-5"


class SiglipAesthetic(nn.Module):
    """SigLIP's image tower followed by a head in float32."""

    def __init__(self, tower: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.head = head

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return scores (N,) of preprocessed pixels (N, 3, H, W)."""
        embedding = self.tower(pixel_values=pixels).pooler_output.float()
        return self.head(F.normalize(embedding, dim=-1)).squeeze(-1)


@dataclass(kw_only=True, eq=False)
class AestheticV25(ModelScorer):
    """Aesthetic Predictor V2.5; it ignores the prompt. Scores of at least 5.5 are high."""

    model: str = "google/siglip-so400m-patch14-384"
    head: str = ""  # local file, which its authors publish on GitHub only

    def load(self) -> nn.Module:
        """Load SigLIP's image tower and the head."""
        if not self.head:
            raise UserError(
                f"needs the weights of the head, {HEAD_FILES[0]} of {REPOSITORY}",
                field="head",
                value=self.head,
                hint="download the file and set head=PATH",
            )
        file = find_file(self.head, HEAD_FILES, option="head", kind=HEAD_KIND)
        network = load_network(SiglipModel, self.model, dtype=self.torch_dtype, kind=KIND)
        with explain_load_errors("model", self.model, "an image processor"):
            self.image_processor = SiglipImageProcessorPil.from_pretrained(self.model)
        width = network.config.vision_config.hidden_size
        with explain_load_errors("head", self.head, HEAD_KIND):
            head = build_linear_head(load_weights_file(file), width)
        return SiglipAesthetic(network.vision_model, head)

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        return {SCORE: self.network(self.preprocess(images))}
