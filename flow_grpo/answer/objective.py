"""What an update minimizes: the loss of the policy, the KL to the reference, the loss of values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flow_grpo.answer.batches import PackedBatch
from flow_grpo.answer.check import GAE
from flow_grpo.answer.credit import Fixed, stacked
from flow_grpo.answer.losses.base import AnswerLoss, Counts, divergence, token_weights, value_loss
from flow_grpo.run.metrics import Loss


@dataclass(frozen=True)
class Objective:
    """The whole loss of a batch of answers: the policy's, and the value's and the KL's where
    wanted."""

    policy: AnswerLoss
    settings: Any  # the config's section `train`
    max_new_tokens: int
    reweighed: bool  # tokens of an engine that is not quite the policy
    critic_only: bool = False  # during train.critic_warmup: the value loss alone

    @property
    def kl_in_loss(self) -> bool:
        return self.settings.beta > 0 and self.settings.kl_in == "loss"

    @property
    def with_values(self) -> bool:
        return self.settings.advantage == GAE

    def has_gradient(self, own: Fixed) -> bool:
        return self.kl_in_loss or self.with_values or bool(own.advantages.any())

    def loss(
        self,
        batch: PackedBatch,
        scores: Mapping[str, Tensor],  # of the policy that is trained
        fixed: Sequence[Fixed],
        counts: Counts,
    ) -> Loss:
        """The loss of every token of a micro-batch, times the tokens of the update, so that their
        mean is the loss. Counts are those of all processes: neither processes nor micro-batches
        change it."""
        train, mask, log_probs = self.settings, batch.mask, scores["log_probs"]
        old, advantages = stacked(fixed, "old", mask), stacked(fixed, "advantages", mask)
        policy = self.policy.per_token(log_probs, old, advantages, mask)
        columns = {"policy_loss": policy.loss}
        if self.reweighed:
            columns["importance"] = stacked(fixed, "importance", mask)
            # as in verl: neither the KL nor the values are weighted
            columns["policy_loss"] = policy.loss * columns["importance"]
        # 0 instead of omitted: DDP waits for a gradient of every weight
        loss = 0.0 * log_probs if self.critic_only else columns["policy_loss"]
        if train.beta > 0:
            reference, clamp = stacked(fixed, "reference", mask), train.clamp_log_ratios
            columns["kl"] = divergence(train.kl, log_probs, reference, clamp=clamp)
            if self.kl_in_loss and not self.critic_only:
                loss = loss + train.beta * columns["kl"]
        if self.with_values:
            before, returns = stacked(fixed, "values", mask), stacked(fixed, "returns", mask)
            columns["value_loss"] = value_loss(scores["values"], before, returns, train.value_clip)
            loss = loss + train.value_weight * columns["value_loss"]
        columns |= {
            "ratio": policy.ratio,
            "approx_kl": 0.5 * (log_probs - old) ** 2,
            "entropy": -old,  # an estimate, of the policy that sampled
            "clip_low": policy.clipped_low.float(),
            "clip_high": policy.clipped_high.float(),
        }
        weights = token_weights(train.aggregation, mask, counts, self.max_new_tokens)
        weighted = (loss * weights * counts.tokens)[mask]
        return Loss(weighted, {name: column[mask].detach() for name, column in columns.items()})
