"""Load the state of a run. No pickle in it is run: what is not plain data is refused."""

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, load
from safetensors import SafetensorError
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.run.checkpoint import STATE, Progress

log = logging.getLogger(__name__)

TORCH_FILES = ("*.bin", "*.pt", "*.pkl")  # written by torch.save
SHARDS = "torch.distributed.checkpoint"
# what the index of FSDP's files is made of
INDEX_TYPES = {
    *((f"{SHARDS}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *((f"{SHARDS}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{SHARDS}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{SHARDS}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError),
    *(pickle.UnpicklingError, SafetensorError),
)


def refuse_code(accelerator: Accelerator, checkpoint: Path) -> None:
    """Tell of a file that is not plain data before anything expensive starts."""
    state = checkpoint / STATE
    if next(state.glob("custom_checkpoint_*.pkl"), None):
        raise UserError(
            f"cannot resume from {checkpoint}: an older version wrote it, with the moving average "
            "as a pickle; start a new run from its lora folder with --config.train.lora_path"
        )
    files = {path: _read_data for name in TORCH_FILES for path in state.rglob(name)}
    files |= {path: _read_index for path in state.rglob(".metadata")}
    for path, read in files.items():
        try:
            with data_only(accelerator):
                read(path)
        except LOADING_ERRORS as error:
            log.debug("%s was refused", path, exc_info=True)
            raise UserError(
                f"cannot resume from {checkpoint}: {path.relative_to(checkpoint)} is damaged, "
                "of another way to distribute, or holds more than data, which is never run"
            ) from error


def load_progress(
    accelerator: Accelerator,
    checkpoint: Path | None,
    optimizer: Optimizer,
    settings: dict[str, Any],
) -> Progress:
    """Bring everything that the accelerator knows back to where it was.

    `settings` of the optimizer are what the config says now, whatever they were.
    """
    if checkpoint is None:
        return Progress()
    try:
        with data_only(accelerator):
            # DeepSpeed's own files have no frozen weights (the others have no use for the argument)
            accelerator.load_state(str(checkpoint / STATE), load_module_strict=False)
        progress = Progress.read(checkpoint)
    except LOADING_ERRORS as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, pickle.UnpicklingError):  # torch would advise to run it
            reason = "it holds more than data, which is never run"
        raise UserError(
            f"cannot resume from {checkpoint}: {reason}; was it another model, LoRA rank or way "
            "to distribute?"
        ) from error
    for group in optimizer.param_groups:
        group.update(settings)
    # It counts micro-steps towards an update. Epochs are whole updates, of any number of
    # micro-steps now, so it starts at 0.
    accelerator.step = 0
    return progress


@contextmanager
def data_only(accelerator: Accelerator) -> Iterator[None]:
    """torch.load, whoever calls it, reads tensors and plain values only.

    accelerate and DeepSpeed ask it for more; that is what torch's own variable is for.
    """
    force, allow = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (force, allow)}
    os.environ[force] = "1"
    try:
        with torch.serialization.safe_globals(_types_of_engine(accelerator)):
            yield
    finally:
        del os.environ[force]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _types_of_engine(accelerator: Accelerator) -> list[type]:
    """DeepSpeed's files hold objects of its own, which do nothing when they are made."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return []
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def _read_data(path: Path) -> None:
    load(path, map_location="cpu", mmap=True)  # tensors stay on the disk


def _read_index(path: Path) -> None:
    with path.open("rb") as file:
        _Index(file).load()


class _Index(pickle.Unpickler):
    """torch reads it with plain pickle."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in INDEX_TYPES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not data")
