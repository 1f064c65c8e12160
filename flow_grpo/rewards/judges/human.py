"""Human votes on pairs of images as an online reward; docs/votes.md describes the page.

The images of a prompt are posted to a vote server as one group, whose key is a hash of the run's
name, the pixels, the prompt and the options. When a killed run is resumed, it samples the
same images, posts the same keys, and therefore finds the votes on them.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from flow_grpo.advantages import win_rates
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, describe_error
from flow_grpo.rewards.frames import encode_png_base64
from flow_grpo.rewards.protocol import (
    SOURCE,
    MetadataRows,
    Scorer,
    ScorerOutput,
    images_in_metadata,
)
from flow_grpo.rewards.workers import map_in_threads
from flow_grpo.rewards.workers.http import RequestRejected, parse_urls, read_token
from flow_grpo.rewards.workers.vote_client import PairVotes, VoteClient

URL_ENV, TOKEN_ENV = "HUMAN_URL", "REWARD_SERVER_TOKEN"
SERVER_FIELD = "reward_servers.human"
MAX_RUN_NAME = 40  # characters, a limit of the server
MAX_TIMEOUT = 10**7  # seconds


@dataclass(frozen=True)
class Group:
    """Images of one prompt: indices into the batch, and the source images of an edit."""

    rows: list[int]
    prompt: str
    sources: list[Image.Image]


class HumanVotes(Scorer):
    """Win rate of an image against other images of its prompt, by human votes.

    With several votes on a pair, an image wins the fraction of votes that it received; a tie is
    half a win. An image without a vote at the timeout is `Failed`. The additional value "unjudged"
    is the fraction of an image's pairs without a vote.

    Args:
        url: Address of the vote server; default: HUMAN_URL of the environment.
        timeout: Seconds to wait for the votes on a batch, including outages of the server.
        votes_per_pair: Votes per pair, each from a different voter; a skip counts as a vote.
        pairs_per_image: Comparisons of each image with others of its prompt.
        run: Name of the run.
    """

    compares_groups = True
    handles_retries = True
    interactive = True

    def __init__(
        self,
        url: str | None = None,
        timeout: float = 3600.0,
        votes_per_pair: int = 1,
        pairs_per_image: int = 4,
        run: str = "",
    ) -> None:
        _check_number("timeout", timeout, float, above=0, most=MAX_TIMEOUT)
        _check_number("votes_per_pair", votes_per_pair, int, above=0, most=100)
        # a group is connected from two pairs per image on
        _check_number("pairs_per_image", pairs_per_image, int, above=1, most=1024)
        self.timeout = float(timeout)
        self._votes_per_pair, self._pairs_per_image = votes_per_pair, pairs_per_image
        self._run = run or "run"
        self._client = VoteClient(_resolve_url(url), read_token(TOKEN_ENV), SERVER_FIELD)

    def check_servers(self) -> None:
        self._client.check()

    def close(self) -> None:
        """Withdraw the groups whose votes are incomplete."""
        self._client.close()

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Post the groups of a batch, wait for their votes and return the win rates, (N,)."""
        if any(not isinstance(image, Image.Image) for image in images):
            raise UserError("compares images only", field="reward 'human'")
        deadline = time.monotonic() + self.timeout
        groups = _split_into_groups(prompts, metadata)
        several = [group for group in groups if len(group.rows) > 1]
        scores: list[float] = [Failed("the batch has no other image of its prompt")] * len(images)
        unjudged = [math.nan] * len(images)
        results = map_in_threads(
            lambda group: self._score_group(group, images, deadline), several, len(several)
        )
        for group, (rates, missing) in zip(several, results, strict=True):
            for row, rate, fraction in zip(group.rows, rates, missing, strict=True):
                scores[row], unjudged[row] = rate, fraction
        return scores, {"unjudged": unjudged}

    def _score_group(
        self, group: Group, images: Sequence[Image.Image], deadline: float
    ) -> tuple[list[float], list[float]]:
        """Return the win rate of each image of a group, and the fraction of its unjudged pairs."""
        own = [images[row] for row in group.rows]
        sources = [encode_png_base64(image) for image in group.sources]
        body = {
            "run": self._run[:MAX_RUN_NAME],
            "key": self._key(group, own),
            "prompts": [group.prompt] * len(own),
            "images": [encode_png_base64(image) for image in own],
            "votes_per_pair": self._votes_per_pair,
            "pairs_per_image": self._pairs_per_image,
        }
        if sources:
            body["sources"] = [sources] * len(own)
        try:
            votes = self._client.collect(body, self._votes_per_pair, deadline)
        except (RequestRejected, ValueError) as error:
            return [Failed(describe_error(error))] * len(own), [1.0] * len(own)
        return _win_rates(len(own), votes, f"nobody voted within {self.timeout:g} s")

    def _key(self, group: Group, images: Sequence[Image.Image]) -> str:
        """Return the key of a group: equal for equal images of the same run, on any machine."""
        pixels = [[_digest(image) for image in each] for each in (images, group.sources)]
        options = [self._votes_per_pair, self._pairs_per_image]
        content = json.dumps([self._run, group.prompt, options, pixels])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def _split_into_groups(prompts: Sequence[str], metadata: MetadataRows) -> list[Group]:
    """Group the rows of a batch by their prompt and source images."""
    groups: dict[tuple, Group] = {}
    for row, (prompt, own) in enumerate(zip(prompts, metadata, strict=True)):
        sources = images_in_metadata(own, SOURCE)
        key = (prompt, *map(_digest, sources))
        groups.setdefault(key, Group([], prompt, sources)).rows.append(row)
    return list(groups.values())


def _win_rates(
    count: int, votes: Sequence[PairVotes], reason: str
) -> tuple[list[float], list[float]]:
    """Return the win rate of each of `count` images, and the fraction of its pairs without a vote.

    An image without any vote is `Failed` with the reason.
    """
    wins = np.full((count, count), np.nan)
    pairs = np.zeros(count)
    for pair in votes:
        i, j = pair.first, pair.second
        pairs[[i, j]] += 1
        if pair.count:
            wins[i, j] = (pair.first_wins + pair.ties / 2) / pair.count
            wins[j, i] = (pair.second_wins + pair.ties / 2) / pair.count
    rates = [Failed(reason) if math.isnan(rate) else rate for rate in win_rates(wins).tolist()]
    judged = (~np.isnan(wins)).sum(axis=1)
    return rates, (1 - judged / np.maximum(pairs, 1)).tolist()


def _digest(image: Image.Image) -> str:
    """Return a hash of an image's pixels."""
    rgb = image.convert("RGB")
    return hashlib.sha256(f"{rgb.width} {rgb.height} ".encode() + rgb.tobytes()).hexdigest()


def _check_number(option: str, value: object, kind: type, *, above: int, most: int) -> None:
    """Raise `UserError` unless an option is a number in its range."""
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not above < value <= most:
        what = "an integer" if kind is int else "a number"
        raise UserError(
            f"must be {what} above {above} and at most {most}",
            field=f"reward_options.human.{option}",
            value=value,
        )


def _resolve_url(url: object) -> str:
    """Return the address of the one vote server.

    Raises:
        UserError: If it is missing, or no URL.
    """
    field = SERVER_FIELD
    if url is None:
        url, field = os.environ.get(URL_ENV, ""), URL_ENV
    if not isinstance(url, str):
        raise UserError("must be a string", field=field, value=url)
    if not url:
        raise UserError(
            "is missing",
            field=SERVER_FIELD,
            hint=f"set it or {URL_ENV} to the address that flow-grpo vote --out DIR prints",
        )
    urls = parse_urls(url, field)
    if len(urls) > 1:
        raise UserError("must name one server, which stores the votes", field=field, value=url)
    return urls[0]
