"""Build the session of a VLM training run from its config."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import AutoConfig

from flow_grpo.config.settings import to_json
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.mixing import held_out_share, parse_sources
from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.modelscope_hub import local_model
from flow_grpo.rewards import WeightedReward
from flow_grpo.training.builder import SessionBuilder, StartFinder
from flow_grpo.training.config_changes import check_same_goal
from flow_grpo.training.distributed import Result, get_ranks, raise_on_all_ranks
from flow_grpo.training.plan import context_size
from flow_grpo.training.resume import find_start
from flow_grpo.training.session import BaseSession
from flow_grpo.vlm.builders import (
    build_engine,
    build_policy,
    check_media,
    check_reward_inputs,
    check_rewards_apply,
    eos_token_ids,
    load_encoder_and_model,
    load_policy_model,
    max_prompt_tokens,
)
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.engine_choice import choose_engine
from flow_grpo.vlm.environment import EnvironmentPool
from flow_grpo.vlm.fields import ENVIRONMENT, GAE, VLLM, VlmConfig
from flow_grpo.vlm.given_responses import GivenResponses, tokenize_responses
from flow_grpo.vlm.losses import GIVEN_LOSSES, build_loss
from flow_grpo.vlm.losses.base import smoke_test_loss
from flow_grpo.vlm.models import find_family
from flow_grpo.vlm.multi_turn import EpisodeRunner
from flow_grpo.vlm.plan import VlmBatchPlan, build_plan, check_tensor_parallel
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.questions import QuestionSets, build_questions
from flow_grpo.vlm.rollout import GenerationBatch, RolloutEngine, Sample
from flow_grpo.vlm.separate_critic import check_critic_model
from flow_grpo.vlm.sequence_parallel import FIELD, SequenceShards, check_heads
from flow_grpo.vlm.vllm_engine import check_vllm_platform, check_vllm_support

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
    given: GivenResponses | None = None  # None with a rollout

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
        if len(parse_sources(self.config.eval_dataset or self.config.dataset)) < 2:
            return []
        return [q.metadata["dataset"] for q in self.test_questions]

    def held_out_share(self) -> float:
        return held_out_share(self.questions, self.test_questions)

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Return whether training recomputes the log-probabilities of the behaviour policy."""
        if self.given is not None:
            return False
        return self.config.train.recompute_old or not self.rollout_engine.exact_log_probs

    @property
    def advantages_need_log_probs(self) -> bool:
        """Return whether advantages depend on a forward pass: on values or on a KL penalty."""
        train = self.config.train
        return train.advantage == GAE or (train.beta > 0 and train.kl_in == "reward")


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
    check_same_goal(to_json(config))
    config = check_config(config)
    if config.train.loss in config.custom_losses:
        loss = build_loss(config.train.loss, config.train)
        smoke_test_loss(loss, f"custom_losses.{config.train.loss}")
    _check_fsdp()
    group = context_size(config.train.sequence_parallel, num_processes)
    with SessionBuilder(config, autocast=False, context_parallel=group, context_field=FIELD) as run:
        plan = _open_run(run, config, begin, num_processes)
        data = _load_questions(config, plan, run.accelerator)
        config = choose_engine(config, [*data.train, *data.test], run.accelerator)
        environments = _add_rewards(run, config, data)
        encoder, model = load_encoder_and_model(
            config, [*data.train, *data.test], load or load_policy_model, run.accelerator
        )
        data, longest_prompt = _check_prompt_lengths(config, data, encoder, model, run.accelerator)
        data, given = _tokenize_given(config, data, encoder, model, run.accelerator)
        policy = build_policy(config, encoder, model, run.accelerator)
        if (ranks := get_ranks(run.accelerator)).mesh is not None:
            policy.split_columns(SequenceShards(ranks))
        logger.info("%-21s %s", "trained", policy.describe())
        run.add_policy(policy)
        questions = [*data.train, *data.test]
        engine = build_engine(config, policy, encoder, questions, longest_prompt, run.accelerator)
        episode_runner = None
        if environments is not None:
            episode_runner = EpisodeRunner(
                engine, environments, config.sample.max_turns, config.sample.max_observation_tokens
            )
        return VlmSession(
            **run.finish(),
            episode_runner=episode_runner,
            given=given,
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
    if (size := config.train.sequence_parallel) > 1:
        source, revision = config.pretrained.model, config.pretrained.revision
        source = local_model(source, revision)
        find_family(source, revision)  # explains a model that cannot be read
        check_heads(
            size,
            AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False),
        )
    if config.train.critic_model:
        source, revision = config.pretrained.model, config.pretrained.revision
        check_critic_model(source, config.train.critic_model, revision)
    plan = build_plan(config.sample, config.train, num_processes or accelerator.num_processes)
    run.open_folder(begin, plan.updates)
    return plan


def _load_questions(
    config: VlmConfig, plan: VlmBatchPlan, accelerator: Accelerator
) -> QuestionSets:
    """Load the questions and check that their images and videos can be read."""
    data = build_questions(config, plan)
    check_media(config, [*data.train, *data.test], accelerator)
    return data


def _add_rewards(
    run: SessionBuilder, config: VlmConfig, data: QuestionSets
) -> EnvironmentPool | None:
    """Build and check the rewards and, if configured, the environments."""
    limit = config.sample.max_new_tokens

    def check_rewards(reward: WeightedReward, eval_reward: WeightedReward) -> None:
        if config.train.loss not in GIVEN_LOSSES:
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


def _check_prompt_lengths(
    config: VlmConfig,
    data: QuestionSets,
    encoder: PromptEncoder,
    model: nn.Module,
    accelerator: Accelerator,
) -> tuple[QuestionSets, int]:
    """Drop or reject overlong prompts; return the questions and the longest prompt's length."""
    limit = max_prompt_tokens(config, model)
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


def _tokenize_given(
    config: VlmConfig,
    data: QuestionSets,
    encoder: PromptEncoder,
    model: nn.Module,
    accelerator: Accelerator,
) -> tuple[QuestionSets, GivenResponses | None]:
    """Drop or reject overlong responses; return the questions and the given responses, if any."""
    if config.train.loss not in GIVEN_LOSSES:
        return data, None
    data, tokens = raise_on_all_ranks(
        accelerator,
        lambda: tokenize_responses(
            data,
            encoder,
            eos_token_ids(model, encoder.tokenizer),
            config.sample.max_new_tokens,
            drop=config.filter_overlong_prompts,
        ),
    )
    loss, liked = build_loss(config.train.loss, config.train), [row.liked for row in data.train]
    if config.train.loss == "kto" and len({*liked}) == 1:
        only, other = ("liked", "disliked") if liked[0] else ("disliked", "liked")
        raise UserError(
            f"has {only} responses only, but train.loss='kto' needs both kinds",
            field="dataset",
            value=config.dataset,
            hint=f"add {other} responses" + (", or set train.loss=sft" if liked[0] else ""),
        )
    return data, GivenResponses(loss, tokens, liked)


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
