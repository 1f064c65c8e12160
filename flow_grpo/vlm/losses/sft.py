"""Supervised fine-tuning: the negative log-likelihood of given responses."""

from dataclasses import dataclass
from types import MappingProxyType

from flow_grpo.training.metrics import Loss
from flow_grpo.vlm.losses.base import UpdateCounts, token_weights
from flow_grpo.vlm.losses.given import GivenBatch, GivenLoss


@dataclass(frozen=True)
class SftLoss(GivenLoss):
    """-log p of every token of a response, including the stop token; prompts are not trained.

    With the default `aggregation`, the mean over the tokens of the update, as TRL with
    `completion_only_loss` (huggingface/trl 1.16.0, trl/trainer/sft_trainer.py, lines 1612 to 1618).
    """

    default_settings = MappingProxyType({"aggregation": "token", "beta": 0.0})

    aggregation: str

    def num_terms(self, counts: UpdateCounts) -> float:
        return counts.tokens

    def terms(self, batch: GivenBatch) -> Loss:
        mask, counts = batch.mask, batch.counts
        weights = token_weights(self.aggregation, mask, counts, batch.max_new_tokens)
        columns = {"nll": -batch.log_probs[mask], "mean_token_accuracy": batch.is_top1[mask]}
        return Loss(
            -(batch.log_probs * weights * counts.tokens)[mask],
            {name: column.detach().float() for name, column in columns.items()},
        )
