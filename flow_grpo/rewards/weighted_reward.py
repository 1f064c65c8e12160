"""Score a batch with several rewards in the background, and return their weighted sum."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flow_grpo.audio import Audio, noise_audio
from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.rewards.frames import DEFAULT_FRAMES, fetch_images
from flow_grpo.rewards.protocol import AUDIO, BatchScores, MetadataRows, Samples, Scorer
from flow_grpo.rewards.workers import SerialThread
from flow_grpo.rewards.workers.guard import GuardedScorer

if TYPE_CHECKING:
    import torch

TOTAL = "avg"  # Flow-GRPO's name for the weighted sum


@dataclass
class PendingScores:
    """Scores that are being computed in the background."""

    parts: "dict[str, Future[BatchScores]]"
    weights: Mapping[str, float]  # of the rewards in the weighted sum

    def result(self) -> dict[str, np.ndarray]:
        """Wait for the scores.

        Returns:
            Arrays (N,), float64, by name: the scores of each reward, NaN where it failed and -inf
            where it does not apply; "avg", the weighted sum of those that apply (rewards of
            weight 0 do not enter it, even if they failed); "<reward>/<name>" for extra values.
        """
        parts = {name: part.result() for name, part in self.parts.items()}
        scores = {name: np.array(part.values, dtype=np.float64) for name, part in parts.items()}
        extras = {
            f"{reward}/{name}": np.array(values, dtype=np.float64)
            for reward, part in parts.items()
            for name, values in part.extras.items()
        }
        applies = {name: ~np.isneginf(scores[name]) for name in self.weights}
        total = sum(w * np.where(applies[n], scores[n], 0.0) for n, w in self.weights.items())
        total = np.where(np.any(list(applies.values()), axis=0), total, np.nan)
        return {**scores, TOTAL: total, **extras}


class WeightedReward:
    """Runs several scorers concurrently and returns the scores of each and their weighted sum.

    It does not raise when a scorer fails: the scores are NaN, and `last_errors` has the reason.
    """

    def __init__(self, scorers: Mapping[str, GuardedScorer], weights: Mapping[str, float]) -> None:
        self._guarded_scorers = {name: scorers[name] for name in weights}
        self.weights = dict(weights)
        self._sum_weights = nonzero_weights(weights) or self.weights
        self._conversion_thread = SerialThread()

    @property
    def scorers(self) -> dict[str, Scorer]:
        """The scorers by name."""
        return {name: guarded.scorer for name, guarded in self._guarded_scorers.items()}

    @property
    def pairwise_rewards(self) -> set[str]:
        """Rewards whose scores are win rates within the group of a prompt."""
        return {name for name, scorer in self.scorers.items() if scorer.compares_groups}

    @property
    def reads_images(self) -> bool:
        """Whether metadata must have the images of questions."""
        return any(scorer.reads_images for scorer in self.scorers.values())

    @property
    def audio_rewards(self) -> set[str]:
        """Rewards that score the sound of a video."""
        return {name for name, scorer in self.scorers.items() if scorer.reads_audio}

    @property
    def interactive_scorers(self) -> dict[str, Scorer]:
        """Scorers that wait for human votes, by name."""
        return {name: scorer for name, scorer in self.scorers.items() if scorer.interactive}

    @property
    def kind(self) -> str:
        """Kind of the last samples: "image" or "answer" (response texts)."""
        return next(iter(self._guarded_scorers.values())).kind

    @property
    def last_errors(self) -> dict[str, str]:
        """Last error of each reward that failed."""
        return {name: g.last_error for name, g in self._guarded_scorers.items() if g.last_error}

    def clear_errors(self) -> None:
        """Forget the errors so far, so that each epoch reports its own only."""
        for guarded in self._guarded_scorers.values():
            guarded.last_error = ""

    def submit(
        self,
        images: "torch.Tensor | Samples",
        prompts: list[str],
        metadata: MetadataRows | None = None,
        audio: Sequence[Audio] | None = None,
    ) -> PendingScores:
        """Start scoring in the background.

        Args:
            images: Images, a tensor (N, 3, H, W) in [0, 1] or PIL images; videos, a tensor
                (N, F, 3, H, W) or lists of PIL images; or response texts.
            prompts: N prompts.
            metadata: N dicts; empty ones by default.
            audio: Sound of the samples, added to the metadata of scorers with `reads_audio`.
        """
        metadata = [{} for _ in prompts] if metadata is None else metadata
        with_audio = metadata
        if audio is not None:
            pairs = zip(metadata, audio, strict=True)
            with_audio = [{**row, AUDIO: sound} for row, sound in pairs]
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata "
                "must have the same length"
            )
        # videos in a tensor are converted per frame rule; lists are passed on unchanged
        videos = not isinstance(images, list) and images.ndim == 5
        rules = {n: s.frames if videos else DEFAULT_FRAMES for n, s in self.scorers.items()}
        samples = {
            rule: self._conversion_thread.submit(fetch_images(images, rule))
            for rule in dict.fromkeys(rules.values())
        }
        parts = {
            name: guarded.submit(
                samples[rules[name]],
                prompts,
                with_audio if guarded.scorer.reads_audio else metadata,
            )
            for name, guarded in self._guarded_scorers.items()
        }
        return PendingScores(parts, self._sum_weights)

    def missing(self, count: int) -> PendingScores:
        """Return scores, all NaN, of `count` samples that another process scores."""
        parts = {name: Future() for name in self._guarded_scorers}
        for part in parts.values():
            part.set_result(BatchScores([math.nan] * count))
        return PendingScores(parts, self._sum_weights)

    def __call__(
        self,
        images: "torch.Tensor | Samples",
        prompts: list[str],
        metadata: MetadataRows | None = None,
        audio: Sequence[Audio] | None = None,
    ) -> dict[str, np.ndarray]:
        """Score a batch: `submit` followed by `PendingScores.result`."""
        return self.submit(images, prompts, metadata, audio).result()

    def check(
        self,
        prompts: Sequence[str],
        metadata: Sequence[dict] | None = None,
        where: Sequence[str] | None = None,
    ) -> None:
        """Check before training that each prompt can be scored and all servers respond.

        Args:
            prompts: All prompts.
            metadata: Their metadata; empty dicts by default.
            where: File and line of each prompt, for messages.

        Raises:
            UserError: For a prompt that no reward can score, or a server that does not respond.
        """
        for scorer in self.scorers.values():
            scorer.check_prompts(prompts)
        for scorer in self.scorers.values():
            scorer.check_servers()
        metadata = [{} for _ in prompts] if metadata is None else metadata
        weighted = {name: self.scorers[name] for name in self._sum_weights}
        for number, (prompt, row) in enumerate(zip(prompts, metadata, strict=True), 1):
            for name, scorer in self.scorers.items():
                if invalid := scorer.invalid_row(prompt, row):
                    raise UserError(
                        f"is invalid for reward {name!r}: {invalid}",
                        field=where[number - 1] if where else f"prompt {number}",
                    )
            reasons = {name: s.skip_reason(prompt, row) for name, s in weighted.items()}
            if all(reasons.values()):
                name, reason = next(iter(reasons.items()))
                raise UserError(
                    f"cannot be scored by {name!r}: {reason}",
                    field=f"prompt {number}",
                    value=prompt,
                )

    def applicable_rows(
        self, prompts: Sequence[str], metadata: Sequence[dict]
    ) -> dict[str, list[int]]:
        """Return for each reward the indices of the prompts it applies to."""
        rows = list(enumerate(zip(prompts, metadata, strict=True)))
        return {
            n: [i for i, row in rows if not s.skip_reason(*row)] for n, s in self.scorers.items()
        }

    def smoke_test(
        self, prompts: Sequence[str], metadata: MetadataRows, width: int, height: int, frames: int
    ) -> None:
        """Call each local scorer with two noise images, or videos if `frames` > 1.

        Errors as in `GuardedScorer.smoke_test`.
        """
        noise = np.random.default_rng(0).integers(256, size=(frames, height, width, 3), dtype="u1")
        video = [Image.fromarray(frame) for frame in noise]
        self.smoke_test_with(video if frames > 1 else video[0], prompts, metadata)

    def smoke_test_with(
        self, sample: Any, prompts: Sequence[str], metadata: Sequence[dict]
    ) -> None:
        """Call each local scorer with two copies of `sample` and the first prompt it applies to.

        Two samples expose a scorer that returns one number per batch. Scorers that retry by
        themselves, such as those of servers, are not called; only the number of frames is checked.
        Errors as in `GuardedScorer.smoke_test`.
        """
        rows = self.applicable_rows(prompts, metadata)
        for name, guarded in self._guarded_scorers.items():
            scorer = guarded.scorer  # servers and people may be slow
            if rows[name]:
                guarded.check_length(sample)
            if rows[name] and not scorer.handles_retries and not scorer.interactive:
                row = rows[name][0]
                columns = metadata[row]
                if scorer.reads_audio:
                    columns = {**columns, AUDIO: noise_audio()}
                guarded.smoke_test([sample] * 2, [prompts[row]] * 2, [columns] * 2)

    def check_differentiable(self, method: str) -> None:
        """Raise `UserError` unless all weighted rewards are differentiable, as `method` needs."""
        for name in self._sum_weights:
            if self.scorers[name].score_pixels is None:
                raise UserError(
                    f"is not differentiable, which {method} requires",
                    field=f"reward {name!r}",
                    hint="use aesthetic, clipscore, hpsv2, pickscore, a custom reward with "
                    "score_pixels, or another algorithm",
                )

    def score_pixels(self, pixels: "torch.Tensor", prompts: list[str]) -> "torch.Tensor":
        """Return the weighted sum (N,), differentiable in the pixels (N, 3, H, W)."""
        scorers, weights = self.scorers, self._sum_weights
        return sum(w * scorers[name].score_pixels(pixels, prompts) for name, w in weights.items())

    def raise_if_failing(self) -> None:
        """Raise `RewardOutage` if the code of a reward has failed on every batch so far.

        Call it before another epoch is sampled. One failed batch is tolerated.
        """
        for name, guarded in self._guarded_scorers.items():
            if guarded.permanent_errors > 1:
                raise RewardOutage(
                    f"fails on every batch: {guarded.last_error}", field=f"reward {name!r}"
                )

    def release_memory(self) -> None:
        """Free the GPU memory of scorers with `offload`, between epochs."""
        for scorer in self.scorers.values():
            scorer.release_memory()

    def stop_waiting_if(self, interrupted: Callable[[], bool]) -> None:
        """Set a function that returns whether to stop waiting for votes; scores are then NaN."""
        for guarded in self._guarded_scorers.values():
            guarded.interrupted = interrupted

    def exclude_interactive(self) -> None:
        """Make scorers of human votes score as if all votes were ties, for dry runs."""
        for guarded in self._guarded_scorers.values():
            guarded.is_dry_run = True

    def silence_errors(self) -> None:
        """Stop logging errors of batches that are still being scored."""
        for guarded in self._guarded_scorers.values():
            guarded.closed = True

    def close_threads(self) -> None:
        """Stop the threads, after all scorers are closed."""
        self._conversion_thread.close()
        for guarded in self._guarded_scorers.values():
            guarded.thread.close()


def nonzero_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards in the weighted sum; those of weight 0 are only logged."""
    return {name: weight for name, weight in weights.items() if weight != 0}


def close_scorers(*rewards: WeightedReward) -> None:
    """Close the scorers of several rewards, each once even if it is shared."""
    for reward in rewards:
        reward.silence_errors()
    for scorer in {id(s): s for r in rewards for s in r.scorers.values()}.values():
        scorer.close()
    for reward in rewards:
        reward.close_threads()
