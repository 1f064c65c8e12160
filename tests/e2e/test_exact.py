"""What is promised of any split of an epoch, and of resuming with another, where it is exact."""

import json
import subprocess
from pathlib import Path
from typing import Any

import exact_run
import pytest
import torch
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file

# processes, batch, micro-batch, micro-batches per update; an epoch has two updates
Layout = tuple[int, int, int, int]
ALONE = (1, 6, 6, 4)
OTHERS = [(4, 6, 6, 1), (1, 2, 2, 12), (8, 6, 3, 1), (2, 12, 12, 1), (1, 48, 24, 1)]


class Runs:
    def __init__(self, logdir: Path, dataset: Path) -> None:
        self.logdir, self.dataset = logdir, dataset

    def __call__(self, layout: Layout, *, name: str, epochs: int, **fields) -> None:
        self.several(layout, {name: fields}, epochs=epochs)

    def several(self, layout: Layout, runs: dict[str, dict[str, Any]], *, epochs: int) -> None:
        """One after the other, in the same processes."""
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
        every = [{**common, "run_name": name, **fields} for name, fields in runs.items()]
        if processes == 1:
            for one in every:
                exact_run.run(**one)
            return
        done = subprocess.run(
            [*torchrun(processes), exact_run.__file__, json.dumps(every)],
            cwd=ROOT,
            env=environment(warmed=True),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def state(self, name: str, checkpoint: str = "latest") -> dict[str, torch.Tensor]:
        """Weights and their moving average."""
        folder = self.logdir / name / "checkpoints" / checkpoint / "state"
        files = ("trained.safetensors", "ema.safetensors")
        return {f"{f}: {k}": v for f in files for k, v in load_file(folder / f).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].dtype == torch.float64
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_run_can_go_on_in_any_split_of_an_epoch(prompt_folder, tmp_path):
    """Four processes to one, batches of 6 to 2, one to eight, eight to two, and two to one batch.

    Other samples in an update would move the weights by some hundredths of their norm.
    """
    runs = Runs(tmp_path, prompt_folder)
    runs(ALONE, name="undisturbed", epochs=len(OTHERS), save_freq=1)
    for epoch, layout in enumerate(OTHERS, start=1):
        runs(layout, name="moving", epochs=epoch, resume="auto")
        assert_equal(runs.state("moving"), runs.state("undisturbed", f"checkpoint-{2 * epoch}"))
