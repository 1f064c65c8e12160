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

from flow_grpo.draw.algorithms import Batch
from flow_grpo.draw.algorithms.trajectory import Taken, TrajectoryAlgorithm, kl_of_step
from flow_grpo.draw.models import Conditioning
from flow_grpo.draw.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.run.finite import backward
from flow_grpo.run.metrics import Loss
from flow_grpo.sde import Step

PIECE = 2**22  # numbers that are copied together: torch hands out pinned memory in powers of two


class Gradient:
    """A gradient of all trained weights, in one piece."""

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
    """The gradients of an epoch's samples, on the host, and their sum."""

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
        """What a sample takes on the host."""
        return self._own.flat.nbytes

    def describe(self, samples: int) -> str:
        """What so many samples take; refuses more than there is."""
        each = self.bytes_each
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        there, needed = psutil.virtual_memory().available, samples * each * processes
        told = f"{samples} x {each / 2**20:.1f} MiB of LoRA"
        if needed > there:
            raise UserError(
                f"train.keep_gradients=True would keep {told} on each of {processes} processes, "
                f"and {there / 2**30:.1f} GiB of this machine's memory are free; lower "
                "sample.num_batches_per_epoch or train.lora_rank"
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
        policy, algorithm = self.policy, self.algorithm
        denoiser, reference = policy.denoiser, None
        if algorithm.needs_reference:  # first: its weights take the place of those that sample
            at = latents[:, None], np.full((len(latents), 1), i)
            reference = policy.fixed_velocities("reference", *at, conditioning)[:, 0]
        with torch.enable_grad(), denoiser.unshared_gradients():
            step, velocity = denoiser.step(i, latents, conditioning, stochastic=True, noise=noise)
            log_prob, mean = step.log_prob.detach(), step.mean.detach()
            one, dt = torch.ones_like(log_prob), policy.dynamics.schedule.dt(i)
            taken = Taken(step, step.log_prob - log_prob, mean, one, dt)
            loss = algorithm.policy_loss(taken, velocity)
            with self._own.grows():
                total = loss.per_sample.sum()
                backward(self.accelerator, total, retain_graph=reference is not None)
            rest = Loss(torch.zeros_like(log_prob), loss.columns)
            if reference is not None:
                taken, kind = (step, velocity), algorithm.settings.kl_type
                rest = algorithm.anchors.hold(
                    rest,
                    np.zeros(0, int),  # no gate chooses among samples
                    velocity=velocity,
                    reference=reference,
                    kl=kl_of_step(kind, policy, i, latents, taken, reference),
                    kl_weight=algorithm.kl_weight,
                )
                with self._total.grows():
                    backward(self.accelerator, rest.per_sample.sum())
        # of the backward passes, two each; the forward pass is counted as the others of sampling
        policy.count(len(latents) * (2 if reference is None else 4))
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

    def weigh(self, batches: list[Batch]) -> list[Loss]:
        """Give the weights the gradient of these samples, each times its credit, the mean over
        processes; and return their losses."""
        total, weighed = self._total.flat, []
        for batch in batches:
            [sample], [credit] = batch.index.tolist(), self.algorithm.cut(batch.credit).tolist()
            pieces, losses = self._kept.pop(sample)
            for there, own in zip(total.split(PIECE), pieces, strict=True):
                if credit:
                    there.add_(own.to(there.device, non_blocking=True), alpha=credit)
            for loss in losses:
                policy_loss = credit * loss.columns["policy_loss"]
                columns = {**loss.columns, "policy_loss": policy_loss}
                weighed.append(Loss(loss.per_sample + policy_loss, columns))
        total.copy_(self.accelerator.reduce(total, "mean"))
        self.accelerator.sync_gradients = True
        self._total.give()
        return weighed
