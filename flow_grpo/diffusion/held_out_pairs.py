"""Held-out pairs: measure how often the policy prefers the chosen image of pairs not trained.

The implicit reward of an image is how much lower its flow-matching error is with the policy than
with the reference. A pair is judged correctly if the chosen image has the higher implicit reward,
averaged over noise levels. Noise and levels are the same at every evaluation of a run.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Batch
from flow_grpo.diffusion.algorithms.dpo import PairAlgorithm
from flow_grpo.diffusion.given_images import GivenImages, GivenRow
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.diffusion.policy import Policy
from flow_grpo.perf.transfer import to_device
from flow_grpo.training.distributed import gather_rows, get_ranks

EVALUATION = 2**31 - 1  # stands for the epoch in seeds; no run has as many
LEVELS = 4  # noise levels per pair, at least


class HeldOutPairs:
    """The pairs of the test split of a preference set."""

    def __init__(self, rows: list[GivenRow], given: GivenImages, policy: Policy) -> None:
        self.rows, self._given, self._policy = rows, given, policy

    def measure(
        self, algorithm: PairAlgorithm, plan: BatchPlan, accelerator: Accelerator, seed: int
    ) -> dict[str, float]:
        """Return the mean margin and the accuracy; margins of 0 count as half correct.

        Args:
            algorithm: Method of the run, which defines the margin.
            plan: Determines the batch size.
            accelerator: Gives rank and world size; this method is collective.
            seed: Seed of the run.
        """
        ranks = get_ranks(accelerator)
        world, rank = ranks.data_size, ranks.data_rank
        size = max(1, plan.train_batch_size // 2)
        own = range(rank, len(self.rows), world)
        margins = torch.zeros(len(own))
        # Equal numbers of passes let all ranks take part in those of sharded weights.
        for start in range(0, math.ceil(len(self.rows) / world), size):
            rows = list(own[start : start + size])
            padded = rows + [0] * (size - len(rows))
            margins[start : start + len(rows)] = self._margins(algorithm, plan, padded, seed)[
                : len(rows)
            ]
        _, gathered = gather_rows(accelerator, torch.tensor(own), {"margin": margins})
        margin = gathered["margin"]
        correct = (margin > 0).float() + (margin == 0).float() / 2
        return {
            "pairs/accuracy": correct.mean().item(),
            "pairs/margin": margin.mean().item(),
        }

    def _margins(
        self, algorithm: PairAlgorithm, plan: BatchPlan, rows: list[int], seed: int
    ) -> Tensor:
        """Return the margin of each pair, averaged over noise levels, (P,), on the CPU."""
        chosen = [self.rows[row] for row in rows]
        batch = self._given.batch(plan, chosen, np.array(rows))
        device = batch.trajectory.final.device
        batch = replace(batch, credit=to_device(batch.credit, device))
        repeats = math.ceil(LEVELS / algorithm.losses_per_sample)
        with torch.no_grad():
            margins = [
                margin
                for repeat in range(repeats)
                for margin in self._level_margins(
                    algorithm, replace(batch, seed=(seed, EVALUATION, repeat))
                )
            ]
        return torch.stack(margins).mean(0).float().cpu()

    def _level_margins(self, algorithm: PairAlgorithm, batch: Batch) -> list[Tensor]:
        """Return the margin of each pair at each noise level, (P,) each."""
        noised = algorithm.prepare(self._policy, batch)
        velocity = algorithm.no_grad_velocities(self._policy, "current", noised, batch)
        columns = [
            algorithm.objective(velocity[:, j], noised[j], batch)[1]
            for j in range(velocity.shape[1])
        ]
        return [each["margin"][0::2] for each in columns]
