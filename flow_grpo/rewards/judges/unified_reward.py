"""Grades of UnifiedReward models (Wang et al. 2025, arXiv 2503.05236)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flow_grpo.errors import UserError
from flow_grpo.rewards.judges.chat import ChatJudge, JudgedScore
from flow_grpo.rewards.judges.templates import MAX_GRADE, JudgeReply, parse_labelled_score
from flow_grpo.rewards.judges.wordings import UNIFIED_REWARD_AXES, UNIFIED_REWARD_FINAL
from flow_grpo.rewards.option_checks import check_choice

AXES = ("alignment", "coherence", "style")
# wordings and names of the extra values of each form
FORMS = {"final": (UNIFIED_REWARD_FINAL, ("raw",)), "axes": (UNIFIED_REWARD_AXES, AXES)}


@dataclass(kw_only=True, eq=False)
class UnifiedReward(ChatJudge):
    """The grade of a UnifiedReward model, from 1 to 5, divided by 5.

    Attributes:
        form: "final" for one grade of alignment and quality, logged as "raw"; "axes" for the three
            grades of UnifiedReward 2.0, logged as "alignment", "coherence" and "style", whose
            weighted mean is the reward.
        weights: Weights of the axes in that mean, 0 for those left out; equal by default.
    """

    name = "unifiedreward"
    url_env = "UNIFIED_REWARD_VLLM_URL"
    model_env = "UNIFIED_REWARD_PATH"

    form: str = "final"
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Check `form` and `weights`, and select the wordings of the form."""
        check_choice(self._option_path("form"), self.form, FORMS)
        self.wordings, self.extras = FORMS[self.form]
        self._weights = self._check_weights(self.weights)
        super().__post_init__()

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        """Return the grade divided by 5, or the weighted mean of the axes' grades divided by 5."""
        if self.form == "final":
            grade = parse_labelled_score(reply, "Final Score")
            return grade / MAX_GRADE, {"raw": grade}
        grades = {axis: parse_labelled_score(reply, f"{axis.capitalize()} Score") for axis in AXES}
        weighted = sum(self._weights.get(axis, 0) * grade for axis, grade in grades.items())
        return weighted / sum(self._weights.values()) / MAX_GRADE, grades

    def _check_weights(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        """Return valid weights of axes: 1 for all if `weights` is None, otherwise those given.

        An axis without a weight counts as 0. Raises a UserError for weights without form="axes",
        unknown names, negative weights, and a sum that is 0 or infinite.
        """
        if weights is None:
            return dict.fromkeys(AXES, 1.0)
        field = self._option_path("weights")
        if not isinstance(weights, Mapping):
            raise UserError(f"must be a dict of {', '.join(AXES)}", field=field, value=weights)
        if self.form != "axes":
            raise UserError(
                f"is incompatible with form={self.form!r}",
                field=field,
                value=dict(weights),
                hint="set form='axes'",
            )
        wrong = [w for w in weights.values() if not (isinstance(w, int | float) and w >= 0)]
        if set(weights) - set(AXES) or wrong or not 0 < sum(weights.values()) < math.inf:
            raise UserError(
                f"must map some of {', '.join(AXES)} to weights >= 0, at least one above 0",
                field=field,
                value=dict(weights),
            )
        return dict(weights)
