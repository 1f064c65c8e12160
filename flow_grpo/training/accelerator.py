"""Build the accelerator of a run: device, precision and distributed backend."""

import logging
import os
import re
import warnings
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, parse_flag_from_env
from packaging.version import Version
from transformers.integrations import unset_hf_deepspeed_config

from flow_grpo.config.fields import SharedFields
from flow_grpo.errors import UserError

logger = logging.getLogger("flow_grpo")
# first version to skip float32 updates with a non-finite gradient norm
MIN_DEEPSPEED_VERSION = "0.19.8"


def build_accelerator(
    config: SharedFields, *, accumulation_steps: int = 1, autocast: bool = True, **kwargs: Any
) -> Accelerator:
    """Return the accelerator of a run.

    Args:
        config: Settings of the run.
        accumulation_steps: Micro-batches per update, for DeepSpeed.
        autocast: False if the model casts by itself, in the same way for sampling and training.
        kwargs: Further arguments of Accelerator.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpu = choose_device(config.device, num_processes)
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    if deepspeed:
        _check_deepspeed_config(config)
    if fsdp and on_cpu:
        raise UserError("FSDP needs GPUs: accelerate does not shard on CPUs", hint="use DeepSpeed")
    # accelerate knows broadcast_buffers by its deprecated name only
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    # buffers never change, and processes may run different numbers of forward passes
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    if num_processes > 1:
        if config.reward_timeout >= config.distributed_timeout:
            raise UserError(
                f"must be below distributed_timeout={config.distributed_timeout}: processes wait "
                "for each other's scores",
                field="reward_timeout",
                value=config.reward_timeout,
            )
        timeout = timedelta(seconds=config.distributed_timeout)
        backend = "gloo" if on_cpu else "nccl"
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=timeout))
    # `accelerate launch` overwrites this variable, and DeepSpeed reads nothing else
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(accumulation_steps)
    accelerator = Accelerator(
        # cpu=True would turn DeepSpeed and FSDP into DDP
        cpu=on_cpu and not (deepspeed or fsdp),
        # DeepSpeed would cast LoRA to half precision, which cannot represent steps of 1e-4
        mixed_precision="no" if deepspeed or not autocast else config.mixed_precision,
        kwargs_handlers=handlers,
        **kwargs,
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _configure_deepspeed(accelerator, config.train.max_grad_norm)
    if on_cpu and config.mixed_precision != "no" and accelerator.is_main_process:
        logger.warning(
            "mixed_precision=%s is slow on a CPU, on some by a factor of hundreds; use "
            "--config.mixed_precision=no",
            config.mixed_precision,
        )
    return accelerator


def _check_deepspeed_config(config: SharedFields) -> None:
    """Reject settings that DeepSpeed ignores or does not support."""
    if config.train.offload_optimizer:
        raise UserError(
            "is incompatible with DeepSpeed",
            field="train.offload_optimizer",
            value=True,
            hint="set offload_optimizer_device: cpu in its accelerate config",
        )
    if config.mixed_precision == "fp16":
        raise UserError(
            "is not supported with DeepSpeed here",
            field="mixed_precision",
            value="fp16",
            hint="use bf16",
        )


def _configure_deepspeed(accelerator: Accelerator, max_grad_norm: float) -> None:
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
