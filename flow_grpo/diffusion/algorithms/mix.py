"""MixGRPO: noise in a moving window of steps, ODE elsewhere (Li et al. 2025, arXiv 2507.21802).

Advantages are the weighted sum of the z-scores of each reward within the group, with the sample
standard deviation (ddof 1) as in the authors' fastvideo/train_grpo_flux.py.
"""

import numpy as np

from flow_grpo.advantages import compute_advantages
from flow_grpo.diffusion.algorithms.base import ScoredSamples
from flow_grpo.diffusion.algorithms.grpo import Grpo
from flow_grpo.diffusion.algorithms.settings import MixSettings
from flow_grpo.errors import UserError
from flow_grpo.windows import moving_window


class Mix(Grpo):
    """MixGRPO: Flow-GRPO with noise in a moving window of steps."""

    name = "mix"
    Settings = MixSettings
    overrides_credit = True

    def check(self) -> None:
        """Also reject `sample.sde_window_size`, because the window is `mix.window_size`."""
        super().check()
        if self.setup.window_size:
            raise UserError(
                "is incompatible with algorithm='mix', which has its own window",
                field="sample.sde_window_size",
                value=self.setup.window_size,
                hint="set mix.window_size instead",
            )

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        """Return the window of this epoch; `rng` is not used."""
        s = self.settings
        return moving_window(
            self.setup.num_steps, size=s.window_size, shift=s.shift, every=s.every, epoch=epoch
        )

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return the weighted sum of the z-scores of each reward within its group, (N,).

        Samples that lack any reward are excluded from all statistics.
        """
        missing = np.isnan(scored.total)  # lacks any reward: excluded from all statistics
        return sum(
            scored.weights[name]
            * compute_advantages(
                np.where(missing, np.nan, values),
                scored.groups,
                scale="group",
                eps=1e-8,
                ddof=1,
            )
            for name, values in scored.weighted_rewards.items()
        )
