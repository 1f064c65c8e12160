"""Train the small model of videos with sound from scratch on synthetic videos, and evaluate it."""

import argparse
import copy
import json
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2Vocoder
from tiny.options import Options
from tiny.saving import save_pipeline_fp16

from tiny_video.autoencoders import VideoSource, train_sound, train_video_vae
from tiny_video.card import NUM_SHOWN, sample_grid, sample_tasks, score_tasks, write_card
from tiny_video.flow import Pool, Wrong, train_flow
from tiny_video.model import build_pipeline
from tiny_video.prompts import split_tasks

TIME_SHARES = {"video_vae": 0.27, "sound": 0.1, "evaluation": 0.06}  # the rest is for the flow
AUTOENCODERS = {
    "vae": AutoencoderKLLTX2Video,
    "audio_vae": AutoencoderKLLTX2Audio,
    "vocoder": LTX2Vocoder,
}
MAX_FOLDER_MIB = 12
TOY = {
    "steps": 2,
    "batch_size": 4,
    "vae_batch_size": 4,
    "vae_width": 8,
    "heads": 1,
    "layers": 1,
    "paths": 1,
    "videos": 1,
    "eval_prompts": 4,
    "device": "cpu",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Options(__doc__.splitlines()[0], out="assets/tiny-video", time_limit=420.0)
    add = parser.add_argument
    add("--steps", type=int, default=10**6, help="maximum of each stage; the time limit ends it")
    add("--batch-size", type=int, default=512, help="batch size of flow matching")
    add("--vae-batch-size", type=int, default=64)
    add("--lr", type=float, default=1.5e-3, help="peak learning rate of flow matching")
    add("--heads", type=int, default=4, help="heads of the transformer, 32 wide each")
    add("--layers", type=int, default=4, help="transformer layers")
    add("--vae-width", type=int, default=32)
    for name, value in vars(Wrong()).items():
        help_text = f"fraction of training videos with a wrong {name}"
        add(f"--wrong-{name}", type=float, default=value, help=help_text)
    add("--paths", type=int, default=2000, help="videos per direction for the VAE")
    add("--videos", type=int, default=1000, help="videos per color and direction")
    add("--autoencoders", type=Path, help="folder of an earlier run: train only the flow")
    add("--eval-prompts", type=int, default=168, help="held-out prompts; 0: no evaluation, no card")
    args = parser.read(argv, "scripts/pretrain_tiny_video.py", TOY)
    args.wrong = Wrong(*(getattr(args, f"wrong_{name}") for name in vars(Wrong())))
    for name, value in vars(args.wrong).items():
        if not 0 <= value <= 1:
            parser.fail(f"--wrong-{name}={value:g} must be from 0 to 1")
    if args.autoencoders and not args.autoencoders.joinpath("model_index.json").is_file():
        parser.fail(f"--autoencoders={args.autoencoders} is not a pipeline directory")
    return args


def train(args: argparse.Namespace) -> tuple[LTX2Pipeline, dict[str, list[dict]]]:
    """Train all parts of a new pipeline; return it with the logged losses of each stage.

    The folder `--out` has the latest weights, also if the training is interrupted.
    """
    start = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    pipeline = build_pipeline(
        heads=args.heads,
        head_width=32,
        layers=args.layers,
        vae_width=args.vae_width,
        seed=args.seed,
    ).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    log = {}
    if args.autoencoders:
        load_autoencoders(pipeline, args.autoencoders)
    else:
        log = train_autoencoders(args, pipeline, generator)
        save(pipeline, args.out)
    pool = Pool(pipeline, generator, args.videos)
    rest = (1 - TIME_SHARES["evaluation"]) * args.time_limit - (time.monotonic() - start)
    log["flow"] = train_flow(
        pipeline,
        pool,
        generator,
        wrong=args.wrong,
        batch=args.batch_size,
        steps=args.steps,
        seconds=max(1.0, rest),
        peak_lr=args.lr,
        watch=partial(watch, args, pipeline),
    )
    return pipeline, log


def train_autoencoders(
    args: argparse.Namespace, pipeline: LTX2Pipeline, generator: torch.Generator
) -> dict[str, list[dict]]:
    """Train the VAEs and the vocoder in place; return the logged losses of each stage."""
    seconds = {name: share * args.time_limit for name, share in TIME_SHARES.items()}
    log = {
        "video_vae": train_video_vae(
            pipeline.vae,
            VideoSource(generator, args.paths),
            generator,
            batch=args.vae_batch_size,
            steps=args.steps,
            seconds=seconds["video_vae"],
        )
    }
    return log | train_sound(
        pipeline.audio_vae,
        pipeline.vocoder,
        generator,
        batch=32,
        steps=args.steps,
        seconds=seconds["sound"],
    )


def load_autoencoders(pipeline: LTX2Pipeline, folder: Path) -> None:
    """Replace the VAEs and the vocoder by those of a saved pipeline."""
    for name, kind in AUTOENCODERS.items():
        part = kind.from_pretrained(folder, subfolder=name).to(pipeline.device)
        setattr(pipeline, name, part.eval())


def save(pipeline: LTX2Pipeline, folder: Path) -> None:
    """Save a copy of the pipeline in half precision."""
    save_pipeline_fp16(copy.deepcopy(pipeline), folder, MAX_FOLDER_MIB)


def watch(args: argparse.Namespace, pipeline: LTX2Pipeline, step: int) -> None:
    """Save the pipeline and print the scores of held-out prompts."""
    save(pipeline, args.out)
    if args.eval_prompts:
        print(json.dumps({"step": step, "scores": evaluate(args, pipeline)}), flush=True)


def evaluate(args: argparse.Namespace, pipeline: LTX2Pipeline) -> dict[str, float]:
    """Return the scores of held-out prompts, which are repeated if there are too few."""
    tasks = list(islice(cycle(split_tasks()["test"]), args.eval_prompts))
    return score_tasks(tasks, *sample_tasks(pipeline, tasks, args.seed))


def finish(
    args: argparse.Namespace, pipeline: LTX2Pipeline, log: dict[str, list[dict]], minutes: float
) -> dict[str, float]:
    """Save the pipeline, evaluate what was saved, and write its model card; return the scores."""
    save(pipeline, args.out)
    args.out.joinpath("training.json").write_text(json.dumps(log))
    if not args.eval_prompts:
        return {}
    pipeline = LTX2Pipeline.from_pretrained(args.out).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    shown = split_tasks()["test"][:NUM_SHOWN]
    sample_grid(shown, sample_tasks(pipeline, shown, args.seed)[0]).save(args.out / "samples.png")
    scores = evaluate(args, pipeline)
    write_card(args.out, args, pipeline, scores=scores, minutes=minutes, log=log)
    return scores


def main(argv: list[str] | None = None) -> None:
    """Train the small video model, evaluate it, and write it with its model card."""
    start = time.monotonic()
    args = parse_args(argv)
    pipeline, log = train(args)
    minutes = (time.monotonic() - start) / 60
    scores = finish(args, pipeline, log, minutes)
    print(json.dumps({"scores": scores, "minutes": round(minutes, 2), "out": str(args.out)}))
