"""What `scripts/benchmark.py` holds its times against, and the random model it takes them on."""

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
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.errors import UserError
from flow_grpo.models.small.sd3 import build as build_tiny_sd3

SD35_MEDIUM = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
SD3_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
PATCH, SCRIPT = "flow_grpo/diffusers_patch", "scripts/train_sd3.py"  # of Flow-GRPO
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def random_sd35_medium(device: torch.device, dtype: torch.dtype) -> StableDiffusion3Pipeline:
    """Transformer and VAE of SD3.5-medium's shape; text encoders of its widths, a layer deep."""
    small = build_tiny_sd3(
        text_width=SD35_MEDIUM["pooled_projection_dim"] // 2,
        text_layers=1,
        joint_width=SD35_MEDIUM["joint_attention_dim"],
        max_length=77,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            transformer = SD3Transformer2DModel(**SD35_MEDIUM)
            vae = AutoencoderKL(**SD3_VAE)
    finally:
        torch.set_default_dtype(before)
    return StableDiffusion3Pipeline(**{**small.components, "transformer": transformer, "vae": vae})


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


def own_resolution(model: str) -> int:
    """Of the pictures that the model was made for."""
    try:
        transformer = SD3Transformer2DModel.load_config(model, subfolder="transformer")
        vae = AutoencoderKL.load_config(model, subfolder="vae")
    except OSError as error:
        raise UserError(f"--model={model}: {str(error).strip().splitlines()[0]}") from error
    return transformer["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)


class TimedReward:
    """Takes `seconds` for a batch, and differs between the images, so that there is something to
    learn."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, images: list, prompts: list[str], metadata: list[dict]) -> list[float]:
        time.sleep(self.seconds)
        return np.random.default_rng(0).random(len(images)).tolist()


def forward_tflop(transformer: nn.Module, latent_shape: tuple[int, ...], tokens: int) -> float:
    """Of one forward of one image, in 1e12 multiplications and additions, LoRA not counted."""
    config = transformer.config
    with torch.device("meta"):
        plain = type(transformer).from_config(config)
        inputs: dict[str, Tensor] = {
            "hidden_states": torch.empty(1, *latent_shape),
            "encoder_hidden_states": torch.empty(1, tokens, config.joint_attention_dim),
            "pooled_projections": torch.empty(1, config.pooled_projection_dim),
            "timestep": torch.empty(1),
        }
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(**inputs)
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


def now(device: torch.device) -> float:
    """The time at which all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: rounded(value) for name, value in found.items()}


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
