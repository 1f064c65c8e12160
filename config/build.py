"""Turn a config into the objects of a run. The library itself never reads a config."""

import json
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from ml_collections import ConfigDict
from tqdm import tqdm

from config.check import check
from flow_grpo import tracking
from flow_grpo.data import Prompt, load_prompts
from flow_grpo.ema import Ema
from flow_grpo.errors import UserError
from flow_grpo.grpo import GrpoSettings
from flow_grpo.models import ModelAdapter, load_adapter
from flow_grpo.plan import BatchPlan
from flow_grpo.policy import Policy
from flow_grpo.rewards import WeightedReward, build_reward
from flow_grpo.rollout import Dynamics
from flow_grpo.seeding import Stream, numpy_rng
from flow_grpo.windows import stochastic_steps

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Session:
    """What lives as long as the run."""

    config: ConfigDict
    accelerator: Accelerator
    plan: BatchPlan
    prompts: list[Prompt]
    test_prompts: list[Prompt]
    reward: WeightedReward
    adapter: ModelAdapter
    policy: Policy
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    folder: Path
    step: int = 0  # optimizer updates so far

    def dynamics(self, num_steps: int) -> Dynamics:
        return build_dynamics(self.config, self.adapter, num_steps)

    def averaged(self) -> AbstractContextManager:
        """The weights to evaluate: their moving average, where there is one."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def progress(self, items: Iterable, name: str) -> tqdm:
        return tqdm(items, desc=name, leave=False, disable=not self.accelerator.is_main_process)


def build_session(config: ConfigDict) -> Session:
    """Everything the run needs; whatever is cheap to check is checked before weights load."""
    check(config)
    try:
        steps = draw_steps(config, epoch=0)
    except ValueError as error:
        raise UserError(str(error)) from error
    accelerator = build_accelerator(
        config,
        gradient_accumulation_steps=config.train.gradient_accumulation_steps * len(steps),
        log_with=config.log_with or None,
        project_dir=config.logdir,
    )
    plan = BatchPlan(
        num_processes=accelerator.num_processes,
        sample_batch_size=config.sample.train_batch_size,
        batches_per_epoch=config.sample.num_batches_per_epoch,
        group_size=config.sample.num_image_per_prompt,
        train_batch_size=config.train.batch_size,
        accumulation_steps=config.train.gradient_accumulation_steps,
        inner_epochs=config.train.num_inner_epochs,
        trained_steps=len(steps),
    )
    if accelerator.is_main_process:
        tracking.refuse_existing(config.logdir, config.run_name)
    prompts = load_prompts(config.dataset, "train", config.prompt_fn)
    plan.check_prompts(len(prompts), config.dataset)
    test_prompts = build_test_prompts(config)
    reward = build_rewards(config, accelerator, prompts, test_prompts)

    adapter = build_adapter(config, accelerator)
    train = config.train
    policy = Policy(
        adapter,
        use_lora=config.use_lora,
        rank=train.lora_rank,
        alpha=train.lora_alpha,
        lora_path=train.lora_path,
        with_reference=train.beta > 0,
        seed=config.seed,
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.adam_weight_decay,
        eps=train.adam_epsilon,
    )
    optimizer = policy.prepare(accelerator, optimizer)
    ema = None
    if train.ema:
        ema = Ema(policy.parameters(), train.ema_decay, train.ema_update_interval)
    as_json = json.loads(config.to_json_best_effort())
    folder = tracking.make_run_folder(accelerator, config.logdir, config.run_name, as_json)
    if config.log_with:
        tracking.start_trackers(accelerator, config.project_name, folder, as_json)
    return Session(
        config=config,
        accelerator=accelerator,
        plan=plan,
        prompts=prompts,
        test_prompts=test_prompts,
        reward=reward,
        adapter=adapter,
        policy=policy,
        optimizer=optimizer,
        ema=ema,
        folder=folder,
    )


def build_accelerator(config: ConfigDict, **kwargs) -> Accelerator:
    # accelerate knows the option below by its old name only
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    return Accelerator(
        cpu=config.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision=config.mixed_precision,
        # buffers never change, and processes may run different numbers of forwards
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        **kwargs,
    )


def build_test_prompts(config: ConfigDict) -> list[Prompt]:
    prompts = load_prompts(config.dataset, "test", config.prompt_fn)
    return prompts[: config.eval_prompts or None]


def build_rewards(
    config: ConfigDict, accelerator: Accelerator, *prompt_sets: list[Prompt]
) -> WeightedReward:
    reward = build_reward(
        config.reward_fn.to_dict(),
        device=str(accelerator.device),
        custom=config.custom_rewards.to_dict(),
        options=config.reward_options.to_dict(),
    )
    for prompts in prompt_sets:
        reward.check_prompts([p.prompt for p in prompts])
    return reward


def build_adapter(config: ConfigDict, accelerator: Accelerator) -> ModelAdapter:
    adapter = load_adapter(
        config.pretrained.model,
        device=accelerator.device,
        dtype=DTYPES[config.mixed_precision],
        max_sequence_length=config.max_sequence_length,
    )
    adapter.latent_shape(*image_size(config))  # refuses sizes the model cannot draw
    return adapter


def build_dynamics(config: ConfigDict, adapter: ModelAdapter, num_steps: int) -> Dynamics:
    return Dynamics(
        adapter.schedule(num_steps, *image_size(config)),
        kind=config.sample.sde_type,
        noise_level=config.sample.noise_level,
        guidance_scale=config.sample.guidance_scale,
    )


def image_size(config: ConfigDict) -> tuple[int, int]:
    """Height, width."""
    return config.height or config.resolution, config.width or config.resolution


def draw_steps(config: ConfigDict, epoch: int) -> range:
    return stochastic_steps(
        config.sample.num_steps,
        window_size=config.sample.sde_window_size,
        window_range=tuple(config.sample.sde_window_range),
        timestep_fraction=config.train.timestep_fraction,
        rng=numpy_rng(config.seed, Stream.WINDOW, epoch),
    )


def grpo_settings(config: ConfigDict) -> GrpoSettings:
    train = config.train
    low, high = train.clip_range_low, train.clip_range_high
    return GrpoSettings(
        clip_low=train.clip_range if low is None else low,
        clip_high=train.clip_range if high is None else high,
        adv_clip_max=train.adv_clip_max,
        beta=train.beta,
        kl=train.kl_type,
    )
