"""Convert weights in a pickle file to safetensors, without executing code of the file.

    flow-grpo rewards convert model.pth model.safetensors

`torch.load(weights_only=True)` unpickles tensors and plain containers only; a file that needs more
is rejected. Names and values are unchanged. The SHA-256 of the original is stored in the metadata
of the result, so that its origin can be verified.
"""

import hashlib
import os
import uuid
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.atomic_io import check_output_folder, fsync_path
from flow_grpo.errors import UserError, did_you_mean_file, first_line
from flow_grpo.rewards.loading import Weights, explain_load_errors, load_weights_file

KIND = "a file of weights"


def convert_weights(source: Path, target: Path, sha256: str = "") -> tuple[str, str]:
    """Convert a file that `torch.save` wrote to safetensors.

    Args:
        source: File with a state dict, which may be nested under "state_dict" or "model".
        target: New .safetensors file.
        sha256: Expected SHA-256 of the source; "" accepts any.

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
        weights = _check_tensors(load_weights_file(source))
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
