"""Judges in which a Qwen-VL model reads the text of an image, or grades it."""

import re
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.judges import templates
from flow_grpo.rewards.judges.chat import PROMPT_PLACEHOLDER, ChatJudge, JudgedScore
from flow_grpo.rewards.judges.templates import (
    MAX_GRADE,
    MIN_GRADE,
    JudgeReply,
    NoScoreError,
    parse_labelled_score,
)
from flow_grpo.rewards.judges.wordings import ALTERNATIVE, PUBLISHED, QWEN_VL, QWEN_VL_OCR
from flow_grpo.rewards.scorers.ocr import missing_quotes_reason, ocr_score, quoted_text


class QwenVlOcr(ChatJudge):
    """The score of the `ocr` reward, for the text that a vision-language model read.

    The published question asks for the text alone, so an empty reply means that there is none, and
    scores 0. The alternative asks for "[no text]" in that case; an empty reply is then a failure.
    A refusal cannot be distinguished from text that the model read, and scores about 0.
    """

    name = "qwenvl_ocr"
    url_env = "QWEN_VL_OCR_VLLM_URL"
    model_env = "QWEN_VL_OCR_PATH"
    wordings = QWEN_VL_OCR
    required_packages = ("Levenshtein",)

    def check_question(self, question: Any) -> None:
        """Reject a question with the prompt."""
        # A model that knows the expected text tends to read it.
        if not isinstance(question, str) or not question.strip() or PROMPT_PLACEHOLDER in question:
            raise UserError(
                f"must be a string without {PROMPT_PLACEHOLDER}, which reveals the expected text",
                field=self._option_path("question"),
                value=question,
            )

    def skip_reason(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return missing_quotes_reason(prompt)

    def build_question(self, prompt: str) -> str:
        return self.question

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        """Return the OCR score of the text in a reply, which may be truncated only if it is 1."""
        text = reply.text
        if self.wording == ALTERNATIVE:
            if not text.strip():
                raise NoScoreError("the reply is empty")
            text = templates.parse_ocr_reply(reply)
        score = ocr_score(text, quoted_text(prompt))
        if reply.cut_off and score < 1:
            raise NoScoreError(
                f"max_tokens={self.max_tokens} truncated the text: {templates.excerpt(reply.text)}"
            )
        return score, {}


class QwenVl(ChatJudge):
    """One grade from 1 to 5, divided by 5; "raw" logs it.

    The published question asks for the aesthetic quality and does not name the prompt; the
    alternative asks for quality and prompt alignment.
    """

    name = "qwenvl"
    url_env = "QWEN_VL_VLLM_URL"
    model_env = "QWEN_VL_PATH"
    wordings = QWEN_VL
    extras = ("raw",)

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        """Return the grade in <Score> tags divided by 5.

        A grade after "Score:" counts as well, unless `unparsed` asks for the published scores.
        """
        tagged = _TAGGED_GRADE.search(reply.text)
        if tagged and MIN_GRADE <= float(tagged[1]) <= MAX_GRADE:
            grade = float(tagged[1])
        elif self.unparsed == PUBLISHED:
            raise NoScoreError(f"the reply has no <Score>: {templates.excerpt(reply.text)}")
        else:
            grade = parse_labelled_score(reply, "Score")
        return grade / MAX_GRADE, {"raw": grade}


_TAGGED_GRADE = re.compile(r"<Score>(\d+)</Score>", re.ASCII)
