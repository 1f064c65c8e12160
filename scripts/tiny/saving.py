"""Save small models in half precision within size limits, and describe them in model cards."""

import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

MAX_FOLDER_MIB, MAX_FILE_MIB = 16, 15


def save_pipeline_fp16(
    pipeline: DiffusionPipeline, folder: Path, max_mib: float = MAX_FOLDER_MIB
) -> None:
    """Save the pipeline in float16; raise if weights overflow or files exceed the size limits."""
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            check_fits_fp16(part, f"{name}.")
    pipeline.to(torch.float16).save_pretrained(folder)
    for path in folder.glob("text_encoder*/config.json"):
        # transformers loads text encoders in this dtype, diffusers everything else in float32: a
        # plain from_pretrained would mix the two.
        config = json.loads(path.read_text()) | {"dtype": "float32"}
        path.write_text(json.dumps(config, indent=2) + "\n")
    check_size(folder, max_mib)


def check_fits_fp16(module: torch.nn.Module, prefix: str = "") -> None:
    """Raise if a weight overflows in float16 or is not finite; `prefix` precedes its name."""
    largest = torch.finfo(torch.float16).max
    for name, value in module.state_dict().items():
        if value.is_floating_point() and not value.abs().max() < largest:
            raise RuntimeError(f"{prefix}{name} does not fit in float16 or is not finite")


def check_size(folder: Path, max_mib: float) -> None:
    """Raise if the files of a model exceed the size limits."""
    sizes = [path.stat().st_size / 2**20 for path in folder.rglob("*") if path.is_file()]
    if sum(sizes) > max_mib or max(sizes) > MAX_FILE_MIB:
        raise RuntimeError(
            f"{folder} has {sum(sizes):.1f} MiB (limit {max_mib:g}), its largest file "
            f"{max(sizes):.1f} (limit {MAX_FILE_MIB}); train fewer or narrower layers"
        )


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def format_parameters(parameters: dict[str, int]) -> str:
    """Format the number of parameters of each component in millions."""
    return ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in parameters.items())
