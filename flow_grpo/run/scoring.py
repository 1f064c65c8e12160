"""The rewards of a run, from its config."""

import logging

from accelerate import Accelerator
from ml_collections import ConfigDict

from flow_grpo.data.prompts import Prompt
from flow_grpo.draw.check import check_eval_judges, check_judges
from flow_grpo.draw.models import Size
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.rewards import WeightedReward, build_scorers, check_weights, guard_scorers
from flow_grpo.rewards.failure import FailurePolicy

logger = logging.getLogger("flow_grpo")


def build_both_rewards(
    config: ConfigDict,
    accelerator: Accelerator,
    plan: BatchPlan,
    prompts: list[Prompt],
    test_prompts: list[Prompt],
    size: Size,
) -> list[WeightedReward]:
    """Of training and of evaluation."""
    weights = config.reward_fn.to_dict()
    reward, eval_reward = build_rewards(config, accelerator, weights, eval_weights(config))
    check_judges(config, reward.judges, plan)
    check_eval_judges(eval_reward.judges)
    check_reward(reward, prompts, size)
    check_reward(eval_reward, test_prompts, size)
    return [reward, eval_reward]


def check_reward(reward: WeightedReward, prompts: list[Prompt], size: Size) -> None:
    """Whatever can be wrong with it, before the model loads."""
    texts, metadata = [p.prompt for p in prompts], [p.metadata for p in prompts]
    reward.check(texts, metadata)
    for name, rows in reward.asked(texts, metadata).items():
        if len(rows) < len(prompts):
            logger.info("%-21s is asked for by %d of %d prompts", name, len(rows), len(prompts))
    reward.rehearse(texts, metadata, size.width, size.height, size.frames)


def eval_weights(config: ConfigDict) -> dict[str, float]:
    return (config.eval_reward_fn or config.reward_fn).to_dict()


def build_rewards(
    config: ConfigDict, accelerator: Accelerator, *weights: dict[str, float]
) -> list[WeightedReward]:
    """One reward per dict of weights; those that name the same scorer share it."""
    for each in weights:
        check_weights(each, "reward_fn" if each == config.reward_fn.to_dict() else "eval_reward_fn")
    policy = FailurePolicy(config.reward_retries, config.reward_timeout)
    scorers = build_scorers(
        dict.fromkeys(name for each in weights for name in each),
        device=str(accelerator.device),
        custom=config.custom_rewards.to_dict(),
        servers=config.reward_servers.to_dict(),
        options=config.reward_options.to_dict(),
        policy=policy,
    )
    guarded = guard_scorers(scorers, policy)
    return [WeightedReward(guarded, each) for each in weights]
