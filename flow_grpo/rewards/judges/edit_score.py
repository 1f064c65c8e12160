"""EditScore (Luo et al. 2025, arXiv 2509.23909), a generative judge of image edits.

The model reasons and then gives grades from 0 to 25, as JSON, in two requests: [success, freedom
from overediting] for source and edit, [naturalness, freedom from artifacts] for the edit alone. The
score from 0 to 10 is sqrt(min of the first * min of the second) / 2.5
(VectorSpaceLab/EditScore:editscore/__init__.py:129-131).
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.judges.chat import (
    UNPARSED,
    ChatJudge,
    JudgedScore,
    image_part,
    to_data_url,
)
from flow_grpo.rewards.judges.templates import JudgeReply, NoScoreError, excerpt
from flow_grpo.rewards.judges.wordings import EDIT_SCORE, EDIT_SCORE_QUALITY, PUBLISHED
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import images_in_metadata

HIGHEST_GRADE = 25.0
SCALE = HIGHEST_GRADE / 10
BACKBONES = ("qwen25vl", "qwen3vl")

_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]+)?"
_GRADES = re.compile(
    rf"[\"']?score[\"']?\s*[:：]\s*\[\s*({_NUMBER})\s*(?:,\s*({_NUMBER})\s*)?\]",
    re.ASCII | re.IGNORECASE,
)


@dataclass(kw_only=True, eq=False)
class EditScore(ChatJudge):
    """Score from 0 to 10 of an edited image, given its source and the instruction.

    Logs "prompt_following", "consistency" and "perceptual_quality", also from 0 to 10.

    Attributes:
        backbone: "qwen25vl" for EditScore-7B, -32B and -72B, whose messages label the images as
            <img1> and <img2>; "qwen3vl" for EditScore-Qwen3-VL.
        passes: Number of replies per request that are averaged. As by the authors, they are sampled
            with temperature 0.7 and the seeds 42, 43, ...
    """

    name = "editscore"
    url_env = "EDITSCORE_URL"
    model_env = "EDITSCORE_MODEL"
    wordings = {PUBLISHED: EDIT_SCORE}  # noqa: RUF012
    extras = ("prompt_following", "consistency", "perceptual_quality")
    images_per_question = 2
    # editscore/mllm_tools/qwen25vl_vllm.py:117, editscore/__init__.py:28
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 42}  # noqa: RUF012

    backbone: str = "qwen25vl"
    passes: int = 1

    def __post_init__(self) -> None:
        """Check `backbone` and `passes`."""
        check_choice(self._option_path("backbone"), self.backbone, BACKBONES)
        if isinstance(self.passes, bool) or not isinstance(self.passes, int) or self.passes < 1:
            field = self._option_path("passes")
            raise UserError("must be an integer >= 1", field=field, value=self.passes)
        super().__post_init__()

    def skip_reason(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return None if images_in_metadata(metadata) else "it has no source image"

    def judge(
        self, image: Image.Image, prompt: str, row: dict[str, Any], deadline: float
    ) -> JudgedScore:
        """Return the score of one edited image and its grades, averaged over the passes."""
        edited = to_data_url(image)
        sources = [to_data_url(source) for source in images_in_metadata(row)]
        passes = [
            self._judge_once([*sources, edited], prompt, deadline, number)
            for number in range(self.passes)
        ]
        scores, values = zip(*passes, strict=True)
        return sum(scores) / self.passes, {
            name: sum(each[name] for each in values) / self.passes for name in values[0]
        }

    def _judge_once(
        self, images: Sequence[str], prompt: str, deadline: float, number: int
    ) -> JudgedScore:
        """Return the score and the grades of pass `number`."""
        sampling = {"seed": self.sampling["seed"] + number}
        question = self.build_question(prompt)
        compared = self._query(images, question, deadline, sampling)
        following, unread_edit = self._grades(compared)
        alone = self._query(images[-1:], EDIT_SCORE_QUALITY.question, deadline, sampling)
        quality, unread_quality = self._grades(alone)
        return edit_score(following, quality), {
            "prompt_following": following[0] / SCALE,
            "consistency": following[1] / SCALE,
            "perceptual_quality": min(quality) / SCALE,
            UNPARSED: float(unread_edit or unread_quality),
        }

    def _grades(self, reply: JudgeReply) -> tuple[tuple[float, float], bool]:
        """Return the two grades in a reply, and whether they are those for an unreadable one."""
        try:
            return parse_grades(reply), False
        except NoScoreError:
            if self.unparsed != PUBLISHED:
                raise
            return (self._wording.unparsed,) * 2, True

    def _content(self, images: Sequence[str], question: str) -> list[dict[str, Any]]:
        """Return the parts of the user's message, with the labels of `backbone`.

        Labels: VectorSpaceLab/EditScore:editscore/mllm_tools/qwen25vl_vllm.py:35-37.
        """
        if self.backbone == "qwen3vl":
            return super()._content(images, question)
        parts = []
        for number, url in enumerate(images, 1):
            parts += [{"type": "text", "text": f"<img{number}>: "}, image_part(url)]
        return [*parts, {"type": "text", "text": question}]


def edit_score(following: Sequence[float], quality: Sequence[float]) -> float:
    """Return sqrt(min(following) * min(quality)) / 2.5, for grades from 0 to 25."""
    return math.sqrt(min(following) * min(quality)) / SCALE


def parse_grades(reply: JudgeReply) -> tuple[float, float]:
    """Return the two grades in a reply.

    Valid JSON is not required, because models forget to escape quotes in their reasoning. A single
    grade counts for both.

    Raises:
        NoScoreError: There are none, or they are not from 0 to 25.
    """
    grades = _json_grades(reply.text)
    if grades is None and (matches := _GRADES.findall(reply.text)):
        grades = [float(number) for number in matches[-1] if number]
    if grades is None:
        why = "max_tokens truncated the reply" if reply.cut_off else "the reply has no grades"
        raise NoScoreError(f'{why} ("score": [...]): {excerpt(reply.text)}')
    if len(grades) not in (1, 2) or not all(0 <= grade <= HIGHEST_GRADE for grade in grades):
        raise NoScoreError(f"the grades {grades} are not two numbers from 0 to 25")
    return grades[0], grades[-1]


def _json_grades(text: str) -> list[float] | None:
    """Return the numbers under "score" in the JSON object of a reply, or None."""
    start, end = text.find("{"), text.rfind("}")
    try:
        score = json.loads(text[start : end + 1], strict=False)["score"]
        return [float(grade) for grade in (score if isinstance(score, list) else [score])]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
