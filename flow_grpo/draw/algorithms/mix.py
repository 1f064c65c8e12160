"""MixGRPO: noise in a window of steps that moves on as training goes on, the rest is ode
(Li et al. 2025, arXiv 2507.21802). Advantages are z-scores of each reward, summed with weights. It
uses the sample standard deviation (ddof 1), as in the authors' fastvideo/train_grpo_flux.py."""

from dataclasses import dataclass

import numpy as np

from flow_grpo.advantages import compute_advantages
from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Scored
from flow_grpo.draw.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.windows import moving_window


@dataclass(frozen=True)
class MixSettings(GrpoSettings):
    window_size: int = setting(4, "Steps with noise; of 25 in the paper.", at_least=1)
    shift: int = setting(1, "Steps by which the window moves on.", at_least=1)
    every: int = setting(25, "Epochs until it moves.", at_least=1)


class Mix(Grpo):
    name = "mix"
    Settings = MixSettings
    own_credit = True

    def check(self) -> None:
        super().check()
        if self.setup.window_size:
            raise ValueError(
                f"sample.sde_window_size={self.setup.window_size} does not go with "
                "algorithm='mix', which moves a window of its own; set mix.window_size"
            )

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        s = self.settings
        return moving_window(
            self.setup.num_steps, size=s.window_size, shift=s.shift, every=s.every, epoch=epoch
        )

    def credit(self, scored: Scored) -> np.ndarray:
        missing = np.isnan(scored.total)  # in any of the rewards: it shifts no statistic
        return sum(
            scored.weights[name]
            * compute_advantages(
                np.where(missing, np.nan, values),
                scored.groups,
                scale="group",
                eps=1e-8,
                ddof=1,
            )
            for name, values in scored.counted.items()
        )
