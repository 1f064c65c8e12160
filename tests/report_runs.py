"""Run folders made by hand, for tests of the report."""

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from flow_grpo.run.trackers import save_samples


def pictures(count: int, edge: int, seed: int = 0, grain: float = 8) -> list[Image.Image]:
    """Blurred noise with some grain: it takes as many bytes as photographs do."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8))
        whole = np.asarray(small.resize((edge, edge), Image.Resampling.BICUBIC)).astype(np.int16)
        noise = rng.normal(0, grain, whole.shape)
        found.append(Image.fromarray((whole + noise).clip(0, 255).astype(np.uint8)))
    return found


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
    """With an evaluation and training samples of each epoch, all with the same few pictures."""
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
    drawn = pictures(prompts, edge, grain=grain)
    save_samples(first, drawn, prompt=texts, avg=scores, ocr=scores)
    for epoch in range(1, epochs + 1):
        for kind in ("eval", "train"):
            copy = folder / f"samples/{kind}-{epoch:05d}"
            copy.mkdir()
            for file in first.iterdir():
                os.link(file, copy / file.name)
    return folder
