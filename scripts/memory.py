"""GPU memory and time of one trained step, for a model of SD3.5-medium's shape with random weights.

    python scripts/memory.py                        # a table of settings, one JSON line each
    python scripts/memory.py --batch 4 --checkpointing --full

Runs the trainer's own policy, loss and optimizer; text embeddings are random, so the encoders and
the VAE (idle in training, see offload_idle) are not counted.
"""

import argparse
import json
import time

import torch
from diffusers import SD3Transformer2DModel

from flow_grpo.benchmarking import SD35_MEDIUM
from flow_grpo.grpo import GrpoSettings, grpo_step_loss, reference_velocities
from flow_grpo.models.base import Conditioning, Schedule
from flow_grpo.models.sd3 import SD3Adapter
from flow_grpo.policy import Policy
from flow_grpo.rollout import Dynamics, Trajectory

TOKENS = 77 + 128  # CLIP's and T5's, at the presets' max_sequence_length


class TransformerOnly(SD3Adapter):
    """The adapter without text encoders and VAE."""

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        self.transformer = transformer


def measure(*, batch: int, checkpointing: bool, full: bool, size: int, beta: float) -> dict:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with device:
        transformer = SD3Transformer2DModel(**SD35_MEDIUM).requires_grad_(False).eval()
    transformer.to(torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    policy = Policy(
        TransformerOnly(transformer),
        use_lora=not full,
        with_reference=beta > 0,
        gradient_checkpointing=checkpointing,
    )
    policy.module.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    dynamics = Dynamics(Schedule((1.0, 0.9, 0.8), (1000.0, 900.0)), "flow", guidance_scale=4.5)
    index = torch.arange(batch, device=device)
    conditioning = Conditioning(
        torch.randn(batch + 1, TOKENS, 4096, device=device, dtype=torch.bfloat16),
        torch.randn(batch + 1, 2048, device=device, dtype=torch.bfloat16),
        positive=index,
        negative=torch.full_like(index, batch),
    )
    trajectory = Trajectory(
        range(1, 2),
        torch.randn(batch, 2, 16, size // 8, size // 8, device=device),
        torch.zeros(batch, 1, device=device),
        conditioning,
    )
    advantages, seconds = torch.randn(batch, device=device), []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            reference = None
            if beta > 0:
                reference = reference_velocities(policy, dynamics, trajectory)[:, 0]
            settings = GrpoSettings(beta=beta)
            loss = grpo_step_loss(
                policy, dynamics, trajectory, 0, advantages, settings, reference=reference
            )
        loss.per_sample.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "weights": "all" if full else "LoRA",
        "batch": batch,
        "checkpointing": checkpointing,
        "size": size,
        "beta": beta,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "seconds_per_sample": round(min(seconds[1:]) / batch, 4),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, help="one setting instead of the table")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA")
    parser.add_argument("--size", type=int, default=512, help="pixels")
    parser.add_argument("--beta", type=float, default=0.04, help="0: no reference")
    args = parser.parse_args()
    settings = [(args.batch, args.checkpointing, args.full)]
    if args.batch is None:
        settings = [(b, c, False) for c in (False, True) for b in (1, 4, 9)]
        settings += [(1, True, True), (4, True, True)]
    for batch, checkpointing, full in settings:
        try:
            row = measure(
                batch=batch,
                checkpointing=checkpointing,
                full=full,
                size=args.size,
                beta=args.beta,
            )
        except torch.OutOfMemoryError:
            row = {"batch": batch, "checkpointing": checkpointing, "full": full, "peak_gib": None}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
