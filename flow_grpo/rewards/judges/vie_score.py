"""How good an edit is."""

import math
from collections.abc import Sequence
from typing import Any

from PIL import Image

from flow_grpo.rewards.judges import forms
from flow_grpo.rewards.judges.chat import ChatJudge, Judged, data_url
from flow_grpo.rewards.judges.forms import Reply, labelled_score
from flow_grpo.rewards.protocol import pictures_in


class VieScore(ChatJudge):
    """How good an edit is, by VIEScore's rubric (Ku et al. 2024, arXiv 2312.14867), which
    GEdit-Bench uses too: the root of the lower of "success" and "kept", times the lower of
    "naturalness" and "cleanness".

    Two requests: the first two grades are of the picture beside what it was made from, the other
    two of the picture alone. All four, from 0 to 10, are further values; the reward is a tenth.
    `question` replaces the wording of the first request.
    """

    name = "viescore"
    url_env = "VIESCORE_URL"
    model_env = "VIESCORE_MODEL"
    default_question = forms.EDIT_QUESTION
    extras = ("success", "kept", "naturalness", "cleanness")
    images_per_question = 2

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return None if pictures_in(metadata) else "it has no picture that was edited"

    def judge(
        self, image: Image.Image, prompt: str, row: dict[str, Any], deadline: float
    ) -> Judged:
        edited, sources = data_url(image), [data_url(source) for source in pictures_in(row)]
        compared = self._reply([*sources, edited], self.build_question(prompt), deadline)
        grades = self._grades(compared, self.extras[:2])
        grades |= self._grades(
            self._reply([edited], forms.LOOK_QUESTION, deadline), self.extras[2:]
        )
        success, kept, naturalness, cleanness = grades.values()
        return math.sqrt(min(success, kept) * min(naturalness, cleanness)) / 10, grades

    def _grades(self, answer: Reply, names: Sequence[str]) -> dict[str, float]:
        return {name: labelled_score(answer, name.capitalize(), 0, 10) for name in names}
