"""A reward that is computed by a server with OpenRLHF's protocol, `POST /get_reward`.

A request has three lists of one length: `query` (prompt and response in the chat template),
`prompts` and `labels` (the reference answers). The response has `rewards`, one number per query:

- the clients: OpenRLHF/OpenRLHF, openrlhf/utils/agent.py `_fetch_rewards_via_http` (line 322), and
  TideDra/lmm-r1, openrlhf/utils/remote_rm_utils.py `remote_rm_fn` (line 36);
- the servers: OpenRLHF/OpenRLHF, openrlhf/cli/serve_rm.py (line 126), which adds `scores` and
  `extra_logs` (numbers per query by name), and TideDra/lmm-r1, openrlhf/models/remote_rm/
  math_verifier.py (line 73), which adds further lists such as `format_rewards`.
"""

import itertools
import os
import re
import time
from typing import Any

import requests

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, FailurePolicy, RetryTimer, describe_error
from flow_grpo.rewards.protocol import (
    GET_REWARD,
    RESERVED_EXTRAS,
    BatchScores,
    MetadataRows,
    Samples,
    Scorer,
    ScorerOutput,
    concatenate_scores,
    parse_scores,
)
from flow_grpo.rewards.text.scorers import check_responses
from flow_grpo.rewards.workers import map_in_threads
from flow_grpo.rewards.workers.http import (
    RequestRejected,
    ServerGroup,
    ServersUnavailable,
    parse_urls,
)
from flow_grpo.rewards.workers.remote import (
    CONNECTIONS_PER_SERVER,
    SAMPLES_PER_REQUEST,
    STARTUP_POLL_SECONDS,
    STARTUP_TIMEOUT,
)

# of Qwen and InternVL; servers that score a response find it by the start of the last message
CHATML = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>\n"
PLACEHOLDERS = ("{prompt}", "{response}")


class GetRewardScorer(Scorer):
    """Scores responses on servers with OpenRLHF's protocol.

    Args:
        name: Name of the reward.
        servers: URLs that end in /get_reward, separated by commas.
        token: Bearer token.
        policy: Attempts and timeout.
        template: Text of a query, with the placeholders {prompt} and {response}.
    """

    handles_retries = True
    kind = "answer"

    def __init__(
        self,
        name: str,
        servers: str,
        *,
        token: str | None = None,
        policy: FailurePolicy,
        template: str = CHATML,
    ) -> None:
        self._name, self._template = name, template
        if not isinstance(template, str) or any(each not in template for each in PLACEHOLDERS):
            raise UserError(
                f"must be a string that contains {' and '.join(PLACEHOLDERS)}",
                field=f"reward_options.{name}.template",
                value=template,
            )
        field = f"reward_servers.{name}"
        urls = parse_urls(servers, field)
        if other := [url for url in urls if not url.endswith(GET_REWARD)]:
            raise UserError(
                f"must end in {GET_REWARD}, like the other servers of this reward",
                field=field,
                value=other[0],
            )
        self._timeout = policy.timeout
        self._threads = CONNECTIONS_PER_SERVER * len(urls)
        self._servers = ServerGroup(
            [url.removesuffix(GET_REWARD) for url in urls],
            policy=policy,
            probe=GET_REWARD,
            token=token,
            connections=self._threads,
        )
        # over all batches, starting at a different server on each rank
        self._round_robin = itertools.count(int(os.environ.get("RANK", "0")))
        self._wait_for_servers(field)

    def _wait_for_servers(self, field: str) -> None:
        """Raise a UserError unless all servers respond, if only with an error to GET."""
        attempts = RetryTimer(
            itertools.repeat(STARTUP_POLL_SECONDS), time.monotonic() + STARTUP_TIMEOUT
        )
        for url in self._servers.urls:
            while True:
                try:
                    self._servers.get(url, GET_REWARD, STARTUP_TIMEOUT)
                    break
                except requests.RequestException as error:
                    if not attempts.wait():
                        raise UserError(
                            f"does not respond ({describe_error(error)[:100]})",
                            field=field,
                            value=url + GET_REWARD,
                            hint="start the server first",
                        ) from error
                except Exception:  # 404 or 405: the protocol has no GET
                    break

    def __call__(
        self, responses: Samples, prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Score responses in chunks, sent to all servers concurrently."""
        check_responses(self._name, responses)
        deadline = time.monotonic() + self._timeout
        answers = [row.get("answer") for row in metadata]
        columns = {
            "query": [self._query(p, r) for p, r in zip(prompts, responses, strict=True)],
            "prompts": list(prompts),
            "labels": ["" if answer is None else str(answer) for answer in answers],
        }

        def score(request: tuple[slice, int]) -> BatchScores:
            part, server = request
            body = {name: column[part] for name, column in columns.items()}
            return self._score(body, server, deadline)

        chunk = SAMPLES_PER_REQUEST
        parts = [slice(i, i + chunk) for i in range(0, len(responses), chunk)]
        chunks = [(part, next(self._round_robin)) for part in parts]
        scores = concatenate_scores(map_in_threads(score, chunks, self._threads))
        return scores.values, scores.extras

    def _query(self, prompt: str, response: str) -> str:
        """Fill in the template; braces in the texts are literal."""
        texts = {"{prompt}": prompt, "{response}": response}
        return re.sub(r"\{(prompt|response)\}", lambda match: texts[match[0]], self._template)

    def _score(self, body: dict[str, list], server: int, deadline: float) -> BatchScores:
        """Send one request; a failed one yields `Failed` for its samples."""
        count = len(body["query"])
        try:
            response = self._servers.post(GET_REWARD, body, deadline=deadline, start=server)
            return _parse_response(response, count)
        except (RequestRejected, ServersUnavailable) as error:
            reason = str(error)
        except Exception as error:  # a malformed response must not affect the other chunks
            reason = describe_error(error)
        return BatchScores([Failed(reason)] * count)


def _parse_response(response: dict[str, Any], count: int) -> BatchScores:
    """Return the rewards of `count` queries, and other lists of as many numbers as extras."""
    extras = {**response, **(response.get("extra_logs") or {})}
    kept = {
        name: values
        for name, values in extras.items()
        if name not in ("rewards", "scores", "extra_logs", *RESERVED_EXTRAS)
        if isinstance(values, list) and len(values) == count
        if all(isinstance(value, int | float) for value in values)
    }
    return parse_scores((response["rewards"], kept), count, "response")
