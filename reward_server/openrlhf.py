"""OpenRLHF's protocol, `POST /get_reward`, for clients that have it as `--remote_rm_url`.

The request has `query` (prompt and response in the chat template), `prompts` and `labels`; the
response has `rewards`. The protocol and its sources are described in
`flow_grpo/rewards/workers/get_reward.py`, our client.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.protocol import BatchScores
from reward_server.errors import ApiError
from reward_server.schemas import GetRewardRequest, ScoreRequest
from reward_server.service import ServedReward

# starts of a response, as in TideDra/lmm-r1, openrlhf/models/remote_rm/math_verifier.py (line 131)
RESPONSE_STARTS = (
    "<|im_start|>assistant\n",
    "<start_of_turn>model\n",
    "<|assistant|>\n",
    "<\uff5cAssistant\uff5c>",
    "<|end_header_id|>\n\n",
    "Assistant: ",
)
# special tokens at the end of a response
END_TOKENS = re.compile(
    r"(?:\s*(?:<\|[^|<>]*\|>|<\uff5c[^\uff5c<>]*\uff5c>|</s>|<eos>|<end_of_turn>|<pad>))+\s*\Z"
)


def extract_response(query: str, prompt: str) -> str:
    """Return the response in a query: what follows the prompt, or the start of the last answer."""
    response = query
    if prompt and query.startswith(prompt):
        response = query[len(prompt) :]
    for start in RESPONSE_STARTS:  # also if `prompts` has the text without its template
        response = response.rpartition(start)[2]
    return END_TOKENS.sub("", response).strip()


def to_score_request(
    body: GetRewardRequest, reward: str, served: Mapping[str, ServedReward]
) -> ScoreRequest:
    """Return the request to /v1/score; `reward` may be empty if one reward scores responses."""
    names = [name for name, each in served.items() if each.scorer.kind == "answer"]
    if not reward and len(names) != 1:
        raise ApiError(
            "unknown_reward",
            f"{len(names)} rewards of this server score responses; name one with ?reward=NAME",
        )
    labels = body.labels if body.labels is not None else [None] * len(body.query)
    if not len(body.query) == len(body.prompts) == len(labels):
        raise ApiError(
            "counts_differ",
            f"{len(body.query)} queries, {len(body.prompts)} prompts and {len(labels)} labels; "
            "send one per query",
        )
    return ScoreRequest(
        reward=reward or names[0],
        answers=[extract_response(*pair) for pair in zip(body.query, body.prompts, strict=True)],
        prompts=body.prompts,
        metadata=[{} if label is None else {"answer": label} for label in labels],
    )


def response_body(scores: BatchScores) -> dict[str, Any]:
    """Return the rewards; clients make a tensor of them, so none may be missing.

    Raises:
        ApiError: A response has no score.
    """
    for number, value in enumerate(scores.values):
        if not math.isfinite(value):
            reason = value.reason if isinstance(value, Failed) else "it does not apply"
            raise ApiError("scorer_failed", f"no score for query {number}: {reason}")
    extras = {
        name: values for name, values in scores.extras.items() if all(map(math.isfinite, values))
    }
    return {"rewards": scores.values, "scores": scores.values, "extra_logs": extras}
