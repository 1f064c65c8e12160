"""IPO (Azar et al. 2023, arXiv 2310.12036) on pairs of images, as `dpo`.

With the margin h of the log-likelihood ratios, the loss is (h - 1 / (2 beta))^2: it has a finite
minimum, so that pairs that are already in the right order are not pushed apart further, and a
deterministic preference does not outweigh the reference. As in `dpo`, h is the difference of errors
averaged over the latents, -1/2 [(e_w - e_w_ref) - (e_l - e_l_ref)]. The loss here is beta^2 times
that formula, (beta h - 1/2)^2, so that its scale does not depend on beta.

huggingface/diffusers has the same loss for epsilon prediction, up to constants
(examples/research_projects/diffusion_dpo/train_diffusion_dpo.py, `loss_type="ipo"`).
"""

from torch import Tensor

from flow_grpo.diffusion.algorithms.dpo import PairAlgorithm
from flow_grpo.diffusion.algorithms.settings import IpoSettings


class Ipo(PairAlgorithm):
    """IPO: regression of the preference margin to a finite value."""

    name = "ipo"
    Settings = IpoSettings

    def pair_loss(self, margin: Tensor, preference: Tensor) -> Tensor:
        """Return (margin - preference / 2)^2.

        With uncertain labels this is the expected loss, apart from a constant: the mean of
        (m - 1/2)^2 and (m + 1/2)^2, weighted by p and 1 - p, is (m - (2 p - 1) / 2)^2 + const.
        """
        return (margin - preference / 2) ** 2
