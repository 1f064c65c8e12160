"""Base class of rewards that regress scores from the hidden states of a Qwen-VL model.

HPSv3, VideoAlign and EditReward add special tokens to the vocabulary of Qwen2-VL or Qwen2.5-VL, and
a head in float32 maps the last hidden state at such a token of the prompt to scores. Two properties
follow from the authors' code, which calls the language model with `inputs_embeds` and without the
image grids:

- All tokens have consecutive 1-D positions, in place of the 3-D positions that Qwen-VL gives the
  tokens of images. The weights were trained that way; other positions give other scores.
- Sequences are padded on the right. Attention is causal, so padding cannot affect the tokens before
  it: no attention mask is needed, and scores do not depend on the other samples of a batch.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
)

from flow_grpo.chat_templates import render_chat_template
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.frozen_model import SCORE, FrozenModel, Values, finite_or_failed
from flow_grpo.rewards.loading import (
    Weights,
    explain_load_errors,
    explain_template_errors,
    find_file,
    load_chat_template,
    load_config,
    load_network,
    load_tokenizer,
    load_weights_file,
)
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.qwen_vl_visuals import Patcher, Visual
from flow_grpo.weight_checks import check_finite

BACKBONES = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel}
PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
TEMPLATES = Path(__file__).parent / "scorers/published"
PROMPT = "{text_prompt}"  # placeholder in a template


class RegressionNetwork(nn.Module):
    """Qwen-VL model with a regression head instead of its LM head."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def encode_visuals(self, visuals: list[Visual]) -> Tensor:
        """Return the features of all tokens of images and videos, (tokens, width)."""
        tower = self.backbone.visual
        weight = next(tower.parameters())
        patches = torch.cat([visual.patches for visual in visuals]).to(weight.device, weight.dtype)
        grids = torch.tensor([visual.grid for visual in visuals], device=weight.device)
        return tower(patches, grid_thw=grids).pooler_output

    def forward(self, ids: Tensor, features: Tensor, placeholder: int) -> Tensor:
        """Return the last hidden states (N, L, width).

        Args:
            ids: Token ids (N, L), padded on the right.
            features: Features of the images or videos of all rows, (tokens, width).
            placeholder: Token id at the positions of the features.
        """
        language = self.backbone.language_model
        embeddings = language.embed_tokens(ids)
        mask = (ids == placeholder)[..., None].expand_as(embeddings)
        embeddings = embeddings.masked_scatter(mask, features.to(embeddings.dtype))
        # without position_ids, the positions are 0, 1, 2, ...
        return language(inputs_embeds=embeddings, use_cache=False).last_hidden_state


@dataclass(kw_only=True, eq=False)
class QwenVlRegression(FrozenModel, Scorer):
    """Base class of rewards with a regression head on a Qwen-VL model.

    Attributes:
        checkpoint: What is loaded, with its article, for messages.
        files: Names of the file with the weights, in order of preference.
        visual_kind: "image" or "video".
        reward_tokens: Special tokens added to the vocabulary, in the order of the prompt.
    """

    processor: str  # model with the config, the tokenizer and the chat template
    dtype: str = "bfloat16"  # of the backbone; the head is in float32

    checkpoint = ""
    files: ClassVar[tuple[str, ...]] = ()
    visual_kind = "image"
    reward_tokens: ClassVar[tuple[str, ...]] = ("<|Reward|>",)

    @abstractmethod
    def build_head(self, weights: Weights, width: int) -> nn.Module:
        """Build the head in float32.

        Args:
            weights: The checkpoint, with the names of `convert_weights`.
            width: Width of the hidden states.
        """

    @abstractmethod
    def prepare_sample(self, sample: Any, row: dict) -> list[Visual] | Failed | NotApplicable:
        """Return the images or videos of a sample and its metadata, or why it has no score."""

    @abstractmethod
    def score_batch(self, visuals: list[list[Visual]], prompts: list[str]) -> Values:
        """Score N samples; see `ModelScorer.score_batch`."""

    def convert_weights(self, weights: Weights) -> Weights:
        """Return the checkpoint with the names of current transformers."""
        return {rename_weight(name): value for name, value in weights.items()}

    def load(self) -> nn.Module:
        """Load the backbone, the head and the tokenizer."""
        file = find_file(self.model, self.files, option="model", kind=self.checkpoint)
        config = load_config(
            (Qwen2VLConfig, Qwen2_5_VLConfig),
            self.processor,
            "a Qwen2-VL or Qwen2.5-VL model",
            option="processor",
        )
        with explain_load_errors("model", self.model, self.checkpoint):
            weights = self.convert_weights(load_weights_file(file))
            tokens, width = weights["language_model.embed_tokens.weight"].shape
            head = self.build_head(weights, width)
        self.tokenizer = self._load_tokenizer(tokens)
        self.reward_ids = self.tokenizer.convert_tokens_to_ids(list(self.reward_tokens))
        vision = config.vision_config
        self.patcher = Patcher(
            vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        )
        check_finite(f"model={self.model!r}", head.state_dict().items())
        return RegressionNetwork(self._load_backbone(weights, config, tokens), head)

    def quantized_part(self) -> nn.Module:
        """Return the language model: the head stays in float32."""
        return self.network.backbone.language_model

    def _load_backbone(self, weights: Weights, config: PretrainedConfig, tokens: int) -> nn.Module:
        """Load the backbone from the checkpoint; its vocabulary differs from that of `config`."""
        config.text_config.vocab_size = tokens
        parts = ("visual.", "language_model.")
        return load_network(
            BACKBONES[config.model_type],
            self.model,
            dtype=self.torch_dtype,
            kind=self.checkpoint,
            weights={name: each for name, each in weights.items() if name.startswith(parts)},
            config=config,
        )

    def _load_tokenizer(self, tokens: int) -> PreTrainedTokenizerBase:
        """Load the tokenizer, with the reward tokens and a chat template for images."""
        option = {"option": "processor"}
        extra = self.reward_tokens
        tokenizer = load_tokenizer(self.processor, tokens=tokens, extra=extra, **option)
        if not tokenizer.chat_template:
            tokenizer.chat_template = load_chat_template(self.processor, **option)
        with explain_template_errors("processor", self.processor):
            rendered = self._render(tokenizer, "", 1)
        if rendered.count(PLACEHOLDERS[self.visual_kind]) != 1:
            raise UserError(
                f"has a chat template without {self.visual_kind}s",
                field="processor",
                value=self.processor,
                hint="use the model that the reward was trained from",
            )
        return tokenizer

    def invalid_row(self, prompt: str, metadata: dict) -> str | None:
        """Reject special tokens in a prompt: they would be read as images or scores."""
        for token in self.tokenizer.get_added_vocab():
            if token in prompt:
                return f"its prompt contains the special token {token}"
        return None

    @torch.inference_mode()
    def __call__(
        self, samples: list[Any], prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Score N samples in batches; see `Scorer.__call__`."""
        self.network.to(self.device)
        results: list[Any] = []
        for part in self.batch_slices(len(samples)):
            results += self._score_part(samples[part], prompts[part], metadata[part])
        names = next(([*each] for each in results if isinstance(each, dict)), [SCORE])
        columns = {
            name: [each[name] if isinstance(each, dict) else each for each in results]
            for name in names
        }
        scores = [finite_or_failed(score, self.dtype) for score in columns.pop(SCORE)]
        return (scores, columns) if columns else scores

    def _score_part(
        self, samples: list[Any], prompts: list[str], metadata: MetadataRows
    ) -> list[dict[str, float] | Failed | NotApplicable]:
        """Return the values of each sample, or why it has none."""
        results: list[Any] = [
            Failed(reason) if (reason := self.invalid_row(prompt, row)) else None
            for prompt, row in zip(prompts, metadata, strict=True)
        ]
        visuals = {}
        for i, (sample, row) in enumerate(zip(samples, metadata, strict=True)):
            if results[i] is None:
                found = self.prepare_sample(sample, row)
                if isinstance(found, list):
                    visuals[i] = found
                else:
                    results[i] = found
        if visuals:
            values = self.score_batch([*visuals.values()], [prompts[i] for i in visuals])
            lists = {name: value.float().cpu().tolist() for name, value in values.items()}
            for position, i in enumerate(visuals):
                results[i] = {name: value[position] for name, value in lists.items()}
        return results

    def encode_visuals(self, visuals: list[list[Visual]]) -> Tensor:
        """Return the features of all images and videos of a batch, (tokens, width)."""
        return self.network.encode_visuals([visual for row in visuals for visual in row])

    def reward_states(
        self, texts: list[str], visuals: list[list[Visual]], features: Tensor
    ) -> Tensor:
        """Return the hidden states at the reward tokens, (N, reward tokens, width), float32.

        Args:
            texts: Prompts of the rows, after their images or videos.
            visuals: Images or videos of the rows.
            features: Their features, as `encode_visuals` returns them.
        """
        rows = [self._tokenize(*row) for row in zip(texts, visuals, strict=True)]
        padding = self.tokenizer.pad_token_id or 0
        ids = pad_sequence(rows, batch_first=True, padding_value=padding).to(self.device)
        placeholder = self.tokenizer.convert_tokens_to_ids(PLACEHOLDERS[self.visual_kind])
        hidden = self.network(ids, features, placeholder)
        found = torch.isin(ids, torch.tensor(self.reward_ids, device=ids.device))
        return hidden[found].view(len(rows), len(self.reward_ids), -1).float()

    def _tokenize(self, text: str, visuals: list[Visual]) -> Tensor:
        """Return the token ids of a user's message with images or videos."""
        placeholder = PLACEHOLDERS[self.visual_kind]
        start, *rest = self._render(self.tokenizer, text, len(visuals)).split(placeholder)
        for visual, part in zip(visuals, rest, strict=True):
            start += placeholder * self.patcher.tokens(visual) + part
        return torch.tensor(self.tokenizer(start, add_special_tokens=False)["input_ids"])

    def _render(self, tokenizer: PreTrainedTokenizerBase, text: str, visuals: int) -> str:
        """Render the chat template for a message of images or videos and a text."""
        content = [{"type": self.visual_kind}] * visuals + [{"type": "text", "text": text}]
        return render_chat_template(tokenizer, [{"role": "user", "content": content}])


def read_template(name: str) -> str:
    """Return the prompt with which a model was trained."""
    return (TEMPLATES / f"{name}.txt").read_text("utf-8")


def rename_weight(name: str) -> str:
    """Return the name of a weight in the backbone of current transformers.

    Earlier versions had the vision tower at the top level and the language model as `model`.
    """
    for prefix in ("model.visual.", "model.language_model."):
        if name.startswith(prefix):
            return name.removeprefix("model.")
    return f"language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def select_prefix(prefix: str, weights: Weights) -> Weights:
    """Return the weights whose name starts with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
