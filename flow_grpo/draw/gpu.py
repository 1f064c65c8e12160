"""What is asked of the GPU: compiled code, CUDA graphs, and less memory where it is short."""

import logging
import os
import shutil
import sysconfig
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType
from ml_collections import ConfigDict
from torch.utils._triton import has_triton

from flow_grpo.draw.plan import BatchPlan
from flow_grpo.run.shards import is_sharded

logger = logging.getLogger("flow_grpo")


def can_compile(config: ConfigDict, accelerator: Accelerator) -> bool:
    if not config.compile or accelerator.device.type != "cuda" or is_sharded(accelerator):
        return False
    if missing := missing_tool():
        logger.warning("nothing is compiled: %s is missing; this run will be slower", missing)
    return not missing


def missing_tool() -> str:
    """What torch.compile would need on a GPU and has not got, or nothing."""
    if not has_triton():
        return "Triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (gcc or clang)"
    # Debian's own scheme names another folder
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return "" if header.is_file() else f"{header} (python3-dev)"


def can_replay(config: ConfigDict, accelerator: Accelerator) -> bool:
    """Whether the transformer can be recorded: not what recomputes in the backward pass, nor
    gradients of all weights, which a recording would hold a second time, nor what gathers its
    weights layer by layer. DDP was tried with one GPU, see docs/performance.md."""
    wanted = config.cuda_graphs and accelerator.device.type == "cuda"
    whole = accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU)
    return wanted and whole and config.use_lora and not config.train.gradient_checkpointing


def lighter_settings(config: ConfigDict) -> list[str]:
    """Options that need less memory, of those that the run has not yet."""
    on = {
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "offload_idle": config.offload_idle,
    }
    return [f"--config.{name}=True" for name, is_on in on.items() if not is_on]


def lighter_training(config: ConfigDict, plan: BatchPlan) -> list[str]:
    smaller = plan.in_smaller_batches()
    batches = [f"{plan.options_for(smaller)} (the same epoch, smaller batches)"] if smaller else []
    # compiled code samples with the memory of training
    larger = config.compile and plan.sample_batch_size > plan.train_batch_size
    return [
        *batches,
        *lighter_settings(config),
        *["--config.compile=False"] * larger,
        *["--config.sample.merge_lora=False"] * config.sample.merge_lora,
    ]


def lighter_evaluation(config: ConfigDict) -> list[str]:
    size = config.sample.test_batch_size
    batches = [f"--config.sample.test_batch_size={size // 2}"] if size > 1 else []
    return batches + lighter_settings(config)
