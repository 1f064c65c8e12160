"""Reward models: sequence classifiers of transformers that score a question and its response."""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from flow_grpo.config.custom import import_object
from flow_grpo.context_length import context_length
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import explain_load_errors, load_network
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput, images_in_metadata
from flow_grpo.rewards.text.scorers import check_responses

KIND = "a sequence-classification model"
STATISTICS = ("mean", "std")  # config fields with the statistics of the test pairs' scores
PADDING_VALUES = {"attention_mask": 0, "token_type_ids": 0}  # other inputs get the pad token
# imported for models with a vision encoder only: their image processing is in a layer above this
FIND_VISION_CLASSIFIER = "flow_grpo.vlm.reward_models.scorer:find_vision_classifier"


class Classifier(Protocol):
    """A sequence classifier with its tokenizer.

    Attributes:
        config: Config of the network.
        network: The network.
        limit: Maximum number of tokens.
        takes_images: Whether questions may have images.
    """

    config: PretrainedConfig
    network: nn.Module
    limit: int
    takes_images: bool

    def encode(self, question: str, response: str, images: list[Image.Image]) -> Sized:
        """Return the tokens of a question and its response; raise UserError if invalid."""

    def logits(self, batch: Sequence[Any], device: str) -> Tensor:
        """Return the logits of encoded texts, (N, labels)."""


@dataclass(kw_only=True, eq=False)
class RewardModel(FrozenModel, Scorer):
    """Score responses with an `AutoModelForSequenceClassification`.

    Question and response are formatted with the model's chat template, or encoded as a text pair if
    it has none. The score is the single logit, or the probability of `label`. Vision-language
    models also see the images of the question.

    Args:
        model: Model directory or hub id.
        label: Name of the label of a model with several.
        max_length: Maximum number of tokens, beyond which there is no score; 0 for the model's.
        normalize: Subtract `mean` from the scores and divide by `std`, both from the model's
            config, as `normalize_reward` of OpenRLHF and LMM-R1 does.
    """

    kind = "answer"

    model: str = ""
    label: str = ""
    max_length: int = 0
    normalize: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("reward_model needs a model directory or hub id; pass model=PATH")
        super().__post_init__()

    def load(self) -> nn.Module:
        """Load the tokenizer and the model; reject other architectures and unknown labels."""
        with explain_load_errors("model", self.model, KIND):
            config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
        classifier_class: type[Classifier] | None = None
        if hasattr(config, "vision_config"):
            find = import_object(FIND_VISION_CLASSIFIER, "model", "reward_model")
            classifier_class = find(config)
        build = classifier_class or TextClassifier
        self._classifier: Classifier = build(config, self.model, self.torch_dtype)
        self.reads_images = self._classifier.takes_images
        self._label_index = self._find_label(self._classifier.config)
        self._mean, self._std = 0.0, 1.0
        if self.normalize:
            self._mean, self._std = self._find_statistics(self._classifier.config)
        longest = self._classifier.limit
        if not 0 <= self.max_length <= longest:
            raise UserError(
                f"must be from 0 (the model's maximum) to {longest}",
                field="max_length",
                value=self.max_length,
            )
        self.max_length = self.max_length or longest
        return self._classifier.network

    def __call__(
        self, responses: list[str], questions: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Return the scores, (N,); `Failed` for responses with too many tokens."""
        check_responses("reward_model", responses)
        scores: list[float] = [Failed("it was not scored")] * len(responses)
        encoded: dict[int, Sized] = {}
        for i, (question, response, row) in enumerate(
            zip(questions, responses, metadata, strict=True)
        ):
            try:
                tokens = self._classifier.encode(question, response, images_in_metadata(row))
            except UserError as error:
                scores[i] = Failed(str(error))
                continue
            if len(tokens) <= self.max_length:
                encoded[i] = tokens
            else:
                reason = f"{len(tokens)} tokens are more than max_length={self.max_length}"
                scores[i] = Failed(reason)
        order = sorted(encoded, key=lambda i: len(encoded[i]))  # to reduce padding
        self.network.to(self.device)
        for part in self.batch_slices(len(order)):
            values = self._score([encoded[i] for i in order[part]]).tolist()
            for i, value in zip(order[part], values, strict=True):
                scores[i] = value
        return scores

    def _find_label(self, config: Any) -> int | None:
        """Return the index of `label` in the logits, or None if there is a single logit."""
        names = [config.id2label[i] for i in range(config.num_labels)]
        if len(names) > 1 and self.normalize:
            rule = f"has no effect: {self.model} has several outputs"
            raise UserError(rule, field="normalize", value=True, hint="leave it out")
        if len(names) == 1:
            if self.label:
                rule = f"has no effect: {self.model} has a single output"
                raise UserError(rule, field="label", value=self.label, hint="leave it out")
            return None
        check_choice("label", self.label, names)
        return names.index(self.label)

    def _find_statistics(self, config: Any) -> tuple[float, float]:
        """Return the mean and standard deviation of the test pairs' scores from the config."""
        found = [getattr(config, name, None) for name in STATISTICS]
        numbers = [n for n in found if isinstance(n, int | float) and math.isfinite(n)]
        if len(numbers) < len(STATISTICS) or numbers[1] <= 0:
            raise UserError(
                f"needs finite mean and std > 0 in the config of {self.model}, which has {found}",
                field="normalize",
                value=True,
                hint="use weights that were evaluated on test pairs in training, or leave it out",
            )
        mean, std = map(float, numbers)
        return mean, std

    @torch.inference_mode()
    def _score(self, batch: list[Any]) -> Tensor:
        """Return the scores of encoded texts, shape (N,)."""
        logits = self._classifier.logits(batch, self.device).float()  # (N, labels)
        if self._label_index is None:
            return (logits[:, 0] - self._mean) / self._std
        return logits.softmax(-1)[:, self._label_index]


@dataclass(frozen=True)
class TextTokens:
    """The tokenizer's output for a text, one list of numbers per input of the model."""

    inputs: dict[str, list[int]]

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


class TextClassifier:
    """A sequence classifier of transformers for text.

    Args:
        config: Its config.
        source: Model directory or hub id.
        dtype: Dtype of the weights.
    """

    takes_images = False

    def __init__(self, config: PretrainedConfig, source: str, dtype: torch.dtype) -> None:
        from transformers import AutoTokenizer

        with explain_load_errors("model", source, KIND):
            self.tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if type(config) not in known:
            raise UserError(f"must be {KIND}, not {config.model_type}", field="model", value=source)
        self.network = load_network(known[type(config)], source, dtype=dtype, kind=KIND)
        self.config = self.network.config
        text_config = self.config.get_text_config()
        limits = (self.tokenizer.model_max_length, context_length(text_config)[0])
        self.limit = min(limit for limit in limits if limit > 0)
        self._pad_token_id = text_config.pad_token_id

    def encode(self, question: str, response: str, images: list[Image.Image]) -> TextTokens:
        """Return the tokenizer's output for a question and its response."""
        if not self.tokenizer.chat_template:
            return TextTokens(dict(self.tokenizer(question, response)))
        chat = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": response},
        ]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        return TextTokens(dict(self.tokenizer(text, add_special_tokens=False)))

    def logits(self, batch: Sequence[TextTokens], device: str) -> Tensor:
        """Return the logits of tokenized texts, (N, labels)."""
        pad = self._pad_token_id
        if pad is None:  # choose a token that no text of the batch contains
            used = {token for each in batch for token in each.inputs["input_ids"]}
            pad = next(token for token in range(len(used) + 1) if token not in used)
            self.config.get_text_config().pad_token_id = pad
        inputs = {
            name: pad_sequence(
                [torch.tensor(each.inputs[name]) for each in batch],
                batch_first=True,
                padding_value=PADDING_VALUES.get(name, pad),
            ).to(device)
            for name in batch[0].inputs
        }
        return self.network(**inputs).logits
