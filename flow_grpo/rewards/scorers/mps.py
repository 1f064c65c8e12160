"""MPS (CVPR 2024): overall human preference for an image given its prompt.

A CLIP ViT-H/14 encodes the image, the prompt and a condition, which lists the aspects to judge. The
image tokens attend to the prompt tokens that are similar to the condition, in four layers. The
score is the logit of the first image token and the prompt (Kwai-Kolors/MPS be9027f:
trainer/models/clip_model.py:98-132, trainer/models/cross_modeling.py:78-300,
eval_overall_mps_on_hpdv2.py:34-78).
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from flow_grpo.errors import UserError
from flow_grpo.rewards import loading
from flow_grpo.rewards.frozen_model import SCORE, Values
from flow_grpo.rewards.scorers.clip import VIT_H, ClipSimilarity
from flow_grpo.weight_checks import check_finite

KIND = "an MPS checkpoint"
NAME = "MPS_overall_checkpoint"
HEAD_WIDTH, ROTARY_BASE = 64, 10_000
THRESHOLD = 0.3  # of the similarity to the condition, relative to that of the most similar token
CONDITION = (
    "light, color, clarity, tone, style, ambiance, artistry, shape, face, hair, hands, limbs, "
    "structure, instance, texture, quantity, attributes, position, number, location, word, things."
)
CROSS, OWN = "0_fn_", "1_fn_"  # cross-attention to the prompt; self-attention of the image
CROSS_PARTS = ("norm", "to_q", "to_kv", "to_out", "ff_0", "ff_2")
OWN_PARTS = ("norm", "fused_attn_ff_proj", "attn_out", "ff_out_1")
PARTS = {CROSS + part for part in CROSS_PARTS} | {OWN + part for part in OWN_PARTS}


class CrossLayer(nn.Module):
    """Cross-attention to the prompt, then self-attention, each parallel to a SwiGLU layer."""

    def __init__(self, weights: loading.Weights) -> None:
        super().__init__()
        named = {k.removesuffix(".weight").replace(".", "_"): v for k, v in weights.items()}
        self.parts = nn.ParameterDict({name: named[name].float() for name in sorted(PARTS)})

    def forward(self, x: Tensor, prompt: Tensor, attended: Tensor) -> Tensor:
        """Return the image tokens (N, T, D) after this layer.

        Args:
            x: Image tokens (N, T, D).
            prompt: Tokens of the prompts (N, L, D).
            attended: Mask of the prompt tokens to attend to, (N, 1, 1, L) bool.
        """
        y = F.layer_norm(x, x.shape[-1:], self.parts[f"{CROSS}norm"])
        keys, values = self._linear(f"{CROSS}to_kv", prompt).chunk(2, dim=-1)
        mixed = _attend(_split_heads(self._linear(f"{CROSS}to_q", y)), keys, values, attended)
        hidden = _swiglu(self._linear(f"{CROSS}ff_0", y))
        x = x + self._linear(f"{CROSS}to_out", mixed) + self._linear(f"{CROSS}ff_2", hidden)
        y = F.layer_norm(x, x.shape[-1:], self.parts[f"{OWN}norm"])
        fused = self._linear(f"{OWN}fused_attn_ff_proj", y)
        inner = self.parts[f"{OWN}attn_out"].shape[1]
        widths = (inner, HEAD_WIDTH, HEAD_WIDTH, fused.shape[-1] - inner - 2 * HEAD_WIDTH)
        queries, keys, values, hidden = fused.split(widths, dim=-1)
        mixed = _attend(_rotate(_split_heads(queries)), _rotate(keys), values)
        x = x + self._linear(f"{OWN}attn_out", mixed)
        return x + self._linear(f"{OWN}ff_out_1", _swiglu(hidden))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.parts[name])


def _split_heads(queries: Tensor) -> Tensor:
    return queries.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with all heads (N, H, T, W) to the same keys and values (N, L, W)."""
    keys, values = (each[:, None].expand(-1, queries.shape[1], -1, -1) for each in (keys, values))
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return mixed.transpose(1, 2).flatten(2)


def _swiglu(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def _rotate(x: Tensor) -> Tensor:
    """Apply rotary position embeddings to (..., T, W), in float32."""
    half = torch.arange(0, HEAD_WIDTH, 2, device=x.device) / HEAD_WIDTH
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * ROTARY_BASE**-half
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


@dataclass(kw_only=True, eq=False)
class Mps(ClipSimilarity):
    """MPS: the logit of image and prompt under a condition."""

    model: str = ""  # converted checkpoint; its authors publish it only on Google Drive
    processor: str = VIT_H  # model with the config, the tokenizer and the image processor
    condition: str = CONDITION

    def load_clip(self) -> nn.Module:
        """Load CLIP and the cross-attention layers that follow it."""
        if not self.model:
            raise UserError(
                f"needs the weights {NAME}.pth, linked in github.com/Kwai-Kolors/MPS",
                field="model",
                value=self.model,
                hint=f"download and convert them: flow-grpo rewards convert --modules {NAME}.pth "
                f"{NAME}.safetensors, then set model=PATH",
            )
        files = (f"{NAME}.safetensors",)
        file = loading.find_file(self.model, files, option="model", kind=KIND)
        config = loading.load_config(CLIPConfig, self.processor, "a CLIP model", option="processor")
        with loading.explain_load_errors("model", self.model, KIND):
            weights = loading.load_weights_file(file)
            names = (re.match(r"cross_model\.layers\.\d+\.", name) for name in weights)
            prefixes = sorted({match[0] for match in names if match}) or ["cross_model.layers.0."]
            layers = nn.ModuleList(CrossLayer(_select(prefix, weights)) for prefix in prefixes)
        check_finite(f"model={self.model!r}", layers.state_dict().items())
        shared = {"dtype": torch.float32, "kind": KIND, "config": config}
        clip = loading.load_network(
            CLIPModel, self.model, weights=_select("model.", weights), **shared
        )
        clip.cross = layers
        return clip

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        return {SCORE: self._score(self.preprocess(images), prompts)}

    def score_pixels(self, pixels: Tensor, prompts: list[str]) -> Tensor:
        self.network.to(self.device)
        return self._score(self.preprocess_tensor(pixels), prompts)

    def _score(self, pixels: Tensor, prompts: list[str]) -> Tensor:
        """Return the logits (N,) of preprocessed pixels (N, 3, H, W)."""
        clip, unique = self.network, list(dict.fromkeys(prompts))
        # padding tokens are included, as in the authors' code
        text = clip.text_model(self.tokenize([*unique, self.condition])["input_ids"])
        tokens = clip.text_projection(text.last_hidden_state)  # (unique prompts + 1, L, D)
        similar = (tokens[:-1].float() @ tokens[-1].float().T).amax(dim=-1)
        attended = similar / similar.amax(dim=-1, keepdim=True) > THRESHOLD
        rows = [unique.index(prompt) for prompt in prompts]
        image = clip.visual_projection(clip.vision_model(pixel_values=pixels).last_hidden_state)
        for layer in clip.cross:
            image = layer(image, tokens[rows], attended[rows][:, None, None])
        pooled = clip.text_projection(text.pooler_output)[rows]
        return self.logit_scale * F.cosine_similarity(image[:, 0].float(), pooled.float(), dim=-1)


def _select(prefix: str, weights: loading.Weights) -> loading.Weights:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
