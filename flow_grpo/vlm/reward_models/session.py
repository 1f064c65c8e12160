"""Build the session of a run that trains a reward model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from accelerate import Accelerator
from torch import nn

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.context_length import context_length
from flow_grpo.data.mixing import held_out_share, parse_sources
from flow_grpo.data.responses import GivenResponse
from flow_grpo.errors import UserError
from flow_grpo.training.builder import DTYPES, SessionBuilder, StartFinder
from flow_grpo.training.config_changes import check_same_goal
from flow_grpo.training.distributed import raise_on_all_ranks
from flow_grpo.training.resume import find_start
from flow_grpo.training.session import BaseSession
from flow_grpo.vlm.attention import flex_attention_supported
from flow_grpo.vlm.builders import check_media, load_encoder_and_model, load_policy_model
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.fields import VlmConfig
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.questions import QuestionSets
from flow_grpo.vlm.reward_models.classifier import find_pad_token
from flow_grpo.vlm.reward_models.plan import PairPlan, build_pair_plan, build_pairs
from flow_grpo.vlm.reward_models.policy import RewardModelPolicy

logger = logging.getLogger("flow_grpo")


@dataclass(kw_only=True)
class RewardModelSession(BaseSession):
    """State of a run that trains a reward model."""

    plan: PairPlan
    pairs: list[GivenResponse]
    test_pairs: list[GivenResponse]
    sets: list[tuple[int, Fraction]]  # per data set: number of pairs, fraction of an epoch
    policy: RewardModelPolicy
    encoder: PromptEncoder

    @property
    def sizes(self) -> list[int]:
        """Return the number of pairs of each data set."""
        return [size for size, _ in self.sets]

    def test_set_names(self) -> list[str]:
        """Return the data set of each test pair, or [] if there is only one data set."""
        if len(parse_sources(self.config.eval_dataset or self.config.dataset)) < 2:
            return []
        return [pair.metadata["dataset"] for pair in self.test_pairs]

    def held_out_share(self) -> float:
        return held_out_share(self.pairs, self.test_pairs)


def build_session(
    config: UncheckedConfig | VlmConfig,
    load: Callable[[VlmConfig, Accelerator], nn.Module] | None = None,
    begin: StartFinder = find_start,
) -> RewardModelSession:
    """Build the session of a run; cheap checks come before the weights are loaded.

    Args:
        config: The settings, checked or not.
        load: Loads the model; by default from `pretrained.model`.
        begin: Finds and locks the run directory.
    """
    check_same_goal(config)
    config = check_config(config)
    with SessionBuilder(config, autocast=False) as run:
        plan = build_pair_plan(config.sample, config.train, run.accelerator.num_processes)
        run.open_folder(begin, plan.updates)
        run.skip_rewards()
        data = build_pairs(config, plan)
        rows = [*data.train, *data.test]
        raise_on_all_ranks(run.accelerator, lambda: reject_videos(rows))
        check_media(config, rows, run.accelerator)
        encoder, model = load_encoder_and_model(
            config, rows, load or load_policy_model, run.accelerator
        )
        limit = max_conversation_tokens(config, model)
        data = raise_on_all_ranks(
            run.accelerator, lambda: check_lengths(config, data, encoder, limit)
        )
        data.log_sizes()
        policy = build_policy(config, encoder, model, run.accelerator)
        logger.info("%-21s %s", "trained", policy.describe())
        run.add_policy(policy)
        return RewardModelSession(
            **run.finish(),
            plan=plan,
            pairs=data.train,
            test_pairs=data.test,
            sets=data.sets,
            encoder=encoder,
        )


def reject_videos(rows: list[GivenResponse]) -> None:
    """Reject a pair with videos, which reward models do not support."""
    for row in rows:
        if row.videos:
            raise UserError(
                "has a video, which a reward model does not support",
                field=row.where,
                hint="remove the row, or give some frames as images",
            )


def max_conversation_tokens(config: VlmConfig, model: nn.Module) -> int:
    """Return the maximum number of tokens of a prompt with its response.

    Raises:
        UserError: If `max_prompt_length` exceeds the model's context.
    """
    positions, context = context_length(model.config.get_text_config())
    if config.max_prompt_length > positions:
        raise UserError(
            f"exceeds {context}",
            field="max_prompt_length",
            value=config.max_prompt_length,
            hint="lower it",
        )
    return config.max_prompt_length or positions


def check_lengths(
    config: VlmConfig, data: QuestionSets, encoder: PromptEncoder, limit: int
) -> QuestionSets:
    """Drop or reject pairs with a conversation of more than `limit` tokens."""

    def length(pair: GivenResponse) -> int:
        return max(encoder.conversation_lengths(pair, pair.responses))

    if config.filter_overlong_prompts:
        return data.drop_overlong(length, limit)[0]
    for pair in (*data.train, *data.test):
        if (tokens := length(pair)) > limit:
            raise UserError(
                f"has a conversation of {tokens} tokens, more than max_prompt_length={limit}",
                field=pair.where,
                hint="remove it, or set --config.filter_overlong_prompts=True",
            )
    return data


def build_policy(
    config: VlmConfig,
    encoder: PromptEncoder,
    model: nn.Module,
    accelerator: Accelerator,
) -> RewardModelPolicy:
    """Set up LoRA or all weights for training, and the score head."""
    train, device = config.train, accelerator.device
    dtype = None if config.mixed_precision == "no" else DTYPES[config.mixed_precision]
    flex_attention = (
        config.flex_attention
        and dtype is not None
        and flex_attention_supported(model, device, dtype)
    )
    return RewardModelPolicy(
        model,
        pad_token_id=find_pad_token(encoder),
        processors=[encoder.tokenizer, encoder.image_processor],
        use_lora=config.use_lora,
        rank=train.lora_rank,
        alpha=train.lora_alpha,
        target_modules=train.lora_target_modules,
        lora_path=train.lora_path,
        freeze_vision=train.freeze_vision,
        gradient_checkpointing=train.gradient_checkpointing,
        compute_dtype=dtype,
        flex_attention=flex_attention,
        seed=config.seed,
    )
