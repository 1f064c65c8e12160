"""Qwen3.5, in which three of four layers use linear attention with a recurrent state."""

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache

from flow_grpo.vlm.models.base import Family
from flow_grpo.vlm.models.qwen3_vl import Qwen3VL
from flow_grpo.vlm.packing import PADDING_SEGMENT, ModelInputs


class Qwen35Decoder(Family):
    """Base class of the families that use the language model of Qwen3.5.

    Each response is trained in its own row: in a shared row, the recurrent state would carry one
    response into the next.
    """

    axes = 3
    layers = f".*language_model({Family.layers}|.*\\.(in_proj_(qkv|z|b|a)|out_proj))"
    shares_prompt = False

    def attention_mask(self, attention: Tensor | BlockMask, inputs: ModelInputs) -> dict[str, Any]:
        """Return a mask per type of layer; linear attention only needs to skip padding."""
        not_padding = inputs.segments != PADDING_SEGMENT
        return {"full_attention": attention, "linear_attention": not_padding}

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)


class Qwen35(Qwen35Decoder, Qwen3VL):
    """Qwen3.5."""

    names = {"qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5"}  # noqa: RUF012
    vllm_scratch_buffers = ""
