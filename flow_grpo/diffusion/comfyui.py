"""Write a LoRA for ComfyUI, and check that it has the same effect as the original."""

from pathlib import Path

import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.diffusion.models.kohya import from_kohya, to_kohya
from flow_grpo.diffusion.models.lora_files import TRANSFORMER, LoraFile
from flow_grpo.errors import UserError

DOWN, UP = "lora_A.weight", "lora_B.weight"
TOLERANCE = 1e-4  # relative; float32 sums of another order


def write_comfyui(file: LoraFile, family: str, out: Path) -> None:
    """Write the transformer's LoRA under the names of ComfyUI, with `.alpha` tensors.

    Args:
        file: The LoRA.
        family: Name of the pipeline class.
        out: File to write.

    Raises:
        UserError: If ComfyUI cannot represent the LoRA, or the file does not convert back to it.
    """
    tensors = file.for_model(TRANSFORMER)
    converted = to_kohya(tensors, file.settings, family, file.path)
    restored, settings = from_kohya(converted, family, file.path)
    before, after = lora_outputs(tensors, file.settings or {}), lora_outputs(restored, settings)
    for layer, expected in before.items():
        found = after.get(layer)
        if found is None or not torch.allclose(
            found, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max())
        ):
            raise UserError(f"changes in {layer} when it is converted for ComfyUI", field=file.path)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in converted.items()}, out, metadata={"format": "pt"})


def lora_outputs(tensors: dict[str, Tensor], settings: dict) -> dict[str, Tensor]:
    """Return what a LoRA adds to the output of each layer, for a fixed random input, by layer."""
    found = {}
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    for name, down in tensors.items():
        layer = name.removesuffix(f".{DOWN}")
        if layer == name:
            continue
        rank = ranks.get(get_pattern_key(ranks, layer), settings.get("r", len(down)))
        alpha = alphas.get(get_pattern_key(alphas, layer), settings.get("lora_alpha", rank))
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(down.shape[1], generator=generator)
        found[layer] = scale * (tensors[f"{layer}.{UP}"].float() @ (down.float() @ x))
    return found
