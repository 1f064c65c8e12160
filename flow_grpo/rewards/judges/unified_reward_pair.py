"""Pairwise verdicts of UnifiedReward models, in the wordings that they were trained with."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flow_grpo.rewards.judges.chat import JudgedScore
from flow_grpo.rewards.judges.pairwise import VlmPairwise
from flow_grpo.rewards.judges.templates import JudgeReply, NoScoreError, excerpt
from flow_grpo.rewards.judges.unified_reward import AXES
from flow_grpo.rewards.judges.wordings import UNIFIED_REWARD_PAIR, Wording
from flow_grpo.rewards.option_checks import check_choice

_SENTENCE = re.compile(r"\bimage ([12]) is better\b|\bboth images are equally good\b", re.I)
_JSON_WINNER = re.compile(r'"winner"\s*:\s*"(?:image\s*)?([12])"', re.I)
_SHARE = r"(0(?:\.[0-9]+)?|1(?:\.0+)?)(?![0-9.])"
_AXES = {
    axis: re.compile(
        rf"\b{axis} Score:\s*Image 1:\s*{_SHARE}\s*Image 2:\s*{_SHARE}", re.ASCII | re.IGNORECASE
    )
    for axis in AXES
}


@dataclass(kw_only=True, eq=False)
class UnifiedRewardPair(VlmPairwise):
    """Win rate of an image against the others of its prompt, as judged by a UnifiedReward model.

    Attributes:
        form: "final" for UnifiedReward 1, which names the better image or a tie; "axes" for
            UnifiedReward 2.0, which divides 1 between the images on each of three axes (the image
            with the greater sum wins); "think" for UnifiedReward-Think, and "flex" for
            UnifiedReward-Flex, which name the better image.
    """

    name = "unifiedreward_pair"
    url_env = "UNIFIED_REWARD_VLLM_URL"
    model_env = "UNIFIED_REWARD_PATH"
    wordings: ClassVar[Mapping[str, Wording]] = UNIFIED_REWARD_PAIR

    form: str = "axes"

    def __post_init__(self) -> None:
        """Check `form` and select its wording."""
        check_choice(self._option_path("form"), self.form, UNIFIED_REWARD_PAIR)
        self.wordings = {"published": UNIFIED_REWARD_PAIR[self.form]}
        super().__post_init__()

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        """Return whether the first of two images wins: 1, 0, or 1/2 for a tie."""
        return PARSERS[self.form](reply), {}


def parse_sentence(reply: JudgeReply) -> float:
    """Return the verdict of the last "Image 1 is better" or the like in a reply."""
    matches = list(_SENTENCE.finditer(reply.text))
    if not matches or reply.cut_off:
        raise _no_verdict(reply)
    return {"1": 1.0, "2": 0.0}.get(matches[-1][1], 0.5)


def parse_json_winner(reply: JudgeReply) -> float:
    """Return the verdict of the last "winner" in a reply."""
    matches = _JSON_WINNER.findall(reply.text)
    if not matches or reply.cut_off:
        raise _no_verdict(reply)
    return 1.0 if matches[-1] == "1" else 0.0


def parse_axes(reply: JudgeReply) -> float:
    """Return which image has the greater sum over the three axes, or 1/2 if they are equal."""
    lead = 0.0
    for pattern in _AXES.values():
        match = pattern.search(reply.text)
        if match is None:
            raise _no_verdict(reply)
        lead += float(match[1]) - float(match[2])
    if abs(lead) < 1e-9:
        return 0.5
    return 1.0 if lead > 0 else 0.0


def _no_verdict(reply: JudgeReply) -> NoScoreError:
    truncated = "max_tokens truncated it: " if reply.cut_off else ""
    return NoScoreError(f"the reply has no verdict: {truncated}{excerpt(reply.text)}")


PARSERS: dict[str, Callable[[JudgeReply], float]] = {
    "final": parse_sentence,
    "axes": parse_axes,
    "think": parse_sentence,
    "flex": parse_json_winner,
}
