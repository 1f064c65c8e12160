"""One update on given responses: its loss and gradients, for comparison with other trainers."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import vlm_runs
from ml_collections import ConfigDict
from torch import Tensor, nn

from flow_grpo.training.metrics import Timer, TrainingStats
from flow_grpo.vlm.builders import load_policy_model
from flow_grpo.vlm.fields import get_config
from flow_grpo.vlm.session import build_session

ROOT = Path(__file__).parents[2]
QUESTIONS = ["What is 2+7?", "What is 1+12?", "What is 5+6?", "What is 9+8?"]
LIKED = ["<think>2+7</think><answer>9</answer>", "13", "<answer>11</answer>", "9+8=17"]
DISLIKED = ["2", "<answer>1 and 12</answer>", "5+6=10", "<think>9</think><answer>8</answer>"]
IMAGES = ["train-000.png", "test-000.png", "test-001.png", "train-004.png"]


def rows(loss: str, model: str) -> list[dict]:
    """Return four rows of TRL's conversational format; those of tiny-vlm have images."""
    found = []
    for question, liked, disliked, image in zip(QUESTIONS, LIKED, DISLIKED, IMAGES, strict=True):
        row = {"prompt": [{"role": "user", "content": question}]}
        if loss == "sft":
            row["completion"] = [{"role": "assistant", "content": liked}]
        elif loss == "kto":
            label = len(found) % 3 != 1
            row["completion"] = [{"role": "assistant", "content": liked if label else disliked}]
            row["label"] = label
        else:
            row["chosen"] = [{"role": "assistant", "content": liked}]
            row["rejected"] = [{"role": "assistant", "content": disliked}]
        if model == "tiny-vlm":
            row["images"] = [str(ROOT / "dataset/shapes_qa/images" / image)]
        found.append(row)
    return found


@torch.no_grad()
def perturb(model: nn.Module, loss: str) -> None:
    """Move a model away from its reference, in the same way for every trainer.

    For KTO in the direction in which its estimate of the KL is above 0, where it is clamped.
    """
    scale = -0.02 if loss == "kto" else 0.02
    for index, (_, weight) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight += scale * (noise * weight.abs().mean().double()).to(weight.dtype)


@dataclass
class Update:
    """An update at the weights of `perturb`, before its optimizer step."""

    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    micro_batches: int


def run_update(loss: str, model: str, folder: Path, **fields: object) -> Update:
    """Return the update of `rows(loss, model)` by scripts/train_vlm.py, in one micro-batch each."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    given = rows(loss, model)
    (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    test = {"question": "What is 1+1?", "answer": "2"}
    (folder / "data/test.jsonl").write_text(json.dumps(test))
    config: ConfigDict = get_config()
    config.update_from_flattened_dict(
        {
            "pretrained.model": str(ROOT / "assets" / model),
            "dataset": str(folder / "data"),
            "logdir": str(folder),
            "run_name": loss,
            "device": "cpu",
            "question_format": "{question}",
            "use_lora": False,
            "sample.questions_per_epoch": len(given),
            "sample.max_new_tokens": 60,
            "train.freeze_vision": False,
            "train.updates_per_epoch": 1,
            "train.tokens_per_batch": 130,
            "train.loss": loss,
            # draws the rows in their order: KTO pairs each prompt with the response before it
            "seed": 27,
            **fields,
        }
    )
    session = build_session(config, load=lambda *both: load_policy_model(*both).double())
    gradients, stats, batches = {}, [], []
    script = vlm_runs.train_vlm

    def record(session, own: TrainingStats) -> None:
        named = session.policy.network.model.named_parameters()
        gradients.update({n: p.grad.clone() for n, p in named if p.grad is not None})
        stats.append(own)
        own.end_update(1.0, 1.0, applied=True)

    def forward(original, *args, **settings):
        batches.append(1)
        return original(*args, **settings)

    try:
        perturb(session.policy.network.model, loss)
        with pytest.MonkeyPatch.context() as patch, vlm_runs.in_float64():
            patch.setattr(script, "optimizer_step", record)
            forward_tokens = session.policy.forward_tokens
            patch.setattr(session.policy, "forward_tokens", partial(forward, forward_tokens))
            rollout = script.sample_epoch(session, 0, Timer())
            tensors = script.compute_rollout_log_probs(session, rollout)
            metrics = script.train_epoch(session, 0, rollout, tensors)
    finally:
        session.close()
    return Update(metrics["train/loss"], gradients, metrics, len(batches))
