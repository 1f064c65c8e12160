"""What an update minimizes: the loss of the policy, the KL to the reference, the loss of values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flow_grpo.answer.batches import PackedBatch
from flow_grpo.answer.check import GAE
from flow_grpo.answer.credit import Fixed, stacked
from flow_grpo.answer.losses import Aggregation, Divergence, build_loss
from flow_grpo.answer.losses.base import (
    AnswerLoss,
    Counts,
    divergence,
    token_weights,
    value_loss,
)
from flow_grpo.run.metrics import Loss


@dataclass(frozen=True)
class Objective:
    policy: AnswerLoss
    aggregation: Aggregation
    max_new_tokens: int
    beta: float  # weight of the KL
    kl: Divergence
    kl_in_loss: bool
    with_values: bool
    value_weight: float
    value_clip: float
    reweighed: bool  # tokens of an engine that is not quite the policy

    @classmethod
    def build(cls, train: Any, *, max_new_tokens: int, reweighed: bool) -> "Objective":
        """As the fields of the config's section `train` say."""
        return cls(
            policy=build_loss(train.loss, train),
            aggregation=train.aggregation,
            max_new_tokens=max_new_tokens,
            beta=train.beta,
            kl=train.kl,
            kl_in_loss=train.beta > 0 and train.kl_in == "loss",
            with_values=train.advantage == GAE,
            value_weight=train.value_weight,
            value_clip=train.value_clip,
            reweighed=reweighed,
        )

    def has_gradient(self, own: Fixed) -> bool:
        return self.kl_in_loss or self.with_values or bool(own.advantages.any())

    def loss(
        self,
        batch: PackedBatch,
        scores: Mapping[str, Tensor],  # of the policy that is trained
        fixed: Sequence[Fixed],
        counts: Counts,
    ) -> Loss:
        """Of every token in a micro-batch, times the tokens of the update: their mean is the loss.
        Counts are those of all processes, so that neither processes nor micro-batches change it."""
        mask, log_probs = batch.mask, scores["log_probs"]
        old, advantages = stacked(fixed, "old", mask), stacked(fixed, "advantages", mask)
        policy = self.policy.per_token(log_probs, old, advantages, mask)
        loss, columns = policy.loss, {"policy_loss": policy.loss}
        if self.beta > 0:
            columns["kl"] = divergence(self.kl, log_probs, stacked(fixed, "reference", mask))
            loss = loss + self.beta * columns["kl"] if self.kl_in_loss else loss
        if self.with_values:
            before, returns = stacked(fixed, "values", mask), stacked(fixed, "returns", mask)
            columns["value_loss"] = value_loss(scores["values"], before, returns, self.value_clip)
            loss = loss + self.value_weight * columns["value_loss"]
        columns |= {
            "ratio": policy.ratio,
            "approx_kl": 0.5 * (log_probs - old) ** 2,
            "entropy": -old,  # an estimate, of the policy that sampled
            "clip_low": policy.clipped_low.float(),
            "clip_high": policy.clipped_high.float(),
        }
        weights = token_weights(self.aggregation, mask, counts, self.max_new_tokens)
        if self.reweighed:
            columns["importance"] = stacked(fixed, "importance", mask)
            weights = weights * columns["importance"]
        weighted = (loss * weights * counts.tokens)[mask]
        return Loss(weighted, {name: column[mask].detach() for name, column in columns.items()})
