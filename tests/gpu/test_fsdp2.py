"""Training with FSDP2 in a single process; accelerate supports it on GPUs only.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

FILE = Path(__file__)
ROOT = FILE.parents[2]
WEIGHTS = ROOT / "assets/tiny-sd3/transformer/diffusion_pytorch_model.safetensors"
KINDS = {
    "lora": {"use_lora": True, "train__beta": 0.04},
    "transformer": {"use_lora": False, "train__beta": 0.04, "mixed_precision": "bf16"},
    "compiled": {"train__beta": 0.04, "mixed_precision": "bf16", "compile": True},
}


def start(logdir: Path, run_name: str, *launcher: str, **fields) -> subprocess.Popen:
    settings = {
        "logdir": logdir,
        "run_name": run_name,
        "eval_prompts": 8,
        "num_epochs": 3,
        "sample.num_batches_per_epoch": 1,
        "sample.train_batch_size": 32,
        "train.batch_size": 32,
        "train.gradient_accumulation_steps": 1,
        "reward_fn": "{'jpeg_incompressibility': 1.0}",
        **{name.replace("__", "."): value for name, value in fields.items()},
    }
    return run(*launcher, "scripts/train.py", "--config=config/grpo.py:tiny_ocr", **settings)


def run(*command: str, **settings) -> subprocess.Popen:
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def finish(*processes: subprocess.Popen) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors.decode()
        assert b"compile=True is ignored" not in errors
        assert b"could not be compiled" not in errors


def launched(engine: str = "fsdp2") -> tuple[str, ...]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1")
    return (
        *launcher,
        *("--main_process_port", port),
        f"--config_file=scripts/accelerate_configs/{engine}.yaml",
    )


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([t.float().norm() for t in tensors]).norm())


@pytest.fixture(scope="module")
def logdir(tmp_path_factory, request) -> Path:
    """Train the selected kinds with and without FSDP2, concurrently: imports take most time."""
    folder = tmp_path_factory.mktemp("logs")
    kinds = [item.callspec.params["kind"] for item in request.session.items if item.path == FILE]
    finish(
        *(start(folder, f"{k}-single", sys.executable, **KINDS[k]) for k in kinds),
        *(start(folder, f"{k}-sharded", *launched(), **KINDS[k], num_epochs=2) for k in kinds),
    )
    finish(*(start(folder, f"{k}-sharded", *launched(), **KINDS[k], resume="auto") for k in kinds))
    return folder


@pytest.mark.parametrize("kind", list(KINDS))
def test_fsdp2_trains_like_a_single_process_and_resumes(logdir, kind):
    """LoRA is compared in float32, others in bf16, where sharding changes the rounding."""
    single, sharded = (
        [json.loads(line) for line in (logdir / f"{kind}-{how}/metrics.jsonl").open()]
        for how in ("single", "sharded")
    )
    rel = {"lora": 5e-2, "transformer": 0.3, "compiled": 0.5}[kind]
    if kind == "compiled":  # sampling and training use the same kernels
        assert {row.get("train/first_update_ratio_dev", 0) for row in sharded} == {0}
    for a, b in zip(single, sharded, strict=True):
        for name in a:
            if name.startswith(("reward/", "eval/", "epoch", "step")):
                assert a[name] == pytest.approx(b[name], rel=rel, abs=1e-2), name
            if name in ("train/grad_norm", "train/kl"):
                assert a[name] == pytest.approx(b[name], rel=rel, abs=1e-6), name
    weights = "transformer" if kind == "transformer" else "lora"
    file = {"lora": "pytorch_lora_weights", "transformer": "diffusion_pytorch_model"}[weights]
    for prefix in ("", "ema_"):
        name = f"{prefix}{weights}/{file}.safetensors"
        first, second = (
            load_file(logdir / f"{kind}-{how}/checkpoints/latest" / name)
            for how in ("single", "sharded")
        )
        assert first.keys() == second.keys()
        before = {k: torch.zeros(()) for k in first if "lora_B" in k} or load_file(WEIGHTS)
        moved = norm(first[k] - before[k] for k in before)
        assert norm(first[k] - second[k] for k in first) < rel * moved
    if kind == "lora":
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            ROOT / "assets/tiny-sd3", torch_dtype=torch.float32
        )
        pipeline.load_lora_weights(logdir / "lora-sharded/checkpoints/latest/lora")
        assert pipeline.get_active_adapters()
