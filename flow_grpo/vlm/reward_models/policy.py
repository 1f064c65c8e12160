"""Reward model in training: a language or vision-language model with a score head."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from flow_grpo.rewards.text.reward_model import STATISTICS
from flow_grpo.vlm.expert_layout import published_layout
from flow_grpo.vlm.packing import PackedBatch
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.reward_models.classifier import (
    SCORE_FILE,
    SCORE_WEIGHT,
    build_classifier,
    score_head,
    set_statistics,
)


class RewardModelPolicy(VlmPolicy):
    """A model whose value head returns the score of a conversation at its last token.

    Args:
        model: The transformers model, from `load_model`.
        pad_token_id: Padding token of the saved model; None if it has none.
        seed: Seed of the head, and of a new LoRA.
        settings: Arguments of `VlmPolicy`.
    """

    def __init__(
        self, model: nn.Module, *, pad_token_id: int | None, seed: int = 0, **settings: Any
    ) -> None:
        super().__init__(model, with_value=True, seed=seed, **settings)
        head = self.network.value
        self.network.value = score_head(head.in_features, head.weight.dtype, seed).to(model.device)
        if model.lm_head.weight is not model.get_input_embeddings().weight:
            model.lm_head.requires_grad_(False)  # a score does not depend on it
        self._pad_token_id = pad_token_id
        # mean and standard deviation of the test pairs' scores, once known
        self.score_statistics: tuple[float, float] | None = None

    def scores(self, batch: PackedBatch) -> Tensor:
        """Return the scores of packed responses with gradients, (R,)."""
        return self.forward_tokens(batch)["values"][:, 0]

    def scores_no_grad(self, batch: PackedBatch) -> Tensor:
        """Return the scores of packed responses, (R,); call it in `gathered_weights`."""
        return self.forward_tokens_no_grad(batch)["values"][:, 0]

    def describe(self) -> str:
        return super().describe().replace("a value head", "a score head")

    def exported_weights(self) -> dict[str, Tensor]:
        """Return the weights that `save` writes, including the score head.

        transformers loads `<prefix>model/`; `flow-grpo export` merges a LoRA.
        """
        return {**super().exported_weights(), SCORE_WEIGHT: self.network.value.weight}

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        lora = {name: weight for name, weight in weights.items() if name != SCORE_WEIGHT}
        super()._write_lora(folder, lora)
        head, metadata = {SCORE_WEIGHT: weights[SCORE_WEIGHT]}, {"format": "pt"}
        if self.score_statistics is not None:
            metadata |= dict(zip(STATISTICS, map(repr, self.score_statistics), strict=True))
        save_file(head, folder / SCORE_FILE, metadata=metadata)

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        classifier = build_classifier(self.model.config, weights, self._pad_token_id)
        set_statistics(classifier.config, self.score_statistics)
        with published_layout(classifier, weights):
            classifier.save_pretrained(folder / f"{prefix}model")
        for part in self._processors:
            part.save_pretrained(folder / f"{prefix}model")
