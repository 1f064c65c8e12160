"""A vision-language model reads or grades a picture."""

from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.judges import forms
from flow_grpo.rewards.judges.chat import SLOT, ChatJudge, Judged
from flow_grpo.rewards.judges.forms import HIGHEST, Reply, Unscorable, labelled_score
from flow_grpo.rewards.scorers.ocr import ocr_score, quoted_text, without_quotes


class QwenVlOcr(ChatJudge):
    """The score of the `ocr` reward, for text that a vision-language model read.

    The question asks for "[no text]" where there is none, which scores 0; an empty answer is a
    failure. What a model says instead of reading, such as that it cannot, cannot be told from a
    text it read, and scores about 0.
    """

    name = "qwenvl_ocr"
    url_env = "QWEN_VL_OCR_VLLM_URL"
    model_env = "QWEN_VL_OCR_PATH"
    default_question = forms.READ_QUESTION
    packages = ("Levenshtein",)

    def check_question(self, question: Any) -> None:
        # A reader that knows what it should find tends to find it.
        if not isinstance(question, str) or not question.strip() or SLOT in question:
            raise UserError(
                f"{self._option('question')}={question!r} must be a text without {SLOT}: the "
                "model is to read what is there, not what was asked for"
            )

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return without_quotes(prompt)

    def build_question(self, prompt: str) -> str:
        return self.question

    def parse(self, answer: Reply, prompt: str) -> Judged:
        if not answer.text.strip():
            raise Unscorable("the answer is empty")
        score = ocr_score(forms.read_text(answer), quoted_text(prompt))
        if answer.cut_off and score < 1:
            raise Unscorable(
                f"max_tokens={self.max_tokens} cut off what it read: {forms.quote(answer.text)}"
            )
        return score, {}


class QwenVl(ChatJudge):
    """Quality and fidelity to the prompt in one grade; the reward is a fifth of it, the further
    value "raw" the grade from 1 to 5 itself."""

    name = "qwenvl"
    url_env = "QWEN_VL_VLLM_URL"
    model_env = "QWEN_VL_PATH"
    default_question = forms.GRADE_QUESTION
    extras = ("raw",)

    def parse(self, answer: Reply, prompt: str) -> Judged:
        grade = labelled_score(answer, "Score")
        return grade / HIGHEST, {"raw": grade}
