"""DPO (Rafailov et al. 2023, arXiv 2305.18290) and IPO (Azar et al. 2023, arXiv 2310.12036)."""

from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import logsigmoid

from flow_grpo.training.metrics import Loss
from flow_grpo.vlm.losses.base import UpdateCounts
from flow_grpo.vlm.losses.given import GivenBatch, GivenLoss


@dataclass(frozen=True)
class DpoLoss(GivenLoss):
    """-log sigmoid(beta (r_w - r_l)), where r = log p(y | x) - log p_ref(y | x) of a response.

    The formula of TRL's loss type "sigmoid" (huggingface/trl 1.16.0, trl/trainer/dpo_trainer.py,
    lines 1304, 1350 and 1351, 1383, 1388).
    """

    default_settings = MappingProxyType({"beta": 0.1})  # TRL's default

    beta: float

    def num_terms(self, counts: UpdateCounts) -> float:
        return counts.responses / 2

    def terms(self, batch: GivenBatch) -> Loss:
        ratios, lengths = batch.log_ratios, batch.mask.sum(1)
        chosen, rejected = self.beta * ratios[0::2], self.beta * ratios[1::2]
        likelihoods = batch.log_probs.sum(1)
        columns = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "logps/chosen": likelihoods[0::2],
            "logps/rejected": likelihoods[1::2],
        }
        loss = self.pair_loss(ratios[0::2], ratios[1::2], lengths[0::2], lengths[1::2])
        return Loss(loss, {name: column.detach() for name, column in columns.items()})

    def pair_loss(
        self, chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor
    ) -> Tensor:
        """Return the loss of each pair, (P,), given its log-ratios and numbers of tokens, (P,)."""
        return -logsigmoid(self.beta * (chosen - rejected))


class IpoLoss(DpoLoss):
    """(r_w / |w| - r_l / |l| - 1 / (2 beta))^2, with log-ratios averaged over the tokens.

    The formula of TRL's loss type "ipo" (huggingface/trl 1.16.0, trl/trainer/dpo_trainer.py, lines
    1400 to 1404).
    """

    def pair_loss(
        self, chosen: Tensor, rejected: Tensor, chosen_length: Tensor, rejected_length: Tensor
    ) -> Tensor:
        difference = chosen / chosen_length - rejected / rejected_length
        return (difference - 1 / (2 * self.beta)) ** 2
