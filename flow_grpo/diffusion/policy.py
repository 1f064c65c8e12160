"""The trained policy: LoRA on the transformer or all its weights, and snapshots to compare with."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from diffusers.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.diffusion.models import Conditioning, ModelAdapter
from flow_grpo.diffusion.models.base import latent_dtype
from flow_grpo.diffusion.models.experts import Experts, iter_experts
from flow_grpo.diffusion.rollout import Denoiser, Dynamics
from flow_grpo.perf.lora import lora_layers
from flow_grpo.perf.transfer import to_device
from flow_grpo.sde import Step
from flow_grpo.training.distributed import needs_equal_passes, unsharded_class_name
from flow_grpo.training.lora_targets import select_target_modules
from flow_grpo.training.policy import BasePolicy, upcast_parameters
from flow_grpo.training.snapshot import Snapshot

PolicyWeights = Literal["reference", "old", "current"]


class Policy(BasePolicy):
    """The transformer being trained.

    The reference and the old policy are the same module with other weights swapped in, so that all
    of them run the same arithmetic.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        dynamics: Dynamics,
        *,
        use_lora: bool = True,
        rank: int = 32,
        alpha: int = 64,
        target_modules: str = "",
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
            target_modules=self._lora_targets(target_modules),
        )
        if isinstance(self.transformer, Experts) and not use_lora:
            self.transformer.restore_offloaded()
        super().__init__(self.transformer, lora if use_lora else None, lora_path, seed)
        if not use_lora:
            self._autocast_forward()
        for name, parameter in self.transformer.named_parameters():
            if self._is_unused(name):
                parameter.requires_grad_(False)
        self.lora_layers = lora_layers(self.transformer)
        upcast_parameters(self.parameters(), latent_dtype(self.transformer))
        if gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        # weights at the start of the run, and earlier ones, for algorithms that need them
        self.reference: Snapshot | None = None
        self.old: Snapshot | None = None
        # Replaces `old` in the loss where `sample.async_depth` sampled with an earlier snapshot.
        self.behaviour: Snapshot | None = None
        self.loras: dict[str, Snapshot] = {}  # LoRA weights of other runs, by path
        self.passes = 0  # transformer passes since the last count: 1 forward, 3 with backward

    def _autocast_forward(self) -> None:
        """Wrap the forward pass in autocast, since the weights become float32.

        Not every distributed engine has its own autocast.
        """
        dtype = self.transformer.dtype
        if dtype != latent_dtype(self.transformer):
            cast = torch.autocast(self.transformer.device.type, dtype)
            self.transformer.forward = cast(self.transformer.forward)

    def _load_lora(self, path: str) -> None:
        self.adapter.load_lora(path)

    def _lora_targets(self, wanted: str) -> list[str] | str:
        """Return the target layers, by full name if some are excluded.

        `exclude_modules` would be stored in the saved file, and diffusers warns about it.

        Args:
            wanted: Value of `train.lora_target_modules`; "" for the family's default.
        """
        _, transformer, _ = next(iter_experts(self.transformer))  # experts have the same layers
        if wanted:
            return select_target_modules(
                transformer,
                wanted,
                lambda name, _: "the output does not use them" if self._is_unused(name) else "",
            )
        targets = self.adapter.lora_targets
        if self.adapter.unused_modules is None:
            return targets
        suffixes = tuple(f".{target}" for target in targets)
        names = [name for name, _ in transformer.named_modules() if name.endswith(suffixes)]
        return [name for name in names if not self._is_unused(name)]

    def _is_unused(self, name: str) -> bool:
        return self.adapter.unused_modules is not None and bool(
            re.fullmatch(self.adapter.unused_modules, name)
        )

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        """Wrap the transformer, see the base class; engines that shard need all its weights."""
        if isinstance(self.transformer, Experts) and needs_equal_passes(accelerator):
            self.transformer.restore_offloaded()
        return super().prepare(accelerator, optimizer)

    @property
    def denoiser(self) -> Denoiser:
        """The denoiser with the weights being trained."""
        return Denoiser(self.adapter, self.module, self.dynamics)

    @contextmanager
    def frozen_denoiser(self, which: PolicyWeights | Snapshot) -> Iterator[Denoiser]:
        """Yield the denoiser with the given weights, without gradients."""
        weights = getattr(self, which, None) if isinstance(which, str) else which
        swapped = nullcontext() if which == "current" else weights.applied()
        with torch.no_grad(), swapped:
            yield self.denoiser

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditioning: Conditioning,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """Return the guided velocity with gradients, (B, C, H, W).

        Args:
            latents: (B, C, H, W).
            timestep: (B,).
            conditioning: Encoded prompts of the samples.
            guidance: Guidance scale; that of the rollout by default.
        """
        self.count_passes(len(latents), backward=True, guidance=guidance)
        return self.denoiser.with_guidance(guidance).velocity(latents, timestep, conditioning)

    def step(
        self, i: int, latents: Tensor, next_latents: Tensor, conditioning: Conditioning
    ) -> tuple[Step, Tensor]:
        """Evaluate the stochastic step i from `latents` to `next_latents` again, with gradients.

        Returns:
            The step and the velocity it used.
        """
        self.count_passes(len(latents), backward=True)
        return self.denoiser.step(
            i, latents, conditioning, stochastic=True, next_latents=next_latents
        )

    def no_grad_velocities(
        self,
        which: PolicyWeights | Snapshot,
        latents: Tensor,
        steps: np.ndarray,
        conditioning: Conditioning,
        *,
        guidance: float | None = None,
    ) -> Tensor:
        """Return the velocities of the given weights, (B, S, C, H, W), without gradients.

        Steps are computed one at a time, as in training, because another batch size rounds
        differently.

        Args:
            which: The weights to use.
            latents: (B, S, C, H, W).
            steps: Indices in the schedule, (B, S).
            conditioning: Encoded prompts of the samples.
            guidance: Guidance scale; that of the rollout by default.
        """
        timesteps = torch.tensor(self.dynamics.schedule.timesteps)[torch.from_numpy(steps)]
        timesteps = to_device(timesteps, latents.device)
        self.count_passes(steps.size, guidance=guidance)
        with self.frozen_denoiser(which) as frozen:
            denoiser = frozen.with_guidance(guidance)
            velocities = [
                denoiser.velocity_with_training_kernels(
                    latents[:, j], timesteps[:, j], conditioning
                )
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
        """Return the vector-Jacobian product of the velocity in `latents` with `incoming`.

        Weights get no gradient. All tensors are (B, C, H, W).
        """
        self.count_passes(len(latents), backward=True, guidance=guidance)
        denoiser = self.denoiser.with_guidance(guidance)
        with torch.enable_grad(), denoiser.no_gradient_sync():
            latents = latents.detach().requires_grad_()
            velocity = denoiser.velocity(latents, timestep, conditioning)
        [gradient] = torch.autograd.grad(velocity, latents, incoming)
        return gradient

    def on_weights_updated(self) -> None:
        if self.old is not None:
            self.old.is_current = False

    def count_passes(
        self, samples: int, *, backward: bool = False, guidance: float | None = None
    ) -> None:
        """Add the passes of `samples` to `passes`; a backward pass counts as two."""
        per_velocity = self.denoiser.with_guidance(guidance).passes_per_velocity
        self.passes += samples * per_velocity * (3 if backward else 1)

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self.adapter.save_lora(folder, self.transformer, weights)

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        """Write the transformer's config and `weights`, in a subdirectory for each expert."""
        for subfolder, expert, tensors in iter_experts(self.transformer, weights):
            target = folder / f"{prefix}transformer" / subfolder
            _save_config(expert, target)
            save_file(tensors, target / SAFETENSORS_WEIGHTS_NAME)


def _save_config(transformer: nn.Module, folder: Path) -> None:
    """Write the config with the name of the class that diffusers knows, without FSDP2's prefix."""
    transformer.save_config(folder)
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text("utf-8"))
    config["_class_name"] = unsharded_class_name(transformer)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
