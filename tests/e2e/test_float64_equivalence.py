"""Equivalent layouts of an epoch give the same weights in float64, also after resuming."""

import json
import subprocess
from pathlib import Path
from typing import Any

import float64_run
import pytest
import torch
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
