"""FSDP2, which accelerate does not offer on CPUs: one process, its weights shared out to itself.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
FSDP2 = (
    *LAUNCH,
    *("--config_file", "scripts/accelerate_configs/fsdp2.yaml", "--num_processes", "1"),
)


def train(logdir: Path, run_name: str, launcher: tuple[str, ...], **fields) -> list[dict]:
    settings = {
        "logdir": logdir,
        "run_name": run_name,
        "eval_prompts": 8,
        "num_epochs": 3,
        "sample.num_batches_per_epoch": 1,
        "sample.train_batch_size": 32,
        "train.batch_size": 32,
        "train.gradient_accumulation_steps": 1,
        "reward_fn": "{'jpeg_compressibility': 1.0}",
        **{name.replace("__", "."): value for name, value in fields.items()},
    }
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [*launcher, "scripts/train.py", "--config=config/grpo.py:tiny_ocr", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (logdir / run_name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("use_lora", [True, False])
def test_fsdp2_trains_as_one_process_does_and_can_be_resumed(tmp_path, use_lora):
    fields = {"use_lora": use_lora, "train__beta": 0.04}
    alone = train(tmp_path, "alone", (sys.executable,), **fields)
    train(tmp_path, "shared", FSDP2, **{**fields, "num_epochs": 2})
    shared = train(tmp_path, "shared", FSDP2, resume="auto", **fields)
    for a, b in zip(alone, shared, strict=True):
        for name in a:
            if name.startswith(("reward/", "eval/", "epoch", "step")):
                assert a[name] == pytest.approx(b[name], abs=1e-2), name
            if name in ("train/grad_norm", "train/kl"):
                assert a[name] == pytest.approx(b[name], rel=5e-2, abs=1e-6), name
    kind, file = (
        ("lora", "pytorch_lora_weights.safetensors")
        if use_lora
        else ("transformer", "diffusion_pytorch_model.safetensors")
    )
    for prefix in ("", "ema_"):
        first, second = (
            load_file(tmp_path / run / "checkpoints/latest" / f"{prefix}{kind}" / file)
            for run in ("alone", "shared")
        )
        assert first.keys() == second.keys()
        off = max((first[k] - second[k]).abs().max().item() for k in first)
        assert off < 1e-3, off
    if use_lora:
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            ROOT / "assets/tiny-sd3", torch_dtype=torch.float32
        )
        pipeline.load_lora_weights(tmp_path / "shared/checkpoints/latest/lora")
        assert pipeline.get_active_adapters()
