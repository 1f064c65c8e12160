"""Language models that read text alone: Qwen2 and 3, Llama, and any other causal language model of
transformers that has a chat template."""

import re

from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flow_grpo.answer.models.base import Family
from flow_grpo.errors import UserError

OWN = "write a family of your own for it (custom_models, docs/vlm.md)"


class TextModel(Family):
    """`model.model` gives hidden states, of which `model.lm_head` makes logits: whether that is all
    there is to it is tried by `answer/agreement.py`."""

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
                f"pretrained.model is a {name}, which has no .model and .lm_head (without bias) "
                f"as Llama and Qwen have them; {OWN}"
            )
        refuse_sliding(model, model.config)

    def lora_targets(self, with_tower: bool) -> str:
        names = (name for name, _ in self.model.named_modules())
        usual = any(re.fullmatch(self.layers, name) for name in names)
        return self.layers if usual else "all-linear"


def refuse_sliding(model: nn.Module, config: PretrainedConfig) -> None:
    """`config`: that of the language model."""
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"pretrained.model is a {type(model).__name__} with sliding_window={window}, and "
            "answers are trained with attention to all tokens before; choose one without, or "
            f"{OWN}"
        )


def is_text_model(config: PretrainedConfig) -> bool:
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and not hasattr(config, "vision_config")
