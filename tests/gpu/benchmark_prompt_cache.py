"""Measure the time that Qwen-Image-2.1 saves by caching the keys and values of its prompts.

PYTHONPATH=.:scripts python tests/gpu/benchmark_prompt_cache.py    # full size, random weights
"""

import json
import statistics
import sys
import time
from itertools import cycle, islice

import torch
from untrained import small
from untrained.full import build

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import ModelAdapter, Size, resolve_adapter
from flow_grpo.diffusion.models.qwen_image_21 import QwenImage21Adapter
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, eval_generators, initial_noise

WORDS = "a shop sign on a busy street at night that reads its name in large letters"


class WithoutPromptCache(QwenImage21Adapter):
    """Adapter that runs the prompts through the transformer in every step."""

    precompute = ModelAdapter.precompute


def sample(adapter: ModelAdapter, size: Size, words: int, batch: int, steps: int) -> torch.Tensor:
    text = " ".join(islice(cycle(WORDS.split()), words))
    dynamics = Dynamics(adapter.schedule(steps, *size), guidance_scale=4.0)
    denoiser = Denoiser(adapter, adapter.transformer, dynamics)
    noise = initial_noise(
        eval_generators(0, list(range(batch))), adapter.latent_shape(*size), adapter.device
    )
    with torch.no_grad():
        return denoiser.sample(noise, denoiser.encode([Prompt(text)] * batch)).final


def main() -> None:
    on_gpu, tiny = torch.cuda.is_available(), "--small" in sys.argv
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16
    pipeline = small.build("qwen_image_21") if tiny else build("qwen-image-2.1", device, dtype)
    own = resolve_adapter(type(pipeline).__name__, pipeline.config)
    assert own is QwenImage21Adapter
    batch, steps, size = (2, 3, Size(64, 64)) if tiny else (4, 10, Size(512, 512))
    for words in (16, 128, 512):
        found, latents = {}, {}
        for kind in (WithoutPromptCache, own):
            adapter = kind(pipeline, device=device, dtype=dtype, max_sequence_length=1024)
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                latents[kind] = sample(adapter, size, words, batch, steps).float().cpu()
                seconds.append((time.perf_counter() - start) / batch)
            found["cached" if kind is own else "recomputed"] = round(statistics.median(seconds), 4)
        error = (latents[own] - latents[WithoutPromptCache]).abs().max()
        relative = float(error / latents[own].abs().max())
        line = {"words": words, "s_per_image": found, "largest_difference": relative}
        print(json.dumps({"batch": batch, "steps": steps, "size": size[:2], **line}), flush=True)


if __name__ == "__main__":
    main()
