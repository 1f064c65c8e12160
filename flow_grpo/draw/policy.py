"""What is trained: LoRA on the transformer, or all of it; and the reference it is held to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.draw.models import Conditioning, ModelAdapter
from flow_grpo.draw.models.base import latent_dtype
from flow_grpo.draw.models.experts import parts_of
from flow_grpo.draw.rollout import Denoiser, Dynamics
from flow_grpo.run.policy import BasePolicy, widen
from flow_grpo.run.snapshot import Snapshot
from flow_grpo.sde import Step
from flow_grpo.speed.lora import lora_layers
from flow_grpo.speed.transfer import send

FixedWeights = Literal["reference", "old", "current"]


class Policy(BasePolicy):
    """The transformer being trained, as every process calls it. The reference and the old policy
    are the same module with other weights in it, so that all of them run the same arithmetic."""

    def __init__(
        self,
        adapter: ModelAdapter,
        dynamics: Dynamics,
        *,
        use_lora: bool = True,
        rank: int = 32,
        alpha: int = 64,
        lora_path: str = "",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self.adapter, self.dynamics = adapter, dynamics
        self.transformer = self.network = self.module = adapter.transformer
        lora = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            init_lora_weights="gaussian",
            target_modules=self._lora_targets(),
        )
        super().__init__(self.transformer, lora if use_lora else None, lora_path, seed)
        if not use_lora:
            self._keep_precision()
        for name, parameter in self.transformer.named_parameters():
            if self._is_unused(name):
                parameter.requires_grad_(False)
        self.lora_layers = lora_layers(self.transformer)
        widen(self.parameters(), latent_dtype(self.transformer))
        if gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        # the weights at the start of the run, and earlier ones, for algorithms that need them
        self.reference: Snapshot | None = None
        self.old: Snapshot | None = None
        # Replaces `old` in the loss where `sample.async_depth` sampled with an earlier snapshot.
        self.behaviour: Snapshot | None = None
        self.loras: dict[str, Snapshot] = {}  # of other runs, by path
        self.passes = 0  # of the transformer over samples so far: 1 forward, 3 with backward

    def _keep_precision(self) -> None:
        """Compute in half precision still, when the weights below become float32: not every way to
        distribute has an autocast of its own."""
        dtype = self.transformer.dtype
        if dtype != latent_dtype(self.transformer):
            cast = torch.autocast(self.transformer.device.type, dtype)
            self.transformer.forward = cast(self.transformer.forward)

    def _load_lora(self, path: str) -> None:
        self.adapter.load_lora(path)

    def _lora_targets(self) -> list[str]:
        """Layers, each by its full name where some are left out: `exclude_modules` would go into
        the saved file, and diffusers warn of it."""
        targets = self.adapter.lora_targets
        if self.adapter.unused is None:
            return targets
        ends = tuple(f".{target}" for target in targets)
        names = [name for name, _ in self.transformer.named_modules() if name.endswith(ends)]
        return [name for name in names if not self._is_unused(name)]

    def _is_unused(self, name: str) -> bool:
        return self.adapter.unused is not None and bool(re.fullmatch(self.adapter.unused, name))

    @property
    def denoiser(self) -> Denoiser:
        """What samples and steps with the weights being trained."""
        return Denoiser(self.adapter, self.module, self.dynamics)

    @contextmanager
    def fixed(self, which: FixedWeights | Snapshot) -> Iterator[Denoiser]:
        """The reference, the old policy, the one that is trained or any other weights, to be run
        without gradients."""
        weights = getattr(self, which, None) if isinstance(which, str) else which
        other = nullcontext() if which == "current" else weights.applied()
        with torch.no_grad(), other:
            yield self.denoiser

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditioning: Conditioning,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """With gradients; `timestep` is (B,), `guidance` that of the rollout if none is given."""
        self.count(len(latents), backward=True, guidance=guidance)
        return self.denoiser.guided(guidance).velocity(latents, timestep, conditioning)

    def step(
        self, i: int, latents: Tensor, landed: Tensor, conditioning: Conditioning
    ) -> tuple[Step, Tensor]:
        """The noisy step i that went from `latents` to `landed`, taken again with gradients, and
        the velocity behind it."""
        self.count(len(latents), backward=True)
        return self.denoiser.step(i, latents, conditioning, stochastic=True, next_latents=landed)

    def fixed_velocities(
        self,
        which: FixedWeights | Snapshot,
        latents: Tensor,
        steps: np.ndarray,
        conditioning: Conditioning,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """At `latents` (B, S, C, H, W) of the steps (B, S) of the schedule: one by one, as they are
        trained, since batches of another size round differently."""
        timesteps = torch.tensor(self.dynamics.schedule.timesteps)[torch.from_numpy(steps)]
        timesteps = send(timesteps, latents.device)
        self.count(steps.size, guidance=guidance)
        with self.fixed(which) as fixed:
            denoiser = fixed.guided(guidance)
            velocities = [
                denoiser.velocity_as_trained(latents[:, j], timesteps[:, j], conditioning)
                for j in range(steps.shape[1])
            ]
        return torch.stack(velocities, 1)

    def input_gradient(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditioning: Conditioning,
        incoming: Tensor,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """The gradient in `latents` of the velocity there times `incoming`; none in the weights."""
        self.count(len(latents), backward=True, guidance=guidance)
        denoiser = self.denoiser.guided(guidance)
        with torch.enable_grad(), denoiser.unshared_gradients():
            latents = latents.detach().requires_grad_()
            velocity = denoiser.velocity(latents, timestep, conditioning)
        [gradient] = torch.autograd.grad(velocity, latents, incoming)
        return gradient

    def moved(self) -> None:
        if self.old is not None:
            self.old.is_current = False

    def count(self, samples: int, *, backward: bool = False, guidance: float | None = None) -> None:
        """Add to `passes` what these samples cost: a backward pass counts as two."""
        self.passes += samples * self.denoiser.guided(guidance).passes * (3 if backward else 1)

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self.adapter.save_lora(folder, self.transformer, weights)

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        for place, part, own in parts_of(self.transformer, weights):
            part.save_config(folder / f"{prefix}transformer" / place)
            save_file(own, folder / f"{prefix}transformer" / place / SAFETENSORS_WEIGHTS_NAME)
