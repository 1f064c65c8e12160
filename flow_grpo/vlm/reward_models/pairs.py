"""Pack conversations so that a network returns one score for each, at its last token.

The two conversations of a pair begin with the same tokens: the question with its images. They share
one row (vlm/packing.py), in which these tokens are the prompt and the rest of each conversation is
a response:

    row     [ common tokens | rest of the preferred one | rest of the rejected one | padding ]
    scored                                             ^                          ^

So the question and its images are computed once per pair. A response is scored at the token that
precedes its last sampled one; a token that no row contains therefore ends each conversation.
"""

from collections.abc import Sequence
from itertools import takewhile

import torch

from flow_grpo.vlm.packing import Conversation, Response
from flow_grpo.vlm.prompts import EncodedPrompt

UNSEEN_TOKEN = 0  # the last token of a response, which is not part of the row


def as_responses(
    number: int, conversations: Sequence[EncodedPrompt], *, shares_prompt: bool = True
) -> list[Response]:
    """Return conversations as responses that are scored at their last token.

    Args:
        number: Conversations with equal numbers share a row.
        conversations: Conversations about one question, with its images in their common start.
        shares_prompt: Whether the model's family can share a row; see `Family.shares_prompt`.
    """
    if shares_prompt:
        common = _common_length(conversations)
        return [_as_response(number, each, common) for each in conversations]
    count = len(conversations)
    return [
        _as_response(count * number + i, each, len(each)) for i, each in enumerate(conversations)
    ]


def _common_length(conversations: Sequence[EncodedPrompt]) -> int:
    """Return how many tokens all conversations begin with."""
    columns = zip(*(each.ids.tolist() for each in conversations), strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len({*tokens}) == 1, columns))


def _as_response(number: int, whole: EncodedPrompt, common: int) -> Response:
    """Return a conversation as a prompt of `common` tokens and a response."""
    prompt = EncodedPrompt(
        whole.ids[:common],
        whole.positions[:, :common],
        whole.next_position,
        whole.vision_inputs,
        whole.sources,
    )
    unseen = torch.tensor([UNSEEN_TOKEN])
    after = torch.full((len(whole.positions), 1), whole.next_position)
    rest = Conversation(
        ids=torch.cat([whole.ids[common:], unseen]),
        positions=torch.cat([whole.positions[:, common:], after], 1),
        sampled=torch.arange(len(whole) - common + 1) == len(whole) - common,
    )
    return Response(number, prompt, unseen, rest)
