"""The Bradley-Terry loss of reward models.

In the model of Bradley and Terry, a response with the score r_c is preferred to one with the score
r_r with probability sigmoid(r_c - r_r). The loss is the negative log-likelihood of the pairs, with
two common additions (TRL: trl/trainer/reward_trainer.py, lines 751 to 756, commit f2cd577):

    -log sigmoid(r_c - r_r - margin) + center (r_c + r_r)^2

A margin, one per pair, demands a larger difference where the preference is clear (Llama 2, section
3.2.2; also openrlhf/models/loss.py, lines 281 and 283, commit 3c3be62). The likelihood depends on
differences only; `center` keeps the mean score near 0 (arXiv 2312.09244, eq. 2).
"""

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center: float = 0.0
) -> Tensor:
    """Return the loss of each pair, (P,).

    Args:
        chosen: Scores of the preferred responses, (P,).
        rejected: Scores of the other responses, (P,).
        margin: Difference of the scores at which the likelihood is one half, (P,).
        center: Weight of the squared sum of both scores.
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center * (chosen + rejected) ** 2 if center else loss
