"""Train the small text-to-image model from scratch on synthetic images, and evaluate it."""

import argparse
import json
import time

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from untrained.small.sd3 import build as build_tiny_sd3

from tiny.card import sample_grid, score_signs, write_card
from tiny.flow import LONG_T5, SHORT_T5, train_flow
from tiny.images import Degradation
from tiny.options import Options
from tiny.pool import PromptPool
from tiny.prompts import KEYWORDS
from tiny.saving import describe_device, save_pipeline_fp16
from tiny.vae import train_vae

COMPONENTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
VAE_TIME_SHARE, SCORE_TIME_SHARE = 0.25, 0.15  # of the time limit
DEGRADATION_HELP = {
    "blur_share": "fraction of blurred signs",
    "blur_sigma": "maximum blur in pixels",
    "low_contrast_share": "fraction of signs with low contrast",
    "low_contrast": "maximum low contrast",
    "wrong_share": "fraction of wrong scenes",
}
TOY = {
    "vae_steps": 4,
    "steps": 9,  # the eighth uses the long T5 prompt
    "batch_size": 8,
    "vae_batch_size": 8,
    "width": 32,
    "layers": 2,
    "text_width": 32,
    "pool_words": 200,
    "eval_words": 4,
    "device": "cpu",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Options(__doc__.splitlines()[0], out="assets/tiny-sd3", time_limit=540.0)
    add = parser.add_argument
    add("--vae-steps", type=int, default=4000)
    add("--vae-batch-size", type=int, default=512)
    add("--steps", type=int, default=7000, help="flow-matching steps")
    add("--batch-size", type=int, default=2048)
    add("--lr", type=float, default=1e-3, help="peak learning rate of flow matching")
    add("--width", type=int, default=128, help="transformer width")
    add("--layers", type=int, default=4, help="transformer layers")
    add("--text-width", type=int, default=128, help="width of each CLIP text encoder")
    add("--pool-words", type=int, default=60_000, help="number of training signs")
    for name, text in DEGRADATION_HELP.items():
        default = getattr(Degradation(), name)
        add(f"--{name.replace('_', '-')}", type=float, default=default, help=text)
    add("--eval-words", type=int, default=96, help="held-out words for the evaluation")
    args = parser.read(argv, "scripts/pretrain_tiny.py", TOY)
    try:
        args.degradation = Degradation(**{name: getattr(args, name) for name in DEGRADATION_HELP})
    except ValueError as error:
        parser.fail(str(error))
    return args


def build_pipeline(args: argparse.Namespace) -> StableDiffusion3Pipeline:
    """Build the small SD3 pipeline with random weights on the device."""
    pipeline = build_tiny_sd3(
        width=args.width,
        layers=args.layers,
        text_width=args.text_width,
        text_layers=2,
        vae_channels=(16, 32, 64),
        latent_channels=8,
        words=KEYWORDS,
        max_length=16,
        seed=args.seed,
    )
    for name in COMPONENTS:
        getattr(pipeline, name).eval()  # disables T5's dropout
    return pipeline.to(args.device)


def main(argv: list[str] | None = None) -> None:
    """Train the small text-to-image model, evaluate it, and write it with its model card."""
    start = time.monotonic()
    args = parse_args(argv)
    device = torch.device(args.device)
    pipeline = build_pipeline(args)
    pool = PromptPool(
        pipeline.tokenizer,
        t5_lengths=(SHORT_T5, LONG_T5),
        num_words=args.pool_words,
        degradation=args.degradation,
        device=device,
        seed=args.seed,
    )
    generator = torch.Generator(device).manual_seed(args.seed)
    vae_log = train_vae(
        pipeline.vae,
        pool,
        batch_size=args.vae_batch_size,
        steps=args.vae_steps,
        seconds=VAE_TIME_SHARE * args.time_limit,
        generator=generator,
    )
    used = time.monotonic() - start
    flow_log = train_flow(
        pipeline,
        pool,
        batch_size=args.batch_size,
        steps=args.steps,
        seconds=max(1.0, (1 - SCORE_TIME_SHARE) * args.time_limit - used),
        peak_lr=args.lr,
        generator=generator,
    )
    save_pipeline_fp16(pipeline, args.out)
    log = {"vae": vae_log, "flow": flow_log}
    args.out.joinpath("training.json").write_text(json.dumps(log))

    # Evaluate the saved model, so that the results include rounding to half precision.
    pipeline = StableDiffusion3Pipeline.from_pretrained(args.out)
    pipeline.to(device).set_progress_bar_config(disable=True)
    diffusers_logging.set_verbosity_error()  # it warns in every call about truncated T5 prompts
    sample_grid(pipeline, t5_length=LONG_T5).save(args.out / "samples.png")
    scores = score_signs(pipeline, args.eval_words, (SHORT_T5, LONG_T5))
    minutes = (time.monotonic() - start) / 60
    write_card(
        args.out,
        degradation=args.degradation,
        scores=scores,
        num_words=args.eval_words,
        command=args.command,
        minutes=minutes,
        device=describe_device(device),
        steps_done={name: entries[-1]["step"] + 1 for name, entries in log.items()},
        parameters={name: getattr(pipeline, name).num_parameters() for name in COMPONENTS},
    )
    print(json.dumps({"ocr": scores, "minutes": round(minutes, 2), "out": str(args.out)}))
