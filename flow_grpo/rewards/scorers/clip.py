"""Rewards computed with CLIP: similarity of image and prompt, and LAION's aesthetic predictor."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import CLIPConfig, CLIPModel

from flow_grpo.errors import UserError
from flow_grpo.rewards.frozen_model import SCORE, ModelScorer, Values
from flow_grpo.rewards.loading import (
    Weights,
    build_linear_head,
    explain_load_errors,
    find_file,
    load_image_processor,
    load_network,
    load_tokenizer,
    load_weights_file,
)
from flow_grpo.rewards.option_checks import check_choice

# open_clip has the image tower under "visual." and the text tower at the top level.
OPEN_CLIP_NAMES = {
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
# A matrix (in, out) in open_clip, the weight (out, in) of a linear layer in transformers.
TRANSPOSED = {
    "text_projection": "text_projection.weight",
    "visual.proj": "visual_projection.weight",
}
LAYER_PATTERN = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)")
LAYER_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def convert_open_clip_weights(weights: Weights) -> Weights:
    """Convert a state dict of open_clip to one of transformers' `CLIPModel`."""
    converted = {new: weights[old] for old, new in OPEN_CLIP_NAMES.items()}
    converted |= {new: weights[old].T.contiguous() for old, new in TRANSPOSED.items()}
    for name, value in weights.items():
        match = LAYER_PATTERN.fullmatch(name)
        if not match:
            continue
        visual, number, part, kind = match.groups()
        tower = "vision_model" if visual else "text_model"
        layer = f"{tower}.encoder.layers.{number}"
        if part == "attn.in_proj":  # queries, keys and values in one matrix
            for letter, piece in zip("qkv", value.chunk(3), strict=True):
                converted[f"{layer}.self_attn.{letter}_proj.{kind}"] = piece.contiguous()
        else:
            converted[f"{layer}.{LAYER_PARTS[part]}.{kind}"] = value
    return converted


KIND = "a CLIP model"
VIT_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
# Flow-GRPO divides the logits by these constants, so that good images score about 1.
PICKSCORE_SCALE = 26
CLIPSCORE_SCALE = 30
HPS_REPOSITORY = "xswu/HPSv2"
HPS_FILES = {"v2.1": "HPS_v2.1_compressed", "v2.0": "HPS_v2_compressed"}
# TRL's copy of improved-aesthetic-predictor's sac+logos+ava1-l14-linearMSE.pth
AESTHETIC_HEAD_REPOSITORY = "trl-lib/ddpo-aesthetic-predictor"
AESTHETIC_HEAD_FILES = (
    "aesthetic-model.pth",
    "sac+logos+ava1-l14-linearMSE.pth",
    "sac+logos+ava1-l14-linearMSE.safetensors",
)


@dataclass(kw_only=True, eq=False)
class ClipSimilarity(ModelScorer):
    """Base of rewards that are functions of the cosine similarity of image and prompt."""

    processor: str | None = None  # model with the tokenizer and image processor; None: `model`

    def load(self) -> nn.Module:
        """Load CLIP, its tokenizer and its image processor; keep the logit scale in float32."""
        # The scale is read before casting: bfloat16 would change it by one percent.
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

    def scores_from_cosine(self, cosine: torch.Tensor) -> Values:
        """Return the reward and extra values, (N,) each, for cosine similarities (N,)."""
        return {SCORE: cosine}

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        embedded = self.embed_pil_images(images)
        return self.scores_from_cosine((embedded * self.embed_texts(prompts)).sum(dim=-1))

    def score_pixels(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        self.network.to(self.device)
        embedded = embed_images(self.network, self.preprocess_tensor(pixels))
        return self.scores_from_cosine((embedded * self.embed_texts(prompts)).sum(dim=-1))[SCORE]

    def embed_pil_images(self, images: list[Image.Image]) -> torch.Tensor:
        """Return unit embeddings (N, projection_dim), float32."""
        return embed_images(self.network, self.preprocess(images))

    def embed_texts(self, prompts: list[str]) -> torch.Tensor:
        """Return unit embeddings (N, projection_dim), float32."""
        unique = list(dict.fromkeys(prompts))  # the images of a group share a prompt
        text = self.network.text_model(**self.tokenize(unique))
        embedding = F.normalize(self.network.text_projection(text.pooler_output).float(), dim=-1)
        return embedding[[unique.index(prompt) for prompt in prompts]]


def embed_images(clip: CLIPModel, pixels: torch.Tensor) -> torch.Tensor:
    """Return unit embeddings (N, projection_dim), float32, of preprocessed pixels."""
    image = clip.vision_model(pixel_values=pixels)
    return F.normalize(clip.visual_projection(image.pooler_output).float(), dim=-1)


@dataclass(kw_only=True, eq=False)
class PickScore(ClipSimilarity):
    """PickScore (arXiv 2305.01569), scaled as in Flow-GRPO; the unscaled value is `raw`."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = VIT_H

    def scores_from_cosine(self, cosine: torch.Tensor) -> Values:
        raw = self.logit_scale * cosine
        return {SCORE: raw / PICKSCORE_SCALE, "raw": raw}


@dataclass(kw_only=True, eq=False)
class ClipScore(ClipSimilarity):
    """CLIP's logit, scaled as in Flow-GRPO; the similarity itself is `cosine`."""

    model: str = "openai/clip-vit-large-patch14"

    def scores_from_cosine(self, cosine: torch.Tensor) -> Values:
        return {SCORE: self.logit_scale * cosine / CLIPSCORE_SCALE, "cosine": cosine}


@dataclass(kw_only=True, eq=False)
class HpsV2(ClipSimilarity):
    """Human Preference Score v2 (arXiv 2306.09341): the cosine similarity of a finetuned CLIP.

    `model` is the published open_clip checkpoint or a transformers folder. A checkpoint has no
    config; that of `processor` is used.
    """

    model: str = HPS_REPOSITORY
    processor: str | None = VIT_H
    version: str = "v2.1"

    def load_clip(self) -> nn.Module:
        """Load a checkpoint of HPSv2 as a `CLIPModel`, or a transformers folder."""
        check_choice("version", self.version, HPS_FILES)
        names = tuple(f"{HPS_FILES[self.version]}.{suffix}" for suffix in ("pt", "safetensors"))
        path = Path(self.model)
        if (path / "config.json").is_file() or not (path.exists() or self.model == HPS_REPOSITORY):
            return super().load_clip()
        if not self.processor:
            raise UserError(
                "is a checkpoint without a config",
                field="model",
                value=self.model,
                hint=f"set processor={VIT_H}",
            )
        kind = "an HPSv2 checkpoint"
        file = find_file(self.model, names, option="model", kind=kind)
        with explain_load_errors("processor", self.processor, KIND):
            config = CLIPConfig.from_pretrained(self.processor)
        with explain_load_errors("model", self.model, kind):
            weights = convert_open_clip_weights(load_weights_file(file))
        return load_network(
            CLIPModel, self.model, dtype=torch.float32, kind=kind, weights=weights, config=config
        )


class AestheticNetwork(nn.Module):
    """CLIP's image tower followed by a head; maps pixels to scores (N,)."""

    def __init__(self, clip: CLIPModel, head: nn.Module) -> None:
        super().__init__()
        self.clip = clip
        self.head = head

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return scores (N,) of preprocessed pixels (N, 3, H, W)."""
        return self.head(embed_images(self.clip, pixels)).squeeze(-1)


@dataclass(kw_only=True, eq=False)
class Aesthetic(ModelScorer):
    """LAION's aesthetic predictor, from about 1 (ugly) to 10 (beautiful); it ignores the prompt.

    The head was trained on the embeddings of OpenAI's ViT-L/14 and fits no other `model`.
    """

    model: str = "openai/clip-vit-large-patch14"
    processor: str | None = None  # model with the image processor; None: `model`
    head: str = AESTHETIC_HEAD_REPOSITORY  # or a local .pth or .safetensors file of linear layers

    def load(self) -> nn.Module:
        """Load CLIP's image tower and the head of the aesthetic predictor."""
        clip = load_network(CLIPModel, self.model, dtype=self.torch_dtype, kind=KIND)
        del clip.text_model  # unused, and more than a quarter of the memory
        source, option = (self.processor, "processor") if self.processor else (self.model, "model")
        self.image_processor = load_image_processor(source, option=option)
        kind = "an aesthetic head"
        file = find_file(self.head, AESTHETIC_HEAD_FILES, option="head", kind=kind)
        with explain_load_errors("head", self.head, kind):
            head = build_linear_head(load_weights_file(file), clip.config.projection_dim)
        return AestheticNetwork(clip, head)

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        return {SCORE: self.network(self.preprocess(images))}

    def score_pixels(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        return self.network.to(self.device)(self.preprocess_tensor(pixels))
