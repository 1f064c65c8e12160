"""Synthetic run directories for tests of the report."""

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from flow_grpo.training.trackers import save_samples


def noise_images(count: int, edge: int, seed: int = 0, grain: float = 8) -> list[Image.Image]:
    """Return images of blurred noise with grain, which compress as well as photographs."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8))
        pixels = np.asarray(small.resize((edge, edge), Image.Resampling.BICUBIC)).astype(np.int16)
        noise = rng.normal(0, grain, pixels.shape)
        images.append(Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)))
    return images


def make_run(
    folder: Path,
    *,
    epochs: int,
    prompts: int,
    edge: int = 24,
    grain: float = 8,
    metrics: int = 3,
    last: str = "\n",
) -> Path:
    """Write a run with evaluation and training samples of each epoch, all the same images.

    Args:
        prompts: Samples per epoch.
        edge: Side of the images in pixels.
        grain: Standard deviation of the noise in the images.
        metrics: Number of metrics besides eval/avg.
        last: End of metrics.jsonl.
    """
    folder.mkdir(parents=True)
    config = {"num_epochs": epochs, "sample": {"num_image_per_prompt": prompts}, "seed": 1}
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"eval/m{i}" for i in range(metrics)]
    rows = [
        {"epoch": e, "step": e, "eval/avg": e / epochs, **{n: (e * 7919 % 97) / 97 for n in names}}
        for e in range(epochs + 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + last)
    texts = [f"prompt number {i}" for i in range(prompts)]
    scores = [i / prompts for i in range(prompts)]
    first = folder / "samples/eval-00000"
    images = noise_images(prompts, edge, grain=grain)
    save_samples(first, images, prompt=texts, avg=scores, ocr=scores)
    for epoch in range(1, epochs + 1):
        for kind in ("eval", "train"):
            copy = folder / f"samples/{kind}-{epoch:05d}"
            copy.mkdir()
            for file in first.iterdir():
                os.link(file, copy / file.name)
    return folder
