"""Build the session of a VLM training run from its config."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.images import check_images
from flow_grpo.data.mixing import held_out_share
from flow_grpo.data.questions import Question
from flow_grpo.data.videos import check_videos
from flow_grpo.errors import UserError
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards import WeightedReward
from flow_grpo.training.builder import (
    DTYPES,
    SessionBuilder,
    StartFinder,
    suggest_on_oom,
)
from flow_grpo.training.config_changes import check_same_goal
from flow_grpo.training.distributed import Result, raise_on_all_ranks
from flow_grpo.training.resume import find_start
from flow_grpo.training.session import BaseSession
from flow_grpo.vlm.attention import flex_attention_supported
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.environment import EnvironmentPool
from flow_grpo.vlm.fields import ENVIRONMENT, GAE, VLLM, VlmConfig
from flow_grpo.vlm.forward_parity import check_forward_parity
from flow_grpo.vlm.lora import select_lora_layers
from flow_grpo.vlm.losses import build_loss
from flow_grpo.vlm.losses.base import smoke_test_loss
from flow_grpo.vlm.models import (
    build_meta_model,
    check_gpu_memory,
    get_family,
    load_model,
    load_processors,
)
from flow_grpo.vlm.multi_turn import EpisodeRunner
from flow_grpo.vlm.plan import VlmBatchPlan, build_plan, check_tensor_parallel
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.questions import QuestionSets, build_questions
from flow_grpo.vlm.rollout import GenerationBatch, RolloutEngine, Sample, reward_metadata
from flow_grpo.vlm.vllm_engine import (
    build_vllm_engine,
    check_vllm_platform,
    check_vllm_support,
    reject_videos,
)

logger = logging.getLogger("flow_grpo")
# accelerate options that must be off, with the hint for their error message
UNSUPPORTED_FSDP_OPTIONS = {
    "fsdp_activation_checkpointing": "use --config.train.gradient_checkpointing=True",
    "fsdp_cpu_ram_efficient_loading": "every process loads the model, for tied weights and the "
    "reference policy",
}


@dataclass(kw_only=True)
class VlmSession(BaseSession):
    """State of a VLM training run."""

    plan: VlmBatchPlan
    questions: list[Question]
    test_questions: list[Question]
    sets: list[tuple[int, Fraction]]  # per data set: number of questions, fraction of an epoch
    policy: VlmPolicy
    rollout_engine: RolloutEngine
    episode_runner: EpisodeRunner | None  # None without an environment

    @property
    def sizes(self) -> list[int]:
        """Return the number of questions of each data set."""
        return [size for size, _ in self.sets]

    @property
    def max_response_tokens(self) -> int:
        """Return the maximum number of sampled tokens of a sample, over all its turns."""
        sample = self.config.sample
        return sample.max_new_tokens * (1 if self.episode_runner is None else sample.max_turns)

    def generate_batches(
        self, questions: list[Question], batches: Iterable[GenerationBatch]
    ) -> Iterator[list[Sample]]:
        """Yield the samples of each batch, in order: single responses, or whole episodes."""
        if self.episode_runner is not None:
            return (self.episode_runner.run(questions, *batch) for batch in batches)
        return self.rollout_engine.generate_batches(batches)

    def run_with_engine(self, sample: Callable[[], Result]) -> Result:
        """Return `sample()`, called while the rollout engine is in generation mode.

        Call it on all ranks; a `UserError` on one of them is raised on all. Ranks synchronize after
        leaving the engine, because several may share one.
        """

        def call() -> Result:
            with self.rollout_engine.generation_mode():
                return sample()

        return raise_on_all_ranks(self.accelerator, call)

    def close(self) -> None:
        """Also stop the workers of the environments."""
        try:
            super().close()
        finally:
            if self.episode_runner is not None:
                self.episode_runner.environments.close()

    def test_set_names(self) -> list[str]:
        """Return the data set of each test question, or [] if there is only one data set."""
        several = len(self.sets) > 1
        return [q.metadata["dataset"] for q in self.test_questions] if several else []

    def held_out_share(self) -> float:
        return held_out_share(self.questions, self.test_questions)

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Return whether training recomputes the log-probabilities of the behaviour policy."""
        return self.config.train.recompute_old or not self.rollout_engine.exact_log_probs


def build_session(
    config: UncheckedConfig | VlmConfig,
    load: Callable[[VlmConfig, Accelerator], nn.Module] | None = None,
    begin: StartFinder = find_start,
    num_processes: int | None = None,
) -> VlmSession:
    """Build the session of a run; cheap checks come before the weights are loaded.

    Args:
        config: The settings, checked or not.
        load: Loads the model; by default from `pretrained.model`.
        begin: Finds and locks the run directory. Nothing is written to a directory without a lock.
        num_processes: World size to plan for if not the current one. Such a session can only be
            measured by a dry run.
    """
    check_same_goal(config)
    config = check_config(config)
    if config.train.loss in config.custom_losses:
        loss = build_loss(config.train.loss, config.train)
        smoke_test_loss(loss, f"custom_losses.{config.train.loss}")
    _check_fsdp()
    with SessionBuilder(config, autocast=False) as run:
        plan = _open_run(run, config, begin, num_processes)
        data = _load_questions(config, plan, run.accelerator)
        environments = _add_rewards(run, config, data)
        encoder, model = _load_model(config, data, load or _load_policy_model, run.accelerator)
        data, longest_prompt = _check_prompt_lengths(config, data, encoder, model, run.accelerator)
        policy = _add_policy(run, config, encoder, model)
        engine = _build_engine(config, policy, encoder, data, longest_prompt, run.accelerator)
        episode_runner = None
        if environments is not None:
            episode_runner = EpisodeRunner(
                engine, environments, config.sample.max_turns, config.sample.max_observation_tokens
            )
        return VlmSession(
            **run.finish(),
            episode_runner=episode_runner,
            plan=plan,
            questions=data.train,
            test_questions=data.test,
            sets=data.sets,
            rollout_engine=engine,
        )


def _open_run(
    run: SessionBuilder, config: VlmConfig, begin: StartFinder, num_processes: int | None
) -> VlmBatchPlan:
    """Check the engine and the batch arithmetic, then open the run directory."""
    accelerator, tensor_parallel = run.accelerator, config.sample.vllm_tensor_parallel
    if config.sample.engine == VLLM:
        check_vllm_platform(accelerator.device)
        check_vllm_support(config.pretrained.model, config.pretrained.revision, tensor_parallel)
    check_tensor_parallel(tensor_parallel, accelerator.num_processes)
    plan = build_plan(config, num_processes or accelerator.num_processes)
    run.open_folder(begin, plan.updates)
    return plan


def _load_questions(
    config: VlmConfig, plan: VlmBatchPlan, accelerator: Accelerator
) -> QuestionSets:
    """Load the questions and check that their images and videos can be read."""
    data = build_questions(config, plan)
    questions = [*data.train, *data.test]
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    if config.sample.engine == VLLM:
        reject_videos(questions)
    raise_on_all_ranks(accelerator, lambda: check_images(questions, accelerator, bar))
    raise_on_all_ranks(
        accelerator,
        lambda: check_videos(questions, accelerator, config.video_fps, config.video_frames, bar),
    )
    return data


def _add_rewards(
    run: SessionBuilder, config: VlmConfig, data: QuestionSets
) -> EnvironmentPool | None:
    """Build and check the rewards and, if configured, the environments."""
    limit = config.sample.max_new_tokens

    def check_rewards(reward: WeightedReward, eval_reward: WeightedReward) -> None:
        check_reward_inputs(reward, data.train, limit)
        check_rewards_apply(reward, data.train)
        check_reward_inputs(eval_reward, data.test, limit)

    # the environment's reward comes first: it has the best explanation of a failed episode
    run.add_rewards(check_rewards, {ENVIRONMENT: 1.0} if config.environment else {})
    if not config.environment:
        return None
    environments = EnvironmentPool(
        config.environment,
        config.environment_options,
        timeout=config.environment_timeout,
        workers=config.environment_workers,
    )
    run.cleanup_on_error.callback(environments.close)
    raise_on_all_ranks(run.accelerator, lambda: environments.smoke_test(data.train[0]))
    return environments


def _load_model(
    config: VlmConfig,
    data: QuestionSets,
    load: Callable[[VlmConfig, Accelerator], nn.Module],
    accelerator: Accelerator,
) -> tuple[PromptEncoder, nn.Module]:
    """Load tokenizer, image processor and model."""
    tokenizer, image_processor = load_processors(
        config.pretrained.model,
        config.pretrained.revision,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    if image_processor is None:
        reject_images([*data.train, *data.test], config.pretrained.model)
    with suggest_on_oom(memory_saving_options(config)):
        model = load(config, accelerator)
    encoder = PromptEncoder(
        tokenizer,
        image_processor,
        model,
        system_prompt=config.system_prompt,
        question_format=config.question_format,
        video_fps=config.video_fps,
        video_frames=config.video_frames,
        video_pixels=config.video_pixels,
        special_tokens=config.special_tokens,
    )
    return encoder, model


def _check_prompt_lengths(
    config: VlmConfig,
    data: QuestionSets,
    encoder: PromptEncoder,
    model: nn.Module,
    accelerator: Accelerator,
) -> tuple[QuestionSets, int]:
    """Drop or reject overlong prompts; return the questions and the longest prompt's length."""
    limit = _max_prompt_tokens(config, model)
    if config.filter_overlong_prompts:
        data, longest = raise_on_all_ranks(
            accelerator, lambda: data.drop_overlong(encoder.prompt_length, limit)
        )
    else:
        questions = [*data.train, *data.test]
        longest = raise_on_all_ranks(
            accelerator, lambda: encoder.check_prompt_lengths(questions, limit)
        )
    data.log_sizes()
    return data, longest


def _add_policy(
    run: SessionBuilder, config: VlmConfig, encoder: PromptEncoder, model: nn.Module
) -> VlmPolicy:
    """Build the policy, check its forward pass and register it for training."""
    train, device = config.train, run.accelerator.device
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else None
    use_flex_attention = (
        config.flex_attention
        and dtype is not None
        and flex_attention_supported(model, device, dtype)
    )
    policy = VlmPolicy(
        model,
        processors=[encoder.tokenizer, encoder.image_processor],
        use_lora=config.use_lora,
        rank=train.lora_rank,
        alpha=train.lora_alpha,
        target_modules=train.lora_target_modules,
        lora_path=train.lora_path,
        freeze_vision=train.freeze_vision,
        with_reference=train.beta > 0,
        with_value=train.advantage == GAE,
        temperature=config.sample.temperature,
        gradient_checkpointing=train.gradient_checkpointing,
        compute_dtype=dtype,
        flex_attention=use_flex_attention,
        seed=config.seed,
    )
    raise_on_all_ranks(run.accelerator, lambda: check_forward_parity(policy.network))
    logger.info("%-21s %s", "trained", policy.describe())
    run.add_policy(policy)
    return policy


def _build_engine(
    config: VlmConfig,
    policy: VlmPolicy,
    encoder: PromptEncoder,
    data: QuestionSets,
    longest_prompt: int,
    accelerator: Accelerator,
) -> RolloutEngine:
    """Build the engine that samples: transformers' forward pass or vLLM."""
    sample = config.sample
    engine = RolloutEngine(
        policy,
        encoder,
        sample.max_new_tokens,
        _eos_token_ids(policy.model, encoder.tokenizer),
        cuda_graphs=config.cuda_graphs,
    )
    if sample.engine != VLLM:
        return engine
    later_turns = _later_turn_tokens(config)
    most_images = max(len(question.images) for question in (*data.train, *data.test))
    return build_vllm_engine(
        engine,
        source=config.pretrained.model,
        revision=config.pretrained.revision,
        device=accelerator.device,
        dtype=DTYPES[config.mixed_precision],
        num_processes=accelerator.num_processes,
        longest_prompt=longest_prompt + later_turns,
        max_images=most_images + later_turns,  # an image has at least one token
        memory=sample.vllm_memory,
        tensor_parallel=sample.vllm_tensor_parallel,
        seed=config.seed,
    )


def _check_fsdp() -> None:
    """Reject unsupported FSDP options, which `accelerate launch` passes in the environment."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            "in the accelerate config must be 2",
            field="fsdp_version",
            value=version,
            hint="see scripts/accelerate_configs/fsdp2.yaml",
        )
    for name, hint in UNSUPPORTED_FSDP_OPTIONS.items():
        if parse_flag_from_env(name.upper()):
            raise UserError(
                "in the accelerate config must be false", field=name, value=True, hint=hint
            )


def reject_images(questions: Iterable[Question], model: str) -> None:
    """Reject questions with images or videos for a text-only model."""
    for question in questions:
        if question.shown:
            raise UserError(
                f"has images or videos, but pretrained.model={model!r} is a text-only model",
                field=question.where,
                hint="use a vision-language model, or set --config.image_key=none and "
                "--config.video_key=none",
            )


def check_reward_inputs(
    reward: WeightedReward, questions: list[Question], max_new_tokens: int
) -> None:
    """Check a reward's inputs and run it once, before the model is loaded."""
    texts = [q.text for q in questions]
    metadata = [reward_metadata(q, 0, max_new_tokens) for q in questions]
    reward.check(texts, metadata, [q.where for q in questions])
    reward.smoke_test_with("No idea.", texts, metadata)


def check_rewards_apply(reward: WeightedReward, questions: list[Question]) -> None:
    """Reject a reward that applies to no question, for example without reference answers."""
    texts, metadata = [q.text for q in questions], [q.metadata for q in questions]
    for name, rows in reward.applicable_rows(texts, metadata).items():
        if not rows:
            reason = reward.scorers[name].skip_reason(texts[0], metadata[0])
            raise UserError(
                f"scores none of the {len(texts)} questions; the first is skipped because {reason}",
                field=f"reward_fn.{name}",
                hint="remove it from reward_fn, or check answer_key",
            )


def _load_policy_model(config: VlmConfig, accelerator: Accelerator) -> nn.Module:
    """Load the model of the config; reject one that exceeds the memory of the GPU."""
    source, device = config.pretrained.model, accelerator.device
    precision, dtype = config.pretrained.base_precision, DTYPES[config.mixed_precision]
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
        check_gpu_memory(source, capacity, dtype, config.pretrained.revision, precision)
    if config.train.lora_target_modules:
        layout = get_family(build_meta_model(source, config.pretrained.revision))
        select_lora_layers(layout, config.train.lora_target_modules, config.train.freeze_vision)
    return load_model(source, device, dtype, config.pretrained.revision, precision)


def _max_prompt_tokens(config: VlmConfig, model: nn.Module) -> int:
    """Return the prompt length that leaves enough positions for all responses."""
    positions = model.config.get_text_config().max_position_embeddings
    sample = config.sample
    available = positions - sample.max_new_tokens - _later_turn_tokens(config)
    if available < 1 or config.max_prompt_length > available:
        observations = (
            f"sample.max_observation_tokens={sample.max_observation_tokens} in each of "
            f"sample.max_turns={sample.max_turns} turns "
        )
        context = f"the model's context length of {positions}"
        if not config.max_prompt_length:
            turns = f"with {observations}" if config.environment else ""
            raise UserError(
                f"{turns}leaves no room for a prompt in {context}",
                field="sample.max_new_tokens",
                value=sample.max_new_tokens,
                hint="lower it",
            )
        turns = f"and {observations}" if config.environment else ""
        raise UserError(
            f"plus sample.max_new_tokens={sample.max_new_tokens} {turns}exceeds {context}",
            field="max_prompt_length",
            value=config.max_prompt_length,
            hint="lower one of them",
        )
    return config.max_prompt_length or available


def _later_turn_tokens(config: VlmConfig) -> int:
    """Return how many tokens an episode can add to the prompt before its last response."""
    sample = config.sample
    turn = sample.max_new_tokens + sample.max_observation_tokens
    return (sample.max_turns - 1) * turn if config.environment else 0


def _eos_token_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return tuple(ends) if isinstance(ends, list) else (ends,)


def memory_saving_options(config: VlmConfig) -> list[str]:
    """Return options that reduce memory and that the run does not use yet."""
    sizes = {
        "sample.batch_size": config.sample.batch_size,
        "train.tokens_per_batch": config.train.tokens_per_batch,
    }
    halved = [f"--config.{name}={size // 2}" for name, size in sizes.items() if size > 1]
    options = [" ".join(halved)] if halved else []
    if not config.train.gradient_checkpointing:
        options.append("--config.train.gradient_checkpointing=True")
    return options
