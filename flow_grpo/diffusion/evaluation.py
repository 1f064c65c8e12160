"""Score a model or its checkpoints on a prompt set: ODE sampling, one fixed noise per prompt."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import Size
from flow_grpo.diffusion.rollout import Denoiser, eval_generators, initial_noise
from flow_grpo.diffusion.source_images import load_source_images, reward_metadata
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards import TOTAL, WeightedReward
from flow_grpo.rewards.frames import Sample, as_videos, to_uint8, uint8_to_pil
from flow_grpo.training.distributed import gather_rows, gather_scores, get_ranks
from flow_grpo.training.metrics import finite_mean


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of all prompts and, on the main process, the images of the first ones."""

    # (prompts,) by reward name; NaN: scoring failed, -inf: the reward does not apply
    scores: dict[str, np.ndarray]
    images: list[Sample]
    sources: list[list[Image.Image]] = field(default_factory=list)  # source images of `images`

    def with_max_images(self, count: int) -> "EvaluationResult":
        """Return a copy with only the first `count` images and sources, and all scores."""
        return EvaluationResult(self.scores, self.images[:count], self.sources[:count])

    def means(self) -> dict[str, float]:
        """Return the mean of the finite scores of each reward; NaN if there are none."""
        return {name: finite_mean(values) for name, values in self.scores.items()}

    def num_failed(self) -> int:
        """Return how many prompts have no total score."""
        return int(np.isnan(self.scores[TOTAL]).sum())

    def score(self, name: str, row: int) -> float | None:
        """Return the score of prompt `row`, or None if it failed or the reward does not apply."""
        value = float(self.scores[name][row])
        return value if np.isfinite(value) else None


def evaluate(
    denoiser: Denoiser,
    reward: WeightedReward,
    prompts: list[Prompt],
    *,
    accelerator: Accelerator,
    size: Size,
    batch_size: int,
    seed: int,
    keep_images: int = 0,
    between_batches: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Sample and score every prompt once, split over the processes.

    Args:
        denoiser: Model and sampling dynamics.
        reward: Scores the samples.
        prompts: All prompts, the same on all processes.
        accelerator: Rank, world size and device.
        size: Height and width of the images, and the number of frames.
        batch_size: Upper limit, per process; exact if the model is compiled.
        seed: Seed of the noise; each prompt has its own.
        keep_images: Number of prompts whose images are returned, on the main process.
        between_batches: Called the same number of times on all processes.
    """
    with denoiser.adapter.source_images_at(size):
        device, adapter = accelerator.device, denoiser.adapter
        shape = adapter.latent_shape(*size)
        ranks = get_ranks(accelerator)
        rows = list(range(ranks.data_rank, len(prompts), ranks.data_size))
        most = math.ceil(len(prompts) / ranks.data_size)
        if not adapter.compiled:  # a compiled model would be compiled again for another size
            batch_size = math.ceil(most / math.ceil(most / batch_size))  # least padding
        denoiser.precompute_embeddings([prompts[row] for row in rows])
        pending, kept, kept_audio = [], [], []
        is_main = accelerator.is_main_process
        for start in progress_bar(range(0, most, batch_size), "evaluate", shown=is_main):
            between_batches()
            reward.raise_if_failing()
            batch = rows[start : start + batch_size]
            # Equal batch sizes avoid recompilation for the last batch; equal numbers of batches let
            # all ranks take part in the forward passes of sharded weights.
            padded = batch + [0] * (batch_size - len(batch))
            noise = initial_noise(eval_generators(seed, padded), shape, device)
            latents = denoiser.sample(
                noise, denoiser.encode([prompts[row] for row in padded])
            ).final
            if not batch or not ranks.is_leader:
                continue
            images = adapter.decode(latents)[: len(batch)]
            chosen = [prompts[row] for row in batch]
            # rows are ascending; stored as bytes, because videos are large
            num_kept = sum(row < keep_images for row in batch)
            kept += to_uint8(images[:num_kept])
            audio = adapter.decode_audio(latents[: len(batch)])
            kept_audio += (audio or [])[:num_kept]
            metadata = reward_metadata(chosen, adapter)
            pending.append(reward.submit(images, [p.prompt for p in chosen], metadata, audio))
        rows = rows if ranks.is_leader else []
        index = np.array(rows, dtype=np.int64)
        scores = gather_scores(accelerator, index, [scores.result() for scores in pending])
        # a rank without images needs the shape that the others send
        shape = next(iter(gather_object([tuple(k.shape) for k in kept[:1]])), (0,))
        stacked = torch.stack(kept).cpu() if kept else torch.zeros(0, *shape, dtype=torch.uint8)
        kept_rows = torch.tensor([row for row in rows if row < keep_images], dtype=torch.long)
        stacks = {"images": stacked}
        _, gathered = gather_rows(accelerator, kept_rows, stacks, on_main_only=True)
        sources = load_source_images(prompts[: keep_images if is_main else 0], adapter)
        sounds = _gather_audio(accelerator, kept_rows, kept_audio)
        samples = as_videos(uint8_to_pil(gathered["images"]), adapter.fps, sounds)
        return EvaluationResult(scores, samples, sources)


def _gather_audio(
    accelerator: Accelerator, rows: torch.Tensor, audio: list[Audio]
) -> list[Audio] | None:
    """Return the sound of all processes' samples in the order of `rows`, on the main process.

    None if there is no sound.
    """
    known = gather_object([(each.waveform.shape, each.sample_rate) for each in audio[:1]])
    if not known:
        return None
    shape, rate = known[0]
    waves = np.stack([each.waveform for each in audio]) if audio else np.zeros((0, *shape), "f4")
    columns = {"audio": torch.from_numpy(waves)}
    _, gathered = gather_rows(accelerator, rows, columns, on_main_only=True)
    return [Audio(wave, rate) for wave in gathered["audio"].cpu().numpy()]
