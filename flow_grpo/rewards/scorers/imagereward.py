"""ImageReward (arXiv 2304.05977): how people would like an image for its prompt, about -2 to 2."""

import re
from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn
from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

from flow_grpo.rewards.loading import (
    SCORE,
    ModelScorer,
    Values,
    Weights,
    explained,
    find_file,
    image_processor_class,
    linear_head,
    load_network,
    load_tokenizer,
    read_weights,
)

KIND = "an ImageReward checkpoint"
FILES = ("ImageReward.pt", "ImageReward.safetensors")
EXTRA_TOKENS = ("[DEC]", "[ENC]")  # BLIP's, behind BERT's own
MAX_LENGTH = 35  # tokens of the prompt
HEAD_WIDTH = 64  # of each attention head, in both towers
# Of the training set: rewards have mean 0 and deviation 1 there.
MEAN, STD = 0.16717362830052426, 1.0333394966054072
VISION = "blip.visual_encoder."
TEXT = "blip.text_encoder."
HEAD = "mlp."
# The image tower is timm's, and its weights have other names in transformers.
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
    """The text encoder reads the prompt while it looks at the image; the head judges."""

    def __init__(self, vision: nn.Module, text: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.head = head

    def forward(self, pixels: torch.Tensor, **tokens: torch.Tensor) -> torch.Tensor:
        image = self.vision(pixel_values=pixels).last_hidden_state
        # without a decoder each token sees the whole prompt
        text = self.text(**tokens, encoder_hidden_states=image, is_decoder=False).last_hidden_state
        return self.head(text[:, 0].float()).squeeze(-1)  # (N,)


@dataclass(kw_only=True, eq=False)
class ImageReward(ModelScorer):
    model: str = "THUDM/ImageReward"
    processor: str = "bert-base-uncased"  # the tokenizer, which the checkpoint comes without

    def load(self) -> nn.Module:
        file = find_file(self.model, FILES, option="model", kind=KIND)
        with explained("model", self.model, KIND):
            weights = read_weights(file)
            vision, vision_config = vision_tower(_under(VISION, weights))
            text, text_config = text_tower(_under(TEXT, weights), vision_config.hidden_size)
            head = linear_head(_under(HEAD, weights), text_config.hidden_size)
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
        return BlipReward(
            vision, load_network(BlipTextModel, weights=text, **options, **shared), head
        )

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        judged = self.network(self.pixels(images), **self.tokens(prompts))
        return {SCORE: (judged - MEAN) / STD}


def vision_tower(weights: Weights) -> tuple[Weights, BlipVisionConfig]:
    """The weights under transformers' names, and the sizes that they have."""
    width, _, patch, _ = weights["patch_embed.proj.weight"].shape
    side = round((weights["pos_embed"].shape[1] - 1) ** 0.5)  # one position is the class token's
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(weights, "blocks"),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=side * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    return {_vision_name(name): value for name, value in weights.items()}, config


def text_tower(weights: Weights, image_width: int) -> tuple[Weights, BlipTextConfig]:
    """The weights, whose names are transformers', and the sizes that they have."""
    tokens, width = weights["embeddings.word_embeddings.weight"].shape
    config = BlipTextConfig(
        vocab_size=tokens,
        hidden_size=width,
        encoder_hidden_size=image_width,
        intermediate_size=weights["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(weights, "encoder.layer"),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=weights["embeddings.position_embeddings.weight"].shape[0],
        pad_token_id=0,
    )
    return {k: v for k, v in weights.items() if not k.endswith("position_ids")}, config


def _under(prefix: str, weights: Weights) -> Weights:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _layers(weights: Weights, prefix: str) -> int:
    number = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    return 1 + max(int(match[1]) for match in map(number.match, weights) if match)


def _vision_name(name: str) -> str:
    for pattern, replacement in VISION_NAMES:
        renamed, found = re.subn(f"^{pattern}", replacement, name)
        if found:
            return renamed
    raise ValueError(f"{VISION}{name} is no weight of a ViT")
