"""Turn a config into the objects of a run that trains a model that answers."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from ml_collections import ConfigDict
from torch import nn

from flow_grpo.answer.check import GAE, VLLM, check
from flow_grpo.answer.models import load_model, load_processors
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import PromptEncoder
from flow_grpo.answer.rollout import Answerer, reward_metadata
from flow_grpo.answer.vllm_engine import build_answerer, check_platform
from flow_grpo.config.places import find_files
from flow_grpo.data.questions import Question, check_pictures, load_questions
from flow_grpo.errors import UserError
from flow_grpo.rewards import WeightedReward, close_scorers
from flow_grpo.run import trackers
from flow_grpo.run.accelerator import advice_when_short, build_accelerator
from flow_grpo.run.base import Run
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.run.lock import RunLock
from flow_grpo.run.optimizer import adam_settings, build_optimizer
from flow_grpo.run.resume import Start, find_start, load_progress, prepare_folder
from flow_grpo.run.scoring import build_rewards, eval_weights
from flow_grpo.run.snapshot import Ema
from flow_grpo.run.stopping import StopSignals

logger = logging.getLogger("flow_grpo")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}
Load = Callable[[ConfigDict, Accelerator], nn.Module]
Begin = Callable[..., tuple[Start, RunLock | None]]
# settings of FSDP that must be off, and why
SHARDING = {
    "fsdp_activation_checkpointing": "use --config.train.gradient_checkpointing=True",
    "fsdp_cpu_ram_efficient_loading": "every process loads the model, tied weights and reference",
}


@dataclass(kw_only=True)
class VlmSession(Run):
    plan: AnswerPlan
    questions: list[Question]
    test_questions: list[Question]
    policy: AnswerPolicy
    answerer: Answerer

    @property
    def recomputes_old(self) -> bool:
        """Whether log-probabilities of the policy that sampled are computed again for training."""
        return self.config.train.recompute_old or not self.answerer.exact


def build_session(
    config: ConfigDict, load: Load | None = None, begin: Begin = find_start
) -> VlmSession:
    """Everything the run needs; whatever is cheap to check is checked before weights load. `begin`
    finds and locks the run folder, which without a lock is left alone."""
    with ExitStack() as until_built:
        session = _build_session(config, load or _load, begin, until_built)
        until_built.pop_all()  # the session holds its folder until it is closed
    return session


def _build_session(
    config: ConfigDict, load: Load, begin: Begin, until_built: ExitStack
) -> VlmSession:
    check(config)
    find_files(config)
    _check_sharding()
    accelerator = build_accelerator(
        config,
        autocast=False,
        log_with=trackers.parse(config.log_with) or None,
        project_dir=config.logdir,
    )
    if config.sample.engine == VLLM:
        check_platform(accelerator.device)
    plan = AnswerPlan(
        num_processes=accelerator.num_processes,
        questions=config.sample.questions_per_epoch,
        group_size=config.sample.group_size,
        updates_per_pass=config.train.updates_per_epoch,
        inner_epochs=config.train.num_inner_epochs,
        most_at_once=config.sample.batch_size,
    )
    as_json = json.loads(config.to_json_best_effort())
    start, lock = begin(accelerator, as_json, until_built)
    questions, test_questions = load_questions(config.dataset, config.seed)
    test_questions = test_questions[: config.eval_questions or None]
    plan.check_questions(len(questions), config.dataset)
    every = [*questions, *test_questions]
    on_all_or_none(accelerator, lambda: check_pictures(every, accelerator))
    reward, eval_reward = on_all_or_none(
        accelerator, lambda: _build_rewards(config, accelerator, questions, test_questions)
    )
    until_built.callback(close_scorers, reward, eval_reward)

    tokenizer, images = load_processors(
        config.pretrained.model,
        config.pretrained.revision,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    with advice_when_short(lighter_settings(config)):
        model = load(config, accelerator)
    encoder = PromptEncoder(
        tokenizer,
        images,
        model,
        system_prompt=config.system_prompt,
        question_format=config.question_format,
    )
    most = _longest_prompt(config, model)
    longest = on_all_or_none(accelerator, lambda: encoder.check_lengths(every, most))
    train = config.train
    policy = AnswerPolicy(
        model,
        parts=[tokenizer, images],
        use_lora=config.use_lora,
        rank=train.lora_rank,
        alpha=train.lora_alpha,
        lora_path=train.lora_path,
        freeze_vision=train.freeze_vision,
        with_reference=train.beta > 0,
        with_value=train.advantage == GAE,
        temperature=config.sample.temperature,
        gradient_checkpointing=train.gradient_checkpointing,
        compute_dtype=torch.bfloat16 if config.mixed_precision == "bf16" else None,
        seed=config.seed,
    )
    optimizer = policy.prepare(accelerator, build_optimizer(config, accelerator, policy))
    ema = None
    if train.ema:
        ema = Ema(policy.trained(), train.ema_decay, train.ema_update_interval)
        ema.prepare(accelerator)
    answerer = Answerer(
        policy,
        encoder,
        config.sample.max_new_tokens,
        _end_tokens(model, tokenizer),
        cuda_graphs=config.cuda_graphs,
    )
    if config.sample.engine == VLLM:
        answerer = build_answerer(
            answerer,
            source=config.pretrained.model,
            revision=config.pretrained.revision,
            device=accelerator.device,
            dtype=DTYPES[config.mixed_precision],
            num_processes=accelerator.num_processes,
            longest_prompt=longest,
            pictures=max(len(question.images) for question in every),
            memory=config.sample.vllm_memory,
            seed=config.seed,
        )
    progress = load_progress(accelerator, start.checkpoint, optimizer, adam_settings(config))
    _open(config, accelerator, start, lock, as_json)
    return VlmSession(
        config=config,
        accelerator=accelerator,
        plan=plan,
        questions=questions,
        test_questions=test_questions,
        reward=reward,
        eval_reward=eval_reward,
        policy=policy,
        answerer=answerer,
        optimizer=optimizer,
        ema=ema,
        folder=start.folder,
        progress=progress,
        stop=StopSignals(accelerator),
        lock=lock,
    )


def _check_sharding() -> None:
    """Of the accelerate config, which `accelerate launch` hands on in the environment."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            f"fsdp_version: {version} in the accelerate config must be 2, as in "
            "scripts/accelerate_configs/fsdp2.yaml"
        )
    for name, instead in SHARDING.items():
        if parse_flag_from_env(name.upper()):
            raise UserError(f"{name}: true in the accelerate config must be false; {instead}")


def _build_rewards(
    config: ConfigDict,
    accelerator: Accelerator,
    questions: list[Question],
    test_questions: list[Question],
) -> list[WeightedReward]:
    rewards = build_rewards(config, accelerator, config.reward_fn.to_dict(), eval_weights(config))
    for reward, asked in zip(rewards, (questions, test_questions), strict=True):
        texts = [q.text for q in asked]
        metadata = [reward_metadata(q, 0, config.sample.max_new_tokens) for q in asked]
        reward.check(texts, metadata)
        reward.rehearse_with("No idea.", texts, metadata)
    return rewards


def _load(config: ConfigDict, accelerator: Accelerator) -> nn.Module:
    return load_model(
        config.pretrained.model,
        accelerator.device,
        DTYPES[config.mixed_precision],
        config.pretrained.revision,
    )


def _longest_prompt(config: ConfigDict, model: nn.Module) -> int:
    positions = model.config.get_text_config().max_position_embeddings
    left = positions - config.sample.max_new_tokens
    if left < 1 or config.max_prompt_length > left:
        raise UserError(
            f"max_prompt_length={config.max_prompt_length} and sample.max_new_tokens="
            f"{config.sample.max_new_tokens} do not fit into the model's {positions} positions; "
            "lower one of them"
        )
    return config.max_prompt_length or left


def _end_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return tuple(ends) if isinstance(ends, list) else (ends,)


def _open(
    config: ConfigDict,
    accelerator: Accelerator,
    start: Start,
    lock: RunLock | None,
    as_json: dict[str, Any],
) -> None:
    if config.log_with:
        on_all_or_none(
            accelerator,
            lambda: trackers.start(accelerator, config.project_name, start.folder, as_json),
        )
    on_all_or_none(accelerator, lambda: lock and prepare_folder(start, as_json))


def lighter_settings(config: ConfigDict) -> list[str]:
    """Options that need less memory and that the run does not use yet."""
    sizes = {
        "sample.batch_size": config.sample.batch_size,
        "train.tokens_per_batch": config.train.tokens_per_batch,
    }
    halved = [f"--config.{name}={size // 2}" for name, size in sizes.items() if size > 1]
    lighter = [" ".join(halved)] if halved else []
    if not config.train.gradient_checkpointing:
        lighter.append("--config.train.gradient_checkpointing=True")
    return lighter
