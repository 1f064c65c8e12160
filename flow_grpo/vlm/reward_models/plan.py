"""Batch arithmetic, data and settings of a run that trains a reward model; without torch."""

from dataclasses import dataclass

from flow_grpo.config.paths import resolve_settings_paths
from flow_grpo.config.settings import get_setting
from flow_grpo.config.trackers import parse_trackers
from flow_grpo.data.questions import QuestionLayout
from flow_grpo.data.responses import ResponseLayout
from flow_grpo.errors import UserError, check_model_folder
from flow_grpo.vlm.fields import (
    BRADLEY_TERRY,
    ROLLOUT_SETTINGS,
    VlmConfig,
    VlmSampleConfig,
    VlmTrainConfig,
)
from flow_grpo.vlm.plan import VlmBatchPlan
from flow_grpo.vlm.questions import QuestionSets, build_questions

# Settings of prompts, sampled responses and their rewards: nothing is sampled.
UNUSED_SETTINGS = (
    *ROLLOUT_SETTINGS,
    "system_prompt",
    "reward_fn",
    "eval_reward_fn",
    "sample.engine",
    "train.beta",
    "train.aggregation",
    "compile",
)


@dataclass(frozen=True)
class PairPlan(VlmBatchPlan):
    """Numbers of pairs and updates of an epoch; a sample is a pair."""

    def rows(self) -> dict[str, str]:
        return {
            "pairs per epoch": f"{self.questions}",
            "pairs per update": f"{self.questions // self.updates_per_pass}",
        }


def build_pair_plan(sample: VlmSampleConfig, train: VlmTrainConfig, num_processes: int) -> PairPlan:
    """Return the plan of these settings; `sample.questions_per_epoch` is the number of pairs."""
    return PairPlan(
        num_processes=num_processes,
        questions=sample.questions_per_epoch,
        group_size=1,
        updates_per_pass=train.updates_per_epoch,
        inner_epochs=train.num_inner_epochs,
        max_batch_size=sample.batch_size,
    )


def build_pairs(config: VlmConfig, plan: PairPlan) -> QuestionSets:
    """Load the training and test pairs of all configured datasets."""
    return build_questions(config, plan, pair_layout)


def pair_layout(layout: QuestionLayout) -> ResponseLayout:
    """Return the layout of pairs whose prompts have the layout of questions."""
    return ResponseLayout(
        text=layout.text,
        answer="",
        image=layout.image,
        video=layout.video,
        image_dir=layout.image_dir,
        image_cache=layout.image_cache,
        metadata=layout.metadata,
        kind="pairs",
    )


def check_reward_model_config(settings: VlmConfig) -> VlmConfig:
    """Reject settings without effect; return the settings with bundled paths resolved."""
    default = type(settings)()
    for name in UNUSED_SETTINGS:
        value, unset = get_setting(settings, name), get_setting(default, name)
        if value != unset and value != 0:  # 0 is the value of an unset train.beta
            raise UserError(
                f"has no effect with train.loss={BRADLEY_TERRY!r}, which samples no responses",
                field=name,
                value=value,
                hint=f"reset it to {unset!r}",
            )
    if settings.train.sequence_parallel > 1:
        raise UserError(
            f"is not supported with train.loss={BRADLEY_TERRY!r}",
            field="train.sequence_parallel",
            value=settings.train.sequence_parallel,
            hint="reset it to 1",
        )
    parse_trackers(settings.log_with)
    check_model_folder(settings.pretrained.model, "preprocessor_config.json")
    return resolve_settings_paths(settings)
