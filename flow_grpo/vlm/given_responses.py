"""Training on given responses: their tokens, the epoch's samples, and the objective.

The samples of an epoch come from the data instead of a rollout; packing, updates, checkpoints and
evaluation are those of the rollout's samples. A group is one row: a response, or the preferred and
the rejected one of a pair.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.responses import GivenResponse
from flow_grpo.errors import UserError
from flow_grpo.training.distributed import get_context_size
from flow_grpo.training.metrics import Loss
from flow_grpo.vlm.advantages import ResponseTensors, stack_padded
from flow_grpo.vlm.losses.base import UpdateCounts
from flow_grpo.vlm.losses.given import GivenBatch, GivenLoss
from flow_grpo.vlm.packing import PackedBatch, Response
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.questions import QuestionSets
from flow_grpo.vlm.rollout import EOS_REACHED, LENGTH, Rollout, Sample

if TYPE_CHECKING:
    from flow_grpo.vlm.session import VlmSession

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class GivenResponses:
    """The responses of all training rows, and the loss that trains on them."""

    loss: GivenLoss
    tokens: list[tuple[Tensor, ...]]  # (T,) each, by row: one response, or those of a pair
    liked: list[bool]  # by row


def tokenize_responses(
    data: QuestionSets, encoder: PromptEncoder, stop: Sequence[int], limit: int, *, drop: bool
) -> tuple[QuestionSets, list[tuple[Tensor, ...]]]:
    """Return the tokens of all training responses, each of which ends with the stop token.

    Args:
        data: Training rows and test questions.
        encoder: Encodes the responses.
        stop: Ids of the tokens that end a response.
        limit: Maximum number of tokens of a response.
        drop: Whether to drop rows with longer responses, instead of raising a UserError.

    Returns:
        The remaining rows, and their tokens.
    """
    end, tokens, parts = encoder.stop_token(stop), [], []
    for part in data.parts:
        kept = []
        for row in part:
            own = tuple(encoder.encode_response(text, row.where, end) for text in row.responses)
            longest = max(map(len, own))
            if longest > limit and not drop:
                raise UserError(
                    f"has a response of {longest} tokens, more than sample.max_new_tokens={limit}",
                    field=row.where,
                    hint="raise --config.sample.max_new_tokens, or set "
                    "--config.filter_overlong_prompts=True",
                )
            if longest <= limit:
                kept.append(row)
                tokens.append(own)
        parts.append(kept)
    if dropped := len(data.train) - len(tokens):
        logger.info(
            "dropped %d of %d rows with responses of more than %d tokens (sample.max_new_tokens)",
            dropped,
            len(data.train),
            limit,
        )
    return replace(data, parts=parts), tokens


def given_rollout(session: "VlmSession", epoch: int) -> Rollout:
    """Return the given responses of an epoch in the form of sampled ones, without scores."""
    plan, given = session.plan, session.given
    saved = session.progress.questions
    rollout = Rollout.draw(plan, session.sets, session.config.seed, epoch, saved)
    own = rollout.process_indices(session.accelerator.process_index, np.arange(plan.samples))
    rows = [rollout.row_of(index) for index in own]
    rollout.prompts = session.rollout_engine.encode(session.questions, rows)

    def tokens_of(index: int) -> Tensor:
        return given.tokens[rollout.row_of(index)][index % plan.group_size]

    for index, row in zip(own, rows, strict=True):
        response: GivenResponse = session.questions[row]
        tokens, text = tokens_of(index), response.responses[index % plan.group_size]
        # no behaviour policy has sampled it, so its log-probabilities are not used
        rollout.samples[index] = Sample(row, tokens, torch.zeros(len(tokens)), True, text)
    lengths = [float(len(tokens_of(index))) for index in range(plan.samples)]
    rollout.scores = {LENGTH: np.array(lengths), EOS_REACHED: np.ones(plan.samples)}
    return rollout


def estimate_mismatched_kl(
    session: "VlmSession",
    rollout: Rollout,
    members: np.ndarray,
    pack: Callable[[list[Response]], Any],
) -> float:
    """Return KTO's estimate of KL(policy, reference) at the current weights; collective.

    It is the mean log-ratio of each prompt of the update with the response of the sample before
    it; the first prompt gets the last response. Negative means are clamped to 0.

    Args:
        session: State of the run.
        rollout: The samples of the epoch.
        members: Mask of the update's samples, (samples per epoch,).
        pack: Returns the micro-batches of a list of responses.
    """
    indices = np.flatnonzero(members)
    before = dict(zip(indices.tolist(), np.roll(indices, 1).tolist(), strict=True))
    tokens, policy = session.given.tokens, session.policy
    mismatched = [
        replace(
            rollout.response(index, shares_prompt=False),
            tokens=tokens[rollout.row_of(before[index])][0],
        )
        for index in sorted(rollout.samples)
        if members[index]
    ]
    total = torch.zeros((), dtype=torch.float64)
    with policy.gathered_weights():
        for batch in pack(mismatched):
            own = policy.forward_tokens_no_grad(batch, given=True)["log_probs"]
            ratio = own - policy.reference_log_probs(batch, given=True)
            total += ratio.double().sum().cpu()
    total = session.accelerator.reduce(total.to(session.accelerator.device))
    total /= get_context_size(session.accelerator)  # all processes of a group have its samples
    return max(float(total) / len(indices), 0.0)


@dataclass(frozen=True)
class GivenObjective:
    """The objective of given responses, with the interface of `Objective`."""

    given: GivenResponses
    max_new_tokens: int
    importance_weighted: bool = False
    uses_critic: bool = False
    critic_only: bool = False

    def derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that are computed from the means over an epoch."""
        derived = {}
        if "train/nll" in metrics:
            derived["train/perplexity"] = float(np.exp(metrics["train/nll"]))
        chosen, rejected = (f"train/rewards/{name}" for name in ("chosen", "rejected"))
        if chosen in metrics and rejected in metrics:
            derived["train/rewards/margins"] = metrics[chosen] - metrics[rejected]
        return derived

    def has_gradient(self, response: ResponseTensors) -> bool:
        """Return True: every given response contributes to the gradient."""
        return True

    def num_terms(self, counts: UpdateCounts) -> float:
        """Return the number of terms that the loss of an update averages."""
        return self.given.loss.num_terms(counts)

    def loss(
        self,
        batch: PackedBatch,
        scores: Mapping[str, Tensor],
        tensors: Sequence[ResponseTensors],
        counts: UpdateCounts,
    ) -> Loss:
        """Return the terms of a micro-batch; see `Objective.loss`."""
        reference = None
        if tensors[0].reference_log_probs is not None:
            reference = stack_padded(tensors, "reference_log_probs", batch.mask)
        liked = torch.tensor([response.liked for response in tensors], device=batch.mask.device)
        return self.given.loss.terms(
            GivenBatch(
                scores["log_probs"],
                batch.mask,
                counts,
                self.max_new_tokens,
                reference,
                liked,
                scores["is_top1"],
            )
        )
