"""Train the small vision-language model from scratch on synthetic questions, and evaluate it."""

import argparse
import json
import time

import torch
from tiny.loop import Learner, fit
from tiny.options import Options
from tiny.saving import check_size, describe_device
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tiny_vlm.batches import TokenTables
from tiny_vlm.card import sample_grid, write_card
from tiny_vlm.measure import draw_questions, measure
from tiny_vlm.model import build_model, build_processor, save_fp16
from tiny_vlm.static import StaticForward
from tiny_vlm.texts import PAD

MAX_FOLDER_MIB = 8
TRAINING_TIME_SHARE = 0.8  # of the time limit; the rest is for evaluation
TOY = {
    "steps": 3,
    "batch_size": 11,
    "eval_questions": 8,
    "text_layers": 2,
    "vision_layers": 2,
    "device": "cpu",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Options(__doc__.splitlines()[0], out="assets/tiny-vlm", time_limit=440.0)
    add = parser.add_argument
    add("--steps", type=int, default=6000)
    add("--batch-size", type=int, default=2048)
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--text-layers", type=int, default=6)
    add("--vision-layers", type=int, default=4)
    add("--eval-questions", type=int, default=512, help="questions for the evaluation")
    return parser.read(argv, "scripts/pretrain_tiny_vlm.py", TOY)


def train(args: argparse.Namespace, model: torch.nn.Module, tables: TokenTables) -> list[dict]:
    """Train on the log-probabilities of target responses; return the logged losses."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    forward = StaticForward(model, tables.length, compiled=cuda)
    learner = Learner(model.parameters())
    generator = torch.Generator(device).manual_seed(args.seed)

    def step() -> Tensor:
        batch = tables.batch(args.batch_size, generator)
        learner.begin()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            log_probs = forward.answer_log_probs(batch)
        counts = batch.answers != PAD
        loss = -(log_probs * counts).sum() / counts.sum()
        learner.update(loss)
        return loss.detach()

    log = fit(
        learner,
        lambda _: step,
        steps=args.steps,
        seconds=TRAINING_TIME_SHARE * args.time_limit,
        peak_lr=args.lr,
        name="pretraining",
    )
    learner.use_average()
    return log


def main(argv: list[str] | None = None) -> None:
    """Train the small VLM, evaluate it, and write it with its model card."""
    start = time.monotonic()
    args = parse_args(argv)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = build_model(text_layers=args.text_layers, vision_layers=args.vision_layers).to(device)
    tables = TokenTables(device)
    log = train(args, model, tables)
    training_seconds = time.monotonic() - start
    save_fp16(model, build_processor(), args.out)
    args.out.joinpath("training.json").write_text(json.dumps(log) + "\n")

    # Evaluate the saved model, so that the results include rounding to half precision.
    model = AutoModelForImageTextToText.from_pretrained(args.out, trust_remote_code=False)
    model.to(device)
    questions = draw_questions(args.eval_questions, seed=args.seed + 10**6)
    results = measure(model, build_processor(), questions)
    sample_grid(questions, results.texts).save(args.out / "samples.png")
    minutes = (time.monotonic() - start) / 60
    write_card(
        args.out,
        results=results,
        questions=questions,
        command=args.command,
        minutes=minutes,
        device=describe_device(device),
        steps=log[-1]["step"] + 1,
        batch_size=args.batch_size,
        parameters=model.num_parameters(),
    )
    check_size(args.out, MAX_FOLDER_MIB)
    figures = {
        **results.figures(),
        "loss": log[-1]["loss"],
        "steps": log[-1]["step"] + 1,
        "training_seconds": round(training_seconds, 1),
        "minutes": round(minutes, 2),
        "out": str(args.out),
    }
    print(json.dumps(figures))
