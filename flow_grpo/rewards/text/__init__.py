"""Rewards for responses of language models: `reward(responses, questions, metadata)`.

They have the interface of image rewards, with texts instead of images. A row's metadata has the
ground truth as "answer". A response that is merely wrong or unreadable scores 0; one that cannot be
checked, for example because the ground truth is unreadable, is `Failed` with a reason.
"""

from flow_grpo.rewards.text.equality import compare_without_algebra
from flow_grpo.rewards.text.math_answer import MAX_FINAL_ANSWER_CHARS, MathAnswer
from flow_grpo.rewards.text.response_format import extract_final_answer, has_answer_format
from flow_grpo.rewards.text.scorers import (
    MAX_RESPONSE_CHARS,
    AnswerFormat,
    Choice,
    EnvironmentReward,
    Overlong,
    ResponseScorer,
)

__all__ = [
    "MAX_FINAL_ANSWER_CHARS",
    "MAX_RESPONSE_CHARS",
    "AnswerFormat",
    "Choice",
    "EnvironmentReward",
    "MathAnswer",
    "Overlong",
    "ResponseScorer",
    "compare_without_algebra",
    "extract_final_answer",
    "has_answer_format",
]
