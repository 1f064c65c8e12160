"""DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117).

The advantage becomes a probability r that a sample is good. An implicit positive policy,
v+ = beta v + (1 - beta) v_old, is matched to x0 with weight r, and a negative one,
v- = (1 + beta) v_old - beta v, with weight 1 - r.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Batch
from flow_grpo.diffusion.algorithms.forward_process import (
    ForwardProcessAlgorithm,
    NoisedSamples,
    old_policy_decay,
)
from flow_grpo.diffusion.algorithms.settings import NftSettings
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy


class Nft(ForwardProcessAlgorithm):
    """DiffusionNFT: flow matching of an implicit positive and an implicit negative policy."""

    name = "nft"
    Settings = NftSettings
    keeps_old_policy = True
    old_is_behaviour = True
    needed_velocities = ("old",)

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return r e(v+) + (1 - r) e(v-) with the normalized x0 errors e, scaled by clip / beta."""
        beta, clip = self.settings.beta, self.settings.adv_clip_max
        good = 0.5 + self.clip_credit(batch.credit) / (2 * clip)
        positive_error = _normalized_x0_error(beta * velocity + (1 - beta) * at.old, at)
        negative_error = _normalized_x0_error((1 + beta) * at.old - beta * velocity, at)
        loss = good * positive_error + (1 - good) * negative_error
        return clip * loss / beta, {"old_distance": mean_square(velocity.detach() - at.old)}

    def samples_with_old_policy(self, updates: int) -> bool:
        return True

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        """Blend the current weights into the old policy."""
        s = self.settings
        policy.old.blend(
            old_policy_decay(updates, rate=s.old_rate, start=s.old_start, maximum=s.old_max_decay)
        )


def _normalized_x0_error(velocity: Tensor, at: NoisedSamples) -> Tensor:
    """Return the squared error of the predicted x0 over its detached mean magnitude, (B,)."""
    error = at.t * (at.target - velocity)  # x_t - t v - x0
    magnitude = error.detach().double().abs().flatten(1).mean(1).clamp_min(1e-5)
    return mean_square(error) / magnitude.to(error.dtype)
