"""Reward models as sequence classifiers of transformers: a backbone and a linear `score` head.

`AutoModelForSequenceClassification` has a class for most language models and for few
vision-language models. For the others a subclass of transformers' own generic classifier is built,
which has the name, config and weight names that such a class of transformers would have.
"""

import copy
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.rewards.text.reward_model import STATISTICS
from flow_grpo.vlm.prompts import PromptEncoder

SCORE_WEIGHT = "score.weight"  # (1, hidden size)
SCORE_FILE = "score.safetensors"  # has it, next to a LoRA
UNUSED_PREFIX = "lm_head."  # of a language model, which a classifier does not have


def classifier_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the sequence classifier for the config of a language or vision-language model.

    Raises:
        UserError: transformers has no classifier for a language model. Its generic one would work,
            but the files could not be loaded without this package.
    """
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) in known:
        return known[type(config)]
    if not hasattr(config, "vision_config"):
        raise UserError(
            f"is a {config.model_type} model, for which transformers has no sequence classifier",
            field="pretrained.model",
            hint="use a Qwen, Llama, Gemma or Mistral model",
        )
    backbone = MODEL_MAPPING[type(config)]
    base = backbone.__mro__[1]  # such as Qwen3VLPreTrainedModel
    name = f"{backbone.__name__.removesuffix('Model')}ForSequenceClassification"
    # transformers finds out in the module of a class what its layers support
    attributes = {"config_class": type(config), "__module__": backbone.__module__}
    return type(name, (GenericForSequenceClassification, base), attributes)


def build_classifier(
    config: PretrainedConfig, weights: dict[str, Tensor], pad_token_id: int | None
) -> PreTrainedModel:
    """Return the sequence classifier of a language model and a head.

    Args:
        config: Config of the language or vision-language model.
        weights: Its weights and `SCORE_WEIGHT`, which the classifier then uses.
        pad_token_id: Padding token, which transformers skips to find the last token.
    """
    config = copy.deepcopy(config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    with torch.device("meta"):
        classifier = classifier_class(config)(config)
    weights = {name: w for name, w in weights.items() if not name.startswith(UNUSED_PREFIX)}
    classifier.load_state_dict(weights, assign=True)
    return classifier


def set_statistics(config: PretrainedConfig, statistics: tuple[float, float] | None) -> None:
    """Store the mean and standard deviation of the test pairs' scores in a config, if known.

    OpenRLHF and LMM-R1 do the same (openrlhf/trainer/rm_trainer.py, lines 275 and 276, f917f18).
    Those of the model that training started from are removed.
    """
    for name in STATISTICS:
        if hasattr(config, name):
            delattr(config, name)
    if statistics is not None:
        config.mean, config.std = statistics


def read_statistics(file: Path) -> tuple[float, float] | None:
    """Return the statistics stored in the file of a score head, or None."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    if not {*STATISTICS} <= metadata.keys():
        return None
    mean, std = (float(metadata[name]) for name in STATISTICS)
    return mean, std


def find_pad_token(encoder: PromptEncoder) -> int | None:
    """Return the tokenizer's padding token, or None if conversations end with it.

    transformers scores the last token that is not padding, which would be another token than the
    one that is trained.
    """
    pad = encoder.tokenizer.pad_token_id
    [conversation] = encoder.encode_conversations(Question("?"), ["?"])
    return None if pad == int(conversation.ids[-1]) else pad


def score_head(width: int, dtype: torch.dtype, seed: int) -> nn.Linear:
    """Return a new head without bias, which would cancel in the difference of two scores.

    It is initialized as OpenRLHF does (openrlhf/models/model.py, line 170, commit 3c3be62).
    """
    head = nn.Linear(width, 1, bias=False, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(head.weight, std=1 / (width + 1), generator=generator)
    return head
