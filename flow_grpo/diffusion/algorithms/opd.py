"""On-policy distillation (Li et al. 2026, arXiv 2605.15055).

The student samples, and each of its steps is pulled to that of the teacher of its prompt set. One
teacher per task, initialisation from their average and the anchor follow Fang et al. 2026 (arXiv
2605.08063).
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flow_grpo.diffusion.algorithms.base import (
    Algorithm,
    Batch,
    Loss,
    ScoredSamples,
    Setup,
    select_sde_steps,
)
from flow_grpo.diffusion.algorithms.settings import OpdSettings
from flow_grpo.diffusion.algorithms.trajectory import step_kl
from flow_grpo.errors import UserError
from flow_grpo.losses import root_mean_square

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy

ALL = "all"


class Opd(Algorithm):
    """On-policy distillation from one or several teacher LoRAs."""

    name = "opd"
    Settings = OpdSettings
    overrides_credit = True

    def __init__(self, settings: OpdSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.losses_per_sample = len(self.noisy_steps(np.random.default_rng(0), 0))
        self.max_guidance = settings.teacher_guidance or 0.0
        teachers = {f"opd.teachers[{task!r}]": path for task, path in settings.teachers.items()}
        anchor = {"opd.anchor": settings.anchor} if settings.anchor_beta else {}
        self.loras = teachers | anchor
        self.initial_loras = []
        if settings.start == "merged":
            self.initial_loras = list(dict.fromkeys(teachers.values()))

    def check(self) -> None:
        """Also require a teacher for every prompt set, none for others, and something to learn."""
        super().check()
        teachers, tasks = self.settings.teachers, self.setup.tasks
        for task, path in teachers.items():
            if not isinstance(path, str) or not path:
                raise UserError(
                    "must be a LoRA directory", field=f"opd.teachers[{task!r}]", value=path
                )
        for task in tasks:
            if ALL not in teachers and task not in teachers:
                raise UserError(
                    f"has no teacher for prompt set {task!r}",
                    field="opd.teachers",
                    value=dict(teachers),
                    hint="add its LoRA directory",
                )
        if unknown := teachers.keys() - {*tasks, ALL}:
            raise UserError(
                f"has a teacher for the unknown prompt set {min(unknown)!r}",
                field="opd.teachers",
                value=dict(teachers),
                hint=f"use {' or '.join(map(repr, sorted({*tasks, ALL})))}",
            )
        if self.setup.anchors.diversity:
            raise UserError(
                "has no effect with algorithm='opd', which does not use rewards",
                field="anchors.diversity",
                value=True,
                hint="set it to False",
            )
        if len(self.initial_loras) == 1 and not self.settings.anchor_beta:
            raise UserError(
                "starts at the only teacher, so there is nothing to learn",
                field="opd.start",
                value="merged",
                hint="set 'model'",
            )

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        return select_sde_steps(self.setup, rng)

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        return np.zeros(len(scored.groups))  # rewards are only logged

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """Return batches of equal steps, sorted by task so that each needs few teachers."""
        by_steps: dict[range, list[Batch]] = {}
        for part in update:
            by_steps.setdefault(part.trajectory.steps, []).append(part)
        batches = []
        for parts in by_steps.values():
            samples = Batch.concat(parts)
            order = np.argsort(samples.tasks, kind="stable")
            batches += [samples[order[i : i + size]] for i in range(0, len(order), size)]
        return batches

    def prepare(self, policy: "Policy", batch: Batch) -> dict[str, Tensor]:
        """Return the velocities of each sample's teacher ("teacher") and of the anchor ("anchor").

        Both are (B, T, C, H, W); the anchor is missing if `anchor_beta` is 0.
        """
        s, trajectory = self.settings, batch.trajectory
        latents = trajectory.latents[:, :-1]
        steps = np.tile(trajectory.steps, (len(batch), 1))
        teacher_paths = [s.teachers.get(task, s.teachers.get(ALL)) for task in batch.tasks]
        paths = {*teacher_paths, s.anchor} if s.anchor_beta else {*teacher_paths}
        velocities = {
            path: policy.no_grad_velocities(
                policy.loras[path],
                latents,
                steps,
                trajectory.conditioning,
                guidance=s.teacher_guidance,
            )
            for path in sorted(paths)
        }
        teacher = torch.stack([velocities[path][row] for row, path in enumerate(teacher_paths)])
        anchor = {"anchor": velocities[s.anchor]} if s.anchor_beta else {}
        return {"teacher": teacher} | anchor

    def loss(self, policy: "Policy", batch: Batch, prepared: dict[str, Tensor], j: int) -> Loss:
        """Return the distance of step j to the teacher's, plus `anchor_beta` times the anchor's."""
        trajectory, s = batch.trajectory, self.settings
        i = trajectory.steps[j]
        latents, next_latents = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step, velocity = policy.step(i, latents, next_latents, trajectory.conditioning)
        distances = {
            f"{name}_distance": step_kl(
                s.distance, policy, i, latents, (step, velocity), target[:, j]
            )
            for name, target in prepared.items()
        }
        loss = distances["teacher_distance"] + s.anchor_beta * distances.get("anchor_distance", 0.0)
        norm = root_mean_square(velocity)
        return Loss(loss, {**distances, "policy_loss": loss, "velocity_norm": norm})
