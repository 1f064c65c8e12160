"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306): liked and disliked responses without pairs."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from flow_grpo.training.metrics import Loss
from flow_grpo.vlm.losses.given import GivenBatch, GivenLoss


@dataclass(frozen=True)
class KtoLoss(GivenLoss):
    """Prospect-theoretic loss, with r = log p(y | x) - log p_ref(y | x) of a response.

        liked      desirable_weight   * (1 - sigmoid(beta (r - z)))
        disliked   undesirable_weight * (1 - sigmoid(beta (z - r)))

    z = max(0, KL(p, p_ref)) has no gradient. It is estimated by the mean log-ratio of mismatched
    pairs: each prompt of an update with the response of the row before it. The formulas are those
    of TRL (huggingface/trl 1.16.0, trl/trainer/kto_trainer.py, lines 1150 to 1152 and 1443 to
    1480). TRL estimates z per micro-batch over all processes; here it is per update, so that it
    does not depend on the micro-batches.
    """

    default_settings = MappingProxyType({"beta": 0.1})  # TRL's default
    needs_mismatched_kl = True

    beta: float
    desirable_weight: float
    undesirable_weight: float

    def terms(self, batch: GivenBatch) -> Loss:
        ratios, kl, liked = batch.log_ratios, batch.counts.mismatched_kl, batch.liked
        sign = torch.where(liked, 1.0, -1.0).to(ratios.dtype)
        weight = torch.where(liked, self.desirable_weight, self.undesirable_weight)
        loss = weight.to(ratios.dtype) * (1 - torch.sigmoid(self.beta * sign * (ratios - kl)))
        likelihoods, rewards = batch.log_probs.sum(1), self.beta * ratios
        columns = {
            "rewards/chosen": rewards[liked],
            "rewards/rejected": rewards[~liked],
            "logps/chosen": likelihoods[liked],
            "logps/rejected": likelihoods[~liked],
            "mismatched_kl": torch.full_like(ratios, kl),
        }
        return Loss(loss, {name: column.detach() for name, column in columns.items()})
