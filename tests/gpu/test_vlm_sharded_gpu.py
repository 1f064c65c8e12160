"""VLM training with FSDP2, and ZeRO-3 if DeepSpeed is installed, in a single process.

python -m pytest -q --noconftest tests/gpu/test_vlm_sharded_gpu.py
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_fsdp2 import ROOT, finish, launched, norm, run
from transformers import AutoModelForImageTextToText

MODEL = ROOT / "assets/tiny-vlm"
LORA = {"use_lora": True, "train.lora_rank": 8, "train.ema": True}
HALF = {"use_lora": False, "mixed_precision": "bf16", "train.recompute_old": True}
KINDS = {
    "lora-fsdp2": ("lora", LORA),
    "model-fsdp2": ("model", HALF),
}
if find_spec("deepspeed"):
    KINDS |= {"lora-deepspeed_zero3": ("lora", LORA), "model-deepspeed_zero3": ("model", HALF)}
FILES = {"lora": "lora/adapter_model.safetensors", "model": "model/model.safetensors"}


def start(logdir: Path, name: str, *launcher: str, **fields) -> subprocess.Popen:
    settings = {
        "logdir": logdir,
        "run_name": name,
        "num_epochs": 2,
        "eval_freq": 1,
        "eval_questions": 32,
        "train.beta": 0.04,
        "train.adam_epsilon": 1e-3,  # otherwise Adam amplifies rounding
        **fields,
    }
    return run(*launcher, "scripts/train_vlm.py", "--config=config/vlm.py:tiny_vlm", **settings)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> Path:
    """Train every kind without sharding and, stopped and resumed, with sharding."""
    folder = tmp_path_factory.mktemp("logs")
    single = {kind: fields for kind, fields in KINDS.values()}

    def sharded(epochs: int) -> list[subprocess.Popen]:
        own = {"num_epochs": epochs, "resume": "auto"}
        return [
            start(folder, name, *launched(name.split("-")[1]), **{**fields, **own})
            for name, (_, fields) in KINDS.items()
        ]

    finish(
        *(start(folder, kind, sys.executable, **fields) for kind, fields in single.items()),
        *sharded(epochs=1),
    )
    finish(*sharded(epochs=2))
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_sharded_training_matches_a_single_process(logdir, name):
    kind, _ = KINDS[name]
    single, sharded = (
        [json.loads(line) for line in (logdir / which / "metrics.jsonl").open()]
        for which in (kind, name)
    )
    for a, b in zip(single, sharded, strict=True):
        for metric in ("reward/avg", "eval/avg", "answer/length", "train/grad_norm"):
            if metric in a:
                assert a[metric] == pytest.approx(b[metric], rel=0.1, abs=0.05), metric
    first, second = (
        load_file(logdir / which / "checkpoints/latest" / FILES[kind]) for which in (kind, name)
    )
    assert first.keys() == second.keys()
    before = {k: torch.zeros(()) for k in first if "lora_B" in k}
    before = before or load_file(MODEL / "model.safetensors")
    moved = norm(first[k] - before[k] for k in before)
    assert norm(first[k] - second[k] for k in first) < 0.3 * moved
    folder = logdir / name / "checkpoints/latest" / kind
    if kind == "lora":
        PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(MODEL), folder)
    else:
        AutoModelForImageTextToText.from_pretrained(folder)
