"""Accelerate, told all that a config says of devices, precision and processes."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, parse_flag_from_env
from ml_collections import ConfigDict
from transformers.integrations import unset_hf_deepspeed_config

from flow_grpo.errors import OutOfMemory, UserError


@contextmanager
def advice_when_short(advice: list[str]) -> Iterator[None]:
    """Running out of memory in here is told together with what may help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().split(". ")[0]
        options = f"try {', or '.join(advice)}" if advice else "use fewer or smaller pictures"
        raise OutOfMemory(f"{reason}; {options}; see docs/performance.md") from error


logger = logging.getLogger("flow_grpo")


def build_accelerator(
    config: ConfigDict, *, accumulation_steps: int = 1, autocast: bool = True, **kwargs
) -> Accelerator:
    """`autocast=False`: what is trained casts by itself, in sampling as in training."""
    # accelerate knows the option below by its old name only
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    deepspeed, fsdp = (parse_flag_from_env(f"ACCELERATE_USE_{e}") for e in ("DEEPSPEED", "FSDP"))
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    if deepspeed and config.train.offload_optimizer:
        raise UserError(
            "train.offload_optimizer=True does not go with DeepSpeed; set "
            "offload_optimizer_device: cpu in its accelerate config"
        )
    if deepspeed and config.mixed_precision == "fp16":
        raise UserError("mixed_precision=fp16 does not go with DeepSpeed here; use bf16")
    if fsdp and on_cpu:
        raise UserError("FSDP needs GPUs: accelerate shares nothing out on CPUs; use DeepSpeed")
    # buffers never change, and processes may run different numbers of forwards
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if config.reward_timeout >= config.distributed_timeout:
            raise UserError(
                f"reward_timeout={config.reward_timeout} must be below distributed_timeout="
                f"{config.distributed_timeout}: processes wait for the scores of one another"
            )
        timeout = timedelta(seconds=config.distributed_timeout)
        backend = "gloo" if on_cpu else "nccl"
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=timeout))
    # `accelerate launch` sets it from its own options, and DeepSpeed takes it from nowhere else
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(accumulation_steps)
    accelerator = Accelerator(
        # with cpu=True accelerate would turn DeepSpeed and FSDP into plain data parallelism
        cpu=on_cpu and not (deepspeed or fsdp),
        # DeepSpeed would cast LoRA to half precision, which cannot hold steps of 1e-4
        mixed_precision="no" if deepspeed or not autocast else config.mixed_precision,
        kwargs_handlers=handlers,
        **kwargs,
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # it steps and clips by itself, and asks for the batch size though no batch passes it
        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=1,
            gradient_clipping=config.train.max_grad_norm,
        )
        # under ZeRO-3 transformers would share out the text encoders, which nothing gathers again
        unset_hf_deepspeed_config()
    if on_cpu and config.mixed_precision != "no" and accelerator.is_main_process:
        logger.warning(
            "mixed_precision=%s is slow on a CPU, on some by a factor of hundreds; use "
            "--config.mixed_precision=no",
            config.mixed_precision,
        )
    return accelerator
