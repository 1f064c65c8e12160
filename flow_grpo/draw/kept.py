"""Gradients kept from the rollout (LeanGRPO, 2026). Where an epoch has one update, the policy that
trains is the one that sampled: the gradient of a sample's noisy steps is taken while it is drawn,
and weighed once its credit is known. There is no second forward pass.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from flow_grpo.draw.algorithms import Algorithm, Batch
from flow_grpo.draw.algorithms.trajectory import Taken, TrajectoryAlgorithm, kl_of_step
from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.models import Conditioning
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.draw.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.run.distributed import runs_in_step
from flow_grpo.run.metrics import Loss
from flow_grpo.sde import Step

NAME = "train.keep_gradients=True"
PIECE = 2**22  # numbers that are copied together: torch hands out pinned memory in powers of two


def check_kept(
    config: DrawFields, algorithm: Algorithm, plan: BatchPlan, accelerator: Accelerator
) -> None:
    """Refuse what would not have the gradient of the plain loop, or would save nothing."""
    sample, method = config.sample, algorithm.name
    if not algorithm.linear_in_credit:
        raise UserError(
            f"{NAME} does not go with algorithm={method!r}: it needs a gradient that is the "
            "credit times one of the sample alone; use grpo, mix, grpo_guard or dppo"
        )
    if algorithm.settings.ratio != "step":
        raise UserError(
            f"{method}.ratio={algorithm.settings.ratio!r} has no effect with {NAME}, whose ratios "
            "are all 1; leave it at 'step'"
        )
    if plan.updates > 1:
        raise UserError(
            f"{NAME} needs one update an epoch, by the weights that sampled it, and here are "
            f"{plan.updates}; set train.num_inner_epochs=1 and "
            f"train.gradient_accumulation_steps={plan.micro_batches}"
        )
    if plan.sample_batch_size > 1:
        raise UserError(
            f"{NAME} takes the gradient of one sample at a time, so sample.train_batch_size="
            f"{plan.sample_batch_size} must be 1; where larger batches are faster, set it to False"
        )
    if sample.async_depth:
        raise UserError(
            f"{NAME} does not go with sample.async_depth={sample.async_depth}, whose samples are "
            "by older weights than those that train; set it to 0"
        )
    if config.anchors.kl_gate:
        raise UserError(
            f"{NAME} does not go with anchors.kl_gate={config.anchors.kl_gate}, which chooses "
            "whom the KL holds when all are drawn; set it to 0"
        )
    if not config.use_lora:
        raise UserError(f"{NAME} needs use_lora=True: it keeps a gradient of each sample")
    if runs_in_step(accelerator):
        raise UserError(f"{NAME} does not go with DeepSpeed or FSDP; use plain data parallelism")


class Gradient:
    """Of all trained weights, in one piece."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights, sizes = weights, [weight.numel() for weight in weights]
        self.flat = weights[0].detach().new_zeros(sum(sizes))
        parts = self.flat.split(sizes)
        self.parts = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]

    def give(self) -> None:
        """Let the weights have it for theirs."""
        for weight, part in zip(self.weights, self.parts, strict=True):
            weight.grad = part

    @contextmanager
    def grows(self) -> Iterator[None]:
        """While it is entered, backward passes add to it."""
        self.give()
        yield
        for weight in self.weights:
            weight.grad = None


class KeptGradients:
    """Those of the samples of an epoch, on the host; and their sum."""

    def __init__(
        self, accelerator: Accelerator, policy: Policy, algorithm: TrajectoryAlgorithm
    ) -> None:
        self.accelerator, self.policy, self.algorithm = accelerator, policy, algorithm
        self._own, self._total = (Gradient(policy.parameters()) for _ in range(2))
        self._losses: list[Loss] = []  # of the steps of the sample that is drawn
        self._kept: dict[int, tuple[list[Tensor], list[Loss]]] = {}  # by sample
        if algorithm.needs_reference:  # compiled code goes back twice, and may not tidy up
            functorch_config.donated_buffer = False

    @property
    def bytes_each(self) -> int:
        """Of a sample, on the host."""
        return self._own.flat.nbytes

    def describe(self, samples: int) -> str:
        """What so many samples take; refuses more than there is."""
        each = self.bytes_each
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        there, needed = psutil.virtual_memory().available, samples * each * processes
        told = f"{samples} x {each / 2**20:.1f} MiB of LoRA"
        if needed > there:
            raise UserError(
                f"{NAME} would keep {told} on each of {processes} processes, and of this machine's "
                f"memory {there / 2**30:.1f} GiB are free; lower sample.num_batches_per_epoch or "
                "train.lora_rank"
            )
        return f"{told} = {samples * each / 2**30:.1f} GiB of the host's memory per process"

    def begin(self) -> None:
        """A new epoch, whatever became of the last."""
        self._kept.clear()
        self._losses = []
        for gradient in (self._own, self._total):
            gradient.flat.zero_()

    def step(
        self, i: int, latents: Tensor, conditioning: Conditioning, *, noise: Iterator[Tensor]
    ) -> tuple[Step, Tensor]:
        """Take the noisy step i, and its gradient for a credit of 1. That of the KL and the
        anchors, which no credit weighs, goes into the sum of all samples at once."""
        policy, algorithm, accelerator = self.policy, self.algorithm, self.accelerator
        held, denoiser = algorithm.needs_reference, policy.denoiser
        if held:  # before the policy's pass: its weights stand in for these
            steps = np.full((len(latents), 1), i)
            fixed = policy.fixed_velocities("reference", latents[:, None], steps, conditioning)
        with torch.enable_grad(), denoiser.unshared_gradients():
            step, velocity = denoiser.step(i, latents, conditioning, stochastic=True, noise=noise)
            log_prob, mean = step.log_prob.detach(), step.mean.detach()
            ones, dt = torch.ones_like(log_prob), policy.dynamics.schedule.dt(i)
            taken = Taken(step, step.log_prob - log_prob, mean, ones, dt)
            loss = algorithm.policy_loss(taken, velocity)
            rest = Loss(torch.zeros_like(log_prob), loss.columns)
            with self._own.grows():
                accelerator.backward(loss.per_sample.sum(), retain_graph=held)
            if held:
                at = {
                    "velocity": velocity,
                    "reference": fixed[:, 0],
                    "kl_weight": algorithm.kl_weight,
                }
                kl = kl_of_step(
                    algorithm.settings.kl_type, policy, i, latents, (step, velocity), fixed[:, 0]
                )
                rest = algorithm.anchors.hold(rest, np.zeros(0, int), kl=kl, **at)
                with self._total.grows():
                    accelerator.backward(rest.per_sample.sum())
        policy.count(2 * len(latents) * (2 if held else 1))  # the backward passes alone
        columns = {name: values.detach() for name, values in rest.columns.items()}
        self._losses.append(Loss(rest.per_sample.detach(), columns))
        return replace(step, log_prob=log_prob, mean=mean), velocity.detach()

    def keep(self, index: np.ndarray) -> None:
        """What was taken so far is of this sample."""
        [sample] = index.tolist()
        pinned = self._own.flat.is_cuda
        pieces = [
            torch.empty_like(piece, device="cpu", pin_memory=pinned).copy_(piece, non_blocking=True)
            for piece in self._own.flat.split(PIECE)
        ]
        self._kept[sample], self._losses = (pieces, self._losses), []
        self._own.flat.zero_()

    def weigh(self, batches: list[Batch], *, shared: bool) -> Iterator[Loss]:
        """Give the weights the gradient of these samples by their credit, and yield the losses.
        `shared`: the mean over processes; else a backward pass that comes will share it."""
        total = self._total.flat
        for batch in batches:
            [sample], [credit] = batch.index.tolist(), self.algorithm.cut(batch.credit).tolist()
            pieces, losses = self._kept.pop(sample)
            for there, own in zip(total.split(PIECE), pieces if credit else (), strict=False):
                there.add_(own.to(there.device, non_blocking=True), alpha=credit)
            for loss in losses:
                policy_loss = credit * loss.columns["policy_loss"]
                columns = {**loss.columns, "policy_loss": policy_loss}
                yield Loss(loss.per_sample + policy_loss, columns)
        if shared:
            total.copy_(self.accelerator.reduce(total, "mean"))
        self.accelerator.sync_gradients = True
        self._total.give()
