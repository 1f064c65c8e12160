"""Convert weights in a pickle file to safetensors, without executing code of the file.

    flow-grpo rewards convert model.pth model.safetensors

`torch.load(weights_only=True)` unpickles tensors and plain containers only; a file that needs more
is rejected. With `--modules`, the file contains a whole module: its classes are replaced by
placeholders, and only parameters and buffers are kept. Names and values are unchanged.
The SHA-256 of the original is stored in the metadata of the result, so that its origin can be
verified.
"""

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from flow_grpo.atomic_io import check_output_folder, fsync_path
from flow_grpo.errors import UserError, did_you_mean_file, first_line
from flow_grpo.rewards.loading import Weights, explain_load_errors, load_weights_file

KIND = "a file of weights"


def convert_weights(
    source: Path, target: Path, sha256: str = "", *, modules: bool = False
) -> tuple[str, str]:
    """Convert a file that `torch.save` wrote to safetensors.

    Args:
        source: File with a state dict, which may be nested under "state_dict" or "model".
        target: New .safetensors file.
        sha256: Expected SHA-256 of the source; "" accepts any.
        modules: Whether the file contains a whole module instead of tensors.

    Returns:
        SHA-256 of the source and of the target.

    Raises:
        UserError: If the source is invalid or has another checksum, or the target exists or cannot
            be written.
    """
    if not os.path.isfile(source):  # also False if its folder cannot be searched
        raise UserError(
            "is not a file", field="source", value=str(source), hint=did_you_mean_file(source)
        )
    check_output_folder(target.parent, "target", target)
    if target.suffix != ".safetensors" or target.exists():
        rule = "already exists" if target.exists() else "must end in .safetensors"
        raise UserError(rule, field="target", value=str(target), hint="choose another name")
    with explain_load_errors("source", str(source), KIND):
        found = file_sha256(source)
    if sha256 and found != sha256.lower():
        raise UserError(
            f"has the SHA-256 {found} instead of {sha256}",
            field="source",
            value=str(source),
            hint="download it again",
        )
    with explain_load_errors("source", str(source), KIND):
        load = load_module_weights if modules else load_weights_file
        weights = _check_tensors(load(source))
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # tensors that share memory, such as tied embeddings, are stored separately
        copies = {name: value.detach().clone().contiguous() for name, value in weights.items()}
        # a single entry: several are written in a random order, which changes the checksum
        save_file(copies, partial, metadata={"source_sha256": found})
        fsync_path(partial)
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        rule = f"cannot be written: {first_line(error)}"
        raise UserError(rule, field="target", value=str(target)) from error
    finally:
        partial.unlink(missing_ok=True)
    return found, file_sha256(target)


class _Inert:
    """Placeholder for a class or function of a pickle; it only stores attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def load_module_weights(path: Path) -> Weights:
    """Return the state dict of a whole module written by `torch.save`, without its classes.

    All names that the pickle would import are replaced by placeholders, so none of their code is
    executed.
    """
    names = get_unsafe_globals_in_checkpoint(path)
    with safe_globals([(type(name, (_Inert,), {}), name) for name in names]):
        module = torch.load(path, map_location="cpu", weights_only=True)
    return dict(_module_tensors(module, ""))


def _module_tensors(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the parameters and buffers of a module and its children."""
    content = vars(module) if isinstance(module, _Inert) else {}
    transient = content.get("_non_persistent_buffers_set", ())
    for group in ("_parameters", "_buffers"):
        for name, value in content.get(group, {}).items():
            if value is not None and name not in transient:
                yield f"{prefix}{name}", value
    for name, child in content.get("_modules", {}).items():
        yield from _module_tensors(child, f"{prefix}{name}.")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_tensors(weights: Weights) -> Weights:
    """Return a state dict; raise ValueError if anything else was loaded."""
    if not isinstance(weights, dict) or not weights:
        raise ValueError("it contains no state dict")
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is not a tensor")
    return weights
