"""Sample answers: one random number per token of each sample, whatever the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from flow_grpo.vlm.batches import PADDING, left_padded
from flow_grpo.vlm.network import AnswerModel
from flow_grpo.vlm.prompts import Prompt

LOOK = 4  # steps between two looks at which answers have ended, for which a GPU is waited
MOST_ALIVE = 0.8  # share of the rows that go on, for the others to be left out


@dataclass(frozen=True)
class Sampled:
    """Answers on the CPU, each of its own length."""

    tokens: list[Tensor]  # (T,), the end token included where there is one
    log_probs: list[Tensor]  # (T,)
    ended: list[bool]  # False: cut off after `max_new_tokens`


@torch.no_grad()
def sample_answers(
    network: AnswerModel,
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    *,
    generators: Sequence[torch.Generator] | None,
    max_new_tokens: int,
    stop: Sequence[int],
    pad: int,
) -> Sampled:
    """An answer to `prompts[row]` for each of `rows`; without generators the likeliest tokens.

    Each prompt is read once, for all its answers.
    """
    network.eval()  # in training, a model that recomputes activations keeps no cache
    device = next(network.parameters()).device
    inputs, cache = left_padded(prompts, pad).to(device), DynamicCache()
    hidden = network.hidden(inputs, past_key_values=cache, use_cache=True)[:, -1]
    chosen = torch.tensor(rows, device=device)
    cache.batch_select_indices(chosen)
    hidden = hidden[chosen]
    seen = (inputs.segments[chosen] != PADDING)[:, None, None]
    seen = torch.cat([seen, seen.new_ones(*seen.shape[:3], max_new_tokens)], -1)
    first = torch.tensor([prompts[row].following for row in rows], device=device)
    draws = None if generators is None else uniform(generators, max_new_tokens).to(device)
    stops = torch.tensor(stop, device=device)

    width, count = inputs.input_ids.shape[1], len(rows)
    tokens = torch.full((count, max_new_tokens), pad, device=device)
    log_probs = torch.zeros(count, max_new_tokens, dtype=_precise(hidden), device=device)
    alive = torch.arange(count, device=device)  # the rows that are computed
    for i in range(max_new_tokens):
        scores = network.log_probs(hidden)
        token = scores.argmax(-1) if draws is None else choose(scores, draws[alive, i])
        tokens[alive, i] = token
        log_probs[alive, i] = scores.gather(-1, token[:, None])[:, 0]
        if i + 1 == max_new_tokens:
            break
        if i % LOOK == LOOK - 1:
            going = ~torch.isin(tokens[alive, : i + 1], stops).any(1)
            if not going.any():
                break
            if going.sum() <= MOST_ALIVE * len(alive):
                cache.batch_select_indices(going.nonzero()[:, 0])
                alive, token, seen = alive[going], token[going], seen[going]
        hidden = network.forward_model(
            input_ids=token[:, None],
            attention_mask=seen[..., : width + i + 1],
            position_ids=(first[alive] + i).expand(3, -1)[..., None],
            past_key_values=cache,
            use_cache=True,
        )[:, 0]
    return _cut(tokens.cpu(), log_probs.cpu(), stops.cpu())


def uniform(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """(B, count) in [0, 1), a row of each generator."""
    drawn = [torch.rand(count, generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(drawn)


def choose(log_probs: Tensor, draw: Tensor) -> Tensor:
    """The token at which the summed probabilities (B, vocabulary) pass `draw` (B,). In float64, so
    that how a batch rounds does hardly ever decide; what has no probability is never chosen."""
    reached = log_probs.double().exp().cumsum(-1)
    total = reached[:, -1:].contiguous()
    passed = torch.searchsorted(reached, draw[:, None] * total, right=True)
    last = torch.searchsorted(reached, total)  # that has any, should a draw round up to 1
    return torch.minimum(passed, last)[:, 0]


def _precise(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _cut(tokens: Tensor, log_probs: Tensor, stops: Tensor) -> Sampled:
    """Each answer up to its end token."""
    ends = torch.isin(tokens, stops)
    ended = ends.any(1)
    lengths = torch.where(ended, ends.int().argmax(1) + 1, tokens.shape[1]).tolist()
    return Sampled(
        [row[:n].clone() for row, n in zip(tokens, lengths, strict=True)],
        [row[:n].clone() for row, n in zip(log_probs, lengths, strict=True)],
        ended.tolist(),
    )
