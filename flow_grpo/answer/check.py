"""Hold a config against its fields and their rules, before anything is loaded."""

from dataclasses import replace
from importlib.util import find_spec

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS, SCALES
from flow_grpo.answer import fields
from flow_grpo.answer.losses import AGGREGATIONS, DIVERGENCES, KINDS
from flow_grpo.draw.check import RULES, check_fields, check_values
from flow_grpo.errors import UserError, check_model_folder
from flow_grpo.rewards import ANSWER_REWARDS, REWARDS

GAE = "gae"  # the estimator that is PPO's
PER_REWARD = ("gdpo", "pairwise")  # estimators that compare answers by each reward alone
VLLM = "vllm"
ENGINES = ("transformers", VLLM)
COLDEST, HOTTEST = 0.01, 2.0  # temperatures that vLLM takes as they are
OWN = replace(
    RULES,
    choices={
        **RULES.choices,
        "sample.engine": ENGINES,
        "train.loss": KINDS,
        "train.aggregation": AGGREGATIONS,
        "train.kl": DIVERGENCES,
        "train.kl_in": ("loss", "reward"),
        "train.advantage": (*ESTIMATORS, GAE),
        "train.advantage_scale": SCALES,
        "mixed_precision": ("no", "bf16"),
    },
    at_least={
        **RULES.at_least,
        "eval_questions": 0,
        "min_pixels": 0,
        "max_pixels": 0,
        "max_prompt_length": 0,
        "sample.questions_per_epoch": 1,
        "sample.group_size": 1,
        "sample.batch_size": 1,
        "sample.max_new_tokens": 1,
        "sample.refills": 0,
        "train.importance_cap": 0,
        "train.updates_per_epoch": 1,
        "train.num_inner_epochs": 1,
        "train.tokens_per_batch": 1,
        "train.clip_low": 0,
        "train.clip_high": 0,
        "train.dual_clip": 0,
        "train.beta": 0,
        "train.discount": 0,
        "train.gae_decay": 0,
        "train.value_weight": 0,
    },
    at_most={
        **RULES.at_most,
        "sample.vllm_memory": 1,
        "train.clip_low": 1,
        "train.discount": 1,
        "train.gae_decay": 1,
    },
    above_zero=[
        *RULES.above_zero,
        "sample.temperature",
        "sample.vllm_memory",
        "train.value_clip",
    ],
)


def check(config: ConfigDict) -> None:
    check_fields(config, fields)
    check_values(config.to_dict(), OWN)
    sample, train = config.sample, config.train
    check_model_folder(config.pretrained.model, "preprocessor_config.json")
    _check_rewards(config)
    if sample.engine == VLLM:
        _check_vllm(sample.temperature)
    if 0 < train.dual_clip <= 1 + train.clip_high:
        raise UserError(
            f"train.dual_clip={train.dual_clip} must be above 1 + train.clip_high="
            f"{1 + train.clip_high:g}, or 0 for none"
        )
    if train.dual_clip and train.loss == "cispo":
        raise UserError(
            f"train.dual_clip={train.dual_clip} does not go with train.loss='cispo', whose weights "
            "train.clip_high bounds already; leave it at 0"
        )
    if train.beta > 0 and train.kl_in == "reward" and train.advantage in PER_REWARD:
        raise UserError(
            f"train.kl_in='reward' does not go with train.advantage={train.advantage!r}, which "
            f"brings every reward to one scale, whatever train.beta={train.beta} is; use "
            "train.kl_in='loss'"
        )
    if sample.group_size == 1 and train.advantage not in ("reinforce_pp", "remax", GAE):
        raise UserError(
            f"sample.group_size=1 leaves train.advantage={train.advantage!r} nothing to compare; "
            "use groups of 2 or more, or train.advantage='reinforce_pp', 'remax' or 'gae'"
        )
    if sample.refills and (sample.group_size == 1 or train.advantage == GAE):
        raise UserError(
            f"sample.refills={sample.refills} replaces groups whose rewards are all the same; it "
            "does not go with sample.group_size=1 or train.advantage='gae'"
        )
    if 0 < config.max_pixels < config.min_pixels:
        raise UserError(
            f"min_pixels={config.min_pixels} must be at most max_pixels={config.max_pixels}"
        )


def _check_rewards(config: ConfigDict) -> None:
    for name in (*config.reward_fn, *config.eval_reward_fn):
        elsewhere = name in config.custom_rewards or config.reward_servers.get(name)
        if name in REWARDS and name not in ANSWER_REWARDS and not elsewhere:
            raise UserError(
                f"reward {name!r} scores pictures, not answers; those that score answers are "
                f"{', '.join(ANSWER_REWARDS)}, and your own with custom_rewards"
            )


def _check_vllm(temperature: float) -> None:
    if find_spec(VLLM) is None:
        raise UserError(
            "sample.engine='vllm' needs vLLM: pip install -e '.[vllm]', or use "
            "sample.engine='transformers'"
        )
    if not COLDEST <= temperature <= HOTTEST:
        raise UserError(
            f"sample.temperature={temperature} must be from {COLDEST} to {HOTTEST} for "
            "sample.engine='vllm'"
        )
