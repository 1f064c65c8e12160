"""Compare losses and gradients on given responses with TRL's SFT, DPO and KTO trainers.

    pip install trl
    PYTHONPATH=.:scripts:tests/support python tests/gpu/compare_trl_losses.py [--record FILE]

Both train the same rows of unlike length, in float64, at weights that differ from the reference.
TRL splits an update into two micro-batches of two rows, except where its update depends on them:
KTO's KL is estimated per micro-batch, and SFT of VLMs averages the means of micro-batches, because
transformers' Trainer passes no token count to these models. Here the packing decides. Prints the
largest differences and fails above 1e-6.
"""

import argparse
import json
import tempfile
from pathlib import Path

import given_runs
import torch
import trl
import vlm_runs
from datasets import Dataset
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PaddleOCRVLProcessor,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

from flow_grpo.vlm.models import load_model, load_processors

CASES = [
    *((loss, "tiny-text") for loss in ("sft", "dpo", "ipo", "kto")),
    *((loss, "tiny-vlm") for loss in ("sft", "dpo", "kto")),
]
TOLERANCE = 1e-6


class TorchInFloat64:
    """The torch module for TRL's fused head, which accumulates in float32 on purpose."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


class Processor(PaddleOCRVLProcessor):
    """Qwen3-VL's processor without its video processor, which needs torchvision."""

    def __call__(self, *args: object, **settings: object) -> object:
        return super().__call__(*args, **settings, return_mm_token_type_ids=True)


def processing_class(model: str) -> object:
    """Return the tokenizer, or the processor of tiny-vlm, which has no class of its own."""
    source = str(given_runs.ROOT / "assets" / model)
    if model == "tiny-text":
        return AutoTokenizer.from_pretrained(source)
    tokenizer, images = load_processors(source)
    return Processor(images, tokenizer, chat_template=tokenizer.chat_template)


def build(model: str) -> nn.Module:
    source = str(given_runs.ROOT / "assets" / model)
    return load_model(source, torch.device("cpu"), torch.float32).double()


def run_trl(loss: str, model: str, folder: Path) -> tuple[float, dict[str, Tensor], dict]:
    """Return the loss, gradients and metrics of TRL's trainer for one optimizer step."""
    rows = given_runs.rows(loss, model)
    for row in rows:
        if "images" in row:
            row["images"] = [Image.open(path).convert("RGB") for path in row["images"]]
    micro_batches = 1 if loss == "kto" or (loss, model) == ("sft", "tiny-vlm") else 2
    settings = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": len(rows) // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_length": None,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    data, network = Dataset.from_list(rows), build(model)
    given_runs.perturb(network, loss)
    network.requires_grad_(True)
    common = {"train_dataset": data, "processing_class": processing_class(model)}
    if loss == "sft":
        trainer = SFTTrainer(network, SFTConfig(**settings), **common)
    elif loss == "kto":
        trainer = KTOTrainer(network, build(model), KTOConfig(**settings), **common)
    else:
        kind = "sigmoid" if loss == "dpo" else "ipo"
        config = DPOConfig(**settings, loss_type=[kind])
        trainer = DPOTrainer(network, build(model), config, **common)
    batches = iter(trainer.get_train_dataloader())
    trainer.current_gradient_accumulation_steps = micro_batches
    items, count = trainer.get_batch_samples(batches, micro_batches, network.device)
    total = 0.0
    for item in items:
        total += float(trainer.training_step(network, item, count))
    gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    metrics = {name: sum(own) / len(own) for name, own in trainer._metrics["train"].items()}
    return total, gradients, metrics


def compare(loss: str, model: str, folder: Path) -> dict:
    """Return the numbers of both trainers, and print their differences."""
    ours = given_runs.run_update(loss, model, folder)
    with vlm_runs.in_float64():
        total, gradients, metrics = run_trl(loss, model, folder)
    names = gradients.keys() & ours.gradients.keys()
    assert len(names) == len(gradients) == len(ours.gradients)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    difference = max(float((gradients[n] - ours.gradients[n]).abs().max()) for n in names)
    norm = sum(float((g.double() ** 2).sum()) for g in gradients.values()) ** 0.5
    print(
        f"{loss} {model}: {ours.micro_batches} micro-batches here, loss {ours.loss:.9f} and "
        f"{total:.9f} (TRL), largest gradient {largest:.3g}, difference {difference:.2g}"
    )
    metrics.pop("mean_token_accuracy", None)  # TRL averages the means of micro-batches
    shared = {n: metrics[n] for n in sorted(metrics) if f"train/{n}" in ours.metrics}
    for name, value in shared.items():
        print(f"    {name}: {ours.metrics[f'train/{name}']:.9f} and {value:.9f} (TRL)")
        assert abs(ours.metrics[f"train/{name}"] - value) < TOLERANCE * max(1, abs(value)), name
    assert abs(ours.loss - total) < TOLERANCE
    assert difference < TOLERANCE * max(1, largest)
    largest_weight = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return {
        "loss": total,
        "norm": norm,
        "weight": largest_weight,
        "gradient": gradients[largest_weight].flatten()[:4].tolist(),
        "metrics": shared,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    found = {"trl": trl.__version__}
    chunked_logprob.torch = TorchInFloat64()
    for loss, model in CASES:
        if args.only in f"{loss} {model}":
            with tempfile.TemporaryDirectory() as folder:
                found[f"{loss} {model}"] = compare(loss, model, Path(folder))
    if args.record:
        args.record.write_text(json.dumps(found, indent=1) + "\n")
