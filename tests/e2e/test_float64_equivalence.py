"""Equivalent layouts of an epoch give the same weights in float64, also after resuming."""

import json
import subprocess
from pathlib import Path
from typing import Any

import float64_run
import numpy as np
import pytest
import torch
from PIL import Image
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file

# processes, sampling batch, micro-batch, micro-batches per update; an epoch has two updates
Layout = tuple[int, int, int, int]
ONE_PROCESS = (1, 6, 6, 4)
LAYOUTS = [(4, 6, 6, 1), (1, 2, 2, 12), (8, 6, 3, 1), (2, 12, 12, 1), (1, 48, 24, 1)]


class Runs:
    """Runs short trainings in float64 in one process or in several."""

    def __init__(self, logdir: Path, dataset: Path) -> None:
        self.logdir, self.dataset = logdir, dataset

    def __call__(self, layout: Layout, *, name: str, epochs: int, **fields) -> None:
        self.run_sequence(layout, {name: fields}, epochs=epochs)

    def run_sequence(self, layout: Layout, runs: dict[str, dict[str, Any]], *, epochs: int) -> None:
        """Execute runs one after the other in the same processes."""
        processes, batch, micro, accumulated = layout
        common = {
            "logdir": str(self.logdir),
            "dataset": str(self.dataset),
            "num_epochs": epochs,
            "sample.train_batch_size": batch,
            "sample.num_batches_per_epoch": 2 * micro * accumulated // batch,
            "train.batch_size": micro,
            "train.gradient_accumulation_steps": accumulated,
        }
        all_runs = [{**common, "run_name": name, **fields} for name, fields in runs.items()]
        if processes == 1:
            for run in all_runs:
                float64_run.run(**run)
            return
        done = subprocess.run(
            [*torchrun(processes), float64_run.__file__, json.dumps(all_runs)],
            cwd=ROOT,
            env=environment(warmed=True),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def state(self, name: str, checkpoint: str = "latest") -> dict[str, torch.Tensor]:
        """Return the weights of a checkpoint and their moving average."""
        folder = self.logdir / name / "checkpoints" / checkpoint / "state"
        files = ("trained.safetensors", "ema.safetensors")
        return {f"{f}: {k}": v for f in files for k, v in load_file(folder / f).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].dtype == torch.float64
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_run_can_be_resumed_with_another_batch_layout(prompt_folder, tmp_path):
    """Each epoch has another number of processes and other batch sizes.

    Other samples in an update would change the weights by some hundredths of their norm.
    """
    runs = Runs(tmp_path, prompt_folder)
    runs(ONE_PROCESS, name="reference", epochs=len(LAYOUTS), save_freq=1)
    for epoch, layout in enumerate(LAYOUTS, start=1):
        runs(layout, name="resumed", epochs=epoch, resume="auto")
        assert_equal(runs.state("resumed"), runs.state("reference", f"checkpoint-{2 * epoch}"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Return a table of 30 pairs of random images, five of them with an uncertain preference."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    rows = []
    for i in range(30):
        row = {"prompt": f"picture {i}", "chosen": f"{i}a.png", "rejected": f"{i}b.png"}
        for name in (row["chosen"], row["rejected"]):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name)
        rows.append(row | ({"probability": 0.8} if i < 5 else {}))
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.slow
def test_given_images_do_not_depend_on_the_layout_or_a_resume(pairs, prompt_folder, tmp_path):
    """One process without stop, and one process, then two; a pass ends within the second epoch."""
    runs = Runs(tmp_path, prompt_folder)
    default = {"train_batch_size": 8, "num_batches_per_epoch": 8, "num_steps": 10}
    default |= {"num_image_per_prompt": 16}
    offline = {f"sample.{name}": value for name, value in default.items()}
    given = {"preferences.data": str(pairs), "save_freq": 1, "eval_before_training": False}
    fields = {
        "dpo": {**offline, **given, "algorithm": "dpo", "preferences.per_epoch": 24},
        "mixed": {**given, "algorithm": "kto", "preferences.share": 0.5},
    }
    for own in fields.values():
        own[f"{own['algorithm']}.times"] = 1
    runs.run_sequence(ONE_PROCESS, fields, epochs=2)
    parts = {f"{name}-resumed": {**own, "resume": "auto"} for name, own in fields.items()}
    runs.run_sequence((1, 2, 2, 12), parts, epochs=1)
    runs.run_sequence((2, 12, 12, 1), parts, epochs=2)
    for name in fields:
        assert_equal(runs.state(f"{name}-resumed"), runs.state(name))
        start, end = (runs.state(name, each) for each in ("checkpoint-2", "latest"))
        assert any((end[key] - start[key]).abs().max() > 1e-4 for key in end)
