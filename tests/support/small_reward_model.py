"""Randomly initialized reward models for tests."""

from pathlib import Path
from typing import Any

import small_vlm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)
from untrained.small.components import seeded


def save(folder: Path, seed: int = 0, *, pairs: bool = False, **config: Any) -> Path:
    """Save a causal reward model with a chat template, or with `pairs` a BERT cross-encoder."""
    text = {name: value for name, value in small_vlm.TEXT.items() if name != "head_dim"}
    text |= {"num_labels": 1, **config}
    with seeded(seed):
        if pairs:
            model = BertForSequenceClassification(BertConfig(**text))
        else:
            model = Qwen2ForSequenceClassification(Qwen2Config(**text))
        for parameter in model.parameters():
            parameter.data *= 3  # so that scores differ clearly
    tokenizer = small_vlm.build_tokenizer()
    tokenizer.chat_template = None if pairs else tokenizer.chat_template
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder
