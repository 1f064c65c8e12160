"""Convert pickled weights (torch.save) to safetensors without executing code."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flow_grpo.atomic_io import fsync_and_rename
from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import explain_load_errors
from flow_grpo.weight_checks import check_finite

# Keys under which checkpoints keep their state dict, beside optimizer states and epochs.
NESTED_KEYS = ("state_dict", "model_state_dict", "model", "module", "params")


@dataclass(frozen=True)
class ConvertedWeights:
    """What a conversion read and wrote; checksums are SHA-256 of the files."""

    tensors: int
    parameters: int
    left_out: list[str]  # entries that are not tensors
    source_sha256: str
    target_sha256: str


def convert_weights(source: Path, target: Path) -> ConvertedWeights:
    """Convert a file of `torch.save` to a new .safetensors file.

    It is read with `weights_only=True`, which rejects everything but tensors and plain containers.
    Tensors that share memory are written separately.

    Raises:
        UserError: A file is missing, damaged, no state dict or contains code, or the target exists.
    """
    if target.suffix != ".safetensors":
        raise UserError("must end in .safetensors", field="OUT", value=str(target))
    if target.exists():
        raise UserError("already exists", field="OUT", value=str(target), hint="choose a new name")
    if not source.is_file():
        raise UserError("is not a file", field="IN", value=str(source))
    if not target.absolute().parent.is_dir():
        raise UserError("is in a directory that does not exist", field="OUT", value=str(target))
    with explain_load_errors("IN", str(source), "a state dict without code"):
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=_is_zip(source))
    state, left_out = find_state_dict(content, source)
    check_finite(str(source), state.items())
    tensors = {name: value.detach().clone().contiguous() for name, value in state.items()}
    partial = target.with_name(f".{target.name}.partial")
    try:
        save_file(tensors, partial, {"format": "pt"})
        fsync_and_rename(partial, target)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", field=target) from error
    finally:
        partial.unlink(missing_ok=True)
    parameters = sum(value.numel() for value in tensors.values())
    return ConvertedWeights(
        len(tensors), parameters, left_out, file_sha256(source), file_sha256(target)
    )


def find_state_dict(content: Any, source: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors of a checkpoint by name, and the names of other entries.

    Raises:
        UserError: There are none.
    """
    outer: list[str] = []
    while isinstance(content, dict) and not any(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        key = next((k for k in NESTED_KEYS if isinstance(content.get(k), dict)), None)
        if key is None:
            break
        outer += [str(name) for name in content if name != key]
        content = content[key]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {str(name): value for name, value in items if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(
            f"contains no state dict, but a {type(content).__name__}",
            field="IN",
            value=str(source),
            hint="pass a file of tensors by name",
        )
    return tensors, outer + [str(name) for name, _ in items if str(name) not in tensors]


def _is_zip(path: Path) -> bool:
    """Return whether a file has the format of torch since 1.6, which can be memory-mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
