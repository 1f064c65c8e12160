"""The training objective: policy loss, KL penalty to the reference, and value loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flow_grpo.training.metrics import Loss
from flow_grpo.vlm.advantages import ResponseTensors, stack_padded
from flow_grpo.vlm.fields import GAE
from flow_grpo.vlm.losses.base import UpdateCounts, VlmLoss, estimate_kl, token_weights, value_loss
from flow_grpo.vlm.packing import PackedBatch


@dataclass(frozen=True)
class Objective:
    """Sum of the policy loss and, if configured, the KL penalty and the value loss."""

    policy: VlmLoss
    settings: Any  # the config's `train` section
    max_new_tokens: int
    kl_weight: float  # of this epoch; train.beta unless train.kl_target adapts it
    importance_weighted: bool  # True if the engine's log-probabilities differ from the policy's
    critic_only: bool = False  # use the value loss only (train.critic_warmup)

    def derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that are not means over an epoch: the clip range, if there is one."""
        clip_range = self.policy.clip_range
        return {} if clip_range is None else {"train/clip_range": clip_range}

    def num_terms(self, counts: UpdateCounts) -> float:
        """Return the number of terms that the loss of an update averages."""
        return counts.tokens

    @property
    def kl_in_loss(self) -> bool:
        return self.settings.beta > 0 and self.settings.kl_in == "loss"

    @property
    def uses_critic(self) -> bool:
        return self.settings.advantage == GAE

    def has_gradient(self, response: ResponseTensors) -> bool:
        """Return whether a response contributes to the gradient."""
        return self.kl_in_loss or self.uses_critic or bool(response.advantages.any())

    def loss(
        self,
        batch: PackedBatch,
        scores: Mapping[str, Tensor],
        tensors: Sequence[ResponseTensors],
        counts: UpdateCounts,
    ) -> Loss:
        """Compute the loss of every token of a micro-batch.

        Args:
            batch: R packed responses of up to T tokens.
            scores: `log_probs` (R, T) of the current policy, and `values` (R, T) with a value head.
            tensors: Per-token tensors of the R responses.
            counts: Sizes of the whole update over all processes, so that the loss depends neither
                on the world size nor on the micro-batches.

        Returns:
            Token losses times the number of tokens of the update, so that their mean over the
            update is the loss, with the logged columns.
        """
        train, mask, log_probs = self.settings, batch.mask, scores["log_probs"]
        old = stack_padded(tensors, "old_log_probs", mask)
        advantages = stack_padded(tensors, "advantages", mask)
        policy = self.policy.per_token(log_probs, old, advantages, mask)
        columns = {"policy_loss": policy.loss}
        if self.importance_weighted:
            columns["importance"] = stack_padded(tensors, "importance", mask)
            # as in verl, only the policy loss is weighted
            columns["policy_loss"] = policy.loss * columns["importance"]
        # zero rather than omitted: DDP waits for a gradient of every parameter
        loss = 0.0 * log_probs if self.critic_only else columns["policy_loss"]
        if train.beta > 0:
            reference = stack_padded(tensors, "reference_log_probs", mask)
            columns["kl"] = estimate_kl(
                train.kl, log_probs, reference, clamp=train.clamp_log_ratios
            )
            if self.kl_in_loss and not self.critic_only:
                loss = loss + self.kl_weight * columns["kl"]
        if self.uses_critic:
            old_values = stack_padded(tensors, "values", mask)
            returns = stack_padded(tensors, "returns", mask)
            columns["value_loss"] = value_loss(
                scores["values"], old_values, returns, train.value_clip
            )
            loss = loss + train.value_weight * columns["value_loss"]
        columns |= {
            "ratio": policy.ratio,
            "approx_kl": 0.5 * (log_probs - old) ** 2,
            "entropy": -old,  # single-sample estimate for the behaviour policy
            "clip_low": policy.clipped_low.float(),
            "clip_high": policy.clipped_high.float(),
        }
        weights = token_weights(train.aggregation, mask, counts, self.max_new_tokens)
        weighted = (loss * weights * counts.tokens)[mask]
        return Loss(weighted, {name: column[mask].detach() for name, column in columns.items()})
