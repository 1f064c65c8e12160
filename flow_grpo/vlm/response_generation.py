"""Generate and score the responses of an evaluation that its log lacks."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import Stream, torch_generator
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards import PendingScores, WeightedReward
from flow_grpo.training.distributed import raise_on_all_ranks
from flow_grpo.vlm.evaluation_questions import EvaluationSet
from flow_grpo.vlm.multi_turn import EpisodeRunner
from flow_grpo.vlm.response_log import (
    LoggedResponse,
    ResponseKey,
    ResponseLog,
    Responses,
    scores_to_json,
)
from flow_grpo.vlm.rollout import (
    GenerationBatch,
    RolloutEngine,
    Sample,
    image_metadata,
    reward_metadata,
)

MAX_PENDING = 2  # batches that are scored while the next one is generated


@dataclass(frozen=True)
class Sampling:
    """How responses are generated: greedily, or sampled."""

    n: int = 1  # responses per question
    temperature: float | None = None  # None: greedy

    @property
    def is_greedy(self) -> bool:
        return self.temperature is None

    def describe(self) -> str:
        """Return a phrase for the heading of a table."""
        if self.is_greedy:
            return "greedy"
        return f"{self.n} responses at temperature {self.temperature:g}"


@dataclass
class ResponseScorer:
    """Scores responses in the background and logs the scores.

    Attributes:
        reward: Rewards of the evaluation.
        questions: Questions by dataset.
        max_tokens: Maximum length of a response, over all its turns.
        log: Log of this process.
        scored: All scores so far.
    """

    reward: WeightedReward
    questions: dict[str, list[Question]]
    max_tokens: int
    log: ResponseLog
    scored: Responses = field(default_factory=dict)
    pending: deque[tuple[Responses, PendingScores]] = field(default_factory=deque)

    def submit(self, responses: Responses) -> None:
        """Start scoring responses; wait for earlier ones if there are too many."""
        self.reward.raise_if_failing()
        asked = [self.questions[key.dataset][key.row] for key in responses]
        images = image_metadata(self.reward, asked)
        metadata = [
            reward_metadata(question, each.tokens, self.max_tokens)
            | shown
            | ({"environment": each.episode} if each.episode else {})
            for question, each, shown in zip(asked, responses.values(), images, strict=True)
        ]
        texts = [each.answer for each in responses.values()]
        scores = self.reward.submit(texts, [question.text for question in asked], metadata)
        self.pending.append((responses, scores))
        self.collect(MAX_PENDING)

    def collect(self, most: int = 0) -> None:
        """Wait until at most `most` batches are being scored, and log the others."""
        while len(self.pending) > most:
            responses, scores = self.pending.popleft()
            columns = scores.result()
            found = {key: scores_to_json(columns, i) for i, key in enumerate(responses)}
            self.log.add_scores(found)
            self.scored |= {k: replace(responses[k], scores=own) for k, own in found.items()}


def missing_keys(
    candidate: str, sets: Sequence[EvaluationSet], n: int, known: Responses
) -> list[ResponseKey]:
    """Return the responses of a candidate that have to be generated, in order."""
    keys = (
        ResponseKey(candidate, each.name, row, number)
        for each in sets
        for row in range(len(each.questions))
        for number in range(n)
    )
    return [key for key in keys if key not in known or not known[key].is_complete]


def own_part(
    keys: Sequence[ResponseKey], accelerator: Accelerator, size: int
) -> list[list[ResponseKey]]:
    """Return batches of this process: whole questions, whose prompts are prefilled once."""
    questions = list(dict.fromkeys((key.dataset, key.row) for key in keys))
    own = {*questions[accelerator.process_index :: accelerator.num_processes]}
    mine = [key for key in keys if (key.dataset, key.row) in own]
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def generate_responses(
    engine: RolloutEngine,
    runner: EpisodeRunner | None,
    keys: Sequence[ResponseKey],
    sampling: Sampling,
    scorer: ResponseScorer,
    *,
    accelerator: Accelerator,
    batch_size: int,
    seed: int,
) -> None:
    """Generate responses, each with its own random numbers, and submit them to the rewards.

    Call it on all processes; each generates a part of `keys`.

    Args:
        engine: The candidate's engine.
        runner: Runs episodes, if there is an environment.
        keys: The responses to generate, over all processes.
        sampling: Greedy or sampled.
        scorer: Scores and logs the responses of this process.
        accelerator: Rank and world size.
        batch_size: Responses that are generated concurrently.
        seed: The evaluation's seed.
    """
    batches = own_part(keys, accelerator, batch_size)
    # one list of questions over all datasets, so that a batch may mix them
    rows = {key: row for row, key in enumerate(dict.fromkeys(key[:3] for key in keys))}
    questions = [scorer.questions[dataset][row] for _, dataset, row in rows]

    def requests() -> Iterator[GenerationBatch]:
        for batch in batches:
            own = [rows[key[:3]] for key in batch]
            generators = None
            if not sampling.is_greedy:
                generators = [response_generator(seed, key) for key in batch]
            yield engine.encode(questions, own), own, generators

    def generate() -> None:
        with engine.generation_mode():
            if runner is None:
                generated = engine.generate_batches(requests())
            else:
                generated = (runner.run(questions, *request) for request in requests())
            shown = accelerator.is_main_process
            for batch in progress_bar(batches, "evaluate", shown=shown):
                samples = next(generated)
                responses = {
                    key: to_logged(sample) for key, sample in zip(batch, samples, strict=True)
                }
                scorer.log.add_responses(responses)
                scorer.submit(responses)
        scorer.collect()

    raise_on_all_ranks(accelerator, generate)


def response_generator(seed: int, key: ResponseKey) -> torch.Generator:
    """Return the random generator of a response, the same for all candidates."""
    return torch_generator(seed, Stream.EVAL, key.row, key.number)


def to_logged(sample: Sample) -> LoggedResponse:
    """Return a sample in the form in which it is logged, without scores."""
    episode = sample.episode.to_reward_metadata()["environment"] if sample.episode else {}
    transcript = sample.transcript if sample.episode else ""
    return LoggedResponse(sample.text, len(sample.tokens), bool(sample.ended), transcript, episode)


def score_again(
    responses: Responses, scorer: ResponseScorer, *, accelerator: Accelerator, batch_size: int
) -> None:
    """Score logged responses without scores. Call it on all processes; each scores a part."""
    keys = [key for key, each in responses.items() if each.is_complete and not each.is_scored]

    def score() -> None:
        for batch in own_part(sorted(keys), accelerator, batch_size):
            scorer.submit({key: responses[key] for key in batch})
        scorer.collect()

    raise_on_all_ranks(accelerator, score)


def merge_on_all_ranks(own: Responses) -> Responses:
    """Return the responses of all processes."""
    gathered = gather_object([own])
    return {key: each for part in gathered for key, each in part.items()}
