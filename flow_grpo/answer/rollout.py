"""The samples of an epoch: which question each answers, who samples it, and what it scored."""

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

from flow_grpo.answer.batches import Answer, Talk
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import EncodedPrompt, PromptEncoder
from flow_grpo.answer.sampling import Sampler
from flow_grpo.data.mixing import set_of, share_out
from flow_grpo.data.passes import PassState, pass_states, take_rows
from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.rewards import TOTAL, PendingScores, WeightedReward

# columns beside the rewards', under names that no reward can have
BASELINE, LENGTH, ENDED, TURNS = (
    f"{TOTAL}/{name}" for name in ("baseline", "length", "ended", "turns")
)

# Prompts by row, the row of each answer, and their generators; without these the greedy answers.
ToAnswer = tuple[dict[int, EncodedPrompt], list[int], list[torch.Generator] | None]


@dataclass(frozen=True)
class Played:
    """An episode in an environment."""

    said: list[str]  # its answers
    heard: list[str]  # texts of observations, between them
    reward: float  # the sum of the environment's
    failure: str  # why it ended without a reward; empty if it did not

    def told(self) -> dict[str, Any]:
        """To rewards."""
        own = {"failure": self.failure} if self.failure else {"reward": self.reward}
        return {"environment": {**own, "answers": self.said}}


@dataclass(frozen=True)
class Sample:
    row: int  # of the data set
    tokens: Tensor  # (T,), of all answers where there are several
    log_probs: Tensor  # (T,), of the policy that sampled
    ended: bool  # False: cut off
    text: str  # of the last answer
    talk: Talk | None = None  # where there may be several answers
    played: Played | None = None

    @property
    def shown(self) -> str:
        """All that was said, for people to read."""
        if self.played is None:
            return self.text
        turns = zip_longest(self.played.said, [f"[{text}]" for text in self.played.heard])
        return "\n".join(text for turn in turns for text in turn if text is not None)


@dataclass
class Rollout:
    """An epoch's samples by index, of which index // group size is the group, on all processes.

    A process holds those that it sampled; scores and lengths are known to all.
    """

    plan: AnswerPlan
    rows: np.ndarray  # (groups,), the question of each
    seed: int = 0
    passes: list[PassState] = field(default_factory=list)  # of each data set, after `rows`
    # for each data set, row numbers of the questions drawn in this epoch, including replaced ones
    drawn: list[set[int]] = field(default_factory=list)
    refilled: int = 0  # questions that others were taken instead of
    # (N,) bool: samples to train; False for groups without advantages, with `sample.refills`
    learns: np.ndarray = field(init=False)
    samples: dict[int, Sample] = field(default_factory=dict)
    prompts: dict[int, EncodedPrompt] = field(default_factory=dict)  # by row
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) each

    def __post_init__(self) -> None:
        self.learns = np.full(self.plan.samples, True)

    @classmethod
    def draw(
        cls,
        plan: AnswerPlan,
        sets: Sequence[tuple[int, Fraction]],
        seed: int,
        epoch: int,
        saved: Sequence[Mapping[str, Any]] = (),
    ) -> "Rollout":
        """Choose the questions of an epoch, without replacement; no answer is sampled yet.

        Args:
            sets: For each data set, its number of questions and its share of an epoch.
            saved: Positions in the passes over the data sets, as in `Progress.questions`.
        """
        passes, _ = pass_states([size for size, _ in sets], saved)
        rollout = cls(plan, np.empty(0, np.int64), seed, passes, [set() for _ in sets])
        counts = share_out(plan.questions, [share for _, share in sets])
        parts = [rollout._take(number, count) for number, count in enumerate(counts)]
        rollout.rows = np.concatenate(parts)
        if len(sets) > 1:  # updates mix the sets
            rng = numpy_rng(seed, Stream.PROMPTS, epoch)
            rollout.rows = rng.permutation(rollout.rows)
        return rollout

    @property
    def sizes(self) -> list[int]:
        return [state.size for state in self.passes]

    def left(self, number: int) -> int:
        """Return how many questions of a data set were not drawn in this epoch."""
        return self.passes[number].size - len(self.drawn[number])

    @property
    def has_drawn_all(self) -> bool:
        return not any(map(self.left, range(len(self.passes))))

    def _take(self, number: int, count: int) -> np.ndarray:
        """Draw the next questions of a data set."""
        state, drawn = self.passes[number], self.drawn[number]
        rows, self.passes[number] = take_rows(state, count, drawn, seed=self.seed, number=number)
        drawn.update(rows)
        return sum(self.sizes[:number]) + np.array(rows, dtype=np.int64)

    @property
    def groups(self) -> np.ndarray:
        return np.arange(self.plan.samples) // self.plan.group_size

    @property
    def rewards(self) -> dict[str, np.ndarray]:
        others = (BASELINE, LENGTH, ENDED, TURNS)
        return {name: column for name, column in self.scores.items() if name not in others}

    def metrics(self) -> dict[str, float]:
        """Lengths of answers, and how many questions dynamic sampling replaced."""
        turns = self.scores.get(TURNS)
        return {
            **({} if turns is None else {"answer/turns": float(turns.mean())}),
            "answer/length": float(self.scores[LENGTH].mean()),
            "answer/length_max": float(self.scores[LENGTH].max()),
            "answer/cut_off": float(1 - self.scores[ENDED].mean()),
            "answer/refilled": float(self.refilled),
        }

    def keep_groups_with(self, advantages: np.ndarray) -> None:
        """Train only groups in which some response has a nonzero advantage."""
        by_group = (advantages != 0).reshape(-1, self.plan.group_size)
        self.learns = np.repeat(by_group.any(1), self.plan.group_size)

    def updates(self) -> np.ndarray:
        """(updates, N) bool: the samples of each update."""
        members = np.zeros((self.plan.updates_per_pass, self.plan.samples), bool)
        for number, own in enumerate(map(self.plan.update, range(len(members)))):
            members[number, own] = self.learns[own]
        return members

    def refill(self) -> np.ndarray:
        """Replace the questions of groups that are not trained with the next ones of the same data
        set, as far as available; return the indices to sample."""
        without = ~self.learns[:: self.plan.group_size]
        data_set, replaced = set_of(self.sizes, self.rows), []
        for number in range(len(self.passes)):
            groups = np.flatnonzero(without & (data_set == number))
            groups = groups[: self.left(number)]
            self.rows[groups] = self._take(number, len(groups))
            replaced += groups.tolist()
        self.prompts = {row: self.prompts[row] for row in self.rows.tolist() if row in self.prompts}
        self.refilled += len(replaced)
        return np.flatnonzero(np.isin(self.groups, replaced))

    def own(self, process: int, wanted: np.ndarray) -> list[int]:
        """Which of the wanted indices a process samples: an equal share of each update."""
        parts = np.arange(self.plan.samples)
        parts = parts.reshape(self.plan.updates_per_pass, self.plan.num_processes, -1)
        shares = parts[:, process].ravel()
        return shares[np.isin(shares, wanted)].tolist()

    def row_of(self, index: int) -> int:
        return int(self.rows[index // self.plan.group_size])

    def answer(self, index: int, *, shares_prompt: bool = True) -> Answer:
        """Sampled answer `index` with its prompt, as training takes it."""
        sample = self.samples[index]
        question = sample.row if shares_prompt else index
        return Answer(question, self.prompts[sample.row], sample.tokens, sample.talk)

    def store(self, scores: dict[str, np.ndarray], index: np.ndarray) -> None:
        """Scores of these samples, of all processes, in the order of the index."""
        for name in {**self.scores, **scores}:
            column = self.scores.setdefault(name, np.full(self.plan.samples, np.nan))
            column[index] = scores.get(name, np.nan)


@dataclass
class Answerer:
    """The network that is trained, and how it is asked. Engines other than transformers' are
    subclasses."""

    policy: AnswerPolicy
    encoder: PromptEncoder
    max_new_tokens: int
    stop: tuple[int, ...]  # end tokens
    cuda_graphs: bool = True
    sampler: Sampler | None = field(default=None, init=False)

    @property
    def exact(self) -> bool:
        """Whether log-probabilities of answers are those that training computes."""
        return self.policy.network.compute_dtype is None

    @property
    def pad(self) -> int:
        pad = self.encoder.tokenizer.pad_token_id
        return self.stop[0] if pad is None else pad

    @contextmanager
    def awake(self) -> Iterator[None]:
        """While it is entered, it answers, with the weights as they are on entering. Call it on all
        processes."""
        with self.policy.gathered():
            self.sampler = Sampler(
                self.policy.whole,
                max_new_tokens=self.max_new_tokens,
                stop=self.stop,
                pad=self.pad,
                cuda_graphs=self.cuda_graphs,
            )
            try:
                yield
            finally:
                self.sampler = None  # and the memory that it takes

    def encode(self, questions: list[Question], rows: list[int]) -> dict[int, EncodedPrompt]:
        return {row: self.encoder.encode(questions[row]) for row in dict.fromkeys(rows)}

    def answer(
        self,
        prompts: dict[int, EncodedPrompt],
        rows: list[int],
        generators: list[torch.Generator] | None = None,
    ) -> list[Sample]:
        """One for each of `rows`; without generators the greedy one."""
        [answers] = self.answers([(prompts, rows, generators)])
        return answers

    def answers(self, batches: Iterable[ToAnswer]) -> Iterator[list[Sample]]:
        """What `answer` gives for each batch, in their order. The next one is asked for, and begun,
        before the last answers of a batch have ended."""
        begun: deque[list[int]] = deque()

        def asked() -> Iterator[tuple]:
            for prompts, rows, generators in batches:
                begun.append(rows)
                places = {row: i for i, row in enumerate(dict.fromkeys(rows))}
                yield [prompts[row] for row in places], [places[row] for row in rows], generators

        for sampled in self.sampler.stream(asked()):
            columns = (begun.popleft(), sampled.tokens, sampled.log_probs, sampled.ended)
            yield [
                Sample(row, tokens, log_probs, ended, self.encoder.decode(tokens.tolist()))
                for row, tokens, log_probs, ended in zip(*columns, strict=True)
            ]


def reward_metadata(question: Question, tokens: int, max_new_tokens: int) -> dict[str, Any]:
    """What rewards are told of an answer beside its text: the truth, and how long it is."""
    lengths = {"answer_tokens": tokens, "max_new_tokens": max_new_tokens}
    return {**question.metadata, "answer": question.answer, **lengths}


@dataclass
class PendingAnswers:
    """Scores of samples, and of a greedy answer to each of their questions, if there is one."""

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
    ) -> "PendingAnswers":
        greedy = greedy or []
        both = [*samples, *greedy]
        told = [reward_metadata(questions[s.row], len(s.tokens), max_new_tokens) for s in both]
        told = [
            own | s.played.told() if s.played else own for own, s in zip(told, both, strict=True)
        ]
        asked = [questions[s.row].text for s in both]
        return cls(samples, greedy, reward.submit([s.text for s in both], asked, told))

    def result(self) -> dict[str, np.ndarray]:
        """Columns (samples,), their lengths and the greedy answers' rewards among them."""
        every, count = self.scores.result(), len(self.samples)
        failed = [bool(s.played and s.played.failure) for s in (*self.samples, *self.greedy)]
        every = {name: np.where(failed, np.nan, column) for name, column in every.items()}
        columns = {name: column[:count] for name, column in every.items()}
        columns[LENGTH] = np.array([float(len(s.tokens)) for s in self.samples])
        columns[ENDED] = np.array([float(s.ended) for s in self.samples])
        if any(s.played for s in self.samples):
            columns[TURNS] = np.array([float(len(s.played.said)) for s in self.samples])
        if self.greedy:
            of_greedy = zip(self.greedy, every[TOTAL][count:], strict=True)
            by_row = {sample.row: value for sample, value in of_greedy}
            columns[BASELINE] = np.array([by_row[s.row] for s in self.samples])
        return columns
