"""The parts of a session that do not depend on what it trains, from the config of a run."""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, parse_flag_from_env
from packaging.version import Version
from torch.optim import Optimizer
from transformers import get_scheduler
from transformers.integrations import unset_hf_deepspeed_config

from flow_grpo.config.fields import SharedFields, TrainFields
from flow_grpo.config.settings import to_json
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.errors import OutOfMemory, UserError
from flow_grpo.rewards import (
    WeightedReward,
    build_scorers,
    check_fields,
    close_scorers,
    guard_scorers,
)
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.run import trackers
from flow_grpo.run.distributed import is_sharded, on_all_or_none
from flow_grpo.run.finite import find_nonfinite
from flow_grpo.run.lock import RunLock
from flow_grpo.run.policy import BasePolicy
from flow_grpo.run.resume import Start, load_progress, prepare_folder
from flow_grpo.run.snapshot import Ema
from flow_grpo.run.stopping import StopSignals
from flow_grpo.speed.low_bits import FULL, check_precision

logger = logging.getLogger("flow_grpo")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# what transformers calls them
SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine_with_min_lr",
}
DEEPSPEED = "0.19.8"  # the first to skip float32 updates with a non-finite gradient norm
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in torch's message when CPU memory is exhausted
Begin = Callable[..., tuple[Start, RunLock | None]]


class Building:
    """A session on its way. Each trade calls these in the order in which they stand here, its own
    parts between them: whatever is cheap to check is checked before weights load."""

    def __init__(self, config: SharedFields, until_built: ExitStack, **settings: Any) -> None:
        self.config, self.until_built = config, until_built
        self.accelerator = build_accelerator(
            config,
            log_with=parse_trackers(config.log_with) or None,
            project_dir=config.logdir,
            **settings,
        )
        check_base(config, self.accelerator)
        if config.train.use_8bit_adam and self.accelerator.device.type != "cuda":
            raise UserError("train.use_8bit_adam=True needs a GPU; this run is on the CPU")

    def open_folder(self, begin: Begin, updates: int) -> None:
        """Find the run folder and where to go on from; `begin` locks it, or leaves it alone. An
        epoch has so many `updates`."""
        self._rates = learning_rates(self.config.train, updates * self.config.num_epochs)
        self._as_json = to_json(self.config)
        self._start, self._lock = begin(self.accelerator, self._as_json, self.until_built)

    def add_rewards(
        self,
        check: Callable[[WeightedReward, WeightedReward], None],
        by_default: dict[str, float] | None = None,
    ) -> None:
        """Build those of training and evaluation; `check` raises where they do not suit the run.
        Those `by_default` have these weights unless reward_fn has others for them."""
        trained = {**(by_default or {}), **self.config.reward_fn}
        weights = trained, self.config.eval_reward_fn or trained

        def build() -> list[WeightedReward]:
            rewards = build_rewards(self.config, self.accelerator, *weights)
            check(*rewards)
            return rewards

        self._rewards = on_all_or_none(self.accelerator, build)
        self.until_built.callback(close_scorers, *self._rewards)

    def add_policy(self, policy: BasePolicy) -> None:
        """Its optimizer too, and the moving average of its weights."""
        optimizer = build_optimizer(self.config, self.accelerator, policy)
        self._policy, self._optimizer = policy, policy.prepare(self.accelerator, optimizer)
        train, self._ema = self.config.train, None
        if train.ema:
            ema = Ema(policy.trained(), train.ema_decay, train.ema_update_interval)
            self._ema = ema.prepare(self.accelerator)

    def finish(self) -> dict[str, Any]:
        """Load the checkpoint to go on from, start the trackers and make the folder: the fields
        that every session has."""
        accelerator, start = self.accelerator, self._start
        settings = adam_settings(self.config)
        progress = load_progress(accelerator, start.checkpoint, self._optimizer, settings)
        if start.checkpoint is not None:
            self._check_loaded(start.checkpoint)
        if self.config.log_with:
            project = self.config.project_name
            on_all_or_none(
                accelerator,
                lambda: trackers.start(accelerator, project, start.folder, self._as_json),
            )
        on_all_or_none(accelerator, lambda: self._lock and prepare_folder(start, self._as_json))
        reward, eval_reward = self._rewards
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
            "stop": StopSignals(accelerator),
            "lock": self._lock,
        }

    def _check_loaded(self, checkpoint: Path) -> None:
        """Reject a checkpoint with non-finite state, which earlier versions could write."""
        average = self._ema.named() if self._ema is not None else {}
        if found := find_nonfinite(self._policy.trained(), self._optimizer, average):
            raise UserError(
                f"cannot resume from {checkpoint}: {found} contains NaN or infinite values; "
                "remove that folder to resume from the previous checkpoint"
            )


def check_base(config: SharedFields, accelerator: Accelerator) -> None:
    """Refuse frozen weights in few bits where they cannot be."""
    precision = config.pretrained.base_precision
    if precision != FULL:
        field = f"pretrained.base_precision={precision!r}"
        if not config.use_lora:
            raise UserError(f"{field} needs use_lora=True: weights in few bits are not trained")
        if is_sharded(accelerator):
            raise UserError(
                f"{field} does not go with ZeRO-3 or FSDP: every GPU has all of them; use plain "
                "data parallelism"
            )
        check_precision("pretrained.base_precision", precision, accelerator.device)


@contextmanager
def building(config: SharedFields, **settings: Any) -> Iterator[Building]:
    """Context that builds a session step by step. What was locked and started is given back if that
    fails; else the session holds it until it is closed. `settings` are those of
    `build_accelerator`."""
    with ExitStack() as until_built:
        yield Building(config, until_built, **settings)
        until_built.pop_all()


@contextmanager
def advice_when_short(advice: list[str]) -> Iterator[None]:
    """Running out of memory in here is told together with what may help."""
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
        options = f"try {', or '.join(advice)}" if advice else "use fewer or smaller pictures"
        raise OutOfMemory(f"{reason}; {options}; see docs/performance.md") from error


def choose_device(device: str, processes: int) -> bool:
    """Whether it is the CPU. A GPU that is named by its number is accelerate's from now on."""
    if device in ("auto", "cpu"):
        return device == "cpu" or not torch.cuda.is_available()
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise UserError(f"device={device!r} must be 'auto', 'cpu', 'cuda' or one GPU, as 'cuda:1'")
    count = torch.cuda.device_count()
    if not count:
        raise UserError(f"device={device!r}, but torch sees no GPU here; use device=cpu")
    if device != "cuda":
        if processes > 1:
            raise UserError(
                f"device={device!r} is one GPU for {processes} processes; use device=cuda, and "
                "each has its own"
            )
        if int(device.removeprefix("cuda:")) >= count:
            raise UserError(f"device={device!r}, but the last GPU here is cuda:{count - 1}")
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
        torch.cuda.set_device(device)
    return False


def build_accelerator(
    config: SharedFields, *, accumulation_steps: int = 1, autocast: bool = True, **kwargs
) -> Accelerator:
    """`autocast=False`: what is trained casts by itself, in sampling as in training."""
    # accelerate knows the option below by its old name only
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    on_cpu = choose_device(config.device, int(os.environ.get("WORLD_SIZE", "1")))
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
        check_deepspeed(accelerator.state.deepspeed_plugin.zero_stage)
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


def check_deepspeed(stage: int) -> None:
    """Reject versions and stages that take float32 steps with non-finite gradients."""
    found = version("deepspeed")
    if Version(found) < Version(DEEPSPEED):
        raise UserError(
            f"deepspeed {found} takes steps with non-finite gradients; pip install "
            f"'deepspeed>={DEEPSPEED}'"
        )
    if stage == 0:
        raise UserError(
            "zero_stage: 0 of DeepSpeed takes steps with non-finite gradients; use stage 1, 2 or "
            "3, or scripts/accelerate_configs/multi_gpu.yaml"
        )


def eval_weights(config: SharedFields) -> dict[str, float]:
    return config.eval_reward_fn or config.reward_fn


def build_rewards(
    config: SharedFields, accelerator: Accelerator, *weights: dict[str, float]
) -> list[WeightedReward]:
    """One reward per dict of weights; those that name the same scorer share it."""
    check_fields(config)
    policy = FailurePolicy(config.reward_retries, config.reward_timeout)
    scorers = build_scorers(
        dict.fromkeys(name for each in weights for name in each),
        device=str(accelerator.device),
        custom=config.custom_rewards,
        servers=config.reward_servers,
        options=config.reward_options,
        policy=policy,
    )
    guarded = guard_scorers(scorers, policy)
    return [WeightedReward(guarded, each) for each in weights]


def adam_settings(config: SharedFields) -> dict[str, Any]:
    train = config.train
    return {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "weight_decay": train.adam_weight_decay,
        "eps": train.adam_epsilon,
    }


def learning_rates(train: TrainFields, updates: int) -> Callable[[int], float]:
    """The learning rate of an update of a run, by how many there were before it: there is no other
    state to save."""
    if train.lr_min_ratio and train.lr_scheduler != "cosine":
        raise UserError(
            f"train.lr_min_ratio={train.lr_min_ratio} has no effect with train.lr_scheduler="
            f"{train.lr_scheduler!r}; leave it at 0.0, or use 'cosine'"
        )
    if train.lr_warmup_steps >= updates:
        raise UserError(
            f"train.lr_warmup_steps={train.lr_warmup_steps} must be below the {updates} updates of "
            "the run; lower it, or raise num_epochs"
        )
    name, options = SCHEDULES[train.lr_scheduler], {}
    if train.lr_scheduler == "cosine":
        options["min_lr_rate"] = train.lr_min_ratio
    schedule = get_scheduler(
        name,
        torch.optim.SGD([torch.zeros(1)]),  # takes no step
        num_warmup_steps=train.lr_warmup_steps,
        num_training_steps=updates,
        scheduler_specific_kwargs=options,
    )
    return lambda done: train.learning_rate * schedule.lr_lambdas[0](done)


def build_optimizer(
    config: SharedFields, accelerator: Accelerator, policy: BasePolicy
) -> Optimizer:
    optimizer = _build(config, accelerator, policy)
    if config.train.offload_optimizer:
        offload_state(optimizer)
    return optimizer


def _build(config: SharedFields, accelerator: Accelerator, policy: BasePolicy) -> Optimizer:
    train = config.train
    settings = adam_settings(config)
    on_gpu = accelerator.device.type == "cuda"
    if not train.use_8bit_adam:
        # in fp16 a fused step hides from the moving average which updates were skipped
        fused = on_gpu and config.mixed_precision != "fp16"
        return torch.optim.AdamW(policy.parameter_groups(), fused=fused, **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "train.use_8bit_adam=True needs bitsandbytes: pip install -e '.[adam8bit]'"
        ) from error
    return AdamW8bit(policy.parameter_groups(), **settings)


def offload_state(optimizer: Optimizer) -> None:
    """From now on its state is where the weights are during a step only."""
    optimizer.register_step_pre_hook(lambda *_: _move(optimizer, None))
    optimizer.register_step_post_hook(lambda *_: _move(optimizer, "cpu"))
    optimizer.register_load_state_dict_post_hook(lambda *_: _move(optimizer, "cpu"))


def _move(optimizer: Optimizer, device: str | None) -> None:
    """To `device`, or each to that of its weight. Step counts stay, where Adam wants them."""
    for weight, state in optimizer.state.items():
        moved: dict[str, Any] = {
            name: value.to(device or weight.device)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        }
        state.update(moved)
