"""Checks of weights and model files before and after loading.

transformers, diffusers and PEFT initialise tensors that are missing in a file at random, and only
warn about unexpected tensors. None of them checks the values. The loaders of this package use the
functions here to turn each of these cases into a UserError.
"""

import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flow_grpo.errors import UserError, first_line
from flow_grpo.untrusted_files import read_json

# Values of a config.json that transformers and torch implement themselves. Others may name a
# repository of compiled kernels on the hub, which transformers downloads and runs.
ALLOWED_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# Prefixes that wrappers add to the names of tensors.
WRAPPER_PREFIXES = {
    "module.": "DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "base_model.model.": "PEFT",
}
SHARD_FILE = re.compile(r"-\d+-of-\d+\.safetensors$")
CHUNK = 2**26  # elements checked at a time


def check_loading_report(
    option: str,
    source: str,
    report: Mapping[str, Iterable],
    kind: str,
    *,
    allow_unexpected: bool = False,
) -> None:
    """Reject weights that do not fit the model they were loaded into.

    Args:
        option: Setting that named the weights, for the message.
        source: Its value.
        report: What `from_pretrained(..., output_loading_info=True)` returned: `missing_keys`,
            `unexpected_keys` and `mismatched_keys`. Tied weights are in none of them.
        kind: What was loaded, with its article ("a LoRA of this model"), for the message.
        allow_unexpected: Whether tensors that the model does not have are ignored.
    """
    unexpected = sorted(report["unexpected_keys"])
    found = {
        "missing": sorted(report["missing_keys"]),
        "mismatched": sorted(key[0] for key in report["mismatched_keys"]),  # name and shapes
        "unexpected": [] if allow_unexpected else unexpected,
    }
    problems = [
        f"{len(names)} {what} tensor{'s' if len(names) > 1 else ''} (such as {names[0]})"
        for what, names in found.items()
        if names
    ]
    if problems:
        raise UserError(
            f"does not fit {kind}: {', '.join(problems)}",
            field=option,
            value=source,
            hint=_hint(unexpected),
        )


def _hint(unexpected: list[str]) -> str:
    """Return what to do about unexpected tensor names, such as removing the prefix of a wrapper."""
    for prefix, wrapper in WRAPPER_PREFIXES.items():
        if unexpected and all(name.startswith(prefix) for name in unexpected):
            return f"remove the prefix {prefix!r}, which {wrapper} adds, from the tensors' names"
    return "use the files that the model's authors published, or write them with save_pretrained"


def check_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Reject NaN and infinite values; `where` names the file or model in the message."""
    for name, tensor in tensors:
        if not is_finite(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{where}: {name} contains NaN or infinite values in {dtype}; use another copy"
            )


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, without a copy: minimum and maximum propagate NaN."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return True
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        values = chunk if chunk.dtype.itemsize > 1 else chunk.float()  # float8 has no minimum
        if len(values) and not torch.stack(torch.aminmax(values)).isfinite().all():
            return False
    return True


def check_stored_dtypes(where: str, types: Iterable[tuple[str, str]]) -> None:
    """Reject weights that are stored as integers or complex numbers, which loaders would only cast.

    Args:
        where: File or model, for the message.
        types: Names of tensors and their dtypes in safetensors. Buffers may have any dtype.
    """
    for name, kind in types:
        if name.endswith("weight") and not kind.startswith(("F", "BF")):
            raise UserError(
                f"{where}: {name} is stored as {kind} but must be floating point; use a copy that "
                "is not quantized"
            )


def check_stored_weights(folder: Path, pattern: str = "*.safetensors") -> list[str]:
    """Check the dtypes of all weights in a directory, and that no tensor is in two shards.

    Only headers are read. Directories whose config.json describes a quantization are skipped.

    Returns:
        The names of the tensors.
    """
    config = folder / "config.json"
    stored: list[str] = []
    if config.is_file() and "quantization_config" in read_json(config):
        return stored
    shards: dict[str, Path] = {}
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, "pt") as file:
            names = file.keys()
            stored += names
            check_stored_dtypes(str(path), ((n, file.get_slice(n).get_dtype()) for n in names))
            for name in names if SHARD_FILE.search(path.name) else ():
                if name in shards:
                    raise UserError(
                        f"and {path.name} both contain the tensor {name}",
                        field=shards[name],
                        hint="use the files that the model's authors published",
                    )
                shards[name] = path
    return stored


def check_files_finite(folder: Path) -> None:
    """Reject NaN and infinity in the .safetensors files of a directory, one tensor at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names = file.keys()
                check_finite(str(path), ((name, file.get_tensor(name)) for name in names))
        except SafetensorError as error:
            raise UserError(f"cannot be read: {first_line(error)}", field=path) from error


def check_regular_files(option: str, source: str | Path) -> None:
    """Reject a FIFO, device or socket among the files of a model: reading it may block forever."""
    paths = [Path(source)]
    if os.path.isdir(source):  # unlike Path.is_dir, handles names that are too long
        paths += [*sorted(paths[0].glob("*")), *sorted(paths[0].glob("*/*"))]
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):  # the loader reports missing files
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(
                f"contains {path}, which is not a regular file (a FIFO, device or socket)",
                field=option,
                value=str(source),
                hint="use a directory of regular files",
            )


def check_implementations(option: str, source: str, config: Any) -> None:
    """Reject a config.json that selects attention or expert kernels from the hub.

    Args:
        option: Setting that named the model, for the message.
        source: Its value.
        config: Content of its config.json, including nested configs.
    """
    for key, value in config.items() if isinstance(config, dict) else ():
        field = str(key).removeprefix("_").removesuffix("_internal")
        allowed = ALLOWED_IMPLEMENTATIONS.get(field)
        if allowed:
            # one value for the whole model, or a dict by submodule
            for chosen in value.values() if isinstance(value, dict) else [value]:
                if chosen is not None and chosen not in allowed:
                    raise UserError(
                        f"has {field}={chosen!r} in its config.json, which must be one of "
                        f"{', '.join(allowed)}",
                        field=option,
                        value=source,
                        hint="remove it there",
                    )
        check_implementations(option, source, value)


def check_not_nan(option: str, source: str | Path, config: Any, name: str = "a value") -> None:
    """Reject NaN anywhere in a config, which JSON can contain; infinity may be a valid limit."""
    if isinstance(config, float) and math.isnan(config):
        raise UserError(
            f"has NaN as {name} in its config",
            field=option,
            value=str(source),
            hint="use another copy",
        )
    for key, value in config.items() if isinstance(config, dict) else ():
        check_not_nan(option, source, value, str(key))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager that suppresses transformers' table of missing and unexpected tensors."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
