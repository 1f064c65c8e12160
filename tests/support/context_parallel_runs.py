"""Single passes, and runs, with context parallelism: groups of two processes.

    torchrun --nproc_per_node 2 tests/support/context_parallel_runs.py '[{"family": ...}]' [FILE]

executes the runs one after the other. A run with the key "fsdp2", a class of transformer blocks, is
sharded; the reward of one with the key "fails" fails. Before, it writes to FILE how far the passes
of each family differ from those of one process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import float64_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from families import FAMILIES, Family
from fsdp_on_cpu import shard_on_cpu
from torch import Tensor
from untrained import small

from flow_grpo.diffusion.context_parallel import enable_context_parallel
from flow_grpo.diffusion.models import ADAPTERS, ModelAdapter, Size
from flow_grpo.diffusion.rollout import initial_noise
from flow_grpo.diffusion.session import Session
from flow_grpo.errors import RewardOutage
from flow_grpo.training.distributed import get_ranks, set_context_parallel

SUPPORTED = {  # families by the class of their pipeline
    "wan": "WanPipeline",
    "wan_i2v": "WanImageToVideoPipeline",
    "wan_v2v": "WanVideoToVideoPipeline",
    "flux": "FluxPipeline",
    "flux2": "Flux2Pipeline",
    "flux2_klein": "Flux2KleinPipeline",
    "qwen_image": "QwenImagePipeline",
    "ltx2": "LTX2Pipeline",
}
FRAMES = {"ltx2": 25}  # 4 video tokens, and 26 audio tokens; not its usual 9 audio tokens
PROMPTS = ["a red cat", "a longer text: blue dogs run"]


def measure_errors(family: Family) -> dict[str, float]:
    """Return the relative error of the velocity and of each gradient."""
    pipeline = small.build(family.name)
    kind = ADAPTERS[type(pipeline).__name__]
    size = Size(32, 32, FRAMES.get(family.name, family.frames))
    adapter = kind(pipeline, dtype=torch.float64, max_sequence_length=8, source_size=size)
    images = family.images(PROMPTS) if adapter.context_parallel_sources else None
    alone = velocity_and_gradients(adapter, images)
    accelerator = Accelerator(cpu=True)
    set_context_parallel(accelerator, 2)
    ranks = get_ranks(accelerator)
    enable_context_parallel(adapter, ranks)
    if family.name == "ltx2":  # the exchange would repeat the prompt, with the same result
        of_prompt = [m for n, m in adapter.transformer.named_modules() if n.endswith("attn2")]
        assert of_prompt
        assert all(module.processor._parallel_config is None for module in of_prompt)
    together = velocity_and_gradients(adapter, images)
    for name, gradient in together.items():  # in the same order on all processes
        if name not in ("velocity", "latents"):
            together[name] = ranks.sum_over_context(gradient)
    assert alone.keys() == together.keys()
    norm = max(tensor.norm() for name, tensor in alone.items() if name != "velocity")
    scales = {name: alone[name].norm() for name in ("velocity", "latents")}
    return {
        name: float((together[name] - alone[name]).norm() / scales.get(name, norm))
        for name in alone
    }


def velocity_and_gradients(
    adapter: ModelAdapter, images: list[tuple[bytes, ...]] | None
) -> dict[str, Tensor]:
    """Return a guided velocity and its gradients in the latents and in all weights."""
    conditioning = adapter.encode(PROMPTS, ["ugly", "a blurry photograph"], images)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
    noise = initial_noise(generators, adapter.latent_shape(*adapter.source_size), "cpu")
    latents = noise.to(adapter.dtype).requires_grad_()
    adapter.transformer.requires_grad_(True).zero_grad()
    velocity = adapter.velocity(adapter.transformer, latents, 500.0, conditioning, 2.0)
    (velocity * noise.flip(-1)).sum().backward()
    weights = adapter.transformer.named_parameters()
    gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
    return {"velocity": velocity.detach(), "latents": latents.grad, **gradients}


def main(runs: list[dict], file: Path | None) -> None:
    if file is not None:
        known = {family.name: family for family in FAMILIES}
        errors = {name: measure_errors(known[name]) for name in SUPPORTED}
        if Accelerator(cpu=True).is_main_process:
            file.write_text(json.dumps(errors))
    for fields in runs:
        AcceleratorState._reset_state()
        if block := fields.pop("fsdp2", ""):
            shard_on_cpu(block)
        run = run_with_failing_reward if fields.pop("fails", False) else float64_run.run
        run(**fields)


def run_with_failing_reward(**fields: Any) -> None:
    """Start a run whose reward has failed twice, and write a file when it ends with an outage."""
    train = float64_run.train

    def train_after_failures(session: Session) -> None:
        if get_ranks(session.accelerator).is_leader:
            for guarded in session.reward._guarded_scorers.values():
                guarded.permanent_errors = 2
        train(session)

    float64_run.train = train_after_failures
    try:
        float64_run.run(**fields)
    except RewardOutage:
        Path(fields["logdir"], f"outage-{os.environ['RANK']}").touch()
    finally:
        float64_run.train = train


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
