"""Questions of judges, as published by their authors and as written for this project.

The texts in `published/` are quotations, byte for byte, with `{prompt}` for the prompt; the test of
this module has their checksums. Do not edit them: another wording gives other scores.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flow_grpo.rewards.judges import templates

PUBLISHED, ALTERNATIVE = "published", "alternative"
FLOW_GRPO, WORD_SCORES = "flow_grpo", "word_scores"


@dataclass(frozen=True)
class Wording:
    """A question, and how it is sent.

    Attributes:
        question: Text that is sent with the images; `{prompt}` stands for the prompt.
        source: Where it was published, as repository:path:line; "" for wordings of this project.
        system: System message, or None for that of the model's chat template.
        side: Side of the square that images are resized to, or None to send them unchanged.
        max_tokens: Default maximum number of tokens of a reply.
        unparsed: Score that the authors' code gives to a reply without one; None if it gives none.
    """

    question: str
    source: str = ""
    system: str | None = None
    side: int | None = None
    max_tokens: int = 512
    unparsed: float | None = None


@cache
def quote(name: str) -> str:
    """Return the text of `published/<name>.txt`."""
    return files(__package__).joinpath("published", f"{name}.txt").read_bytes().decode()


UNIFIED_REWARD = "CodeGoat24/UnifiedReward:inference_qwen"

QWEN_VL_OCR = {
    PUBLISHED: Wording(
        quote("qwenvl_ocr"),
        "leibniz-csi/mm_grpo:gerl/utils/reward_score/vllm.py:106",
        system="You are a helpful assistant.",
    ),
    ALTERNATIVE: Wording(templates.OCR_QUESTION),
}
QWEN_VL = {
    PUBLISHED: Wording(
        quote("qwenvl"), "yifan123/flow_grpo:flow_grpo/qwenvl.py:40", max_tokens=2048, unparsed=0.0
    ),
    ALTERNATIVE: Wording(templates.GRADE_QUESTION),
}
UNIFIED_REWARD_FINAL = {
    PUBLISHED: Wording(
        quote("unifiedreward_final"),
        f"{UNIFIED_REWARD}/image_generation/qwen_point_score_image_generation.py:31",
        unparsed=0.0,  # leibniz-csi/mm_grpo:gerl/utils/reward_score/vllm.py:270
    ),
    FLOW_GRPO: Wording(
        quote("unifiedreward_flow_grpo"),
        "yifan123/flow_grpo:flow_grpo/rewards.py:315",
        side=512,
        unparsed=0.0,
    ),
    ALTERNATIVE: Wording(templates.FINAL_SCORE_QUESTION),
}
UNIFIED_REWARD_AXES = {
    PUBLISHED: Wording(
        quote("unifiedreward_axes"),
        f"{UNIFIED_REWARD}/UnifiedReward-2.0-inference/point_score_ACS_image_generation.py:30",
    ),
    WORD_SCORES: Wording(
        quote("unifiedreward_axes_words"),
        f"{UNIFIED_REWARD}/image_generation/qwen_point_score_ACS_image_generation.py:32",
        max_tokens=4096,
    ),
    ALTERNATIVE: Wording(templates.AXES_QUESTION),
}
UNIFIED_REWARD_PAIR = {
    "final": Wording(
        quote("unifiedreward_pair_final"),
        f"{UNIFIED_REWARD}/image_generation/qwen_pair_rank_image_generation.py:35",
    ),
    "axes": Wording(
        quote("unifiedreward_pair_axes"),
        f"{UNIFIED_REWARD}/UnifiedReward-2.0-inference/pair_score_image_generation.py:34",
    ),
    "think": Wording(
        quote("unifiedreward_pair_think"),
        "CodeGoat24/UnifiedReward:UnifiedReward-Think/inference_qwen/"
        "UnifiedReward-Think-qwen3-inference/qwen3_infer_cot_image_generation.py:21",
        max_tokens=4096,
    ),
    "flex": Wording(
        quote("unifiedreward_pair_flex"),
        "CodeGoat24/UnifiedReward:UnifiedReward-Flex/flex_pair_rank_image_generation.py:21",
        max_tokens=4096,
    ),
}
# Unlike the authors' `evaluate`, which guesses a random grade, `batch_evaluate` gives an unreadable
# reply the middle of the scale: editscore/__init__.py:177.
EDIT_SCORE = Wording(
    quote("editscore_edit"), "VectorSpaceLab/EditScore:editscore/__init__.py:89", unparsed=12.5
)
EDIT_SCORE_QUALITY = Wording(
    quote("editscore_quality"), "VectorSpaceLab/EditScore:editscore/__init__.py:90", unparsed=12.5
)
