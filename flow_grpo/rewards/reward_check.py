"""Check that a reward loads and prefers the good sample of three built-in pairs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards.builder import build_scorers
from flow_grpo.rewards.cards import get_card
from flow_grpo.rewards.example_pairs import ExamplePair, example_pairs
from flow_grpo.rewards.failure import Failed, FailurePolicy, NotApplicable
from flow_grpo.rewards.protocol import Scorer, score

POLICY = FailurePolicy(retries=1, timeout=120.0)


@dataclass(frozen=True)
class ScoredPair:
    """Scores of an example pair; `Failed` or `NotApplicable` if there is none."""

    prompt: str
    good: float
    bad: float

    @property
    def is_right(self) -> bool:
        return self.good > self.bad

    @property
    def failure(self) -> str:
        """Return why a sample has no score, or ""."""
        for value in (self.good, self.bad):
            if isinstance(value, Failed):
                return value.reason
            if isinstance(value, NotApplicable):
                return "the reward does not apply to this pair"
        return ""


@dataclass(frozen=True)
class CheckResult:
    """Scored pairs of a reward, and the seconds to load and to score."""

    name: str
    pairs: list[ScoredPair]
    load_seconds: float
    score_seconds: float

    @property
    def is_right(self) -> bool:
        return all(pair.is_right for pair in self.pairs)

    def verdict(self) -> str:
        """Return the verdict in one line."""
        failures = [pair.failure for pair in self.pairs if pair.failure]
        right = sum(pair.is_right for pair in self.pairs)
        if failures:
            return f"{len(failures)} of {len(self.pairs)} pairs have no score: {failures[0]}"
        counted = f"{right} of {len(self.pairs)} pairs ranked as expected"
        if right == len(self.pairs):
            return f"{counted}: the reward works"
        return f"{counted}: check the model and its options"


def check_reward(
    name: str, *, options: Mapping[str, Any], device: str = "cpu", server: str = ""
) -> CheckResult:
    """Load a built-in reward and score its example pairs.

    Args:
        name: Name of the reward.
        options: Its options.
        device: Device of a model.
        server: URL of a reward server that computes it instead.

    Raises:
        UserError: The reward cannot be loaded, or its scores are votes of people.
    """
    card = get_card(name)
    pairs = example_pairs(card.pairs, options)
    if not pairs:
        raise UserError(
            "has no example pairs, because its scores are votes of people",
            field=f"reward {name!r}",
            hint="flow-grpo vote shows its page",
        )
    start = time.perf_counter()
    scorer = None
    try:
        scorer = build_scorers(
            [name],
            device=device,
            options={name: options} if options else {},
            servers={name: server},
            policy=POLICY,
        )[name]
        scorer.check_servers()
        loaded = time.perf_counter()
        scored = score_pairs(scorer, pairs)
        return CheckResult(name, scored, loaded - start, time.perf_counter() - loaded)
    except UserError:
        raise
    except Exception as error:  # of a library, while loading or on the samples of this check
        step = "cannot be loaded" if scorer is None else "fails on the example pairs"
        raise UserError(
            f"{step}: {type(error).__name__}: {first_line(error)}",
            field=f"reward {name!r}",
        ) from error
    finally:
        if scorer is not None:
            scorer.close()


def score_pairs(scorer: Scorer, pairs: list[ExamplePair]) -> list[ScoredPair]:
    """Score the samples of all pairs in one batch."""
    samples = [sample for pair in pairs for sample in (pair.good, pair.bad)]
    prompts = [pair.prompt for pair in pairs for _ in range(2)]
    rows = [row for pair in pairs for row in pair.rows()]
    values = score(scorer, samples, prompts, rows).values
    return [
        ScoredPair(pair.prompt, values[2 * i], values[2 * i + 1]) for i, pair in enumerate(pairs)
    ]
