"""DiffusionNFT: the good and the bad side of a sample as two velocities around the old one, both
matched to the same x0 (Zheng et al. 2025, arXiv 2509.16117)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised, decay_at
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy


@dataclass(frozen=True)
class NftSettings(ForwardSettings):
    times: int = setting(
        9, "Noise levels trained per sample: 9 of the 10 of the rollout.", at_least=1
    )
    beta: float = setting(
        1.0, "How far the two sides are apart; 0.1 for OCR and for several rewards.", above=0
    )
    adv_clip_max: float = setting(
        5.0, "Advantages become shares of good and bad within it.", above=0
    )
    kl_beta: float = setting(
        1e-4, "Weight of the KL to the model as training began: a weak leash.", at_least=0
    )
    old_rate: float = setting(
        0.001,
        "The old weights keep more of themselves with each update of the others, once an epoch: "
        "min(old_rate * (updates - old_start), old_most).",
        at_least=0,
    )
    old_start: int = setting(
        0, "Updates after which they begin to; 75 in the slow schedule.", at_least=0
    )
    old_most: float = setting(
        0.5, "0: the old weights are those of the last epoch.", at_least=0, below=1
    )


class Nft(ForwardProcess):
    name = "nft"
    Settings = NftSettings
    keeps_old = old_is_behaviour = True
    fixed = ("old",)

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        beta, most = self.settings.beta, self.settings.adv_clip_max
        good = 0.5 + batch.credit.clamp(-most, most) / (2 * most)
        positive = beta * velocity + (1 - beta) * at.old
        negative = (1 + beta) * at.old - beta * velocity
        loss = good * _matching(positive, at) + (1 - good) * _matching(negative, at)
        moved = mean_square(velocity.detach() - at.old)
        return most * loss / beta, {"old_distance": moved}

    def samples_with_old(self, updates: int) -> bool:
        return True

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        s = self.settings
        policy.old.blend(decay_at(updates, rate=s.old_rate, start=s.old_start, most=s.old_most))


def _matching(velocity: Tensor, at: Noised) -> Tensor:
    """Squared error of the x0 that `velocity` leads to, over its own size."""
    error = at.t * (at.target - velocity)  # x_t - t v - x0
    size = error.detach().double().abs().flatten(1).mean(1).clamp_min(1e-5)
    return mean_square(error) / size.to(error.dtype)
