"""The grades of UnifiedReward models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flow_grpo.errors import UserError
from flow_grpo.rewards.judges import forms
from flow_grpo.rewards.judges.chat import ChatJudge, Judged
from flow_grpo.rewards.judges.forms import HIGHEST, Reply, labelled_score

AXES = ("alignment", "coherence", "style")
# the question of each form, and the names of its further values
FORMS = {"final": (forms.FINAL_QUESTION, ("raw",)), "axes": (forms.AXES_QUESTION, AXES)}


@dataclass(kw_only=True, eq=False)
class UnifiedReward(ChatJudge):
    """The two forms in which UnifiedReward models grade; a fifth of the grade is the reward.

    form: "final" for one grade of alignment and quality, with the further value "raw"; "axes"
        for UnifiedReward 2.0 and its three grades, whose mean is the reward, with the further
        values "alignment", "coherence" and "style".
    weights: of the axes in that mean; an axis that is left out weighs 0.
    """

    name = "unifiedreward"
    url_env = "UNIFIED_REWARD_VLLM_URL"
    model_env = "UNIFIED_REWARD_PATH"

    form: str = "final"
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            known = ", ".join(FORMS)
            raise UserError(f"{self._option('form')}={self.form!r} must be one of {known}")
        self.default_question, self.extras = FORMS[self.form]
        self._weights = self._check_weights(self.weights)
        super().__post_init__()

    def parse(self, answer: Reply, prompt: str) -> Judged:
        if self.form == "final":
            grade = labelled_score(answer, "Final Score")
            return grade / HIGHEST, {"raw": grade}
        grades = {axis: labelled_score(answer, f"{axis.capitalize()} Score") for axis in AXES}
        weighted = sum(self._weights.get(axis, 0) * grade for axis, grade in grades.items())
        return weighted / sum(self._weights.values()) / HIGHEST, grades

    def _check_weights(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        if weights is None:
            return dict.fromkeys(AXES, 1.0)
        setting = self._option("weights")
        if not isinstance(weights, Mapping):
            raise UserError(f"{setting}={weights!r} must be a dict of {', '.join(AXES)}")
        if self.form != "axes":
            raise UserError(f"{setting} is of use with form='axes' only; form is {self.form!r}")
        wrong = [w for w in weights.values() if not (isinstance(w, int | float) and w >= 0)]
        if set(weights) - set(AXES) or wrong or not 0 < sum(weights.values()) < math.inf:
            raise UserError(
                f"{setting}={dict(weights)!r} must give {', '.join(AXES)}, or some of them, "
                "weights from 0, at least one above 0"
            )
        return dict(weights)
