"""What `scripts/benchmark.py` holds its times against."""

import ast
import importlib
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoModel
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.draw.models import ModelAdapter, Size, find_adapter
from flow_grpo.draw.models.experts import parts_of
from flow_grpo.draw.models.inputs import Inputs
from flow_grpo.errors import UserError
from flow_grpo.run.metrics import now
from flow_grpo.show.console import table

PATCH, SCRIPT = "flow_grpo/diffusers_patch", "scripts/train_sd3.py"  # of Flow-GRPO
TIMES = {  # what is timed, and what it is called in tables
    "sampling_s_per_image": "sampling, s per image",
    "trained_step_s_per_sample": "a trained step, s per sample",
    "full_s_per_sample": "sampling and training, s per sample",
}
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def find_functions(clone: Path) -> tuple[Callable, Callable]:
    """Flow-GRPO's `pipeline_with_logprob` and `compute_log_prob`."""
    package = types.ModuleType("reference")  # its own name is ours too
    package.__path__ = [str(clone / PATCH)]
    sys.modules[package.__name__] = package
    sampler = importlib.import_module("reference.sd3_pipeline_with_logprob")
    step = importlib.import_module("reference.sd3_sde_with_logprob")
    # the function alone: the script around it wants wandb and all rewards
    module = ast.parse((clone / SCRIPT).read_text("utf-8"))
    module.body = [n for n in module.body if getattr(n, "name", "") == "compute_log_prob"]
    names = {"torch": torch, "sde_step_with_logprob": step.sde_step_with_logprob}
    exec(compile(module, SCRIPT, "exec"), names)
    return sampler.pipeline_with_logprob, names["compute_log_prob"]


def own_resolution(model: str) -> int | None:
    """The size of the pictures that the model was made for, where it says so."""
    try:
        transformer = AutoModel.load_config(model, subfolder="transformer")
        vae = AutoModel.load_config(model, subfolder="vae")
    except OSError as error:
        raise UserError(f"--model={model}: {str(error).strip().splitlines()[0]}") from error
    size = transformer.get("sample_size")
    return size and size * find_adapter(model).grid(transformer, vae).scale


class TimedReward:
    """Takes `seconds` for a batch, and differs between the images, so that there is something to
    learn."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, images: list, prompts: list[str], metadata: list[dict]) -> list[float]:
        time.sleep(self.seconds)
        return np.random.default_rng(0).random(len(images)).tolist()


def forward_tflop(adapter: ModelAdapter, size: Size, texts: Inputs) -> float | None:
    """What one forward of one sample takes, in 1e12 multiplications and additions, without LoRA;
    `texts` are those of one sample. None for a model that looks at numbers, such as Qwen-Image-2.1:
    none are computed here."""
    _, model, _ = next(parts_of(adapter.transformer))
    with torch.device("meta"):
        plain = type(model).from_config(model.config)
    latents = torch.empty(1, *adapter.latent_shape(*size), device="meta")
    host = ("lengths", "source_lengths")
    there = {k: v if k in host else v.to("meta", torch.float32) for k, v in texts.items()}
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            adapter.forward(plain, latents, torch.empty(1, device="meta"), there, 1.0)
    except RuntimeError:
        return None
    return counter.get_total_flops() / 1e12


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of a large square matrix product, 1e12 operations per second."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(20):
        start = now(device)
        a @ b
        seconds.append(now(device) - start)
    return 2 * size**3 / min(seconds) / 1e12


def spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: rounded(value) for name, value in found.items()}


def report(result: dict[str, Any]) -> str:
    """What was measured, as a table for people; `result` is what goes into the JSON line."""
    settings, theirs = result["settings"], result.get("flow_grpo", {})
    rows = [["", "median", "min", "max", *(["Flow-GRPO", "times as fast"] if theirs else [])]]
    for name, what in TIMES.items():
        own = result[name]
        rows.append([what, *(f"{own[key]:.4g}" for key in ("median", "min", "max"))])
        if theirs:
            other = theirs[name]["median"]
            rows[-1] += [f"{other:.4g}", f"{other / own['median']:.2f}"]
    precision = "float32" if settings["precision"] == "no" else settings["precision"]
    if (base := settings.get("base_precision", "bf16")) != "bf16":
        precision += f" on a base in {base}"
    rates = [
        f"{kind} {result[f'{kind}_tflops']:.4g} ({100 * result[f'{kind}_tflops_share']:.3g} %)"
        for kind in ("sampling", "training")
        if f"{kind}_tflops" in result
    ]
    return "\n".join(
        [
            f"{settings['model']}, {settings['size']}, {settings['steps']} steps, "
            f"{settings['algorithm']}, {settings['weights']}, batch {settings['batch']}, "
            f"{precision} on {result['device']}",
            table(rows),
            f"peak memory {result['peak_gib']} GiB, warm-up {result['warm_up_s']} s, "
            f"epoch {result['epoch_s']} s",
            f"TFLOP/s (share of a large matrix product's {result['matmul_tflops']:.4g}): "
            + (", ".join(rates) or "not counted"),
        ]
    )


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "python": platform.python_version(),
        **{p: version(p) for p in PACKAGES},
    }
