"""A reward model: a network of transformers that reads a question and its answer and gives a
score."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.loading import FrozenModel, explained, load_network
from flow_grpo.rewards.protocol import Returned, Rows, Scorer

KIND = "a sequence-classification model"
FILL = {"attention_mask": 0, "token_type_ids": 0}  # what padding is, beside the pad token


@dataclass(kw_only=True, eq=False)
class RewardModel(FrozenModel, Scorer):
    """The score of AutoModelForSequenceClassification. With several labels, the probability of
    `label`.

    It reads the chat as its own template writes it; without a template, question and answer as a
    pair. What has more than `max_length` tokens (0: what the model takes) has no score.
    """

    kind = "answer"

    model: str = ""
    label: str = ""
    max_length: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("reward_model needs a model, a folder or a hub id; give model=PATH")
        super().__post_init__()

    def load(self) -> nn.Module:
        from transformers import AutoTokenizer

        with explained("model", self.model, KIND):
            config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if type(config) not in known:
            raise UserError(f"model={self.model!r} is a {config.model_type}, and must be {KIND}")
        network = load_network(known[type(config)], self.model, dtype=self.torch_dtype, kind=KIND)
        self.tokenizer, self._column = tokenizer, self._find_label(network.config)
        text = network.config.get_text_config()
        limits = (tokenizer.model_max_length, getattr(text, "max_position_embeddings", 0))
        most = min(limit for limit in limits if limit > 0)
        if not 0 <= self.max_length <= most:
            raise UserError(f"max_length={self.max_length} must be from 1 to {most}, or 0 for that")
        self.max_length = self.max_length or most
        # a causal model without one is given one that no text of a batch has
        self._pad = text.pad_token_id
        return network

    def __call__(self, answers: list[str], questions: list[str], metadata: Rows) -> Returned:
        if any(not isinstance(answer, str) for answer in answers):
            raise TypeError("'reward_model' scores answers (scripts/train_vlm.py), not pictures")
        read = [self._read(*pair) for pair in zip(questions, answers, strict=True)]
        lengths = [len(each["input_ids"]) for each in read]
        scores: list[float] = [
            Failed(f"{n} tokens are more than max_length={self.max_length}") for n in lengths
        ]
        # by length, so that little of a batch is padding
        fitting = [i for i, n in enumerate(lengths) if n <= self.max_length]
        fitting.sort(key=lengths.__getitem__)
        self.network.to(self.device)
        for part in self.parts(len(fitting)):
            values = self._score([read[i] for i in fitting[part]]).tolist()
            for i, value in zip(fitting[part], values, strict=True):
                scores[i] = value
        return scores

    def _find_label(self, config: Any) -> int | None:
        """Its column of the logits; None where there is one column."""
        names = [config.id2label[i] for i in range(config.num_labels)]
        if len(names) == 1 and not self.label:
            return None
        if len(names) == 1:
            raise UserError(f"label={self.label!r} has no use: {self.model} gives one score")
        if self.label not in names:
            raise UserError(f"label={self.label!r} must be one of {', '.join(names)}")
        return names.index(self.label)

    def _read(self, question: str, answer: str) -> dict[str, list[int]]:
        if not self.tokenizer.chat_template:
            return dict(self.tokenizer(question, answer))
        turns = (("user", question), ("assistant", answer))
        chat = [{"role": role, "content": text} for role, text in turns]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        return dict(self.tokenizer(text, add_special_tokens=False))

    @torch.inference_mode()
    def _score(self, read: list[dict[str, list[int]]]) -> Tensor:
        """(N,) of texts as the tokenizer reads them."""
        pad = self._pad
        if pad is None:
            used = {token for each in read for token in each["input_ids"]}
            pad = next(token for token in range(len(used) + 1) if token not in used)
            self.network.config.get_text_config().pad_token_id = pad
        columns = {
            name: pad_sequence(
                [torch.tensor(each[name]) for each in read],
                batch_first=True,
                padding_value=FILL.get(name, pad),
            ).to(self.device)
            for name in read[0]
        }
        logits = self.network(**columns).logits.float()  # (N, labels)
        return logits[:, 0] if self._column is None else logits.softmax(-1)[:, self._column]
