"""Given images to train on: preference pairs, rated images and demonstrations.

A row becomes one sample, or two for a pair, each with final latents and a credit. These samples go
through the same updates as those of a rollout. Each pass over the dataset uses a new permutation of
its rows. An update takes the next rows and divides them equally among the processes. Noise and
noise levels are keyed by the position of the sample in the epoch. Therefore, the world size, the
batch size and resuming do not change what is trained.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from accelerate import Accelerator

from flow_grpo.data.preference_checks import check_preferences
from flow_grpo.data.preference_rows import PreferenceLayout
from flow_grpo.data.preferences import PreferenceSet, find_preferences, load_preferences
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.diffusion.algorithms.base import Algorithm, Batch
from flow_grpo.diffusion.image_latents import ImageLatents
from flow_grpo.diffusion.models import ModelAdapter
from flow_grpo.diffusion.models.prompt_cache import MAX_IN_MEMORY
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Trajectory
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource
from flow_grpo.report.console import progress_bar
from flow_grpo.training.distributed import raise_on_all_ranks

logger = logging.getLogger("flow_grpo")
FIELD = "preferences.data"


@dataclass(frozen=True)
class GivenRow:
    """A prompt with the images that are trained together, and the credit of each."""

    prompt: Prompt
    images: tuple[ImageSource, ...]
    credit: tuple[float, ...]


@dataclass(frozen=True)
class GivenData:
    """A preference set and the rows that an algorithm trains; empty without `preferences.data`."""

    found: PreferenceSet
    rows: list[GivenRow]

    @property
    def prompts(self) -> list[Prompt]:
        return [row.prompt for row in self.rows]


def load_given_data(source: str, algorithm: Algorithm, layout: PreferenceLayout) -> GivenData:
    """Load `preferences.data` and convert it to the rows that the algorithm trains.

    Args:
        source: `preferences.data`; "" for none.
        algorithm: Method of the run.
        layout: Columns to read.

    Raises:
        UserError: If there are no such rows.
    """
    if not source:
        return GivenData(PreferenceSet([], []), [])
    found = load_preferences(source, layout=layout)
    if algorithm.given == "pairs":
        rows = _pairs(found, algorithm.name, source)
    elif algorithm.given == "rated":
        rows = _rated(found, algorithm.name, source)
    else:
        rows = [GivenRow(each.prompt, (each.image,), (1.0,)) for each in found.demonstrations()]
        _log_unused(len(found.rated()) - len(rows), "disliked or rejected", algorithm.name)
    if not rows:
        raise UserError(
            f"contains no liked image, but algorithm={algorithm.name!r} requires some",
            field=FIELD,
            value=source,
            hint="use algorithm=kto for disliked images",
        )
    return GivenData(found, rows)


def load_held_out_pairs(
    source: str, algorithm: Algorithm, layout: PreferenceLayout, most: int
) -> GivenData:
    """Load the pairs of the test split of `preferences.data`; empty if there are none.

    Args:
        source: `preferences.data`; "" for none.
        algorithm: Method of the run; only those that compare pairs use them.
        layout: Columns to read.
        most: Maximum number of pairs; 0 for all.
    """
    found = find_preferences(source, "test", layout) if source else None
    if found is None or algorithm.given != "pairs":
        return GivenData(PreferenceSet([], []), [])
    found = PreferenceSet(found.pairs[: most or None], [])
    return GivenData(found, _pairs(found, algorithm.name, source))


def _pairs(found: PreferenceSet, method: str, source: str) -> list[GivenRow]:
    if not found.pairs:
        raise UserError(
            f"contains no pairs, but algorithm={method!r} requires some",
            field=FIELD,
            value=source,
            hint="use algorithm=kto for rated images, or sft for demonstrations",
        )
    _log_unused(len(found.images), "unpaired", method)
    credit = [2 * pair.probability - 1 for pair in found.pairs]
    return [
        GivenRow(pair.prompt, (pair.chosen, pair.rejected), (each, -each))
        for pair, each in zip(found.pairs, credit, strict=True)
    ]


def _rated(found: PreferenceSet, method: str, source: str) -> list[GivenRow]:
    rated = found.rated()
    if len({each.liked for each in rated}) == 1:
        only = "liked" if rated[0].liked else "disliked"
        raise UserError(
            f"contains only {only} images, but algorithm={method!r} requires both kinds",
            field=FIELD,
            value=source,
            hint="use algorithm=sft for demonstrations" if rated[0].liked else "add liked images",
        )
    return [GivenRow(each.prompt, (each.image,), (1.0 if each.liked else -1.0,)) for each in rated]


def _log_unused(count: int, kind: str, method: str) -> None:
    if count:
        logger.info("%-21s %d %s images are not used by %s", FIELD, count, kind, method)


def check_given_data(
    data: GivenData,
    model: str,
    family: type[ModelAdapter] | None,
    accelerator: Accelerator,
    *,
    unlike_sizes: bool,
) -> None:
    """Reject models whose VAE cannot encode images, and invalid images and pairs."""
    if not data.rows:
        return
    if family and not family.encodes_images:
        raise UserError(
            f"contains images, but {model} generates videos", field=FIELD, hint="set it to ''"
        )
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    check = partial(check_preferences, allow_unlike_sizes=unlike_sizes, bar=bar)
    raise_on_all_ranks(accelerator, lambda: check(data.found, accelerator))


class GivenImages:
    """Micro-batches of given images for the updates of a run."""

    def __init__(self, rows: list[GivenRow], policy: Policy, seed: int) -> None:
        self.rows, self._policy, self._seed = rows, policy, seed
        _warn_of_small_cache(rows, policy.adapter)
        self._latents = ImageLatents(policy)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def batches(self, plan: BatchPlan, epoch: int, update: int, process: int) -> list[Batch]:
        """Return a process's micro-batches of an update.

        Args:
            plan: The plan of the epoch.
            epoch: The epoch, from 0.
            update: Index of the update among those of a pass over the epoch.
            process: Rank of the process.
        """
        per_update = plan.given_rows * plan.num_processes
        first = update * per_update + process * plan.given_rows
        positions = np.arange(first, first + plan.given_rows)
        offset = epoch * per_update * plan.updates_per_pass
        size = max(1, plan.train_batch_size // plan.images_per_row)
        return [
            self.batch(plan, [self._row(offset + each) for each in part.tolist()], part)
            for part in (positions[i : i + size] for i in range(0, len(positions), size))
        ]

    def _row(self, position: int) -> GivenRow:
        """Return the row at a position of the endless sequence of passes."""
        number, offset = divmod(position, len(self.rows))
        return self.rows[self._order(number)[offset]]

    def _permutation(self, number: int) -> list[int]:
        rng = numpy_rng(self._seed, Stream.PREFERENCES, number)
        return rng.permutation(len(self.rows)).tolist()

    def batch(self, plan: BatchPlan, rows: list[GivenRow], position: np.ndarray) -> Batch:
        """Return rows as samples; `position` is that of each row in the epoch, (rows,)."""
        each = plan.images_per_row
        final = self._latents.encode(_flatten(row.images for row in rows))
        empty = final.new_zeros(len(final), 0)
        conditioning = self._policy.denoiser.encode(
            [row.prompt for row in rows for _ in row.images]
        )
        return Batch(
            Trajectory(final, range(0), empty, empty, conditioning),
            torch.tensor(_flatten(row.credit for row in rows), dtype=final.dtype),
            index=plan.samples + (position[:, None] * each + np.arange(each)).ravel(),
            group=plan.groups + np.repeat(position, each),
            tasks=np.full(len(final), "given"),
        )


def _warn_of_small_cache(rows: list[GivenRow], adapter: ModelAdapter) -> None:
    """Warn if embeddings or latents do not fit into the cache in memory and there is no other."""
    prompts = len({row.prompt.prompt for row in rows})
    images = sum(len(row.images) for row in rows)
    if adapter.prompt_cache is None and max(prompts, images) > MAX_IN_MEMORY:
        logger.warning(
            "preferences.data has %d prompts and %d images; only the last %d of each stay encoded "
            "in memory, so set prompt_cache to a directory to encode each only once",
            prompts,
            images,
            MAX_IN_MEMORY,
        )


def _flatten(lists: Iterable[tuple]) -> list:
    return [each for values in lists for each in values]
