"""Turn a config into the objects of a run that trains a model that answers."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn

from flow_grpo.answer.agreement import check_agreement
from flow_grpo.answer.attention import compiles
from flow_grpo.answer.check import check
from flow_grpo.answer.environment import Environments
from flow_grpo.answer.fields import ENVIRONMENT, GAE, VLLM, AnswerFields
from flow_grpo.answer.losses import build_loss
from flow_grpo.answer.losses.base import try_loss
from flow_grpo.answer.models import check_room, load_model, load_processors
from flow_grpo.answer.plan import AnswerPlan, build_plan, check_parallel
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import PromptEncoder
from flow_grpo.answer.questions import build_questions
from flow_grpo.answer.rollout import Answerer, Sample, ToAnswer, reward_metadata
from flow_grpo.answer.turns import Player
from flow_grpo.answer.vllm_engine import (
    build_answerer,
    check_family,
    check_platform,
    refuse_videos,
)
from flow_grpo.config.trade import Unchecked
from flow_grpo.data.images import check_pictures
from flow_grpo.data.mixing import held_out_share
from flow_grpo.data.questions import Question
from flow_grpo.data.videos import check_videos
from flow_grpo.errors import UserError
from flow_grpo.rewards import WeightedReward
from flow_grpo.run.building import DTYPES, Begin, advice_when_short, building
from flow_grpo.run.distributed import Result, on_all_or_none
from flow_grpo.run.resume import check_goal, find_start
from flow_grpo.run.session import BaseSession
from flow_grpo.show.console import progress_bar

logger = logging.getLogger("flow_grpo")
# settings of FSDP that must be off, and why
SHARDING = {
    "fsdp_activation_checkpointing": "use --config.train.gradient_checkpointing=True",
    "fsdp_cpu_ram_efficient_loading": "every process loads the model, tied weights and reference",
}


@dataclass(kw_only=True)
class VlmSession(BaseSession):
    """A run of a model that answers."""

    plan: AnswerPlan
    questions: list[Question]
    test_questions: list[Question]
    sets: list[tuple[int, Fraction]]  # questions of each data set, and its share of an epoch
    policy: AnswerPolicy
    answerer: Answerer
    player: Player | None  # where there is an environment

    @property
    def sizes(self) -> list[int]:
        """Number of questions of each data set."""
        return [size for size, _ in self.sets]

    @property
    def most_tokens(self) -> int:
        """What a sample has at most."""
        sample = self.config.sample
        return sample.max_new_tokens * (1 if self.player is None else sample.max_turns)

    def answers(
        self, questions: list[Question], batches: Iterable[ToAnswer]
    ) -> Iterator[list[Sample]]:
        """The samples of each batch, in their order: answers, or episodes."""
        if self.player is not None:
            return (self.player.play(questions, *asked) for asked in batches)
        return self.answerer.answers(batches)

    def while_awake(self, sample: Callable[[], Result]) -> Result:
        """What it returns, with the answerer awake; a mistake or an outage on one process ends all.
        Call it on all processes. They wait for each other when they have left the engine, which
        several may share."""

        def call() -> Result:
            with self.answerer.awake():
                return sample()

        return on_all_or_none(self.accelerator, call)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self.player is not None:
                self.player.environments.close()

    def test_sets(self) -> list[str]:
        """The data set that each test question is of, where there are several."""
        several = len(self.sets) > 1
        return [q.metadata["dataset"] for q in self.test_questions] if several else []

    def held_out_share(self) -> float:
        return held_out_share(self.questions, self.test_questions, attrgetter("text", "shown"))

    @property
    def recomputes_old(self) -> bool:
        """Whether log-probabilities of the policy that sampled are computed again for training."""
        return self.config.train.recompute_old or not self.answerer.exact


def build_session(
    config: Unchecked | AnswerFields,
    load: Callable[[AnswerFields, Accelerator], nn.Module] | None = None,
    begin: Begin = find_start,
    num_processes: int | None = None,
) -> VlmSession:
    """Everything the run needs; whatever is cheap to check is checked before weights load. `begin`
    finds and locks the run folder, which without a lock is left alone. `num_processes` is the
    number of processes to plan for, if not the current one; such a session can only be measured."""
    check_goal(config)
    config = check(config)
    if config.train.loss in config.custom_losses:
        loss = build_loss(config.train.loss, config.train)
        try_loss(loss, f"custom_losses.{config.train.loss}")
    _check_sharding()
    with building(config, autocast=False) as run:
        accelerator, sample, train = run.accelerator, config.sample, config.train
        if sample.engine == VLLM:
            check_platform(accelerator.device)
            where = config.pretrained.model, config.pretrained.revision
            check_family(*where, sample.vllm_tensor_parallel)
        check_parallel(sample.vllm_tensor_parallel, accelerator.num_processes)
        plan = build_plan(config, num_processes or accelerator.num_processes)
        run.open_folder(begin, plan.updates)
        data = build_questions(config, plan)
        every = [*data.train, *data.test]
        bar = partial(progress_bar, shown=accelerator.is_main_process)
        if sample.engine == VLLM:
            refuse_videos(every)
        video = {"video_fps": config.video_fps, "video_frames": config.video_frames}
        on_all_or_none(accelerator, lambda: check_pictures(every, accelerator, bar))
        on_all_or_none(accelerator, lambda: check_videos(every, accelerator, *video.values(), bar))

        def check_rewards(reward: WeightedReward, eval_reward: WeightedReward) -> None:
            check_reward(reward, data.train, sample.max_new_tokens)
            check_asked(reward, data.train)
            check_reward(eval_reward, data.test, sample.max_new_tokens)

        # first: it knows best why an episode failed
        run.add_rewards(check_rewards, {ENVIRONMENT: 1.0} if config.environment else {})
        environments = None
        if config.environment:
            environments = Environments(
                config.environment,
                config.environment_options,
                timeout=config.environment_timeout,
                workers=config.environment_workers,
            )
            run.until_built.callback(environments.close)
            on_all_or_none(accelerator, lambda: environments.try_out(data.train[0]))
        tokenizer, images = load_processors(
            config.pretrained.model,
            config.pretrained.revision,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
        )
        if images is None:
            reject_images(every, config.pretrained.model)
        with advice_when_short(lighter_settings(config)):
            model = (load or _load)(config, accelerator)
        encoder = PromptEncoder(
            tokenizer,
            images,
            model,
            system_prompt=config.system_prompt,
            question_format=config.question_format,
            video_pixels=config.video_pixels,
            special_tokens=config.special_tokens,
            **video,
        )
        most = _longest_prompt(config, model)
        if config.filter_overlong_prompts:
            data, longest = on_all_or_none(
                accelerator, lambda: data.without_long(encoder.length, most)
            )
            every = [*data.train, *data.test]
        else:
            longest = on_all_or_none(accelerator, lambda: encoder.check_lengths(every, most))
        data.tell()
        half = torch.bfloat16 if config.mixed_precision == "bf16" else None
        flex = config.flex_attention and half and compiles(model, accelerator.device, half)
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
            temperature=sample.temperature,
            gradient_checkpointing=train.gradient_checkpointing,
            compute_dtype=half,
            flex_attention=bool(flex),
            seed=config.seed,
        )
        on_all_or_none(accelerator, lambda: check_agreement(policy.network))
        logger.info("%-21s %s", "trained", policy.describe())
        run.add_policy(policy)
        answerer = Answerer(
            policy,
            encoder,
            sample.max_new_tokens,
            _end_tokens(model, tokenizer),
            cuda_graphs=config.cuda_graphs,
        )
        if sample.engine == VLLM:
            answerer = build_answerer(
                answerer,
                source=config.pretrained.model,
                revision=config.pretrained.revision,
                device=accelerator.device,
                dtype=DTYPES[config.mixed_precision],
                num_processes=accelerator.num_processes,
                longest_prompt=longest + _later_tokens(config),
                # a picture has one token at least
                pictures=max(len(question.images) for question in every) + _later_tokens(config),
                memory=sample.vllm_memory,
                parallel=sample.vllm_tensor_parallel,
                seed=config.seed,
            )
        limits = sample.max_turns, sample.max_observation_tokens
        return VlmSession(
            **run.finish(),
            player=Player(answerer, environments, *limits) if environments else None,
            plan=plan,
            questions=data.train,
            test_questions=data.test,
            sets=data.sets,
            answerer=answerer,
        )


def _check_sharding() -> None:
    """Refuse what the accelerate config may say, which `accelerate launch` hands on in the
    environment."""
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


def reject_images(questions: Iterable[Question], model: str) -> None:
    """Reject questions with images or videos for a language model."""
    for question in questions:
        if question.shown:
            raise UserError(
                f"{question.where}: has images or videos, and pretrained.model={model!r} is a "
                "language model, which reads text only; use a vision-language model, or set "
                "--config.image_key=none and --config.video_key=none"
            )


def check_reward(reward: WeightedReward, questions: list[Question], max_new_tokens: int) -> None:
    """Tell whatever can be wrong with it, before the model loads."""
    texts = [q.text for q in questions]
    metadata = [reward_metadata(q, 0, max_new_tokens) for q in questions]
    reward.check(texts, metadata, [q.where for q in questions])
    reward.rehearse_with("No idea.", texts, metadata)


def check_asked(reward: WeightedReward, questions: list[Question]) -> None:
    """Refuse a reward that no question asks for, as one that checks a truth where there is none."""
    texts, metadata = [q.text for q in questions], [q.metadata for q in questions]
    for name, asked in reward.asked(texts, metadata).items():
        if not asked:
            reason = reward.scorers[name].why_not(texts[0], metadata[0])
            raise UserError(
                f"reward {name!r} scores none of the {len(texts)} questions, the first because "
                f"{reason}; leave it out of reward_fn, or see answer_key"
            )


def _load(config: AnswerFields, accelerator: Accelerator) -> nn.Module:
    source, device = config.pretrained.model, accelerator.device
    precision, dtype = config.pretrained.base_precision, DTYPES[config.mixed_precision]
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
        check_room(source, room, dtype, config.pretrained.revision, precision)
    return load_model(source, device, dtype, config.pretrained.revision, precision)


def _longest_prompt(config: AnswerFields, model: nn.Module) -> int:
    positions = model.config.get_text_config().max_position_embeddings
    sample, turns = config.sample, ""
    left = positions - sample.max_new_tokens - _later_tokens(config)
    if config.environment:
        turns = f" and sample.max_observation_tokens={sample.max_observation_tokens}, for sample."
        turns += f"max_turns={sample.max_turns},"
    if left < 1 or config.max_prompt_length > left:
        raise UserError(
            f"max_prompt_length={config.max_prompt_length} and sample.max_new_tokens="
            f"{sample.max_new_tokens}{turns} do not fit into the model's {positions} positions; "
            "lower one of them"
        )
    return config.max_prompt_length or left


def _later_tokens(config: AnswerFields) -> int:
    """What the prompt of an episode's last answer has at most beyond that of the first."""
    sample = config.sample
    turn = sample.max_new_tokens + sample.max_observation_tokens
    return (sample.max_turns - 1) * turn if config.environment else 0


def _end_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return tuple(ends) if isinstance(ends, list) else (ends,)


def lighter_settings(config: AnswerFields) -> list[str]:
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
