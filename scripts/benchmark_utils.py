"""Helpers of `scripts/benchmark.py`: FLOP counts, hardware description, the reference clone."""

import ast
import importlib
import platform
import statistics
import sys
import tempfile
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

from flow_grpo.diffusion.models import ModelAdapter, Size, find_adapter
from flow_grpo.diffusion.models.experts import iter_experts
from flow_grpo.diffusion.models.inputs import Inputs
from flow_grpo.errors import UserError, first_line
from flow_grpo.report.console import format_table
from flow_grpo.training.metrics import synchronized_time

PATCH, SCRIPT = "flow_grpo/diffusers_patch", "scripts/train_sd3.py"  # of Flow-GRPO
TIMED_PHASES = {  # key in the JSON line: row title
    "sampling_s_per_image": "sampling, s per image",
    "trained_step_s_per_sample": "training step, s per sample",
    "full_s_per_sample": "sampling and training, s per sample",
}
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def load_reference_functions(clone: Path) -> tuple[Callable, Callable]:
    """Return Flow-GRPO's `pipeline_with_logprob` and `compute_log_prob` from a clone."""
    package = types.ModuleType("reference")  # its package is called flow_grpo, as ours is
    package.__path__ = [str(clone / PATCH)]
    sys.modules[package.__name__] = package
    sampler = importlib.import_module("reference.sd3_pipeline_with_logprob")
    # Copy the function to a module: importing the whole script would need wandb and every reward.
    script = ast.parse((clone / SCRIPT).read_text("utf-8"))
    functions = {each.name: each for each in script.body if isinstance(each, ast.FunctionDef)}
    imports = "import torch\nfrom reference.sd3_sde_with_logprob import sde_step_with_logprob\n"
    with tempfile.TemporaryDirectory() as folder:
        package.__path__.append(folder)
        code = imports + ast.unparse(functions["compute_log_prob"]) + "\n"
        Path(folder, "compute_log_prob.py").write_text(code, "utf-8")
        module = importlib.import_module("reference.compute_log_prob")
    return sampler.pipeline_with_logprob, module.compute_log_prob


def native_resolution(model: str) -> int | None:
    """Return the resolution the model was trained for, or None if its config has none."""
    try:
        transformer = AutoModel.load_config(model, subfolder="transformer")
        vae = AutoModel.load_config(model, subfolder="vae")
    except OSError as error:
        raise UserError(
            f"cannot be read: {first_line(error)}", field="--model", value=model
        ) from error
    size = transformer.get("sample_size")
    return size and size * find_adapter(model).grid(transformer, vae).scale


class TimedReward:
    """Reward that takes `seconds` per batch and gives each image a different score."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, images: list, prompts: list[str], metadata: list[dict]) -> list[float]:
        time.sleep(self.seconds)
        return np.random.default_rng(0).random(len(images)).tolist()


def forward_tflop(adapter: ModelAdapter, size: Size, texts: Inputs) -> float | None:
    """Return the TFLOP of one forward pass of one sample, without LoRA.

    The pass runs on the meta device. Returns None for models whose forward pass depends on tensor
    values, such as Qwen-Image-2.1.

    Args:
        adapter: The model.
        size: Height, width and frames.
        texts: Text inputs of one sample.
    """
    _, model, _ = next(iter_experts(adapter.transformer))
    with torch.device("meta"):
        base = type(model).from_config(model.config)
    latents = torch.empty(1, *adapter.latent_shape(*size), device="meta")
    on_host = ("lengths", "source_lengths")
    inputs = {k: v if k in on_host else v.to("meta", torch.float32) for k, v in texts.items()}
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            adapter.forward(base, latents, torch.empty(1, device="meta"), inputs, 1.0)
    except RuntimeError:
        return None
    return counter.get_total_flops() / 1e12


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best measured TFLOP/s of a large square matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(20):
        start = synchronized_time(device)
        a @ b
        seconds.append(synchronized_time(device) - start)
    return 2 * size**3 / min(seconds) / 1e12


def spread(values: list[float]) -> dict[str, float]:
    summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: rounded(value) for name, value in summary.items()}


def report(result: dict[str, Any]) -> str:
    """Return the fields of the JSON line as a readable table."""
    settings, theirs = result["settings"], result.get("flow_grpo", {})
    rows = [["", "median", "min", "max", *(["Flow-GRPO", "speedup"] if theirs else [])]]
    for name, title in TIMED_PHASES.items():
        ours = result[name]
        rows.append([title, *(f"{ours[key]:.4g}" for key in ("median", "min", "max"))])
        if theirs:
            other = theirs[name]["median"]
            rows[-1] += [f"{other:.4g}", f"{other / ours['median']:.2f}"]
    precision = "float32" if settings["precision"] == "no" else settings["precision"]
    if (base := settings.get("base_precision", "bf16")) != "bf16":
        precision += f", base weights in {base}"
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
            format_table(rows),
            f"peak memory {result['peak_gib']} GiB, warm-up {result['warm_up_s']} s, "
            f"epoch {result['epoch_s']} s",
            f"TFLOP/s (percentage of a large matmul's {result['matmul_tflops']:.4g}): "
            + (", ".join(rates) or "not counted"),
        ]
    )


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Return the names of the device and the versions of Python and packages."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "python": platform.python_version(),
        **{p: version(p) for p in PACKAGES},
    }
