"""On-policy distillation: the student samples, and each of its steps is pulled to that of its
prompt's teacher (Li et al. 2026, arXiv 2605.15055; a teacher per task, their mean to start from and
an anchor after Fang et al. 2026, arXiv 2605.08063)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Algorithm, Batch, Loss, Scored, Setup, trajectory_steps
from flow_grpo.draw.algorithms.trajectory import kl_of_step
from flow_grpo.losses import KL, KLS, root_mean_square

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy

ALL = "all"


@dataclass(frozen=True)
class OpdSettings:
    teachers: dict = setting({}, "A LoRA folder for each prompt set; 'all' serves every prompt.")
    start: str = setting(
        "merged", "Begin with the mean of the teachers, or the model.", choices=("merged", "model")
    )
    distance: KL = setting(
        "velocity",
        "From a step to the teacher's, as kl_type of other methods; velocity counts all alike.",
        choices=KLS,
    )
    teacher_guidance: float | None = setting(
        None, "Guidance of teachers, if another.", at_least=0, at_most=1000
    )
    anchor: str = setting("", "A LoRA folder to stay near on all prompts. Empty: the model alone.")
    anchor_beta: float = setting(0.0, "Weight of the anchor. 0 saves a pass.", at_least=0)


class Opd(Algorithm):
    name = "opd"
    Settings = OpdSettings
    own_credit = True

    def __init__(self, settings: OpdSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.losses_per_sample = len(self.noisy_steps(np.random.default_rng(0), 0))
        self.most_guidance = settings.teacher_guidance or 0.0
        fields = {f"opd.teachers[{task!r}]": path for task, path in settings.teachers.items()}
        self.loras = fields | ({"opd.anchor": settings.anchor} if settings.anchor_beta else {})
        self.start = [*dict.fromkeys(fields.values())] if settings.start == "merged" else []

    def check(self) -> None:
        super().check()
        given, tasks = self.settings.teachers, self.setup.tasks
        for task, path in given.items():
            if not isinstance(path, str) or not path:
                raise ValueError(f"opd.teachers[{task!r}]={path!r} must name a LoRA folder")
        if missing := [t for t in tasks if ALL not in given and t not in given]:
            raise ValueError(
                f"opd.teachers={given} has none for {missing[0]!r}; add its LoRA folder"
            )
        if unknown := given.keys() - {*tasks, ALL}:
            raise ValueError(f"opd.teachers: {min(unknown)!r} is none of {', '.join(tasks)}, {ALL}")
        if len(self.start) == 1 and not self.settings.anchor_beta:
            raise ValueError("opd.start='merged' is at the one teacher already; set it to 'model'")

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        return trajectory_steps(self.setup, rng)

    def credit(self, scored: Scored) -> np.ndarray:
        return np.zeros(len(scored.groups))  # rewards are measured, and train nothing

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """Batches of samples that took the same steps, sorted by task: a batch goes through the
        teachers of all its samples."""
        by_steps: dict[range, list[Batch]] = {}
        for part in update:
            by_steps.setdefault(part.trajectory.steps, []).append(part)
        batches = []
        for parts in by_steps.values():
            whole = Batch.join(parts)
            order = np.argsort(whole.tasks, kind="stable")
            batches += [whole[order[i : i + size]] for i in range(0, len(order), size)]
        return batches

    def prepare(self, policy: "Policy", batch: Batch) -> dict[str, Tensor]:
        """Velocities (B, steps, C, H, W) of each sample's teacher, and of the anchor."""
        s, steps = self.settings, np.tile(batch.trajectory.steps, (len(batch), 1))
        states, given = batch.trajectory.latents[:, :-1], batch.trajectory.conditioning
        of = np.array([s.teachers.get(task, s.teachers.get(ALL)) for task in batch.tasks])
        found = {
            path: policy.fixed_velocities(
                policy.loras[path], states, steps, given, guidance=s.teacher_guidance
            )
            for path in sorted({*of.tolist(), *([s.anchor] if s.anchor_beta else [])})
        }
        teacher = torch.stack([found[path][row] for row, path in enumerate(of.tolist())])
        return {"teacher": teacher} | ({"anchor": found[s.anchor]} if s.anchor_beta else {})

    def loss(self, policy: "Policy", batch: Batch, prepared: dict[str, Tensor], j: int) -> Loss:
        trajectory, s = batch.trajectory, self.settings
        i, state, landed = trajectory.steps[j], *trajectory.latents[:, j : j + 2].unbind(1)
        taken = policy.step(i, state, landed, trajectory.conditioning)
        far = {
            f"{name}_distance": kl_of_step(s.distance, policy, i, state, taken, other[:, j])
            for name, other in prepared.items()
        }
        loss = far["teacher_distance"] + s.anchor_beta * far.get("anchor_distance", 0.0)
        return Loss(loss, {**far, "policy_loss": loss, "velocity_norm": root_mean_square(taken[1])})
