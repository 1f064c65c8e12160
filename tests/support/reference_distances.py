"""Distances of the policy from its reference and from the behaviour policy, before any update."""

from dataclasses import replace

import numpy as np
import torch

from flow_grpo.diffusion.algorithms import Algorithm, Batch, Setup
from flow_grpo.diffusion.algorithms.dgpo import Dgpo, DgpoSettings
from flow_grpo.diffusion.algorithms.dpo import Dpo, DpoSettings
from flow_grpo.diffusion.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Trajectory

SETUP = Setup(num_steps=3, group_size=2, update_samples=4)
METHODS = {
    "grpo": Grpo(GrpoSettings(beta=0.04), SETUP),
    "trajectory": Grpo(GrpoSettings(beta=0.04, ratio="trajectory"), SETUP),
    "dpo": Dpo(DpoSettings(times=3, kl_beta=0.1), SETUP),
    "dgpo": Dgpo(DgpoSettings(times=3), SETUP),
}
START = {"kl": 0.0, "margin": 0.0, "ratio": 1.0, "group_weight": 0.5}


def distances(algorithm: Algorithm, policy: Policy, trajectory: Trajectory) -> dict[str, float]:
    """Return how far each metric is at most from its value in `START`, for two groups of two."""
    credit = torch.tensor([1.0, -1.0, -1.0, 1.0])
    batch = Batch(trajectory, credit, np.arange(4), np.array([0, 0, 1, 1]))
    [batch] = algorithm.batches([batch], 4)
    batch = replace(batch, credit=batch.credit.to(trajectory.final.device))
    [(batch, prepared)] = algorithm.iter_prepared(policy, [batch])
    losses = [
        algorithm.loss(policy, batch, prepared, j) for j in range(algorithm.losses_per_sample)
    ]
    return {
        name: max((loss.columns[name] - start).abs().max().item() for loss in losses)
        for name, start in START.items()
        if name in losses[0].columns
    }
