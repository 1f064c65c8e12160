"""Build the model, policy and rollout engine of a VLM run, for training and for evaluation."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from flow_grpo.config.fields import ADAMW_BF16
from flow_grpo.context_length import context_length
from flow_grpo.data.images import check_images
from flow_grpo.data.questions import Question
from flow_grpo.data.videos import check_videos
from flow_grpo.errors import UserError
from flow_grpo.modelscope_hub import local_model
from flow_grpo.perf.compile_utils import missing_compile_dependency
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards import WeightedReward
from flow_grpo.training.builder import DTYPES, suggest_on_oom
from flow_grpo.training.distributed import is_sharded, raise_on_all_ranks
from flow_grpo.vlm.attention import flex_attention_supported
from flow_grpo.vlm.chat_template_file import read_chat_template
from flow_grpo.vlm.fields import GAE, SEPARATE, VLLM, VlmConfig
from flow_grpo.vlm.forward_parity import check_forward_parity
from flow_grpo.vlm.lora import select_lora_layers
from flow_grpo.vlm.models import (
    build_meta_model,
    check_gpu_memory,
    get_family,
    load_model,
    load_processors,
)
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.rollout import RolloutEngine, image_metadata, reward_metadata
from flow_grpo.vlm.vllm_engine import build_vllm_engine, reject_videos

logger = logging.getLogger("flow_grpo")


def check_media(config: VlmConfig, questions: list[Question], accelerator: Accelerator) -> None:
    """Check that all images and videos can be read. Call it on all processes."""
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    if config.sample.engine == VLLM:
        reject_videos(questions)
    raise_on_all_ranks(accelerator, lambda: check_images(questions, accelerator, bar))
    raise_on_all_ranks(
        accelerator,
        lambda: check_videos(questions, accelerator, config.video_fps, config.video_frames, bar),
    )


def load_encoder_and_model(
    config: VlmConfig,
    questions: Iterable[Question],
    load: Callable[[VlmConfig, Accelerator], nn.Module],
    accelerator: Accelerator,
) -> tuple[PromptEncoder, nn.Module]:
    """Load tokenizer, image processor and model.

    Args:
        config: Settings of the run.
        questions: All questions, rejected if they have images and the model is text-only.
        load: Loads the model.
        accelerator: Provides the device.
    """
    processors = load_checked_processors(config, questions)
    with suggest_on_oom(memory_saving_options(config)):
        model = load(config, accelerator)
    return build_encoder(config, processors, model), model


def load_checked_processors(
    config: VlmConfig, questions: Iterable[Question]
) -> tuple[PreTrainedTokenizerBase, Any]:
    """Load tokenizer and image processor; reject questions with images for a text-only model."""
    tokenizer, image_processor = load_processors(
        config.pretrained.model,
        config.pretrained.revision,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        chat_template=read_chat_template(config.chat_template),
    )
    if image_processor is None:
        reject_images(questions, config.pretrained.model)
    return tokenizer, image_processor


def build_encoder(
    config: VlmConfig, processors: tuple[PreTrainedTokenizerBase, Any], model: nn.Module
) -> PromptEncoder:
    """Build the encoder of prompts; the model may be on the meta device."""
    return PromptEncoder(
        *processors,
        model,
        system_prompt=config.system_prompt,
        question_format=config.question_format,
        video_fps=config.video_fps,
        video_frames=config.video_frames,
        video_pixels=config.video_pixels,
        special_tokens=config.special_tokens,
    )


def load_policy_model(config: VlmConfig, accelerator: Accelerator) -> nn.Module:
    """Load the model of the config.

    Before the weights are read, a model that exceeds the memory of the GPU and unknown names of
    LoRA layers are rejected.
    """
    source, device = config.pretrained.model, accelerator.device
    precision, dtype = config.pretrained.base_precision, DTYPES[config.mixed_precision]
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
        check_gpu_memory(source, capacity, dtype, config.pretrained.revision, precision)
    if config.train.lora_target_modules:
        layout = get_family(build_meta_model(source, config.pretrained.revision))
        select_lora_layers(layout, config.train.lora_target_modules, config.train.freeze_vision)
    return load_model(source, device, dtype, config.pretrained.revision, precision)


def build_policy(
    config: VlmConfig, encoder: PromptEncoder, model: nn.Module, accelerator: Accelerator
) -> VlmPolicy:
    """Build the policy of a run from its model, and check its forward pass."""
    train, device = config.train, accelerator.device
    if config.compile and is_sharded(accelerator):
        raise UserError(
            "does not support sharded weights",
            field="compile",
            value=True,
            hint="set compile=False",
        )
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else None
    use_flex_attention = (
        config.flex_attention
        and dtype is not None
        and flex_attention_supported(model, device, dtype)
    )
    critic = None
    if train.critic == SEPARATE:
        critic = load_critic(config, len(encoder.tokenizer), model)
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
        with_value=train.advantage == GAE and critic is None,
        critic_model=critic,
        temperature=config.sample.temperature,
        gradient_checkpointing=train.gradient_checkpointing,
        compute_dtype=dtype,
        flex_attention=use_flex_attention,
        compiled=config.compile and _can_compile(dtype, device),
        weight_dtype=torch.bfloat16 if train.optimizer == ADAMW_BF16 else torch.float32,
        seed=config.seed,
    )
    raise_on_all_ranks(accelerator, lambda: check_forward_parity(policy.network))
    return policy


def load_critic(config: VlmConfig, tokens: int, model: nn.Module) -> nn.Module:
    """Load the model that a separate critic starts from.

    Args:
        config: Settings of the run.
        tokens: Number of tokens of the policy's tokenizer.
        model: The model of the policy, for device and dtype.
    """
    source, field, revision = config.train.critic_model, "train.critic_model", "main"
    if not source:
        source, field = config.pretrained.model, "pretrained.model"
        revision = config.pretrained.revision
    with suggest_on_oom(memory_saving_options(config)):
        critic = load_model(source, model.device, model.dtype, revision, field=field)
    if (found := critic.get_input_embeddings().num_embeddings) < tokens:
        raise UserError(
            f"has {found} token embeddings, but the policy's tokenizer has {tokens} tokens",
            field=field,
            value=source,
            hint="use a model of the same family",
        )
    return critic


def _can_compile(dtype: torch.dtype | None, device: torch.device) -> bool:
    """Return whether decoder layers can be compiled here; otherwise log why not."""
    if dtype is None or device.type != "cuda":
        missing = "a GPU and mixed_precision=bf16"
    else:
        missing = missing_compile_dependency()
    if missing:
        logger.warning("compile=True has no effect: it needs %s", missing)
    return not missing


def build_engine(
    config: VlmConfig,
    policy: VlmPolicy,
    encoder: PromptEncoder,
    questions: Iterable[Question],
    longest_prompt: int,
    accelerator: Accelerator,
) -> RolloutEngine:
    """Build the engine that samples: transformers' forward pass or vLLM."""
    sample = config.sample
    engine = RolloutEngine(
        policy,
        encoder,
        sample.max_new_tokens,
        eos_token_ids(policy.model, encoder.tokenizer),
        cuda_graphs=config.cuda_graphs,
    )
    if sample.engine != VLLM:
        return engine
    later_turns = later_turn_tokens(config)
    most_images = max(len(question.images) for question in questions)
    return build_vllm_engine(
        engine,
        source=local_model(config.pretrained.model, config.pretrained.revision),
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


def max_prompt_tokens(config: VlmConfig, model: nn.Module) -> int:
    """Return the prompt length that leaves enough positions for all responses.

    Raises:
        UserError: If prompts and responses do not fit into the model's context.
    """
    positions, context = context_length(model.config.get_text_config())
    sample = config.sample
    available = positions - sample.max_new_tokens - later_turn_tokens(config)
    if available < 1 or config.max_prompt_length > available:
        observations = (
            f"sample.max_observation_tokens={sample.max_observation_tokens} in each of "
            f"sample.max_turns={sample.max_turns} turns "
        )
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


def later_turn_tokens(config: VlmConfig) -> int:
    """Return how many tokens an episode can add to the prompt before its last response."""
    sample = config.sample
    turn = sample.max_new_tokens + sample.max_observation_tokens
    return (sample.max_turns - 1) * turn if config.environment else 0


def eos_token_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return tuple(ends) if isinstance(ends, list) else (ends,)


def check_reward_inputs(
    reward: WeightedReward, questions: list[Question], max_new_tokens: int
) -> None:
    """Check a reward's inputs and run it once, before the model is loaded."""
    for name, scorer in reward.interactive_scorers.items():  # they get no test call
        if scorer.kind == "image":
            raise UserError("compares images, not responses", field=f"reward {name!r}")
    texts = [q.text for q in questions]
    metadata = [reward_metadata(q, 0, max_new_tokens) for q in questions]
    reward.check(texts, metadata, [q.where for q in questions])
    for rows in reward.applicable_rows(texts, metadata).values():
        for row in rows[:1]:  # the one of the smoke test
            metadata[row] |= image_metadata(reward, [questions[row]])[0]
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
