"""ImageReward (arXiv 2304.05977): human preference for an image given its prompt, about -2 to 2."""

import re
from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn
from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

from flow_grpo.rewards.frozen_model import SCORE, ModelScorer, Values
from flow_grpo.rewards.loading import (
    Weights,
    build_linear_head,
    explain_load_errors,
    find_file,
    image_processor_class,
    load_network,
    load_tokenizer,
    load_weights_file,
)

KIND = "an ImageReward checkpoint"
FILES = ("ImageReward.pt", "ImageReward.safetensors")
EXTRA_TOKENS = ("[DEC]", "[ENC]")  # added by BLIP to BERT's vocabulary
MAX_LENGTH = 35  # tokens of the prompt
ATTENTION_HEAD_DIM = 64  # in both towers
# Of the training set, where rewards are normalized to mean 0 and standard deviation 1.
MEAN, STD = 0.16717362830052426, 1.0333394966054072
VISION = "blip.visual_encoder."
TEXT = "blip.text_encoder."
HEAD = "mlp."
# The image tower has timm's weight names; these are transformers'.
VISION_NAMES = (
    (r"cls_token", "embeddings.class_embedding"),
    (r"pos_embed", "embeddings.position_embedding"),
    (r"patch_embed\.proj", "embeddings.patch_embedding"),
    (r"blocks\.(\d+)\.norm(\d)", r"encoder.layers.\1.layer_norm\2"),
    (r"blocks\.(\d+)\.attn\.qkv", r"encoder.layers.\1.self_attn.qkv"),
    (r"blocks\.(\d+)\.attn\.proj", r"encoder.layers.\1.self_attn.projection"),
    (r"blocks\.(\d+)\.mlp", r"encoder.layers.\1.mlp"),
    (r"norm", "post_layernorm"),
)


class BlipReward(nn.Module):
    """BLIP's text encoder with cross-attention to the image, and a head on its first token."""

    def __init__(self, vision: nn.Module, text: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.head = head

    def forward(self, pixels: torch.Tensor, **tokens: torch.Tensor) -> torch.Tensor:
        """Return scores (N,) of preprocessed pixels (N, 3, H, W) and tokenized prompts (N, L)."""
        image = self.vision(pixel_values=pixels).last_hidden_state
        # bidirectional: each token attends to the whole prompt
        text = self.text(**tokens, encoder_hidden_states=image, is_decoder=False).last_hidden_state
        return self.head(text[:, 0].float()).squeeze(-1)  # (N,)


@dataclass(kw_only=True, eq=False)
class ImageReward(ModelScorer):
    """ImageReward (arXiv 2304.05977): a BLIP reward, normalized on its training set."""

    model: str = "THUDM/ImageReward"
    processor: str = "bert-base-uncased"  # model with the tokenizer, which the checkpoint lacks

    def load(self) -> nn.Module:
        """Build BLIP and its head from the published checkpoint, and load the tokenizer."""
        file = find_file(self.model, FILES, option="model", kind=KIND)
        with explain_load_errors("model", self.model, KIND):
            weights = load_weights_file(file)
            vision, vision_config = convert_vision_tower(_select_prefix(VISION, weights))
            text_weights = _select_prefix(TEXT, weights)
            text, text_config = convert_text_tower(text_weights, vision_config.hidden_size)
            head = build_linear_head(_select_prefix(HEAD, weights), text_config.hidden_size)
        self.tokenizer = load_tokenizer(
            self.processor,
            option="processor",
            tokens=text_config.vocab_size,
            extra=EXTRA_TOKENS,
        )
        self.max_length = MAX_LENGTH
        size = vision_config.image_size
        self.image_processor = image_processor_class()(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        )
        shared = {"source": self.model, "dtype": self.torch_dtype, "kind": KIND}
        vision = load_network(BlipVisionModel, weights=vision, config=vision_config, **shared)
        options = {"config": text_config, "add_pooling_layer": False}
        text = load_network(BlipTextModel, weights=text, **options, **shared)
        return BlipReward(vision, text, head)

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        rewards = self.network(self.preprocess(images), **self.tokenize(prompts))
        return {SCORE: (rewards - MEAN) / STD}


def convert_vision_tower(weights: Weights) -> tuple[Weights, BlipVisionConfig]:
    """Return the ViT weights under transformers' names, and a config inferred from their shapes."""
    width, _, patch, _ = weights["patch_embed.proj.weight"].shape
    side = round((weights["pos_embed"].shape[1] - 1) ** 0.5)  # one position is the class token
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_count_layers(weights, "blocks"),
        num_attention_heads=width // ATTENTION_HEAD_DIM,
        image_size=side * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    return {_vision_name(name): value for name, value in weights.items()}, config


def convert_text_tower(weights: Weights, image_width: int) -> tuple[Weights, BlipTextConfig]:
    """Return the weights, already under transformers' names, and a config from their shapes."""
    tokens, width = weights["embeddings.word_embeddings.weight"].shape
    config = BlipTextConfig(
        vocab_size=tokens,
        hidden_size=width,
        encoder_hidden_size=image_width,
        intermediate_size=weights["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_count_layers(weights, "encoder.layer"),
        num_attention_heads=width // ATTENTION_HEAD_DIM,
        max_position_embeddings=weights["embeddings.position_embeddings.weight"].shape[0],
        pad_token_id=0,
    )
    return {k: v for k, v in weights.items() if not k.endswith("position_ids")}, config


def _select_prefix(prefix: str, weights: Weights) -> Weights:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _count_layers(weights: Weights, prefix: str) -> int:
    number = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    return 1 + max(int(match[1]) for match in map(number.match, weights) if match)


def _vision_name(name: str) -> str:
    """Return transformers' name of a ViT weight; raise ValueError for an unknown one."""
    for pattern, replacement in VISION_NAMES:
        renamed, found = re.subn(f"^{pattern}", replacement, name)
        if found:
            return renamed
    raise ValueError(f"{VISION}{name} is not a weight of a ViT")
