"""A judge that compares two images of a prompt (Pref-GRPO, Wang et al. 2025, arXiv 2508.20751)."""

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from flow_grpo.advantages import win_rates
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.judges import templates
from flow_grpo.rewards.judges.chat import ChatJudge, JudgedScore, to_data_url
from flow_grpo.rewards.judges.templates import JudgeReply, NoScoreError
from flow_grpo.rewards.judges.wordings import ALTERNATIVE, Wording
from flow_grpo.rewards.protocol import MetadataRows, ScorerOutput
from flow_grpo.rewards.workers import map_in_threads
from flow_grpo.rewards.workers.http import RequestRejected, ServersUnavailable


@dataclass(frozen=True)
class Verdict:
    """The judgement of a pair of images."""

    first_wins: float  # 1, 0, or 1/2 for a tie; `Failed` if the judge gave none
    flipped: bool = False  # whether the winner depended on the order


class VlmPairwise(ChatJudge):
    """Win rate of an image against the other images of its prompt in the call; ties are half a win.

    Each pair is shown in both orders, because judges have a position bias; if the verdicts differ
    it is a tie. A pair without a verdict counts for neither image. Further values per image:
    "flipped", the fraction of its judged pairs whose verdicts differed, and "unjudged", the
    fraction of its pairs without a verdict.
    """

    name = "vlm_pairwise"
    url_env = "VLM_PAIRWISE_URL"
    model_env = "VLM_PAIRWISE_MODEL"
    wordings: ClassVar[Mapping[str, Wording]] = {ALTERNATIVE: Wording(templates.PAIRWISE_QUESTION)}
    extras = ("flipped", "unjudged")
    images_per_question = 2
    compares_groups = True

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        """Return whether the first of two images wins: 1, 0, or 1/2 for a tie."""
        return templates.parse_labelled_winner(reply, "Better"), {}

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows | None = None
    ) -> ScorerOutput:
        """Compare all pairs of images with equal prompts and return their win rates, (N,)."""
        deadline = time.monotonic() + self.policy.timeout
        urls = map_in_threads(_encode_image, images, self.concurrency)
        pairs = [
            (i, j)
            for i, j in itertools.combinations(range(len(urls)), 2)
            if prompts[i] == prompts[j]
        ]

        def compare(pair: tuple[int, int]) -> Verdict:
            i, j = pair
            return self._compare(urls[i], urls[j], prompts[i], deadline)

        verdicts = map_in_threads(compare, pairs, self.concurrency)
        return _win_rates(len(urls), dict(zip(pairs, verdicts, strict=True)))

    def _compare(
        self, first: str | Failed, second: str | Failed, prompt: str, deadline: float
    ) -> Verdict:
        """Compare two images (data URLs) in both orders; different verdicts are a tie.

        `first_wins` of the result is `Failed` if an image is, or if the judge gives no verdict.
        """
        for image in (first, second):
            if isinstance(image, Failed):
                return Verdict(image)
        try:
            wins = self._ask_winner([first, second], prompt, deadline)
            loses = self._ask_winner([second, first], prompt, deadline)
        except (NoScoreError, RequestRejected, ServersUnavailable) as error:
            return Verdict(Failed(str(error)))
        flipped = wins != 1 - loses
        return Verdict(0.5 if flipped else wins, flipped)

    def _ask_winner(self, images: list[str], prompt: str, deadline: float) -> float:
        """Return whether the first of two images (data URLs) wins: 1, 0, or 1/2 for a tie."""
        reply = self._query(images, self.build_question(prompt), deadline)
        return self.parse(reply, prompt)[0]


def _win_rates(
    count: int, verdicts: dict[tuple[int, int], Verdict]
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the win rates of `count` images and their extra values, given the verdicts by pair.

    An image without a verdict gets `Failed` with the reason.
    """
    wins, flipped = np.full((2, count, count), np.nan)
    reasons = dict.fromkeys(range(count), "the batch has no other image of its prompt")
    pairs = np.zeros(count)
    for (i, j), verdict in verdicts.items():
        won = verdict.first_wins
        pairs[[i, j]] += 1
        if isinstance(won, Failed):
            reasons[i] = reasons[j] = won.reason
        else:
            wins[i, j], wins[j, i] = won, 1 - won
            flipped[i, j] = flipped[j, i] = verdict.flipped
    scores = [
        Failed(reasons[i]) if math.isnan(rate) else rate
        for i, rate in enumerate(win_rates(wins).tolist())
    ]
    judged = (~np.isnan(wins)).sum(axis=1)
    unjudged = 1 - judged / np.where(pairs > 0, pairs, np.nan)
    return scores, {"flipped": win_rates(flipped).tolist(), "unjudged": unjudged.tolist()}


def _encode_image(image: Image.Image) -> str | Failed:
    """Return an image as a data URL, to be shared by its comparisons; `Failed` if it is damaged."""
    try:
        return to_data_url(image)
    except NoScoreError as error:
        return Failed(str(error))
