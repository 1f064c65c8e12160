"""Score a model on a prompt set: one fixed noise per prompt, deterministic sampling."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn
from tqdm import tqdm

from flow_grpo.data import Prompt
from flow_grpo.distributed import gather_rows
from flow_grpo.metrics import mean_of_scored
from flow_grpo.models import ModelAdapter
from flow_grpo.rewards import TOTAL, WeightedReward, to_pil
from flow_grpo.rollout import Dynamics, eval_generators, initial_noise, sample_trajectory


@dataclass(frozen=True)
class Evaluation:
    scores: dict[str, np.ndarray]  # (prompts,) by reward name, NaN where it failed
    images: list[Image.Image]  # of the first prompts, as many as were asked for

    def means(self) -> dict[str, float]:
        return {name: mean_of_scored(values) for name, values in self.scores.items()}

    def failed(self) -> int:
        return int(np.isnan(self.scores[TOTAL]).sum())

    def score(self, name: str, row: int) -> float | None:
        value = float(self.scores[name][row])
        return None if np.isnan(value) else value


def evaluate(
    adapter: ModelAdapter,
    transformer: nn.Module,
    reward: WeightedReward,
    prompts: list[Prompt],
    dynamics: Dynamics,
    *,
    accelerator: Accelerator,
    size: tuple[int, int],  # height, width
    batch_size: int,
    seed: int,
    keep_images: int = 0,
) -> Evaluation:
    """Every prompt once, shared out over the processes without repeats."""
    device = accelerator.device
    shape = adapter.latent_shape(*size)
    rows = list(range(accelerator.process_index, len(prompts), accelerator.num_processes))
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    futures, kept = [], []
    with ThreadPoolExecutor(1) as background:
        for batch in tqdm(
            batches, desc="evaluate", leave=False, disable=not accelerator.is_main_process
        ):
            chosen = [prompts[row] for row in batch]
            negative = [p.negative_prompt for p in chosen] if dynamics.guidance_scale > 1 else None
            latents, _ = sample_trajectory(
                adapter,
                transformer,
                dynamics,
                initial_noise(eval_generators(seed, batch), shape, device),
                adapter.encode([p.prompt for p in chosen], negative),
            )
            images = adapter.decode(latents)
            kept += [images[i] for i, row in enumerate(batch) if row < keep_images]
            futures.append(
                background.submit(
                    reward, images, [p.prompt for p in chosen], [p.metadata for p in chosen]
                )
            )
        results = [future.result() for future in futures]

    columns = {
        name: torch.tensor([float(s) for r in results for s in r[name]], dtype=torch.float64)
        for name in reward.names
    }
    _, scores = gather_rows(accelerator, torch.tensor(rows, dtype=torch.long), columns)
    empty = torch.zeros(0, 3, *size)
    _, gathered = gather_rows(
        accelerator,
        torch.tensor([row for row in rows if row < keep_images], dtype=torch.long),
        {"images": torch.stack(kept).cpu() if kept else empty},
    )
    return Evaluation(
        {name: values.numpy() for name, values in scores.items()}, to_pil(gathered["images"])
    )
