"""A reward scored by `reward_server`, here or on other machines."""

import itertools
import math
import os
import time
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import map_in_threads
from flow_grpo.rewards.calling.http import Refused, ServerGroup, Unavailable, parse_urls
from flow_grpo.rewards.failure import Attempts, Failed, FailurePolicy, NotAsked, describe
from flow_grpo.rewards.frames import (
    CLIP,
    DEFAULT,
    Sample,
    agreed_rule,
    is_clip,
    kind_of,
    png_base64,
)
from flow_grpo.rewards.protocol import (
    MASK,
    SOURCE,
    BatchScores,
    Returned,
    Rows,
    Samples,
    Scorer,
    joined,
    parse_scores,
    pictures_in,
)

COLUMNS = {SOURCE: "sources", MASK: "masks"}  # of a request, for the pictures in metadata
CHUNK = 16  # images or clips per request: enough to batch, few enough to spread over servers
BODY_SHARE = 0.9  # of what a server takes, for the images; the rest is for the texts
CONNECTIONS = 4  # requests under way per server
START_GRACE = 10.0  # seconds for a server that is started together with the run
START_PAUSE = 0.5  # seconds between two looks for it


class RemoteScorer(Scorer):
    """Sends images to the servers that have the reward `name`, and scores them nowhere else.

    A batch is cut into chunks, shared out over the servers; a chunk whose server does not
    answer goes to the next one. Chunks that no server answered in time are `Failed`.
    """

    has_policy = True

    def __init__(
        self,
        name: str,
        servers: str,
        *,
        token: str | None = None,
        policy: FailurePolicy,
        frames: str | None = None,
    ) -> None:
        """`frames` is the rule; by default whole clips where the servers take them."""
        urls = parse_urls(servers, f"reward_servers.{name}")
        self.name = name
        self._timeout = policy.timeout
        self._threads = CONNECTIONS * len(urls)
        self._servers = ServerGroup(
            urls, policy=policy, probe="/healthz", token=token, connections=self._threads
        )
        # over all batches, and from another server on each process
        self._turns = itertools.count(int(os.environ.get("RANK", "0")))
        attempts = Attempts(itertools.repeat(START_PAUSE), time.monotonic() + START_GRACE)
        asked = [self._ask_server(url, attempts) for url in urls]
        rules, limits = zip(*asked, strict=True)
        if len(set(rules)) > 1:
            raise UserError(
                f"reward_servers.{name}: some of {', '.join(urls)} take whole clips and some "
                "pictures; start all with the same --options"
            )
        self.frames = agreed_rule(name, frames, rules[0])
        self._max_images = min(limit["max_images"] for limit in limits)
        self._max_body = min(limit["max_body_bytes"] for limit in limits)

    def __call__(self, images: Samples, prompts: list[str], metadata: Rows) -> Returned:
        deadline = time.monotonic() + self._timeout
        servers = len(self._servers.urls)
        frames = max((len(image) for image in images if is_clip(image)), default=1)
        given = [sum(len(pictures_in(row, name)) for name in COLUMNS) for row in metadata]
        pictures = frames + max(given, default=0)  # of a sample, at most
        most = max(1, min(CHUNK, self._max_images // pictures))
        rounds = math.ceil(len(images) / (most * servers))
        chunk = math.ceil(len(images) / max(1, rounds * servers))  # as many for each server

        def score(request: tuple[slice, int]) -> BatchScores:
            part, turn = request
            encoded = [_encoded(image) for image in images[part]]
            columns = {f"{kind_of(images)}s": encoded, "prompts": prompts[part]}
            columns |= _with_pictures(metadata[part])
            return self._score(columns, turn, deadline)

        parts = [slice(i, i + chunk) for i in range(0, len(images), chunk or 1)]
        requests = [(part, next(self._turns)) for part in parts]
        scores = joined(map_in_threads(score, requests, self._threads))
        return scores.values, scores.extras

    def _score(self, columns: dict[str, list], turn: int, deadline: float) -> BatchScores:
        """`columns` are the samples, first, and what belongs to each."""
        samples = next(iter(columns.values()))
        half = len(samples) // 2
        sent = [*samples, *(each for name in COLUMNS.values() for each in columns.get(name, ()))]
        if half and sum(map(_characters, sent)) > BODY_SHARE * self._max_body:
            halves = (slice(half), slice(half, None))
            parts = [{name: column[part] for name, column in columns.items()} for part in halves]
            return joined([self._score(part, turn, deadline) for part in parts])
        body = {"reward": self.name, **columns}
        try:
            answer = self._servers.post("/v1/score", body, deadline=deadline, start=turn)
            return _parse(answer, len(samples))
        except (Refused, Unavailable) as error:
            reason = str(error)
        except Exception as error:  # an answer of another form; the other chunks are unharmed
            reason = describe(error)
        return BatchScores([Failed(reason)] * len(samples))

    def _ask_server(self, url: str, attempts: Attempts) -> tuple[str, dict[str, int]]:
        """Its rule for frames and its limits; one that is not there or lacks the reward is
        refused, before anything else starts."""
        while True:
            try:
                answer = self._servers.get(url, "/v1/rewards", START_GRACE)
                names = [reward["name"] for reward in answer["rewards"]]
                clips = answer.get("clips", ())  # an older server does not say
                limits = answer["limits"]
                break
            except Refused as error:
                hint = "; REWARD_SERVER_TOKEN is taken for it" if "401" in str(error) else ""
                raise UserError(f"reward_servers.{self.name}: {error}{hint}") from error
            except Exception as error:
                if not attempts.wait():
                    raise UserError(
                        f"reward_servers.{self.name}: no reward server at {url} "
                        f"({describe(error)[:100]}); start one with "
                        f"python -m reward_server --rewards {self.name}"
                    ) from error
        if self.name not in names:
            raise UserError(
                f"reward_servers.{self.name}: {url} does not serve {self.name!r}, it serves "
                f"{', '.join(names)}"
            )
        return CLIP if self.name in clips else DEFAULT, limits


def _encoded(sample: Sample | str) -> str | list[str]:
    """Answers travel as they are."""
    if isinstance(sample, str):
        return sample
    return [png_base64(frame) for frame in sample] if is_clip(sample) else png_base64(sample)


def _with_pictures(metadata: Rows) -> dict[str, list]:
    """Columns of a request. JSON has no pictures: they go in columns of their own, where there are
    any. Samples of a group have one object, which is encoded once."""
    columns = {"metadata": metadata}
    encoded: dict[int, str] = {}
    for name, column in COLUMNS.items():
        found = [pictures_in(row, name) for row in metadata]
        if not any(found):
            continue
        for picture in (picture for own in found for picture in own):
            encoded[id(picture)] = encoded.get(id(picture)) or png_base64(picture)
        texts = [[encoded[id(picture)] for picture in own] or [None] for own in found]
        columns[column] = [own if own[1:] else own[0] for own in texts]
        pairs = zip(columns["metadata"], found, strict=True)
        columns["metadata"] = [
            {key: value for key, value in row.items() if not own or key != name}
            for row, own in pairs
        ]
    return columns


def _characters(encoded: str | list[str] | None) -> int:
    return sum(map(len, encoded)) if is_clip(encoded) else len(encoded or "")


def _parse(answer: dict[str, Any], count: int) -> BatchScores:
    errors = answer.get("errors") or [None] * count
    asked = answer.get("asked") or [True] * count
    scores = [
        score if score is not None else Failed(error or "the server gave no score")
        for score, error in zip(answer["scores"], errors, strict=True)
    ]
    scores = [s if was else NotAsked() for s, was in zip(scores, asked, strict=True)]
    return parse_scores((scores, answer.get("extras") or {}), count)
