"""Score a model, or checkpoints of it, on a prompt set: one fixed noise per prompt, no other."""

import copy
import math
import os
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
from flow_grpo.draw.models import ModelAdapter
from flow_grpo.draw.models.lora_files import read_lora
from flow_grpo.draw.rollout import Denoiser, eval_generators, initial_noise
from flow_grpo.draw.sources import reward_metadata, sources_of
from flow_grpo.errors import UserError
from flow_grpo.rewards import TOTAL, WeightedReward
from flow_grpo.rewards.frames import Sample, from_bytes, to_bytes
from flow_grpo.run.checkpoint import weights_in
from flow_grpo.run.distributed import gather_rows, gather_scores
from flow_grpo.run.export import Source
from flow_grpo.run.metrics import mean_of_scored
from flow_grpo.run.plan import check_lora_path
from flow_grpo.show.console import progress_bar
from flow_grpo.show.reading import short_names

BASE = "base"


@dataclass(frozen=True)
class Evaluation:
    scores: dict[
        str, np.ndarray
    ]  # (prompts,) by reward name, NaN where it failed, -inf where not asked
    images: list[Sample]  # of the first prompts, as many as were asked for
    sources: list[list[Image.Image]] = field(default_factory=list)  # what these were made from

    def shortened(self, count: int) -> "Evaluation":
        """With no more pictures than `count`."""
        return Evaluation(self.scores, self.images[:count], self.sources[:count])

    def means(self) -> dict[str, float]:
        return {name: mean_of_scored(values) for name, values in self.scores.items()}

    def failed(self) -> int:
        return int(np.isnan(self.scores[TOTAL]).sum())

    def score(self, name: str, row: int) -> float | None:
        value = float(self.scores[name][row])
        return value if np.isfinite(value) else None


def evaluate(
    denoiser: Denoiser,
    reward: WeightedReward,
    prompts: list[Prompt],
    *,
    accelerator: Accelerator,
    size: tuple[int, int],  # height, width
    batch_size: int,
    seed: int,
    keep_images: int = 0,
    between_batches: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Every prompt once, shared out over the processes without repeats.

    `between_batches` is called equally often on all processes.
    """
    device, adapter = accelerator.device, denoiser.adapter
    shape = adapter.latent_shape(*size)
    rows = list(range(accelerator.process_index, len(prompts), accelerator.num_processes))
    most = math.ceil(len(prompts) / accelerator.num_processes)
    if not adapter.compiled:  # another size than was asked for would be compiled anew
        batch_size = math.ceil(most / math.ceil(most / batch_size))  # with the fewest to spare
    denoiser.encode_ahead([prompts[row] for row in rows])
    pending, kept = [], []
    starts, shown = range(0, most, batch_size), accelerator.is_main_process
    for start in progress_bar(starts, "evaluate", shown=shown):
        between_batches()
        reward.end_if_broken()
        batch = rows[start : start + batch_size]
        # Batches of one size, so that nothing is compiled again for the last, and as many on each
        # process, so that all take part in the forwards of weights that are shared out.
        full = batch + [0] * (batch_size - len(batch))
        noise = initial_noise(eval_generators(seed, full), shape, device)
        latents = denoiser.sample(noise, denoiser.encode([prompts[row] for row in full])).final
        if not batch:
            continue
        images = adapter.decode(latents)[: len(batch)]
        chosen = [prompts[row] for row in batch]
        # rows only grow; as bytes, as clips are large
        kept += to_bytes(images[: sum(row < keep_images for row in batch)])
        told = reward_metadata(chosen, adapter)
        pending.append(reward.submit(images, [p.prompt for p in chosen], told))
    index = np.array(rows, dtype=np.int64)
    scores = gather_scores(accelerator, index, [scores.result() for scores in pending])
    # a process that kept none has to know what the others send
    shape = next(iter(gather_object([tuple(k.shape) for k in kept[:1]])), (0,))
    _, gathered = gather_rows(
        accelerator,
        torch.tensor([row for row in rows if row < keep_images], dtype=torch.long),
        {"images": torch.stack(kept).cpu() if kept else torch.zeros(0, *shape, dtype=torch.uint8)},
    )
    sources = sources_of(prompts[: keep_images if shown else 0], adapter)
    return Evaluation(scores, from_bytes(gathered["images"]), sources)


@dataclass(frozen=True)
class Candidate:
    name: str  # short, and no other candidate's
    weights: Path | None  # None: the model as it is


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
            f"train.lora_path={lora_path!r} contains no LoRA weights; pass full weights with "
            "--checkpoint, or a pipeline folder with --config.pretrained.model"
        )
    return Candidate(BASE, Path(lora_path))


def find_candidates(words: list[str], lora_path: str = "") -> list[Candidate]:
    """In the order of `words`: "base" or what `weights_in` takes; several may stand in one word,
    with commas between. Nothing means the base alone. The base has the LoRA at `lora_path`, the
    config's `train.lora_path`; checkpoints contain theirs already."""
    named = [name for word in words for name in _split(word) if name] or [BASE]
    base = base_candidate(lora_path) if BASE in named else None
    found = [None if name == BASE else weights_in(Path(name)) for name in named]
    places = [weights and weights.resolve() for weights in found]
    for i, place in enumerate(places):
        if place in places[:i]:
            first = named[places.index(place)]
            also = f", as {first} does" if first != named[i] else " twice"
            raise UserError(f"--checkpoint names {place or BASE}{also}; leave one out")
    short = short_names([place for place in places if place])
    names = iter(f"checkpoint {name}" if name == BASE else name for name in short)
    return [Candidate(next(names), weights) if weights else base for weights in found]


def _split(word: str) -> list[str]:
    """A folder may have a comma in its name."""
    return [word] if os.path.exists(word) else [part.strip() for part in word.split(",")]


class Exchange:
    """Puts the weights of candidates on one model, and takes them off again."""

    def __init__(self, adapter: ModelAdapter, candidates: list[Candidate]) -> None:
        self.adapter = adapter
        self.alone = len(candidates) == 1  # then nothing comes after it
        self._own: dict[str, Tensor] = {}  # the base's weights, once others took their place

    @contextmanager
    def applied(self, candidate: Candidate) -> Iterator[ModelAdapter]:
        """The adapter to sample with; the model is the base again afterwards, bit for bit."""
        if candidate.weights is None:
            yield self.adapter
            return
        adapter = copy.copy(self.adapter)  # LoRA may be on text encoders: embeddings of its own
        is_lora = Source(candidate.weights).is_lora
        if not (is_lora or self.alone or self._own):
            state = adapter.transformer.state_dict()
            self._own = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        try:
            adapter.load_weights(candidate.weights)
            yield adapter
        finally:
            if is_lora:
                self.adapter.pipeline.unload_lora_weights()
            elif not self.alone:
                self.adapter.transformer.load_state_dict(self._own)

    def check(self, candidates: list[Candidate]) -> None:
        """Load each once, so that one that does not fit is told before the first is scored."""
        for candidate in candidates if not self.alone else ():
            with self.applied(candidate):
                pass
