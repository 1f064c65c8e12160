"""A judge of image edits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from PIL import Image

from flow_grpo.rewards.judges import templates
from flow_grpo.rewards.judges.chat import ChatJudge, JudgedScore, to_data_url
from flow_grpo.rewards.judges.templates import JudgeReply, parse_labelled_score
from flow_grpo.rewards.judges.wordings import ALTERNATIVE, Wording
from flow_grpo.rewards.protocol import images_in_metadata


class VieScore(ChatJudge):
    """VIEScore (Ku et al. 2024, arXiv 2312.14867) of an edit, as GEdit-Bench uses it:
    sqrt(min(success, kept) * min(naturalness, cleanness)) / 10.

    Two requests: "success" and "kept" compare the edited image with its sources, "naturalness" and
    "cleanness" grade it by itself. All four grades, from 0 to 10, are logged. `question` replaces
    the wording of the first request.
    """

    name = "viescore"
    url_env = "VIESCORE_URL"
    model_env = "VIESCORE_MODEL"
    wordings: ClassVar[Mapping[str, Wording]] = {ALTERNATIVE: Wording(templates.EDIT_QUESTION)}
    extras = ("success", "kept", "naturalness", "cleanness")
    images_per_question = 2

    def skip_reason(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return None if images_in_metadata(metadata) else "it has no source image"

    def judge(
        self, image: Image.Image, prompt: str, row: dict[str, Any], deadline: float
    ) -> JudgedScore:
        """Return the score of one edited image and its four grades; `row` has its sources."""
        edited = to_data_url(image)
        sources = [to_data_url(source) for source in images_in_metadata(row)]
        compared = self._query([*sources, edited], self.build_question(prompt), deadline)
        grades = self._parse_grades(compared, self.extras[:2])
        perceptual = self._query([edited], templates.PERCEPTUAL_QUESTION, deadline)
        grades |= self._parse_grades(perceptual, self.extras[2:])
        success, kept, naturalness, cleanness = grades.values()
        return math.sqrt(min(success, kept) * min(naturalness, cleanness)) / 10, grades

    def _parse_grades(self, reply: JudgeReply, names: Sequence[str]) -> dict[str, float]:
        return {name: parse_labelled_score(reply, name.capitalize(), 0, 10) for name in names}
