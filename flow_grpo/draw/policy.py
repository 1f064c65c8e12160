"""What is trained: LoRA on the transformer, or all of it; and the reference it is held to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from flow_grpo.draw.models import Conditioning, ModelAdapter
from flow_grpo.draw.models.base import latent_dtype
from flow_grpo.draw.rollout import Denoiser, Dynamics
from flow_grpo.errors import UserError
from flow_grpo.run.shards import is_sharded, whole_state
from flow_grpo.run.snapshot import Snapshot
from flow_grpo.run.trained import Trained
from flow_grpo.sde import Step
from flow_grpo.speed.lora import fold_lora, lora_layers
from flow_grpo.speed.transfer import send

Fixed = Literal["reference", "old", "current"]


class Policy(Trained):
    """The transformer being trained, as every process calls it.

    `module` is the wrapped module after `prepare`; call that one, always, so that distribution
    sees every forward. The reference and the old policy are the same module with other weights in
    it, so that all of them run the same arithmetic.
    """

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
        self.adapter = adapter
        self.dynamics = dynamics
        self.transformer = self.network = adapter.transformer
        self.use_lora = use_lora
        if use_lora:
            self._add_lora(rank, alpha, lora_path, seed)
        else:
            if lora_path:
                raise UserError(f"train.lora_path={lora_path} needs use_lora=True")
            self.transformer.requires_grad_(True)
            self._keep_precision()
        for name, parameter in self.transformer.named_parameters():
            if self._is_unused(name):
                parameter.requires_grad_(False)
        self.lora_layers = lora_layers(self.transformer)
        for parameter in self.parameters():
            # a half-precision weight cannot hold steps of 1e-4
            parameter.data = parameter.data.to(latent_dtype(self.transformer))
        if gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.module: nn.Module = self.transformer
        # the weights at the start of the run, and earlier ones, for algorithms that need them
        self.reference: Snapshot | None = None
        self.old: Snapshot | None = None
        self.passes = 0  # of the transformer over samples so far: 1 forward, 3 with backward

    def _keep_precision(self) -> None:
        """Compute in half precision still, when the weights below become float32: not every way to
        distribute has an autocast of its own."""
        dtype = self.transformer.dtype
        if dtype != latent_dtype(self.transformer):
            cast = torch.autocast(self.transformer.device.type, dtype)
            self.transformer.forward = cast(self.transformer.forward)

    def _add_lora(self, rank: int, alpha: int, lora_path: str, seed: int) -> None:
        if lora_path:
            self.adapter.load_lora(lora_path)
            for name, parameter in self.transformer.named_parameters():
                parameter.requires_grad_("lora_" in name)
            return
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.transformer.add_adapter(
                LoraConfig(
                    r=rank,
                    lora_alpha=alpha,
                    init_lora_weights="gaussian",
                    target_modules=self._lora_targets(),
                )
            )

    def _lora_targets(self) -> list[str]:
        """Each by its full name where some are left out: `exclude_modules` would go into the saved
        file, and diffusers warn of it."""
        targets = self.adapter.lora_targets
        if self.adapter.unused is None:
            return targets
        ends = tuple(f".{target}" for target in targets)
        names = [name for name, _ in self.transformer.named_modules() if name.endswith(ends)]
        return [name for name in names if not self._is_unused(name)]

    def _is_unused(self, name: str) -> bool:
        return self.adapter.unused is not None and bool(re.fullmatch(self.adapter.unused, name))

    def prepare(
        self, accelerator: Accelerator, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        if not is_sharded(accelerator):  # engines that do gather them layer by layer
            fold_lora(self.transformer)
        self.module, optimizer = accelerator.prepare(self.transformer, optimizer)
        self.register(accelerator)
        return optimizer

    @property
    def denoiser(self) -> Denoiser:
        """The weights that are trained."""
        return Denoiser(self.adapter, self.module, self.dynamics)

    @contextmanager
    def fixed(self, which: Fixed) -> Iterator[Denoiser]:
        """The reference, the old policy or the one that is trained, to be run without gradients."""
        other = nullcontext() if which == "current" else getattr(self, which).applied()
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
        which: Fixed,
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

    def moved(self) -> None:
        """After an update of the weights."""
        if self.old is not None:
            self.old.is_current = False

    def count(self, samples: int, *, backward: bool = False, guidance: float | None = None) -> None:
        self.passes += samples * self.denoiser.guided(guidance).passes * (3 if backward else 1)

    def save(self, folder: Path, prefix: str = "") -> None:
        """`<prefix>lora/` for LoRA, `<prefix>transformer/` for full fine-tuning.

        Call it on all processes; one of them writes.
        """
        # with the buffers, where it is the whole model
        named = self.transformer.state_dict(keep_vars=True)
        if self.use_lora:  # all of it, also what a loaded one has where nothing is trained
            named = {name: weight for name, weight in named.items() if "lora_" in name}
        weights = whole_state(named)
        if not PartialState().is_main_process:
            return
        if self.use_lora:
            self.adapter.save_lora(folder / f"{prefix}lora", self.transformer, weights)
        else:
            self.transformer.save_config(folder / f"{prefix}transformer")
            save_file(weights, folder / f"{prefix}transformer" / SAFETENSORS_WEIGHTS_NAME)
