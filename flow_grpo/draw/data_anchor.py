"""The flow-matching loss on pictures of the user's beside that of a method (Ye et al. 2025, arXiv
2512.04332): what the model draws stays like them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.data.images import check_pictures
from flow_grpo.data.prompts import load_prompts
from flow_grpo.data.rows import Prompt
from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.draw.algorithms.forward import Noised, noise
from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.models import Conditioning, ModelAdapter
from flow_grpo.draw.models.base import latent_dtype
from flow_grpo.draw.models.embeddings import PromptCache, identity
from flow_grpo.draw.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.files import read_text
from flow_grpo.losses import mean_square
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.show.console import progress_bar

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_pictures(config: DrawFields) -> list[Prompt]:
    """The captions of anchors.data, each with its picture; none where it is not set."""
    source = config.anchors.data
    if not source:
        return []
    files = sorted(each for each in _files(source) if each.suffix.lower() in ENDINGS)
    if files:
        return [_captioned(file) for file in files]
    columns = config.dataset_column, config.image_column, config.metadata_columns
    rows = load_prompts(source, "train", config.prompt_fn, *columns)
    for row in rows:
        if len(row.images) != 1:
            raise UserError(
                f"{row.where}: has {len(row.images) or 'no'} pictures, and anchors.data needs one "
                'in each row; add its path as "image"'
            )
    return rows


def _files(source: str) -> list[Path]:
    """Pictures of a folder that has no table of them."""
    folder = Path(source)
    if not os.path.isdir(folder) or any(folder.glob("train*.*")):
        return []
    return list(folder.iterdir())


def _captioned(file: Path) -> Prompt:
    caption = file.with_suffix(".txt")
    if not caption.is_file():
        raise UserError(f"{file} has no caption: write it to {caption.name} beside it")
    text = read_text(caption).strip()
    if not text:
        raise UserError(f"{caption} is empty; write what {file.name} shows")
    return Prompt(text, images=(file,), where=str(caption))


def check_data(
    rows: list[Prompt], model: str, family: type[ModelAdapter] | None, accelerator: Accelerator
) -> None:
    """Refuse models that cannot be trained on pictures alone, and files that are none."""
    if not rows:
        return
    if family and not family.encodes_pictures:
        raise UserError(f"anchors.data has pictures, and {model} draws clips; leave it empty")
    if family and family.sources[0] > 0:
        raise UserError(
            f"anchors.data: {model} draws from a picture that it is given, and here are captions "
            "alone; leave it empty"
        )
    bar = partial(progress_bar, shown=accelerator.is_main_process)
    on_all_or_none(accelerator, lambda: check_pictures(rows, accelerator, bar))


@dataclass(frozen=True)
class DataBatch:
    at: Noised  # (B, C, H, W)
    conditioning: Conditioning


class DataAnchor:
    """Pictures with captions, encoded once: kept in memory, and on disk where prompts are."""

    def __init__(self, rows: list[Prompt], policy: Policy, weight: float) -> None:
        self.rows, self.policy, self.weight = rows, policy, weight
        adapter = policy.adapter
        facts = {"device": adapter.device, "size": adapter.source_size}
        encoder = {"vae": adapter.vae} if adapter.prompt_cache else {}
        self._latents = PromptCache(adapter.prompt_cache, identity(encoder, {}, **facts))

    def batches(
        self, seed: tuple[int, ...], size: int, count: int, process: int, processes: int
    ) -> Iterator[DataBatch]:
        """This process's pictures of an update, `count` times `size` of them, at one noise level
        each: which ones follows from the seed alone, for any number of processes."""
        schedule, (first, *rest) = self.policy.dynamics.schedule, seed
        places = np.arange(processes * count * size).reshape(processes, count, size)[process]
        for own in places.tolist():
            keys = [(first, Stream.DATA, *rest, place) for place in own]
            rngs = [numpy_rng(*key) for key in keys]
            rows = [self.rows[rng.integers(len(self.rows))] for rng in rngs]
            steps = np.array([[rng.integers(len(schedule))] for rng in rngs])
            x0 = torch.cat([self._encoded(row) for row in rows])
            generators = [torch_generator(*key) for key in keys]
            texts = self.policy.adapter.encode([row.prompt for row in rows], None)
            yield DataBatch(noise(schedule, x0, steps, generators)[0], texts)

    def loss(self, batch: DataBatch) -> Tensor:
        """The flow-matching error of each picture, (B,)."""
        adapter, scale = self.policy.adapter, self.policy.dynamics.guidance_scale
        velocity = self.policy.velocity(
            batch.at.x_t,
            batch.at.timesteps,
            batch.conditioning,
            # what the model was trained with, where guidance is a matter of sampling
            guidance=adapter.unguided if adapter.is_guided(scale) else scale,
        )
        return mean_square(velocity - batch.at.target)

    def _encoded(self, row: Prompt) -> Tensor:
        [picture], adapter = row.images, self.policy.adapter
        name = self._latents.name("", row.images)
        found = self._latents.find([name]).get(name)
        if found is None:
            found = self._latents.add(name, {"latents": adapter.encode_picture(picture)})
        latents = found["latents"][None].to(latent_dtype(self.policy.transformer))
        return latents.to(adapter.device)
