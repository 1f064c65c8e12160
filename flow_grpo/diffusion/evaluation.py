"""Score a model or its checkpoints on a prompt set: ODE sampling, one fixed noise per prompt."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import ModelAdapter, Size
from flow_grpo.diffusion.models.lora_files import read_lora
from flow_grpo.diffusion.rollout import Denoiser, eval_generators, initial_noise
from flow_grpo.diffusion.source_images import load_source_images, reward_metadata
from flow_grpo.errors import UserError
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards import TOTAL, WeightedReward
from flow_grpo.rewards.frames import Sample, to_uint8, uint8_to_pil
from flow_grpo.training.candidates import BASE, Candidate, parse_candidates
from flow_grpo.training.distributed import gather_rows, gather_scores
from flow_grpo.training.export import ExportSource
from flow_grpo.training.metrics import finite_mean
from flow_grpo.training.plan import check_lora_path


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of all prompts, and the images of the first ones."""

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
        size: Height and width of the images, and the number of frames.
        batch_size: Upper limit, per process; exact if the model is compiled.
        keep_images: Number of prompts whose images are returned.
        between_batches: Called the same number of times on all processes.
    """
    device, adapter = accelerator.device, denoiser.adapter
    shape = adapter.latent_shape(*size)
    rows = list(range(accelerator.process_index, len(prompts), accelerator.num_processes))
    most = math.ceil(len(prompts) / accelerator.num_processes)
    if not adapter.compiled:  # a compiled model would be compiled again for another size
        batch_size = math.ceil(most / math.ceil(most / batch_size))  # least padding
    denoiser.precompute_embeddings([prompts[row] for row in rows])
    pending, kept = [], []
    is_main = accelerator.is_main_process
    for start in progress_bar(range(0, most, batch_size), "evaluate", shown=is_main):
        between_batches()
        reward.raise_if_failing()
        batch = rows[start : start + batch_size]
        # Equal batch sizes avoid recompilation for the last batch; equal numbers of batches let all
        # ranks take part in the forward passes of sharded weights.
        padded = batch + [0] * (batch_size - len(batch))
        noise = initial_noise(eval_generators(seed, padded), shape, device)
        latents = denoiser.sample(noise, denoiser.encode([prompts[row] for row in padded])).final
        if not batch:
            continue
        images = adapter.decode(latents)[: len(batch)]
        chosen = [prompts[row] for row in batch]
        # rows are ascending; stored as bytes, because videos are large
        kept += to_uint8(images[: sum(row < keep_images for row in batch)])
        metadata = reward_metadata(chosen, adapter)
        pending.append(reward.submit(images, [p.prompt for p in chosen], metadata))
    index = np.array(rows, dtype=np.int64)
    scores = gather_scores(accelerator, index, [scores.result() for scores in pending])
    # a rank without images needs the shape that the others send
    shape = next(iter(gather_object([tuple(k.shape) for k in kept[:1]])), (0,))
    stacked = torch.stack(kept).cpu() if kept else torch.zeros(0, *shape, dtype=torch.uint8)
    kept_rows = torch.tensor([row for row in rows if row < keep_images], dtype=torch.long)
    _, gathered = gather_rows(accelerator, kept_rows, {"images": stacked})
    sources = load_source_images(prompts[: keep_images if is_main else 0], adapter)
    return EvaluationResult(scores, uint8_to_pil(gathered["images"]), sources)


def base_candidate(lora_path: str) -> Candidate:
    """Return the policy before training: the model, with the LoRA of `train.lora_path` if set.

    Raises:
        UserError: If the path is missing or is not a LoRA; before the model is loaded.
    """
    if not lora_path:
        return Candidate(BASE, None)
    check_lora_path(lora_path)
    if not any("lora" in name.lower() for name in read_lora(lora_path).tensors):
        raise UserError(
            "contains no LoRA weights",
            field="train.lora_path",
            value=lora_path,
            hint="pass full weights with --checkpoint, or a pipeline folder with "
            "--config.pretrained.model",
        )
    return Candidate(BASE, Path(lora_path))


def parse_diffusion_candidates(arguments: list[str], lora_path: str = "") -> list[Candidate]:
    """Parse the values of --checkpoint, where "base" has the LoRA of `train.lora_path`."""
    return parse_candidates(arguments, base=lambda: base_candidate(lora_path))


class WeightSwapper:
    """Loads the weights of candidates into one model and restores the model afterwards."""

    def __init__(self, adapter: ModelAdapter, candidates: list[Candidate]) -> None:
        self.adapter = adapter
        self.is_single = len(candidates) == 1  # then nothing has to be restored
        self._base_state: dict[str, Tensor] = {}  # the base weights, once overwritten

    @contextmanager
    def applied(self, candidate: Candidate) -> Iterator[ModelAdapter]:
        """Yield the adapter with the candidate's weights.

        On exit the base weights are restored bit for bit, except after the full weights of a
        single candidate.
        """
        if candidate.weights is None:
            yield self.adapter
            return
        adapter = copy.copy(self.adapter)  # LoRA on text encoders changes the embeddings
        is_lora = ExportSource(candidate.weights).is_lora
        if not (is_lora or self.is_single or self._base_state):
            state = adapter.transformer.state_dict()
            self._base_state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        try:
            adapter.load_weights(candidate.weights)
            yield adapter
        finally:
            if is_lora:
                self.adapter.pipeline.unload_lora_weights()
            elif not self.is_single:
                self.adapter.transformer.load_state_dict(self._base_state)

    def check_loadable(self, candidates: list[Candidate]) -> None:
        """Load each candidate once, so that a mismatch is reported before the first is scored."""
        if self.is_single:
            return
        for candidate in candidates:
            with self.applied(candidate):
                pass
