"""Which of two pictures is better."""

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
from PIL import Image

from flow_grpo.advantages import win_shares
from flow_grpo.rewards.calling import map_in_threads
from flow_grpo.rewards.calling.http import Refused, Unavailable
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.judges import forms
from flow_grpo.rewards.judges.chat import ChatJudge, Judged, data_url
from flow_grpo.rewards.judges.forms import Reply, Unscorable
from flow_grpo.rewards.protocol import Returned, Rows


@dataclass(frozen=True)
class Verdict:
    """On two pictures."""

    first_wins: float  # 1, 0, or 1/2 for a tie; `Failed` where there is none
    flipped: bool = False  # the judge changed its mind with their order


class VlmPairwise(ChatJudge):
    """The share of other pictures of its prompt, among those it is called with, that a picture
    beats; a tie is half a win (Pref-GRPO, Wang et al. 2025, arXiv 2508.20751).

    Each pair is shown in both orders, since judges like one place better: where the answers differ
    it is a tie. A pair without a verdict counts for neither. Further values, of a picture's pairs:
    "flipped" is the share of those judged whose answers differed, "unjudged" the share without a
    verdict.
    """

    name = "vlm_pairwise"
    url_env = "VLM_PAIRWISE_URL"
    model_env = "VLM_PAIRWISE_MODEL"
    default_question = forms.BETTER_QUESTION
    extras = ("flipped", "unjudged")
    images_per_question = 2
    compares_groups = True

    def parse(self, answer: Reply, prompt: str) -> Judged:
        return forms.labelled_winner(answer, "Better"), {}

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: Rows | None = None
    ) -> Returned:
        deadline = time.monotonic() + self.policy.timeout
        urls = map_in_threads(_encoded, images, self.concurrency)
        pairs = [
            (i, j)
            for i, j in itertools.combinations(range(len(urls)), 2)
            if prompts[i] == prompts[j]
        ]

        def compare(pair: tuple[int, int]) -> Verdict:
            i, j = pair
            return self._compare(urls[i], urls[j], prompts[i], deadline)

        verdicts = map_in_threads(compare, pairs, self.concurrency)
        return _shares(len(urls), dict(zip(pairs, verdicts, strict=True)))

    def _compare(
        self, first: str | Failed, second: str | Failed, prompt: str, deadline: float
    ) -> Verdict:
        for picture in (first, second):
            if isinstance(picture, Failed):
                return Verdict(picture)
        try:
            wins, _ = self._ask([first, second], prompt, deadline)
            loses, _ = self._ask([second, first], prompt, deadline)
        except (Unscorable, Refused, Unavailable) as error:
            return Verdict(Failed(str(error)))
        flipped = wins != 1 - loses
        return Verdict(0.5 if flipped else wins, flipped)


def _shares(
    count: int, verdicts: dict[tuple[int, int], Verdict]
) -> tuple[list[float], dict[str, list[float]]]:
    wins, flipped = np.full((2, count, count), np.nan)
    reasons = dict.fromkeys(range(count), "no other picture of its prompt came with it")
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
        Failed(reasons[i]) if math.isnan(share) else share
        for i, share in enumerate(win_shares(wins).tolist())
    ]
    judged = (~np.isnan(wins)).sum(axis=1)
    unjudged = 1 - judged / np.where(pairs > 0, pairs, np.nan)
    return scores, {"flipped": win_shares(flipped).tolist(), "unjudged": unjudged.tolist()}


def _encoded(image: Image.Image) -> str | Failed:
    """Once, however many pictures it is compared with."""
    try:
        return data_url(image)
    except Unscorable as error:
        return Failed(str(error))
