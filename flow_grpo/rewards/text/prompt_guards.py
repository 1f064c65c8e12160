"""Rewards that keep a rewritten prompt short and close to the user's prompt.

They guard the training of a prompt enhancer (docs/vlm/prompt_enhancer.md) against drift: without
them, a language model may drop parts of a request that its image reward does not measure.
"""

import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from flow_grpo.errors import UserError
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import explain_load_errors, load_config, load_network
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.text.response_format import extract_prompt
from flow_grpo.rewards.text.scorers import ResponseScorer, check_responses

KIND = "an encoder of texts"


@dataclass(kw_only=True, eq=False)
class PromptSimilarity(FrozenModel, Scorer):
    """Score how much of the question is left in the rewritten prompt, from 0 to 1.

    Without a model, the score is the fraction of the question's words that the prompt contains;
    added words are not penalised. With a text encoder, it is the cosine similarity of the mean
    token embeddings.

    Args:
        model: Text encoder of transformers, such as sentence-transformers/all-MiniLM-L6-v2.
        enough: Similarity from which the score is 1.
    """

    kind = "answer"

    model: str = ""
    enough: float = 1.0

    def __post_init__(self) -> None:
        """Check the options and load the encoder, if there is one."""
        if not 0 < self.enough <= 1:
            raise UserError("must be above 0 and at most 1", field="enough", value=self.enough)
        if self.model:
            super().__post_init__()
        else:
            self.offload = False

    def load(self) -> nn.Module:
        """Load the tokenizer and the encoder."""
        from transformers import AutoTokenizer, PretrainedConfig
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        config = load_config(PretrainedConfig, self.model, KIND)
        if type(config) not in MODEL_MAPPING:
            raise UserError(f"must be {KIND}, not {config.model_type}", field="model")
        with explain_load_errors("model", self.model, KIND):
            self._tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        return load_network(
            MODEL_MAPPING[type(config)], self.model, dtype=self.torch_dtype, kind=KIND
        )

    def __call__(
        self, responses: list[str], questions: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Return the similarity of each response to its question."""
        check_responses("prompt_similarity", responses)
        prompts = [extract_prompt(response) for response in responses]
        if not self.model:
            pairs = zip(prompts, questions, strict=True)
            similarities = [kept_words(*pair) for pair in pairs]
        else:
            texts = list(dict.fromkeys([*prompts, *questions]))
            vectors = dict(zip(texts, self._embed(texts), strict=True))
            similarities = [
                float(vectors[prompt] @ vectors[question]) if prompt else 0.0
                for prompt, question in zip(prompts, questions, strict=True)
            ]
        return [min(1.0, max(0.0, each) / self.enough) for each in similarities]

    @torch.inference_mode()
    def _embed(self, texts: list[str]) -> torch.Tensor:
        """Return the normalized mean of the token embeddings of each text, (N, D), float32."""
        self.network.to(self.device)
        parts = []
        for part in self.batch_slices(len(texts)):
            tokens = self._tokenizer(
                texts[part], padding=True, truncation=True, return_tensors="pt"
            ).to(self.device)
            hidden = self.network(**tokens).last_hidden_state.float()  # (B, L, D)
            mask = tokens["attention_mask"][..., None].float()
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            parts.append(nn.functional.normalize(mean, dim=-1).cpu())
        return torch.cat(parts) if parts else torch.zeros(0, 0)


@dataclass(kw_only=True, eq=False)
class PromptLength(ResponseScorer):
    """Score 0 for a short rewritten prompt, falling linearly to -1 beyond `limit` words.

    Args:
        limit: Number of words without a penalty. CLIP encoders read about 50 and ignore the rest.
        buffer: Number of further words at which the score reaches -1.
    """

    name = "prompt_length"
    limit: int = 50
    buffer: int = 25

    def __post_init__(self) -> None:
        """Reject a `limit` or `buffer` below 1."""
        for option in ("limit", "buffer"):
            if getattr(self, option) < 1:
                raise UserError("must be at least 1", field=option, value=getattr(self, option))

    def score(self, response: str, metadata: dict) -> float:
        """Return the penalty of a response, from -1 to 0."""
        over = len(split_words(extract_prompt(response))) - self.limit
        return -min(1.0, max(0.0, over / self.buffer))


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def kept_words(prompt: str, question: str) -> float:
    """Return the fraction of the question's words, with repeats, that the prompt contains."""
    wanted = Counter(split_words(question))
    if not wanted:
        return 1.0
    return (wanted & Counter(split_words(prompt))).total() / wanted.total()
