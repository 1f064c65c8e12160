"""Judges in which a Qwen-VL model reads the text of an image, or grades it."""

from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.judges import templates
from flow_grpo.rewards.judges.chat import PROMPT_PLACEHOLDER, ChatJudge, JudgedScore
from flow_grpo.rewards.judges.templates import (
    MAX_GRADE,
    JudgeReply,
    NoScoreError,
    parse_labelled_score,
)
from flow_grpo.rewards.scorers.ocr import missing_quotes_reason, ocr_score, quoted_text


class QwenVlOcr(ChatJudge):
    """The score of the `ocr` reward, for the text that a vision-language model read.

    The question asks for "[no text]" if there is none, which scores 0; an empty reply is a failure.
    A refusal cannot be distinguished from text that the model read, and scores about 0.
    """

    name = "qwenvl_ocr"
    url_env = "QWEN_VL_OCR_VLLM_URL"
    model_env = "QWEN_VL_OCR_PATH"
    default_question = templates.OCR_QUESTION
    required_packages = ("Levenshtein",)

    def check_question(self, question: Any) -> None:
        """Reject a question with the prompt: a model that knows the text tends to read it."""
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
        if not reply.text.strip():
            raise NoScoreError("the reply is empty")
        score = ocr_score(templates.parse_ocr_reply(reply), quoted_text(prompt))
        if reply.cut_off and score < 1:
            raise NoScoreError(
                f"max_tokens={self.max_tokens} truncated the text: {templates.excerpt(reply.text)}"
            )
        return score, {}


class QwenVl(ChatJudge):
    """One grade of quality and prompt alignment, divided by 5; "raw" logs it, from 1 to 5."""

    name = "qwenvl"
    url_env = "QWEN_VL_VLLM_URL"
    model_env = "QWEN_VL_PATH"
    default_question = templates.GRADE_QUESTION
    extras = ("raw",)

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        grade = parse_labelled_score(reply, "Score")
        return grade / MAX_GRADE, {"raw": grade}
