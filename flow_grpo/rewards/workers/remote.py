"""A reward that is computed by `reward_server`, on this or on other machines."""

import itertools
import math
import os
import time
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import (
    Failed,
    FailurePolicy,
    NotApplicable,
    RetryTimer,
    describe_error,
)
from flow_grpo.rewards.frames import (
    DEFAULT_FRAMES,
    WHOLE_VIDEO,
    Sample,
    encode_png_base64,
    is_video,
    reconcile_frame_rules,
    sample_kind,
)
from flow_grpo.rewards.protocol import (
    MASK,
    SOURCE,
    BatchScores,
    MetadataRows,
    Samples,
    Scorer,
    ScorerOutput,
    concatenate_scores,
    images_in_metadata,
    parse_scores,
)
from flow_grpo.rewards.workers import map_in_threads
from flow_grpo.rewards.workers.http import (
    RequestRejected,
    ServerGroup,
    ServersUnavailable,
    parse_urls,
)

IMAGE_COLUMNS = {SOURCE: "sources", MASK: "masks"}  # request fields for the images in metadata
SAMPLES_PER_REQUEST = 16  # enough to batch, few enough to spread over servers
BODY_FRACTION = 0.9  # fraction of the largest request body for images; texts need the rest
CONNECTIONS_PER_SERVER = 4  # concurrent requests
STARTUP_TIMEOUT = 10.0  # seconds to wait for a server that is started together with the run
STARTUP_POLL_SECONDS = 0.5


class RemoteScorer(Scorer):
    """Scores samples on the servers that offer the reward `name`.

    A batch is split into chunks that are distributed over the servers; a chunk whose server does
    not respond is sent to the next one. Chunks without a response in time are `Failed`.

    Args:
        name: Name of the reward.
        servers: URLs, separated by commas.
        token: Bearer token.
        policy: Attempts and timeout.
        frames: Frame rule; by default whole videos if the servers take them.
    """

    handles_retries = True

    def __init__(
        self,
        name: str,
        servers: str,
        *,
        token: str | None = None,
        policy: FailurePolicy,
        frames: str | None = None,
    ) -> None:
        urls = parse_urls(servers, f"reward_servers.{name}")
        self.name = name
        self._timeout = policy.timeout
        self._threads = CONNECTIONS_PER_SERVER * len(urls)
        self._servers = ServerGroup(
            urls, policy=policy, probe="/healthz", token=token, connections=self._threads
        )
        # over all batches, starting at a different server on each rank
        self._round_robin = itertools.count(int(os.environ.get("RANK", "0")))
        attempts = RetryTimer(
            itertools.repeat(STARTUP_POLL_SECONDS), time.monotonic() + STARTUP_TIMEOUT
        )
        replies = [self._query_server(url, attempts) for url in urls]
        rules, limits, image_readers, min_frames = zip(*replies, strict=True)
        self.reads_images, self.min_frames = any(image_readers), max(min_frames)
        if len(set(rules)) > 1:
            raise UserError(
                f"is inconsistent: some of {', '.join(urls)} take whole videos and some images",
                field=f"reward_servers.{name}",
                hint="start all servers with the same --options",
            )
        self.frames = reconcile_frame_rules(name, frames, rules[0])
        self._max_images = min(limit["max_images"] for limit in limits)
        self._max_body = min(limit["max_body_bytes"] for limit in limits)

    def __call__(self, images: Samples, prompts: list[str], metadata: MetadataRows) -> ScorerOutput:
        """Score samples in chunks of equal size, sent to all servers concurrently."""
        deadline = time.monotonic() + self._timeout
        servers = len(self._servers.urls)
        frames = max((len(image) for image in images if is_video(image)), default=1)
        metadata_images = [
            sum(len(images_in_metadata(row, name)) for name in IMAGE_COLUMNS) for row in metadata
        ]
        images_per_sample = frames + max(metadata_images, default=0)  # upper bound
        max_chunk = max(1, min(SAMPLES_PER_REQUEST, self._max_images // images_per_sample))
        rounds = math.ceil(len(images) / (max_chunk * servers))
        chunk = math.ceil(len(images) / max(1, rounds * servers))  # equal for all servers

        def score(request: tuple[slice, int]) -> BatchScores:
            """Encode the samples of a slice and score them, first on the given server."""
            part, server = request
            encoded = [_encode_sample(image) for image in images[part]]
            columns = {f"{sample_kind(images)}s": encoded, "prompts": prompts[part]}
            columns |= _metadata_columns(metadata[part])
            return self._score(columns, server, deadline)

        parts = [slice(i, i + chunk) for i in range(0, len(images), chunk or 1)]
        requests = [(part, next(self._round_robin)) for part in parts]
        scores = concatenate_scores(map_in_threads(score, requests, self._threads))
        return scores.values, scores.extras

    def _score(self, columns: dict[str, list], server: int, deadline: float) -> BatchScores:
        """Send one request, or two halves if it is too large; the first column has the samples.

        A failed request yields `Failed` for its samples.
        """
        samples = next(iter(columns.values()))
        half = len(samples) // 2
        images = [*samples]
        for name in IMAGE_COLUMNS.values():
            images += columns.get(name, ())
        if half and sum(map(_encoded_length, images)) > BODY_FRACTION * self._max_body:
            halves = (slice(half), slice(half, None))
            parts = [{name: column[part] for name, column in columns.items()} for part in halves]
            return concatenate_scores([self._score(part, server, deadline) for part in parts])
        body = {"reward": self.name, **columns}
        try:
            response = self._servers.post("/v1/score", body, deadline=deadline, start=server)
            return _parse_response(response, len(samples))
        except (RequestRejected, ServersUnavailable) as error:
            reason = str(error)
        except Exception as error:  # a malformed response must not affect the other chunks
            reason = describe_error(error)
        return BatchScores([Failed(reason)] * len(samples))

    def _query_server(
        self, url: str, attempts: RetryTimer
    ) -> tuple[str, dict[str, int], bool, int]:
        """Return the frame rule, the limits, whether images are read, and the minimum of frames.

        Raises:
            UserError: The server does not respond or does not offer the reward.
        """
        field = f"reward_servers.{self.name}"
        while True:
            try:
                response = self._servers.get(url, "/v1/rewards", STARTUP_TIMEOUT)
                names = [reward["name"] for reward in response["rewards"]]
                video_rewards = response.get("clips", ())  # older servers do not send these
                image_readers = response.get("reads_images", ())
                min_frames = int(response.get("min_frames", {}).get(self.name, 1))
                limits = response["limits"]
                break
            except RequestRejected as error:
                hint = "set REWARD_SERVER_TOKEN to its token" if "401" in str(error) else ""
                raise UserError(f"cannot be used: {error}", field=field, hint=hint) from error
            except Exception as error:
                if not attempts.wait():
                    raise UserError(
                        f"does not respond ({describe_error(error)[:100]})",
                        field=field,
                        value=url,
                        hint=f"start it with python -m reward_server --rewards {self.name}",
                    ) from error
        if self.name not in names:
            raise UserError(
                f"does not serve {self.name!r}, only {', '.join(names)}", field=field, value=url
            )
        rule = WHOLE_VIDEO if self.name in video_rewards else DEFAULT_FRAMES
        return rule, limits, self.name in image_readers, min_frames


def _encode_sample(sample: Sample | str) -> str | list[str]:
    """Encode an image or the frames of a video; response texts are sent unchanged."""
    if isinstance(sample, str):
        return sample
    if is_video(sample):
        return [encode_png_base64(frame) for frame in sample]
    return encode_png_base64(sample)


def _metadata_columns(metadata: MetadataRows) -> dict[str, list]:
    """Return the request fields for metadata.

    JSON cannot represent the images in it, which are moved to the fields of `IMAGE_COLUMNS`. The
    samples of a group share the image object, which is encoded once.
    """
    columns = {"metadata": metadata}
    encoded: dict[int, str] = {}
    for name, column in IMAGE_COLUMNS.items():
        images = [images_in_metadata(row, name) for row in metadata]
        if not any(images):
            continue
        columns[column] = []
        for row_images in images:
            for image in row_images:
                if id(image) not in encoded:
                    encoded[id(image)] = encode_png_base64(image)
            texts = [encoded[id(image)] for image in row_images] or [None]
            columns[column].append(texts if len(texts) > 1 else texts[0])
        columns["metadata"] = [
            {key: value for key, value in row.items() if not row_images or key != name}
            for row, row_images in zip(columns["metadata"], images, strict=True)
        ]
    return columns


def _encoded_length(encoded: str | list[str] | None) -> int:
    return sum(map(len, encoded)) if is_video(encoded) else len(encoded or "")


def _parse_response(response: dict[str, Any], count: int) -> BatchScores:
    """Return the scores of `count` samples in the JSON of a server's response."""
    errors = response.get("errors") or [None] * count
    applies = response.get("asked") or [True] * count
    scores: list[float] = []
    for score, error, is_applicable in zip(response["scores"], errors, applies, strict=True):
        if not is_applicable:
            scores.append(NotApplicable())
        elif score is None:
            scores.append(Failed(error or "the server returned no score"))
        else:
            scores.append(score)
    return parse_scores((scores, response.get("extras") or {}), count)
