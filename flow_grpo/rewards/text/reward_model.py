"""Reward models: sequence classifiers of transformers that score a question and its response."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import explain_load_errors, load_network
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.text.scorers import check_responses

KIND = "a sequence-classification model"
PADDING_VALUES = {"attention_mask": 0, "token_type_ids": 0}  # other inputs get the pad token


@dataclass(kw_only=True, eq=False)
class RewardModel(FrozenModel, Scorer):
    """Score responses with an `AutoModelForSequenceClassification`.

    Question and response are formatted with the model's chat template, or encoded as a text pair if
    it has none. The score is the single logit, or the probability of `label`.

    Args:
        model: Model directory or hub id.
        label: Name of the label of a model with several.
        max_length: Maximum number of tokens, beyond which there is no score; 0 for the model's.
    """

    kind = "answer"

    model: str = ""
    label: str = ""
    max_length: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("reward_model needs a model directory or hub id; pass model=PATH")
        super().__post_init__()

    def load(self) -> nn.Module:
        """Load the tokenizer and the model; reject other architectures and unknown labels."""
        from transformers import AutoTokenizer

        with explain_load_errors("model", self.model, KIND):
            config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if type(config) not in known:
            raise UserError(
                f"must be {KIND}, not {config.model_type}", field="model", value=self.model
            )
        network = load_network(known[type(config)], self.model, dtype=self.torch_dtype, kind=KIND)
        self.tokenizer, self._label_index = tokenizer, self._find_label(network.config)
        text_config = network.config.get_text_config()
        limits = (tokenizer.model_max_length, getattr(text_config, "max_position_embeddings", 0))
        longest = min(limit for limit in limits if limit > 0)
        if not 0 <= self.max_length <= longest:
            raise UserError(
                f"must be from 0 (the model's maximum) to {longest}",
                field="max_length",
                value=self.max_length,
            )
        self.max_length = self.max_length or longest
        self._pad_token_id = text_config.pad_token_id
        return network

    def __call__(
        self, responses: list[str], questions: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Return the scores, (N,); `Failed` for responses with too many tokens."""
        check_responses("reward_model", responses)
        encoded = [self._tokenize(*pair) for pair in zip(questions, responses, strict=True)]
        lengths = [len(each["input_ids"]) for each in encoded]
        scores: list[float] = [
            Failed(f"{n} tokens are more than max_length={self.max_length}") for n in lengths
        ]
        # sorted by length to reduce padding
        fitting = [i for i, n in enumerate(lengths) if n <= self.max_length]
        fitting.sort(key=lengths.__getitem__)
        self.network.to(self.device)
        for part in self.batch_slices(len(fitting)):
            values = self._score([encoded[i] for i in fitting[part]]).tolist()
            for i, value in zip(fitting[part], values, strict=True):
                scores[i] = value
        return scores

    def _find_label(self, config: Any) -> int | None:
        """Return the index of `label` in the logits, or None if there is a single logit."""
        names = [config.id2label[i] for i in range(config.num_labels)]
        if len(names) == 1:
            if self.label:
                rule = f"has no effect: {self.model} has a single output"
                raise UserError(rule, field="label", value=self.label, hint="leave it out")
            return None
        check_choice("label", self.label, names)
        return names.index(self.label)

    def _tokenize(self, question: str, response: str) -> dict[str, list[int]]:
        """Return the tokenizer's output for a question and its response."""
        if not self.tokenizer.chat_template:
            return dict(self.tokenizer(question, response))
        chat = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": response},
        ]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        return dict(self.tokenizer(text, add_special_tokens=False))

    @torch.inference_mode()
    def _score(self, encoded: list[dict[str, list[int]]]) -> Tensor:
        """Return the scores of tokenized texts, shape (N,)."""
        pad = self._pad_token_id
        if pad is None:  # choose a token that no text of the batch contains
            used = {token for each in encoded for token in each["input_ids"]}
            pad = next(token for token in range(len(used) + 1) if token not in used)
            self.network.config.get_text_config().pad_token_id = pad
        inputs = {
            name: pad_sequence(
                [torch.tensor(each[name]) for each in encoded],
                batch_first=True,
                padding_value=PADDING_VALUES.get(name, pad),
            ).to(self.device)
            for name in encoded[0]
        }
        logits = self.network(**inputs).logits.float()  # (N, labels)
        if self._label_index is None:
            return logits[:, 0]
        return logits.softmax(-1)[:, self._label_index]
