"""Build the parts of a session that do not depend on what is trained."""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, parse_flag_from_env

from flow_grpo.config.fields import RewardFields, SharedFields
from flow_grpo.config.settings import to_json
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.errors import OutOfMemory, UserError
from flow_grpo.perf.quantization import UNQUANTIZED, check_precision
from flow_grpo.rewards import (
    WeightedReward,
    build_scorers,
    check_reward_fields,
    close_scorers,
    guard_scorers,
)
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.training import trackers
from flow_grpo.training.accelerator import choose_device, configure_deepspeed
from flow_grpo.training.distributed import is_sharded, raise_on_all_ranks, set_context_parallel
from flow_grpo.training.finite import find_nonfinite
from flow_grpo.training.lock import RunLock
from flow_grpo.training.optimizer import adamw_kwargs, build_lr_schedule, build_optimizer
from flow_grpo.training.policy import BasePolicy
from flow_grpo.training.resume import RunStart, load_training_state, prepare_run_directory
from flow_grpo.training.snapshot import Ema
from flow_grpo.training.stop_signals import StopSignals

logger = logging.getLogger("flow_grpo")

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_ALLOCATOR = "DefaultCPUAllocator"  # part of torch's error when CPU memory is exhausted
StartFinder = Callable[..., tuple[RunStart, RunLock | None]]


class SessionBuilder:
    """Context manager that builds a session step by step.

    A trainer calls the methods in the order of their definition, with its own steps in between, so
    that everything cheap is checked before weights are loaded. If a step fails, what was locked and
    started before is released.

    Attributes:
        cleanup_on_error: Stack for what else has to be released.
    """

    def __init__(self, config: SharedFields, **settings: Any) -> None:
        """Start the accelerator.

        Args:
            config: Settings of the run.
            settings: Further arguments of `build_accelerator`.
        """
        self.config, self.cleanup_on_error = config, ExitStack()
        self.accelerator = build_accelerator(
            config,
            log_with=parse_trackers(config.log_with) or None,
            project_dir=config.logdir,
            **settings,
        )
        check_base_precision(config, self.accelerator)
        if config.train.use_8bit_adam and self.accelerator.device.type != "cuda":
            raise UserError(
                "needs a GPU", field="train.use_8bit_adam", value=True, hint="this run uses the CPU"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error is not None:
            self.cleanup_on_error.close()

    def open_folder(self, begin: StartFinder, updates: int) -> None:
        """Find the run directory and the checkpoint to resume from.

        Args:
            begin: Finds and locks the directory; a dry run finds it without locking it.
            updates: Optimizer updates per epoch.
        """
        self._rates = build_lr_schedule(self.config.train, updates * self.config.num_epochs)
        self._as_json = to_json(self.config)
        self._start, self._lock = begin(self.accelerator, self._as_json, self.cleanup_on_error)

    def add_rewards(
        self,
        check: Callable[[WeightedReward, WeightedReward], None],
        by_default: dict[str, float] | None = None,
    ) -> None:
        """Build the rewards of training and evaluation.

        Args:
            check: Raises a UserError if the rewards do not suit the run.
            by_default: Weights of rewards that `reward_fn` does not mention.
        """
        trained = {**(by_default or {}), **self.config.reward_fn}
        weights = trained, self.config.eval_weights(trained)

        def build() -> list[WeightedReward]:
            name = self._start.folder.name
            rewards = build_rewards(self.config, self.accelerator, *weights, run=name)
            check(*rewards)
            return rewards

        self._rewards = raise_on_all_ranks(self.accelerator, build)
        self.cleanup_on_error.callback(close_scorers, *self._rewards)

    def skip_rewards(self) -> None:
        """Train without rewards, instead of `add_rewards`."""
        self._rewards = [WeightedReward({}, {}), WeightedReward({}, {})]
        self.cleanup_on_error.callback(close_scorers, *self._rewards)

    def add_policy(self, policy: BasePolicy) -> None:
        """Prepare the policy, its optimizer and the moving average of its weights."""
        optimizer = build_optimizer(
            self.config.train, self.config.mixed_precision, self.accelerator, policy
        )
        self._policy, self._optimizer = policy, policy.prepare(self.accelerator, optimizer)
        train, self._ema = self.config.train, None
        if train.ema:
            ema = Ema(policy.sampled_parameters(), train.ema_decay, train.ema_update_interval)
            policy.add_snapshot(ema, self.accelerator)
            self._ema = ema

    def finish(self) -> dict[str, Any]:
        """Load the checkpoint, start the trackers and create the run directory.

        Returns:
            The fields of `BaseSession`, except `plan`.
        """
        accelerator, start = self.accelerator, self._start
        settings = adamw_kwargs(self.config.train)
        progress = load_training_state(accelerator, start.checkpoint, self._optimizer, settings)
        if start.checkpoint is not None:
            self._check_loaded(start.checkpoint)
        if self.config.log_with:
            project = self.config.project_name
            raise_on_all_ranks(
                accelerator,
                lambda: trackers.start_trackers(accelerator, project, start.folder, self._as_json),
            )
        raise_on_all_ranks(
            accelerator, lambda: self._lock and prepare_run_directory(start, self._as_json)
        )
        reward, eval_reward = self._rewards
        stop = StopSignals(accelerator)
        reward.stop_waiting_if(lambda: stop.received)
        return {
            "config": self.config,
            "accelerator": accelerator,
            "reward": reward,
            "eval_reward": eval_reward,
            "policy": self._policy,
            "optimizer": self._optimizer,
            "learning_rate": self._rates,
            "ema": self._ema,
            "folder": start.folder,
            "progress": progress,
            "stop": stop,
            "lock": self._lock,
        }

    def _check_loaded(self, checkpoint: Path) -> None:
        """Reject a checkpoint with non-finite values, which earlier versions could write."""
        average = self._ema.named() if self._ema is not None else {}
        if found := find_nonfinite(self._policy.trained_parameters(), self._optimizer, average):
            raise UserError(
                f"contains NaN or infinite values in {found}",
                field=checkpoint,
                hint="remove it to resume from the previous checkpoint",
            )


def build_accelerator(
    config: SharedFields,
    *,
    accumulation_steps: int = 1,
    autocast: bool = True,
    context_parallel: int = 1,
    context_field: str = "sample.context_parallel",
    **kwargs: Any,
) -> Accelerator:
    """Return the accelerator of a run.

    Args:
        config: Settings of the run.
        accumulation_steps: Micro-batches per update, for DeepSpeed.
        autocast: False if the model casts by itself, in the same way for sampling and training.
        context_parallel: Number of processes that compute each sample together.
        context_field: Setting that configures it.
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
    set_context_parallel(accelerator, context_parallel, context_field)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure_deepspeed(accelerator, config.train.max_grad_norm)
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


def check_base_precision(config: SharedFields, accelerator: Accelerator) -> None:
    """Reject quantized base weights where they are unsupported."""
    name, precision = "pretrained.base_precision", config.pretrained.base_precision
    if precision == UNQUANTIZED:
        return
    if not config.use_lora:
        raise UserError(
            "needs use_lora=True: quantized weights cannot be trained", field=name, value=precision
        )
    if is_sharded(accelerator):
        raise UserError(
            "is incompatible with ZeRO-3 and FSDP: every GPU holds all quantized weights",
            field=name,
            value=precision,
            hint="use DDP, ZeRO-1 or ZeRO-2",
        )
    check_precision(name, precision, accelerator.device)


@contextmanager
def suggest_on_oom(advice: list[str]) -> Iterator[None]:
    """Context manager that turns OOM errors into an `OutOfMemory` with `advice` as its hint."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, torch.OutOfMemoryError):
            reason = str(error).strip().split(". ")[0]
        elif isinstance(error, MemoryError) or CPU_ALLOCATOR in str(error):
            asked = re.search(r"allocate (\d+ bytes|[\d.]+ [KMGTPE]?i?B)", str(error))
            reason = "out of CPU memory" + (f": cannot allocate {asked[1]}" if asked else "")
        else:
            raise
        options = f"try {', or '.join(advice)}" if advice else "use fewer or smaller images"
        raise OutOfMemory(reason, hint=f"{options}; see docs/memory.md") from error


def eval_reward_weights(config: RewardFields) -> dict[str, float]:
    """Return the weights of the evaluation rewards, by default those of training."""
    return config.eval_weights()


def available_scorers(config: RewardFields, builtin: Iterable[str]) -> dict[str, str]:
    """Return the rewards that a config can use, with the origin of those that are not built in."""
    served = {name: "reward server" for name, urls in config.reward_servers.items() if urls}
    custom = {name: f"custom {path}" for name, path in config.custom_rewards.items()}
    return {**dict.fromkeys(builtin, ""), **custom, **served}


def build_rewards(
    config: RewardFields, accelerator: Accelerator, *weights: dict[str, float], run: str = ""
) -> list[WeightedReward]:
    """Build the training and evaluation rewards of a run; scorers that they share are built once.

    Args:
        config: Settings of the rewards, which are checked.
        accelerator: Provides the device.
        *weights: Weights by reward name, one dict per `WeightedReward` to return.
        run: Name of the run.
    """
    check_reward_fields(config)
    policy = FailurePolicy(config.reward_retries, config.reward_timeout)
    scorers = build_scorers(
        dict.fromkeys(name for each in weights for name in each),
        device=str(accelerator.device),
        custom=config.custom_rewards,
        servers=config.reward_servers,
        options=config.reward_options,
        policy=policy,
        run=run,
        draw=getattr(config, "draw", None),  # only language models have this section
    )
    guarded = guard_scorers(scorers, policy)
    return [WeightedReward(guarded, each) for each in weights]
