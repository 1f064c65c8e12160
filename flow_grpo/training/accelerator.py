"""Device selection and the DeepSpeed engine of a run's accelerator."""

import os
import re
from importlib.metadata import version

import torch
from accelerate import Accelerator
from packaging.version import Version
from transformers.integrations import unset_hf_deepspeed_config

from flow_grpo.errors import UserError

# first version to skip float32 updates with a non-finite gradient norm
MIN_DEEPSPEED_VERSION = "0.19.8"


def configure_deepspeed(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Set DeepSpeed's batch size and gradient clipping; keep ZeRO-3 from sharding frozen encoders.

    Raises:
        UserError: For a version or stage that `check_deepspeed` rejects.
    """
    plugin = accelerator.state.deepspeed_plugin
    check_deepspeed(plugin.zero_stage)
    # DeepSpeed clips by itself, and requires a batch size although no data loader is used
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=1, gradient_clipping=max_grad_norm
    )
    # under ZeRO-3 transformers would shard the text encoders, which nothing gathers again
    unset_hf_deepspeed_config()


def check_deepspeed(stage: int) -> None:
    """Reject DeepSpeed versions and ZeRO stages that apply updates with non-finite gradients.

    Args:
        stage: ZeRO stage; 0 is rejected.
    """
    found = version("deepspeed")
    if Version(found) < Version(MIN_DEEPSPEED_VERSION):
        raise UserError(
            "is too old: it applies updates with non-finite gradients",
            field="deepspeed",
            value=found,
            hint=f"pip install 'deepspeed>={MIN_DEEPSPEED_VERSION}'",
        )
    if stage == 0:
        raise UserError(
            "applies updates with non-finite gradients",
            field="zero_stage",
            value=stage,
            hint="use stage 1, 2 or 3, or scripts/accelerate_configs/multi_gpu.yaml",
        )


def choose_device(device: str, processes: int) -> bool:
    """Validate `device`, make accelerate use its GPU, and return whether the run is on the CPU.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" (the GPU of each process) or "cuda:N",
            for a single process.
        processes: Number of processes.

    Raises:
        UserError: If the device is invalid or does not exist, or one GPU is selected for several
            processes.
    """
    if device in ("auto", "cpu"):
        return device == "cpu" or not torch.cuda.is_available()
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise UserError("must be 'auto', 'cpu', 'cuda' or 'cuda:N'", field="device", value=device)
    count = torch.cuda.device_count()
    if not count:
        raise UserError(
            "needs a GPU, but torch finds none", field="device", value=device, hint="use device=cpu"
        )
    if device != "cuda":
        if processes > 1:
            raise UserError(
                f"selects one GPU, but there are {processes} processes",
                field="device",
                value=device,
                hint="use device=cuda, which gives each process its own GPU",
            )
        if int(device.removeprefix("cuda:")) >= count:
            raise UserError(f"must be at most cuda:{count - 1}", field="device", value=device)
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
        torch.cuda.set_device(device)
    return False
