"""Score a model on a prompt set: one fixed noise per prompt, deterministic sampling."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo.data.prompts import Prompt
from flow_grpo.draw.rollout import Denoiser, eval_generators, initial_noise
from flow_grpo.rewards import TOTAL, WeightedReward
from flow_grpo.rewards.frames import Sample, from_bytes, to_bytes
from flow_grpo.run.distributed import gather_rows, gather_scores
from flow_grpo.run.metrics import mean_of_scored
from flow_grpo.run.tracking import progress_bar


@dataclass(frozen=True)
class Evaluation:
    scores: dict[
        str, np.ndarray
    ]  # (prompts,) by reward name, NaN where it failed, -inf where not asked
    images: list[Sample]  # of the first prompts, as many as were asked for

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
    for start in progress_bar(range(0, most, batch_size), "evaluate", accelerator):
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
        pending.append(
            reward.submit(images, [p.prompt for p in chosen], [p.metadata for p in chosen])
        )
    index = np.array(rows, dtype=np.int64)
    scores = gather_scores(accelerator, index, [scores.result() for scores in pending])
    # a process that kept none has to know what the others send
    shape = next(iter(gather_object([tuple(k.shape) for k in kept[:1]])), (0,))
    _, gathered = gather_rows(
        accelerator,
        torch.tensor([row for row in rows if row < keep_images], dtype=torch.long),
        {"images": torch.stack(kept).cpu() if kept else torch.zeros(0, *shape, dtype=torch.uint8)},
    )
    return Evaluation(scores, from_bytes(gathered["images"]))
