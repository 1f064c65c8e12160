"""Context parallelism and sharded experts give the weights of one process, in float64."""

import json
import subprocess
from pathlib import Path

import context_parallel_runs
import float64_run
import pytest
import torch
from context_parallel_runs import SUPPORTED
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file

from flow_grpo.diffusion.models import ADAPTERS

pytestmark = pytest.mark.slow
RUNS = {
    "wan": {"family": "wan", "frames": 5, "train.gradient_checkpointing": True},
    "flux": {"family": "flux", "use_lora": False},
    "ltx2": {"family": "ltx2", "frames": 25, "train.gradient_checkpointing": True},
    # with random timesteps, so that processes need different transformers at the same time
    "a14b": {"family": "wan22_a14b", "frames": 5, "algorithm": "nft", "nft.times": 2},
}
COMMON = {
    "num_epochs": 1,
    "compile": False,
    "resolution": 32,
    "max_sequence_length": 8,
    "eval_before_training": False,
    "eval_prompts": 3,
    "sample.num_image_per_prompt": 4,
    "sample.test_batch_size": 2,
    "train.gradient_accumulation_steps": 1,
}


class Layouts:
    """Runs with one process and with groups of two, in one directory."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self.errors = folder, folder / "errors.json"
        paths = {"logdir": str(folder), "dataset": str(dataset)}
        for name, own in RUNS.items():
            float64_run.run(**COMMON, **paths, **own, **batch(4), run_name=name)
        two, four = batch(4, 2), batch(2, 2)
        sharded = {**RUNS["flux"], **four, "fsdp2": "FluxTransformerBlock"}
        wan = {**RUNS["wan"], **two}
        pair = {"wan-2": wan, "fails": {**wan, "fails": True}, "ltx2-2": {**RUNS["ltx2"], **two}}
        pair["a14b-fsdp2"] = {**RUNS["a14b"], **batch(2), "fsdp2": "WanTransformerBlock"}
        self.launch(2, pair, paths, str(self.errors))
        runs = {f"{name}-4": {**RUNS[name], **four} for name in ("wan", "flux")}
        self.launch(4, {**runs, "flux-fsdp2": sharded}, paths)

    def launch(self, processes: int, runs: dict, paths: dict[str, str], *more: str) -> None:
        fields = [{**COMMON, **paths, **own, "run_name": name} for name, own in runs.items()]
        script = [context_parallel_runs.__file__, json.dumps(fields), *more]
        done = subprocess.run(
            [*torchrun(processes), *script],
            cwd=ROOT,
            env=environment(warmed=True),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the exported weights: LoRA or the transformer."""
        checkpoint = self.folder / name / "checkpoints/latest"
        files = [
            f for kind in ("lora", "transformer") for f in checkpoint.glob(f"{kind}/**/*.saf*")
        ]
        return {f"{f.parent.name}: {key}": w for f in files for key, w in load_file(f).items()}

    def metrics(self, name: str) -> dict[str, float]:
        [line] = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return json.loads(line)


def batch(size: int, context: int = 1) -> dict[str, int]:
    return {
        "sample.train_batch_size": size,
        "sample.num_batches_per_epoch": 2,
        "train.batch_size": size,
        "sample.context_parallel": context,
    }


@pytest.fixture(scope="module")
def layouts(tmp_path_factory, prompt_folder) -> Layouts:
    return Layouts(tmp_path_factory.mktemp("logs"), prompt_folder)


def test_velocities_and_gradients_are_those_of_one_process(layouts):
    """diffusers computes norms and rotations in float32."""
    errors = json.loads(layouts.errors.read_text())
    assert errors.keys() == SUPPORTED.keys()
    kinds = {kind for kind in ADAPTERS.values() if kind.context_parallel}
    assert kinds == {ADAPTERS[name] for name in SUPPORTED.values()}
    for name, found in errors.items():
        assert len(found) > 10
        assert max(found.values()) < 1e-5, name


def test_an_outage_of_the_reward_ends_all_processes(layouts):
    """Only the first process of a group scores."""
    assert all((layouts.folder / f"outage-{rank}").exists() for rank in (0, 1))


@pytest.mark.parametrize("name", ["wan-2", "wan-4", "flux-4", "flux-fsdp2", "ltx2-2", "a14b-fsdp2"])
def test_a_run_has_the_weights_and_metrics_of_one_process(layouts, name):
    reference = name.partition("-")[0]
    found, expected = layouts.weights(name), layouts.weights(reference)
    assert found.keys() == expected.keys()
    for key in expected:
        assert expected[key].dtype == torch.float64
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-10)
    metrics, expected = layouts.metrics(name), layouts.metrics(reference)
    if reference != "a14b":  # nft has no ratio
        assert metrics["train/first_update_ratio_dev"] == 0
    assert metrics["perf/passes"] == expected["perf/passes"]
    for key in ("reward/avg", "eval/avg", "train/loss", "train/grad_norm"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-6), key
