"""Text-only models: Qwen, Llama and other causal language models with a chat template."""

import re
from typing import ClassVar

from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flow_grpo.errors import UserError
from flow_grpo.vlm.models.base import Family

CUSTOM_FAMILY_HINT = "write a custom family for it (custom_models, docs/vlm/models.md)"


class TextModel(Family):
    """A model whose logits are `model.lm_head` of the hidden states of `model.model`.

    `vlm/forward_parity.py` verifies that on the loaded model.
    """

    sliding_window: ClassVar[bool] = False  # whether the family's masks implement it

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        head, name = getattr(model, "lm_head", None), type(model).__name__
        inner = getattr(model, "model", None)
        if (
            not isinstance(inner, nn.Module)
            or not isinstance(head, nn.Linear)
            or head.bias is not None
        ):
            raise UserError(
                f"is a {name}, which is not supported: it needs `model` and a bias-free "
                "`lm_head`, as in Llama",
                field="pretrained.model",
                hint=CUSTOM_FAMILY_HINT,
            )
        if not self.sliding_window:
            reject_sliding_window(model, model.config)

    def lora_targets(self, with_tower: bool) -> str:
        names = (name for name, _ in self.model.named_modules())
        has_usual_names = any(re.fullmatch(self.layers, name) for name in names)
        return self.layers if has_usual_names else "all-linear"


def reject_sliding_window(model: nn.Module, config: PretrainedConfig) -> None:
    """Reject a model whose language model has a sliding window, which the masks do not model."""
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"is a {type(model).__name__} with sliding_window={window}, which is not supported",
            field="pretrained.model",
            hint=f"use a model with full attention, or {CUSTOM_FAMILY_HINT}",
        )


def is_text_model(config: PretrainedConfig) -> bool:
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and not hasattr(config, "vision_config")
