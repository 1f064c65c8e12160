"""Policy gradients computed during the rollout (`train.keep_gradients`; LeanGRPO, 2026).

With one update per epoch, the policy that trains is the one that sampled: all ratios are 1 and the
gradient of the loss is -sum_i A_i G_i, with G_i = sum_t grad log p(x_t' | x_t) over the stochastic
steps of sample i. G_i does not depend on the rewards, so it is computed while sample i is drawn
and weighted by the advantage A_i once that is known. This saves the second forward pass; it costs
host memory for one gradient of the trained weights (LoRA) per sample, and sampling batches of one.

Layout: a gradient is one flat tensor over all trained parameters (`FlatGradient`). That of the
current sample and the total of the epoch are on the device, stored ones on the host in chunks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flow_grpo.diffusion.algorithms import Batch
from flow_grpo.diffusion.algorithms.trajectory import PolicyStep, TrajectoryAlgorithm, step_kl
from flow_grpo.diffusion.models import Conditioning
from flow_grpo.diffusion.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.host_memory import available_memory
from flow_grpo.perf.inductor import keep_backward_buffers
from flow_grpo.sde import Step
from flow_grpo.training.finite import backward
from flow_grpo.training.metrics import Loss

COPY_CHUNK_NUMEL = 2**22  # elements per copy: torch rounds pinned memory up to powers of two


class FlatGradient:
    """A gradient of all trained parameters in one flat buffer, with a view per parameter."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        sizes = [weight.numel() for weight in weights]
        self.flat = weights[0].detach().new_zeros(sum(sizes))
        parts = self.flat.split(sizes)
        self.parts = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]

    def assign_to_parameters(self) -> None:
        """Assign this buffer to each parameter's `.grad`."""
        for weight, part in zip(self.weights, self.parts, strict=True):
            weight.grad = part

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context in which backward passes add to this buffer."""
        self.assign_to_parameters()
        yield
        for weight in self.weights:
            weight.grad = None


class RolloutGradients:
    """The gradients of an epoch's samples, and their weighted sum."""

    def __init__(
        self, accelerator: Accelerator, policy: Policy, algorithm: TrajectoryAlgorithm
    ) -> None:
        self.accelerator, self.policy, self.algorithm = accelerator, policy, algorithm
        self._sample_gradient = FlatGradient(policy.parameters())
        self._total_gradient = FlatGradient(policy.parameters())
        self._losses: list[Loss] = []  # of the current sample's steps
        self._stored: dict[int, tuple[list[Tensor], list[Loss]]] = {}  # by sample index
        if algorithm.needs_reference:  # two backward passes: the first must not free buffers
            keep_backward_buffers()

    @property
    def bytes_per_sample(self) -> int:
        """Host memory per stored sample."""
        return self._sample_gradient.flat.nbytes

    def describe_memory(self, samples: int) -> str:
        """Describe the host memory that `samples` need.

        Raises:
            UserError: If it exceeds the available memory.
        """
        each = self.bytes_per_sample
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = available_memory()
        lora_size = f"{samples} x {each / 2**20:.1f} MiB of LoRA"
        if samples * each * processes > available:
            raise UserError(
                f"needs {samples * each * processes / 2**30:.1f} GiB of host memory for LoRA "
                f"gradients ({lora_size} on each of {processes} processes), but only "
                f"{available / 2**30:.1f} GiB are available",
                field="train.keep_gradients",
                value=True,
                hint="lower sample.num_batches_per_epoch or train.lora_rank",
            )
        return f"{lora_size} = {samples * each / 2**30:.1f} GiB of host memory per process"

    def reset(self) -> None:
        """Discard everything, for a new epoch."""
        self._stored.clear()
        self._losses = []
        for gradient in (self._sample_gradient, self._total_gradient):
            gradient.flat.zero_()

    def step(
        self, i: int, latents: Tensor, conditioning: Conditioning, *, noise: Iterator[Tensor]
    ) -> tuple[Step, Tensor]:
        """Sample the stochastic step i and accumulate its gradient for an advantage of 1.

        The gradient of the KL and the anchors does not depend on the advantage, so it is added to
        the epoch's total right away.
        """
        policy, algorithm = self.policy, self.algorithm
        denoiser = policy.denoiser
        reference = None
        if algorithm.needs_reference:  # before the forward pass: it swaps the weights
            steps = np.full((len(latents), 1), i)
            velocities = policy.no_grad_velocities(
                "reference", latents[:, None], steps, conditioning
            )
            reference = velocities[:, 0]
        with torch.enable_grad(), denoiser.no_gradient_sync():
            step, velocity = denoiser.step(i, latents, conditioning, stochastic=True, noise=noise)
            log_prob, mean = step.log_prob.detach(), step.mean.detach()
            credit = torch.ones_like(log_prob)
            dt = policy.dynamics.schedule.dt(i)
            policy_step = PolicyStep(step, step.log_prob - log_prob, mean, credit, dt)
            loss = algorithm.policy_loss(policy_step, velocity)
            with self._sample_gradient.accumulate():
                total = loss.per_sample.sum()
                backward(self.accelerator, total, retain_graph=reference is not None)
            regularization = Loss(torch.zeros_like(log_prob), loss.columns)
            if reference is not None:
                kl_type = algorithm.settings.kl_type
                regularization = algorithm.anchors.add_regularization(
                    regularization,
                    np.zeros(0, int),  # sample indices, for the KL gate only
                    velocity=velocity,
                    reference=reference,
                    kl=step_kl(kl_type, policy, i, latents, (step, velocity), reference),
                    kl_weight=algorithm.kl_weight,
                )
                with self._total_gradient.accumulate():
                    backward(self.accelerator, regularization.per_sample.sum())
        # a backward pass counts as two; the forward pass is counted with the other sampling steps
        policy.count_passes(len(latents) * (2 if reference is None else 4))
        columns = {name: values.detach() for name, values in regularization.columns.items()}
        self._losses.append(Loss(regularization.per_sample.detach(), columns))
        return replace(step, log_prob=log_prob, mean=mean), velocity.detach()

    def store(self, index: np.ndarray) -> None:
        """Move the accumulated gradient to the host as that of the sample `index`, (1,)."""
        [sample] = index.tolist()
        pinned = self._sample_gradient.flat.is_cuda
        chunks = [
            torch.empty_like(chunk, device="cpu", pin_memory=pinned).copy_(chunk, non_blocking=True)
            for chunk in self._sample_gradient.flat.split(COPY_CHUNK_NUMEL)
        ]
        self._stored[sample] = (chunks, self._losses)
        self._losses = []
        self._sample_gradient.flat.zero_()

    def assign_weighted_gradient(self, batches: list[Batch]) -> list[Loss]:
        """Set `.grad` to the sum of the samples' gradients times their advantages.

        The sum includes the regularization and is averaged over processes. The gradients of these
        samples are then discarded.

        Returns:
            The losses of the samples' steps.
        """
        total, losses_with_credit = self._total_gradient.flat, []
        for batch in batches:
            [sample] = batch.index.tolist()
            [credit] = self.algorithm.clip_credit(batch.credit).tolist()
            chunks, losses = self._stored.pop(sample)
            for target, chunk in zip(total.split(COPY_CHUNK_NUMEL), chunks, strict=True):
                if credit:
                    target.add_(chunk.to(target.device, non_blocking=True), alpha=credit)
            for loss in losses:
                policy_loss = credit * loss.columns["policy_loss"]
                columns = {**loss.columns, "policy_loss": policy_loss}
                losses_with_credit.append(Loss(loss.per_sample + policy_loss, columns))
        total.copy_(self.accelerator.reduce(total, "mean"))
        self.accelerator.sync_gradients = True
        self._total_gradient.assign_to_parameters()
        return losses_with_credit
