"""Qwen3.5: three layers of four have linear attention, which keeps what came before in a state."""

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache

from flow_grpo.answer.models.qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    """Each answer is trained in a row of its own: in one that they share, the state would carry
    every answer into the next."""

    names = {"qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5"}  # noqa: RUF012
    layers = f"({Qwen3VL.layers}|.*language_model.*\\.(in_proj_(qkv|z|b|a)|out_proj))"
    shares_prompt = False
    vllm_scratch = ""

    def mask(self, attention: Tensor | BlockMask, there: Tensor) -> dict[str, Any]:
        """By the kind of layer: padding is nothing to a state."""
        return {"full_attention": attention, "linear_attention": there}

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)
