"""Data anchor: a flow-matching loss on given images, added to the loss of the algorithm.

With an image x0, noise e and x_t = (1 - t) x0 + t e, the loss is mean((v(x_t, t) - (e - x0))^2). It
keeps samples close to the data, in place of or in addition to a KL penalty (Ye et al. 2025, arXiv
2512.04332).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.data.captioned_images import load_captioned_images
from flow_grpo.data.images import check_images
from flow_grpo.data.prompts import Prompt, PromptLayout, load_prompts
from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.diffusion.algorithms.forward_process import NoisedSamples, add_noise
from flow_grpo.diffusion.image_latents import ImageLatents
from flow_grpo.diffusion.models import Conditioning, ModelAdapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.losses import mean_square
from flow_grpo.report.console import progress_bar
from flow_grpo.training.distributed import raise_on_all_ranks


def load_anchor_images(source: str, layout: PromptLayout, prompt_fn: str) -> list[Prompt]:
    """Load the captions and images of `anchors.data`; empty if it is not set.

    Args:
        source: `anchors.data`.
        layout: Layout of its table, if it has one.
        prompt_fn: Which of several tables to read, as for prompts.
    """
    if not source:
        return []
    if captioned := _load_image_folder(source):
        return captioned
    rows = load_prompts(source, "train", layout, prompt_fn)
    for row in rows:
        if len(row.images) != 1:
            raise UserError(
                f"has {len(row.images)} images, but anchors.data needs exactly one per row",
                field=row.where,
                hint='put one path in the column "image"',
            )
    return rows


def _load_image_folder(source: str) -> list[Prompt]:
    """Return the captioned images of a folder that has no prompt table."""
    folder = Path(source)
    if not os.path.isdir(folder) or any(folder.glob("train*.*")):
        return []
    return load_captioned_images(folder, "anchors.data")


def check_anchor_data(
    rows: list[Prompt], model: str, family: type[ModelAdapter] | None, accelerator: Accelerator
) -> None:
    """Reject models that cannot be trained on captioned images, and invalid image files."""
    if not rows:
        return
    if family and not family.encodes_images:
        raise UserError(
            f"contains images, but {model} generates videos",
            field="anchors.data",
            hint="set it to ''",
        )
    if family and family.num_source_images[0] > 0:
        raise UserError(
            f"has no source images, which {model} needs",
            field="anchors.data",
            hint="set it to ''",
        )
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    raise_on_all_ranks(accelerator, lambda: check_images(rows, accelerator, bar))


@dataclass(frozen=True)
class DataBatch:
    """Noised captioned images and the embeddings of their captions."""

    noised: NoisedSamples  # (B, C, H, W)
    conditioning: Conditioning


class DataAnchor:
    """Captioned images and their flow-matching loss."""

    def __init__(self, rows: list[Prompt], policy: Policy, weight: float) -> None:
        self.rows, self.policy, self.weight = rows, policy, weight
        self._latents = ImageLatents(policy)

    def batches(
        self, seed: tuple[int, ...], size: int, count: int, process: int, processes: int
    ) -> Iterator[DataBatch]:
        """Yield this process's `count` batches of `size` images, at one random noise level each.

        The images of an update depend on the seed only, not on the number of processes.
        """
        schedule = self.policy.dynamics.schedule
        first, *rest = seed
        positions = np.arange(processes * count * size).reshape(processes, count, size)[process]
        for batch_positions in positions.tolist():
            keys = [(first, Stream.DATA, *rest, position) for position in batch_positions]
            rngs = [numpy_rng(*key) for key in keys]
            rows = [self.rows[rng.integers(len(self.rows))] for rng in rngs]
            steps = np.array([[rng.integers(len(schedule))] for rng in rngs])
            x0 = self._latents.encode([image for row in rows for image in row.images])
            generators = [torch_generator(*key) for key in keys]
            texts = self.policy.adapter.encode([row.prompt for row in rows], None)
            yield DataBatch(add_noise(schedule, x0, steps, generators)[0], texts)

    def loss(self, batch: DataBatch) -> Tensor:
        """Return the flow-matching loss of each image, (B,)."""
        adapter, scale = self.policy.adapter, self.policy.dynamics.guidance_scale
        velocity = self.policy.velocity(
            batch.noised.x_t,
            batch.noised.timesteps,
            batch.conditioning,
            # unguided, as in pretraining, if guidance is applied in sampling only
            guidance=adapter.guidance_threshold if adapter.is_guided(scale) else scale,
        )
        return mean_square(velocity - batch.noised.target)
