"""LAION's aesthetic predictor, without the prompt: about 1 (ugly) to 10 (beautiful)."""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn
from transformers import CLIPModel

from flow_grpo.rewards.loading import (
    explained,
    find_file,
    image_processor_class,
    linear_head,
    load_network,
    read_weights,
)
from flow_grpo.rewards.scorers.clip import KIND, embed_images
from flow_grpo.rewards.scorers.model import SCORE, ModelScorer

# TRL's copy of improved-aesthetic-predictor's sac+logos+ava1-l14-linearMSE.pth
HEAD_REPOSITORY = "trl-lib/ddpo-aesthetic-predictor"
HEAD_NAMES = (
    "aesthetic-model.pth",
    "sac+logos+ava1-l14-linearMSE.pth",
    "sac+logos+ava1-l14-linearMSE.safetensors",
)


class AestheticNetwork(nn.Module):
    def __init__(self, clip: CLIPModel, head: nn.Module) -> None:
        super().__init__()
        self.clip = clip
        self.head = head

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(embed_images(self.clip, pixels)).squeeze(-1)  # (N,)


@dataclass(kw_only=True, eq=False)
class Aesthetic(ModelScorer):
    """The head was trained on the embeddings of OpenAI's ViT-L/14: no other `model` fits it."""

    model: str = "openai/clip-vit-large-patch14"
    processor: str | None = None  # whose image sizes to use; `model`'s own if None
    head: str = HEAD_REPOSITORY  # or a local .pth or .safetensors file of linear layers

    def load(self) -> nn.Module:
        clip = load_network(CLIPModel, self.model, dtype=self.torch_dtype, kind=KIND)
        del clip.text_model  # more than a quarter of the memory, for nothing
        source, option = (self.processor, "processor") if self.processor else (self.model, "model")
        with explained(option, source, "an image processor"):
            self.image_processor = image_processor_class().from_pretrained(source)
        kind = "an aesthetic head"
        file = find_file(self.head, HEAD_NAMES, option="head", kind=kind)
        with explained("head", self.head, kind):
            head = linear_head(read_weights(file), clip.config.projection_dim)
        return AestheticNetwork(clip, head)

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> dict[str, torch.Tensor]:
        pixels = self.image_processor(images=images, return_tensors="pt")["pixel_values"]
        return {SCORE: self.network(pixels.to(self.device, self.torch_dtype))}
