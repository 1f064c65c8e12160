"""Reinforce adjoint matching: regression on the reference's velocity, moved towards good samples
and away from bad ones (Bergmeister et al. 2026, arXiv 2605.10759)."""

from dataclasses import dataclass

from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised
from flow_grpo.losses import mean_square


@dataclass(frozen=True)
class RamSettings(ForwardSettings):
    adv_clip_max: float = setting(
        5.0, "Advantages beyond +-this are cut: one success in 1,152 samples has 32.", above=0
    )
    adv_scale: float = setting(
        5.0,
        "Advantages are divided by it. At adv_clip_max or above, the loss of every sample has a "
        "minimum: a bad one pushes no harder than the KL holds.",
        above=0,
    )
    kl_beta: float = setting(
        1.0,
        "Weight of the KL to the model as training began; 1 is the paper's loss, less lets the "
        "reward count for more.",
        at_least=0,
    )


class Ram(ForwardProcess):
    name = "ram"
    Settings = RamSettings

    def has_gradient(self, credit: Tensor) -> Tensor:
        return super().has_gradient(credit) if self.is_held else credit != 0

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """R |v - u|^2; with the KL it has the gradient of |v - sg(v_ref + R (u - v))|^2, which is
        2 (v - v_ref) + 2 R (v - u)."""
        s, error = self.settings, mean_square(velocity - at.target)
        credit = batch.credit.clamp(-s.adv_clip_max, s.adv_clip_max) / s.adv_scale
        return credit * error, {"matching_error": error}
