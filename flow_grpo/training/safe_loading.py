"""Read state files of a checkpoint without executing code from them.

Optimizer, scheduler and random states are written by torch.save, that is as pickles, and a pickle
can call any function when it is loaded. torch.load is therefore restricted to tensors and plain
values, whichever library calls it, and the pickled index of FSDP checkpoints to a fixed list of
types.

Trade-off: files are read once to check them before the model is loaded, and again to restore them.
They are mapped into memory, so the first pass touches little of the tensors.
"""

import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, load, patch_environment
from safetensors import SafetensorError

from flow_grpo.errors import UserError
from flow_grpo.training.checkpoint import STATE_DIR

log = logging.getLogger(__name__)

TORCH_FILES = ("*.bin", "*.pt", "*.pkl")  # written by torch.save
DCP_MODULE = "torch.distributed.checkpoint"
PATH_TYPES = {"PosixPath", "PurePosixPath"}
# types in the index (.metadata) of an FSDP checkpoint, by module
FSDP_INDEX_TYPES = {
    f"{DCP_MODULE}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{DCP_MODULE}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "pathlib": PATH_TYPES,
    "pathlib._local": PATH_TYPES,
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}
LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    SafetensorError,
)


def reject_unsafe_files(accelerator: Accelerator, checkpoint: Path) -> None:
    """Raise a UserError for state files that are not plain data, before the model is loaded."""
    state = checkpoint / STATE_DIR
    if next(state.glob("custom_checkpoint_*.pkl"), None):
        raise UserError(
            "cannot be resumed: an older version saved its EMA weights as a pickle",
            field=checkpoint,
            hint="start a new run from its lora directory with --config.train.lora_path",
        )
    files = {path: _read_torch_file for name in TORCH_FILES for path in state.rglob(name)}
    files |= {path: _read_fsdp_index for path in state.rglob(".metadata")}
    for path, read in files.items():
        try:
            with weights_only_loading(accelerator):
                read(path)
        except LOADING_ERRORS as error:
            log.debug("%s was rejected", path, exc_info=True)
            raise UserError(
                "cannot be loaded: it is damaged, was saved with another distributed backend, or "
                "contains pickled code, which is never executed",
                field=path,
            ) from error


@contextmanager
def weights_only_loading(accelerator: Accelerator) -> Iterator[None]:
    """Restrict torch.load to tensors and plain values, also where a library calls it.

    accelerate and DeepSpeed call torch.load with `weights_only=False`; torch's environment
    variables, which are set here, take precedence over that.
    """
    only_weights = patch_environment(
        TORCH_FORCE_WEIGHTS_ONLY_LOAD="1", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="0"
    )
    allowed = [*_deepspeed_types(accelerator), (_get_enum_member, "builtins.getattr")]
    with only_weights, torch.serialization.safe_globals(allowed):
        yield


def _deepspeed_types(accelerator: Accelerator) -> list[type]:
    """Return the DeepSpeed classes in its files, which have no side effects when created."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return []
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def _get_enum_member(kind: type[Enum], name: str) -> Enum:
    """Return an enumeration member; replaces `getattr` in pickles of Python 3.11.0 to 3.11.3.

    Raises:
        pickle.UnpicklingError: If `kind` is not an enumeration.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"attribute {name} of {kind} is not an enumeration member")
    return kind[name]


def _read_torch_file(path: Path) -> None:
    load(path, map_location="cpu", mmap=True)  # tensors stay on disk


def _read_fsdp_index(path: Path) -> None:
    with path.open("rb") as file:
        _IndexUnpickler(file).load()


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler for FSDP's index, which torch reads with plain pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a torch dtype or a class in `FSDP_INDEX_TYPES`; reject all others."""
        if (module, name) == ("builtins", "getattr"):
            return _get_enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in FSDP_INDEX_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not data")
