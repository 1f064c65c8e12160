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

# 48 samples in two updates: processes, batch, micro-batch, micro-batches per update
LAYOUTS = {
    "1 x 48": (1, 48, 24, 1),
    "1 x 6": (1, 6, 6, 4),
    "1 x 2": (1, 2, 2, 12),
    "2 x 12": (2, 12, 12, 1),
    "4 x 6": (4, 6, 6, 1),
    "8 x 6": (8, 6, 3, 1),
}


class Runs:
    def __init__(self, logdir: Path, dataset: Path) -> None:
        self.logdir, self.dataset = logdir, dataset

    def __call__(self, layout: str, *, name: str = "run", epochs: int, **fields) -> None:
        self.several(layout, {name: fields}, epochs=epochs)

    def several(self, layout: str, runs: dict[str, dict[str, Any]], *, epochs: int) -> None:
        """One after the other, in the same processes."""
        processes, batch, micro, accumulated = LAYOUTS[layout]
        common = {
            "logdir": str(self.logdir),
            "dataset": str(self.dataset),
            "num_epochs": epochs,
            "sample.train_batch_size": batch,
            "sample.num_batches_per_epoch": 48 // (batch * processes),
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

    def state(self, name: str = "run") -> dict[str, torch.Tensor]:
        """Weights and their moving average."""
        folder = self.logdir / name / "checkpoints/latest/state"
        files = ("trained.safetensors", "ema.safetensors")
        return {f"{f}: {k}": v for f in files for k, v in load_file(folder / f).items()}


@pytest.fixture(scope="module")
def runs(prompt_folder, tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("exact"), prompt_folder)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].dtype == torch.float64
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_any_split_of_an_epoch_trains_the_same_weights(runs):
    """Other samples in an update would move them by some hundredths of their norm."""
    runs("1 x 6", name="whole", epochs=2)
    for layout in ("1 x 48", "2 x 12", "4 x 6"):
        runs(layout, name=layout, epochs=2)
        assert_equal(runs.state(layout), runs.state("whole"))


@pytest.mark.slow
def test_a_run_can_go_on_in_any_split(runs):
    """Four processes to one, batches of 6 to 2, one to eight, and eight to two."""
    layouts = ("4 x 6", "1 x 2", "8 x 6", "2 x 12")
    runs("1 x 6", name="undisturbed", epochs=len(layouts))
    for epoch, layout in enumerate(layouts, start=1):
        runs(layout, name="moving", epochs=epoch, resume="auto")
    assert_equal(runs.state("moving"), runs.state("undisturbed"))
