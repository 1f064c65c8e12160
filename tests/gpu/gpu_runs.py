"""A policy on a GPU that samples and trains without a session."""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from families import SOURCE, TOKENS, Family
from untrained import small

from flow_grpo.data.seeding import sample_generators
from flow_grpo.diffusion.algorithms import Batch, Setup
from flow_grpo.diffusion.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.diffusion.models import Size, resolve_adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Dynamics, Trajectory, initial_noise
from flow_grpo.training.snapshot import Snapshot

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPTS = ["one", "two", "three", "four"]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 2.0])


SD3 = Family("sd3", 4.5)


class Run:
    def __init__(
        self,
        precision: str = "no",
        *,
        compiled: bool = False,
        replay: bool,
        family: Family = SD3,
        use_lora: bool = True,
        handlers: list | None = None,
        **size,
    ) -> None:
        # otherwise it keeps the precision of the first run
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
        pipeline = small.build(family.name, **size)
        self.images = family.images(PROMPTS)
        self.size = Size(32, 32, family.frames)
        self.adapter = resolve_adapter(type(pipeline).__name__, pipeline.config)(
            pipeline,
            device="cuda",
            dtype=DTYPES[precision],
            max_sequence_length=TOKENS,
            source_size=self.size if family.frames > 1 else SOURCE,
        )
        dynamics = Dynamics(
            self.adapter.schedule(4, *self.size), "flow", 0.7, family.guidance_scale
        )
        self.policy = policy = Policy(self.adapter, dynamics, use_lora=use_lora, rank=4, alpha=8)
        policy.prepare(accelerator, torch.optim.AdamW(policy.parameters()))
        policy.reference, policy.old = (
            Snapshot(policy.trained_parameters(), n) for n in ("reference", "old")
        )
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.adapter.transformer.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.adapter.apply_optimizations(fold=True, compiled=compiled, graphs=replay)

    def reset(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.policy.parameters(), self.policy.reference.copy)

    def sample(self, first: int = 0) -> Trajectory:
        generators = sample_generators(0, 0, list(range(first, first + len(PROMPTS))))
        return self.policy.denoiser.sample(
            initial_noise(generators, self.adapter.latent_shape(*self.size), "cuda"),
            self.adapter.encode(PROMPTS, [""] * len(PROMPTS), self.images),
            steps=range(1, 3),
            generators=generators,
        )

    def train(self, trajectory: Trajectory, steps: list[int], *, add: bool = False) -> torch.Tensor:
        """Return the summed gradient of these steps; `add` keeps the earlier one."""
        algorithm, rows = Grpo(GrpoSettings(), Setup()), np.arange(len(trajectory))
        batch = Batch(trajectory, ADVANTAGES.cuda(), rows, rows)
        references = algorithm.prepare(self.policy, batch)
        if not add:
            self.policy.transformer.zero_grad(set_to_none=True)
        for j in steps:
            loss = algorithm.loss(self.policy, batch, references, j)
            self.ratio = loss.columns["ratio"]
            loss.per_sample.mean().backward()
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
