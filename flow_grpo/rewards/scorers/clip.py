"""Rewards of a CLIP model: the similarity of image and prompt, and LAION's aesthetic predictor."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import CLIPConfig, CLIPModel

from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import (
    SCORE,
    ModelScorer,
    Values,
    Weights,
    explained,
    find_file,
    linear_head,
    load_image_processor,
    load_network,
    load_tokenizer,
    read_weights,
)

# open_clip keeps the image tower under "visual." and the text tower at the top.
RENAMED = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # transformers' spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
# Here x @ matrix, there a linear layer, which keeps its matrix transposed.
TRANSPOSED = {
    "text_projection": "text_projection.weight",
    "visual.proj": "visual_projection.weight",
}
LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)")
PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def from_open_clip(weights: Weights) -> Weights:
    converted = {new: weights[old] for old, new in RENAMED.items()}
    converted |= {new: weights[old].T.contiguous() for old, new in TRANSPOSED.items()}
    for name, value in weights.items():
        match = LAYER.fullmatch(name)
        if not match:
            continue
        visual, number, part, kind = match.groups()
        tower = "vision_model" if visual else "text_model"
        layer = f"{tower}.encoder.layers.{number}"
        if part == "attn.in_proj":  # queries, keys and values in one matrix
            for letter, piece in zip("qkv", value.chunk(3), strict=True):
                converted[f"{layer}.self_attn.{letter}_proj.{kind}"] = piece.contiguous()
        else:
            converted[f"{layer}.{PARTS[part]}.{kind}"] = value
    return converted


KIND = "a CLIP model"
VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
# Flow-GRPO divides the logits by these, which brings good images near 1.
PICKSCORE_SCALE = 26
CLIPSCORE_SCALE = 30
HPS_REPOSITORY = "xswu/HPSv2"
HPS_FILES = {"v2.1": "HPS_v2.1_compressed", "v2.0": "HPS_v2_compressed"}
# TRL's copy of improved-aesthetic-predictor's sac+logos+ava1-l14-linearMSE.pth
HEAD_REPOSITORY = "trl-lib/ddpo-aesthetic-predictor"
HEAD_NAMES = (
    "aesthetic-model.pth",
    "sac+logos+ava1-l14-linearMSE.pth",
    "sac+logos+ava1-l14-linearMSE.safetensors",
)


@dataclass(kw_only=True, eq=False)
class ClipSimilarity(ModelScorer):
    """The cosine of image and prompt, and what CLIP multiplies it by."""

    processor: str | None = None  # whose tokenizer and image sizes to use; `model`'s own if None

    def load(self) -> nn.Module:
        # Cast after the scale is taken: in bfloat16 it would be off by one percent.
        network = self.load_clip()
        self.logit_scale = network.logit_scale.float().exp().item()
        source, option = (self.processor, "processor") if self.processor else (self.model, "model")
        text = network.config.text_config
        self.tokenizer = load_tokenizer(source, option=option, tokens=text.vocab_size)
        self.max_length = text.max_position_embeddings
        self.image_processor = load_image_processor(source, option=option)
        return network.to(self.torch_dtype)

    def load_clip(self) -> nn.Module:
        return load_network(CLIPModel, self.model, dtype=torch.float32, kind=KIND)

    def values(self, cosine: torch.Tensor) -> Values:
        """What is made of the cosines (N,) of images and prompts."""
        return {SCORE: cosine}

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        return self.values((self.embed_pictures(images) * self.embed_texts(prompts)).sum(dim=-1))

    def score_pixels(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        self.network.to(self.device)
        embedded = embed_images(self.network, self.processed(pixels))
        return self.values((embedded * self.embed_texts(prompts)).sum(dim=-1))[SCORE]

    def embed_pictures(self, images: list[Image.Image]) -> torch.Tensor:
        return embed_images(self.network, self.pixels(images))

    def embed_texts(self, prompts: list[str]) -> torch.Tensor:
        unique = list(dict.fromkeys(prompts))  # the images of a group share theirs
        text = self.network.text_model(**self.tokens(unique))
        embedding = F.normalize(self.network.text_projection(text.pooler_output).float(), dim=-1)
        return embedding[[unique.index(prompt) for prompt in prompts]]


def embed_images(clip: CLIPModel, pixels: torch.Tensor) -> torch.Tensor:
    """(N, projection_dim) float32, of length 1."""
    image = clip.vision_model(pixel_values=pixels)
    return F.normalize(clip.visual_projection(image.pooler_output).float(), dim=-1)


@dataclass(kw_only=True, eq=False)
class PickScore(ClipSimilarity):
    """PickScore (arXiv 2305.01569), as Flow-GRPO scales it; its own value is `raw`."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = VIT_H

    def values(self, cosine: torch.Tensor) -> Values:
        raw = self.logit_scale * cosine
        return {SCORE: raw / PICKSCORE_SCALE, "raw": raw}


@dataclass(kw_only=True, eq=False)
class ClipScore(ClipSimilarity):
    """CLIP's own logit, as Flow-GRPO scales it, and the plain `cosine`."""

    model: str = "openai/clip-vit-large-patch14"

    def values(self, cosine: torch.Tensor) -> Values:
        return {SCORE: self.logit_scale * cosine / CLIPSCORE_SCALE, "cosine": cosine}


@dataclass(kw_only=True, eq=False)
class HpsV2(ClipSimilarity):
    """Human Preference Score v2 (arXiv 2306.09341): the cosine in a finetuned CLIP.

    `model` is the published checkpoint, which is open_clip's, or a transformers folder.
    `processor` also has the sizes of the network for a checkpoint, which does not tell them all.
    """

    model: str = HPS_REPOSITORY
    processor: str | None = VIT_H
    version: str = "v2.1"

    def load_clip(self) -> nn.Module:
        if self.version not in HPS_FILES:
            raise UserError(f"version={self.version!r} must be one of {', '.join(HPS_FILES)}")
        names = tuple(f"{HPS_FILES[self.version]}.{suffix}" for suffix in ("pt", "safetensors"))
        path = Path(self.model)
        if (path / "config.json").is_file() or not (path.exists() or self.model == HPS_REPOSITORY):
            return super().load_clip()
        if not self.processor:
            raise UserError(f"model={self.model!r} is a checkpoint and needs a processor={VIT_H}")
        kind = "an HPSv2 checkpoint"
        file = find_file(self.model, names, option="model", kind=kind)
        with explained("processor", self.processor, KIND):
            config = CLIPConfig.from_pretrained(self.processor)
        with explained("model", self.model, kind):
            weights = from_open_clip(read_weights(file))
        return load_network(
            CLIPModel, self.model, dtype=torch.float32, kind=kind, weights=weights, config=config
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
    """LAION's predictor, without the prompt: about 1 (ugly) to 10 (beautiful).

    The head was trained on the embeddings of OpenAI's ViT-L/14: no other `model` fits it.
    """

    model: str = "openai/clip-vit-large-patch14"
    processor: str | None = None  # whose image sizes to use; `model`'s own if None
    head: str = HEAD_REPOSITORY  # or a local .pth or .safetensors file of linear layers

    def load(self) -> nn.Module:
        clip = load_network(CLIPModel, self.model, dtype=self.torch_dtype, kind=KIND)
        del clip.text_model  # more than a quarter of the memory, for nothing
        source, option = (self.processor, "processor") if self.processor else (self.model, "model")
        self.image_processor = load_image_processor(source, option=option)
        kind = "an aesthetic head"
        file = find_file(self.head, HEAD_NAMES, option="head", kind=kind)
        with explained("head", self.head, kind):
            head = linear_head(read_weights(file), clip.config.projection_dim)
        return AestheticNetwork(clip, head)

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        return {SCORE: self.network(self.pixels(images))}

    def score_pixels(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        return self.network.to(self.device)(self.processed(pixels))
