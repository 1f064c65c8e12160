"""The rollout of an epoch: its questions, samples and scores, and the engine that samples."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.mixing import allocate_groups, set_indices
from flow_grpo.data.passes import PassState, restore_pass_states, take_rows
from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.images import read_image
from flow_grpo.rewards import TOTAL, PendingScores, WeightedReward
from flow_grpo.rewards.protocol import SOURCE
from flow_grpo.vlm.packing import Conversation, Response
from flow_grpo.vlm.plan import VlmBatchPlan
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt, PromptEncoder
from flow_grpo.vlm.sampling import PromptBatch, Sampler

# columns of `Rollout.scores` that are not rewards; no reward can have these names
BASELINE, LENGTH, EOS_REACHED, TURNS = (
    f"{TOTAL}/{name}" for name in ("baseline", "length", "ended", "turns")
)

# prompts by row, the row of each response, and their generators (None for greedy decoding)
GenerationBatch = tuple[dict[int, EncodedPrompt], list[int], list[torch.Generator] | None]


@dataclass(frozen=True)
class EpisodeRecord:
    """Texts and rewards of an episode in an environment."""

    responses: list[str]
    observations: list[str]  # between the responses
    rewards: list[float]  # one per step, except a failed step
    lengths: list[int]  # number of sampled tokens per response
    failure: str  # why it ended without a reward, or ""

    @property
    def reward(self) -> float:
        """Return the sum over all steps."""
        return sum(self.rewards)

    def token_rewards(self) -> Tensor:
        """Return token rewards (T,): the reward of each step at the last token of its response."""
        rewards = torch.zeros(sum(self.lengths))
        ends = torch.tensor(self.lengths).cumsum(0) - 1
        rewards[ends[: len(self.rewards)]] = torch.tensor(self.rewards)
        return rewards

    def to_reward_metadata(self) -> dict[str, Any]:
        """Return the metadata in which the `environment` reward finds the return of the episode."""
        result = {"failure": self.failure} if self.failure else {"reward": self.reward}
        return {"environment": {**result, "answers": self.responses}}


@dataclass(frozen=True)
class Sample:
    """A sampled response, or all responses of an episode."""

    row: int  # of the data set
    tokens: Tensor  # (T,), sampled tokens of all turns
    log_probs: Tensor  # (T,), of the behaviour policy
    ended: bool  # False if truncated
    text: str  # of the last response
    conversation: Conversation | None = None  # None without an environment
    episode: EpisodeRecord | None = None

    @property
    def transcript(self) -> str:
        """Return all responses, with observations in brackets, as readable text."""
        if self.episode is None:
            return self.text
        turns = zip_longest(
            self.episode.responses, [f"[{text}]" for text in self.episode.observations]
        )
        return "\n".join(text for turn in turns for text in turn if text is not None)


@dataclass
class Rollout:
    """The N samples of an epoch; sample i belongs to group i // group size.

    Each process has the samples that it generated; `scores` are gathered from all processes.
    """

    plan: VlmBatchPlan
    rows: np.ndarray  # (groups,), question of each group
    seed: int = 0
    passes: list[PassState] = field(default_factory=list)  # per data set, after drawing `rows`
    # per data set, row numbers of the questions drawn in this epoch, including replaced ones
    drawn: list[set[int]] = field(default_factory=list)
    refilled: int = 0  # number of replaced questions
    # (N,) bool: samples to train on; False for groups without advantages, with `sample.refills`
    is_trained: np.ndarray = field(init=False)
    samples: dict[int, Sample] = field(default_factory=dict)
    prompts: dict[int, EncodedPrompt] = field(default_factory=dict)  # by row
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) each

    def __post_init__(self) -> None:
        self.is_trained = np.full(self.plan.samples, True)

    @classmethod
    def draw(
        cls,
        plan: VlmBatchPlan,
        sets: Sequence[tuple[int, Fraction]],
        seed: int,
        epoch: int,
        saved: Sequence[Mapping[str, Any]] = (),
    ) -> "Rollout":
        """Draw the questions of an epoch without replacement; nothing is sampled yet.

        Args:
            plan: The batch arithmetic.
            sets: For each data set, its number of questions and its fraction of an epoch.
            seed: The run's seed.
            epoch: Epoch number, counted from 0.
            saved: Positions in the passes over the data sets, as in `Progress.questions`.
        """
        passes, _ = restore_pass_states([size for size, _ in sets], saved)
        rollout = cls(plan, np.empty(0, np.int64), seed, passes, [set() for _ in sets])
        counts = allocate_groups(plan.questions, [share for _, share in sets])
        parts = [rollout._draw_rows(number, count) for number, count in enumerate(counts)]
        rollout.rows = np.concatenate(parts)
        if len(sets) > 1:  # updates mix the sets
            rng = numpy_rng(seed, Stream.PROMPTS, epoch)
            rollout.rows = rng.permutation(rollout.rows)
        return rollout

    @property
    def sizes(self) -> list[int]:
        """Number of questions of each dataset."""
        return [state.size for state in self.passes]

    def num_undrawn(self, number: int) -> int:
        """Return how many questions of a data set were not drawn in this epoch."""
        return self.passes[number].size - len(self.drawn[number])

    @property
    def all_questions_drawn(self) -> bool:
        """Whether this epoch has drawn every question of every dataset."""
        return not any(map(self.num_undrawn, range(len(self.passes))))

    def _draw_rows(self, number: int, count: int) -> np.ndarray:
        """Draw the next `count` questions of data set `number`.

        Returns:
            Their row indices in the concatenation of all data sets, (count,).
        """
        state, drawn = self.passes[number], self.drawn[number]
        rows, self.passes[number] = take_rows(state, count, drawn, seed=self.seed, number=number)
        drawn.update(rows)
        return sum(self.sizes[:number]) + np.array(rows, dtype=np.int64)

    @property
    def groups(self) -> np.ndarray:
        """Group index of each sample of the epoch, (samples,)."""
        return np.arange(self.plan.samples) // self.plan.group_size

    @property
    def rewards(self) -> dict[str, np.ndarray]:
        """Scores (samples,) by reward, without lengths and baselines."""
        not_rewards = (BASELINE, LENGTH, EOS_REACHED, TURNS)
        return {name: column for name, column in self.scores.items() if name not in not_rewards}

    def metrics(self) -> dict[str, float]:
        """Return response lengths, truncation rate and the number of replaced questions."""
        turns = self.scores.get(TURNS)
        return {
            **({} if turns is None else {"answer/turns": float(turns.mean())}),
            "answer/length": float(self.scores[LENGTH].mean()),
            "answer/length_max": float(self.scores[LENGTH].max()),
            "answer/cut_off": float(1 - self.scores[EOS_REACHED].mean()),
            "answer/refilled": float(self.refilled),
        }

    def keep_groups_with_advantage(self, advantages: np.ndarray) -> None:
        """Train only groups in which some response has a nonzero advantage."""
        by_group = (advantages != 0).reshape(-1, self.plan.group_size)
        self.is_trained = np.repeat(by_group.any(1), self.plan.group_size)

    def keep_groups_within(self, reward: str, low: float, high: float) -> None:
        """Train on only the groups whose mean of a reward is between the bounds, both exclusive.

        Samples without a score are ignored; a group without any score is excluded.
        """
        scores = self.scores[reward].reshape(-1, self.plan.group_size)
        counts = np.isfinite(scores).sum(1)
        means = np.where(np.isfinite(scores), scores, 0.0).sum(1) / np.maximum(counts, 1)
        kept = (counts > 0) & (means > low) & (means < high)
        self.is_trained &= np.repeat(kept, self.plan.group_size)

    def mask_truncated(self) -> None:
        """Train on only the responses that ended before the limit."""
        self.is_trained &= self.scores[EOS_REACHED] == 1

    def updates(self) -> np.ndarray:
        """Return the samples of each update, (updates, N) bool."""
        members = np.zeros((self.plan.updates_per_pass, self.plan.samples), bool)
        for number in range(len(members)):
            indices = self.plan.update(number)
            members[number, indices] = self.is_trained[indices]
        return members

    def refill(self) -> np.ndarray:
        """Replace questions without advantages by the next ones of the same data set.

        Returns:
            Indices of the samples to draw again; fewer if a data set has no undrawn questions left.
        """
        without_advantage = ~self.is_trained[:: self.plan.group_size]
        data_set, replaced = set_indices(self.sizes, self.rows), []
        for number in range(len(self.passes)):
            groups = np.flatnonzero(without_advantage & (data_set == number))
            groups = groups[: self.num_undrawn(number)]
            self.rows[groups] = self._draw_rows(number, len(groups))
            replaced += groups.tolist()
        self.prompts = {row: self.prompts[row] for row in self.rows.tolist() if row in self.prompts}
        self.refilled += len(replaced)
        return np.flatnonzero(np.isin(self.groups, replaced))

    def process_indices(self, process: int, wanted: np.ndarray) -> list[int]:
        """Return which of the `wanted` samples a rank generates: an equal part of each update."""
        parts = np.arange(self.plan.samples)
        parts = parts.reshape(self.plan.updates_per_pass, self.plan.num_processes, -1)
        own = parts[:, process].ravel()
        return own[np.isin(own, wanted)].tolist()

    def row_of(self, index: int) -> int:
        """Return the dataset row of sample `index` of the epoch."""
        return int(self.rows[index // self.plan.group_size])

    def response(self, index: int, *, shares_prompt: bool = True) -> Response:
        """Return sample `index` with its prompt, in the form used for training."""
        sample = self.samples[index]
        question = sample.row if shares_prompt else index
        return Response(question, self.prompts[sample.row], sample.tokens, sample.conversation)

    def store_scores(self, scores: dict[str, np.ndarray], index: np.ndarray) -> None:
        """Store score columns of the samples `index`, gathered from all processes."""
        for name in {**self.scores, **scores}:
            column = self.scores.setdefault(name, np.full(self.plan.samples, np.nan))
            column[index] = scores.get(name, np.nan)


@dataclass
class RolloutEngine:
    """Samples responses with the policy's own forward pass; other engines are subclasses.

    Args:
        policy: The policy to sample from.
        encoder: Encodes the prompts and decodes the responses.
        max_new_tokens: Maximum length of a response.
        stop: Ids of the tokens that end a response.
        cuda_graphs: Whether to replay decoding steps as CUDA graphs on a GPU.
    """

    policy: VlmPolicy
    encoder: PromptEncoder
    max_new_tokens: int
    stop: tuple[int, ...]
    cuda_graphs: bool = True
    sampler: Sampler | None = field(default=None, init=False)

    @property
    def exact_log_probs(self) -> bool:
        """Whether sampling yields the same log-probabilities as training."""
        return self.policy.network.compute_dtype is None

    @property
    def pad(self) -> int:
        """Padding token id; the first stop token if the tokenizer has none."""
        pad = self.encoder.tokenizer.pad_token_id
        return self.stop[0] if pad is None else pad

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Context manager in which responses can be generated; collective.

        The weights are those at its entry.
        """
        with self.policy.gathered_weights():
            self.sampler = Sampler(
                self.policy.full_model,
                max_new_tokens=self.max_new_tokens,
                stop=self.stop,
                pad=self.pad,
                cuda_graphs=self.cuda_graphs,
            )
            try:
                yield
            finally:
                self.sampler = None  # frees its memory

    def encode(self, questions: list[Question], rows: list[int]) -> dict[int, EncodedPrompt]:
        return {row: self.encoder.encode(questions[row]) for row in dict.fromkeys(rows)}

    def generate(
        self,
        prompts: dict[int, EncodedPrompt],
        rows: list[int],
        generators: list[torch.Generator] | None = None,
    ) -> list[Sample]:
        """Sample a response for each of `rows`, greedily without generators.

        Args:
            prompts: Prompts by row.
            rows: Row of each response; a row may occur several times.
            generators: Random generator of each response.
        """
        [samples] = self.generate_batches([(prompts, rows, generators)])
        return samples

    def generate_batches(self, batches: Iterable[GenerationBatch]) -> Iterator[list[Sample]]:
        """Yield the result of `generate` for each batch, in order.

        The next batch is requested and started before the last responses of a batch have ended.
        """
        started: deque[list[int]] = deque()

        def requests() -> Iterator[PromptBatch]:
            """Yield each batch with its prompts in a list and rows as indices into that list."""
            for prompts, rows, generators in batches:
                started.append(rows)
                order = {row: i for i, row in enumerate(dict.fromkeys(rows))}
                yield [prompts[row] for row in order], [order[row] for row in rows], generators

        for sampled in self.sampler.sample_stream(requests()):
            columns = (started.popleft(), sampled.tokens, sampled.log_probs, sampled.ended)
            yield [
                Sample(row, tokens, log_probs, ended, self.encoder.decode(tokens.tolist()))
                for row, tokens, log_probs, ended in zip(*columns, strict=True)
            ]


def reward_metadata(question: Question, tokens: int, max_new_tokens: int) -> dict[str, Any]:
    """Return the metadata that rewards receive: columns, reference answer and lengths."""
    lengths = {"answer_tokens": tokens, "max_new_tokens": max_new_tokens}
    return {**question.metadata, "answer": question.answer, **lengths}


def image_metadata(reward: WeightedReward, questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Return the images of each question as metadata, {} if no reward reads them.

    Equal questions share the image objects.
    """
    if not reward.reads_images:
        return [{} for _ in questions]
    found: dict[int, dict[str, Any]] = {}
    rows = []
    for question in questions:
        if id(question) not in found:
            images = [read_image(source, question.where) for source in question.images]
            found[id(question)] = {SOURCE: images} if images else {}
        rows.append(found[id(question)])
    return rows


@dataclass
class PendingResponses:
    """Submitted samples, with optional greedy responses to their questions (the ReMax baseline)."""

    samples: list[Sample]
    greedy: list[Sample]
    scores: PendingScores

    @classmethod
    def submit(
        cls,
        reward: WeightedReward,
        questions: list[Question],
        max_new_tokens: int,
        samples: list[Sample],
        greedy: list[Sample] | None = None,
    ) -> "PendingResponses":
        """Start scoring the samples and greedy responses; `result` waits for the scores."""
        greedy = greedy or []
        both = [*samples, *greedy]
        images = image_metadata(reward, [questions[s.row] for s in both])
        metadata = [
            reward_metadata(questions[s.row], len(s.tokens), max_new_tokens)
            | shown
            | (s.episode.to_reward_metadata() if s.episode else {})
            for s, shown in zip(both, images, strict=True)
        ]
        texts = [questions[s.row].text for s in both]
        return cls(samples, greedy, reward.submit([s.text for s in both], texts, metadata))

    def result(self) -> dict[str, np.ndarray]:
        """Wait for the scores; return columns (samples,) with rewards, lengths and baselines."""
        scores, count = self.scores.result(), len(self.samples)
        failed = [bool(s.episode and s.episode.failure) for s in (*self.samples, *self.greedy)]
        scores = {name: np.where(failed, np.nan, column) for name, column in scores.items()}
        columns = {name: column[:count] for name, column in scores.items()}
        columns[LENGTH] = np.array([float(len(s.tokens)) for s in self.samples])
        columns[EOS_REACHED] = np.array([float(s.ended) for s in self.samples])
        if any(s.episode for s in self.samples):
            columns[TURNS] = np.array([float(len(s.episode.responses)) for s in self.samples])
        if self.greedy:
            baselines = zip(self.greedy, scores[TOTAL][count:], strict=True)
            by_row = {sample.row: value for sample, value in baselines}
            columns[BASELINE] = np.array([by_row[s.row] for s in self.samples])
        return columns
