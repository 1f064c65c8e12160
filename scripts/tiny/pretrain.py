"""Makes the small model: draws pictures, trains VAE, text encoders and transformer, measures."""

import argparse
import json
import time
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from untrained.small.sd3 import build as build_tiny_sd3

from tiny.card import sample_grid, score_signs, write_card
from tiny.flow import LONG_T5, SHORT_T5, train_flow
from tiny.options import Options
from tiny.pictures import Degradation
from tiny.pool import PromptPool
from tiny.prompts import KEYWORDS
from tiny.vae import train_vae

COMPONENTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
VAE_TIME_SHARE, SCORE_TIME_SHARE = 0.25, 0.15  # of the time limit
MAX_FOLDER_MIB, MAX_FILE_MIB = 16, 15
TOY = {
    "vae_steps": 4,
    "steps": 9,  # the ninth comes after one with the long T5 prompt
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
    spoil = Degradation()
    parser = Options(__doc__.splitlines()[0], out="assets/tiny-sd3", time_limit=540.0)
    add = parser.add_argument
    add("--vae-steps", type=int, default=4000)
    add("--vae-batch-size", type=int, default=512)
    add("--steps", type=int, default=7000, help="of flow matching")
    add("--batch-size", type=int, default=2048)
    add("--lr", type=float, default=1e-3, help="peak, of flow matching")
    add("--width", type=int, default=128, help="of the transformer")
    add("--layers", type=int, default=4, help="of the transformer")
    add("--text-width", type=int, default=128, help="of each CLIP text encoder")
    add("--pool-words", type=int, default=60_000, help="signs to learn from")
    add("--blur-share", type=float, default=spoil.blur_share, help="of the signs")
    add("--blur-sigma", type=float, default=spoil.blur_sigma, help="strongest blur, pixels")
    add("--low-contrast-share", type=float, default=spoil.low_contrast_share, help="of the signs")
    add(
        "--low-contrast",
        type=float,
        default=spoil.low_contrast,
        help="most contrast of a pale sign",
    )
    add("--wrong-share", type=float, default=spoil.wrong_share, help="of the scenes")
    add("--eval-words", type=int, default=96, help="held-out words to score at the end")
    args = parser.read(argv, "scripts/pretrain_tiny.py", TOY)
    try:
        args.degradation = Degradation(
            args.blur_share,
            args.blur_sigma,
            args.low_contrast_share,
            args.low_contrast,
            args.wrong_share,
        )
    except ValueError as error:
        parser.fail(str(error))
    return args


def build_pipeline(args: argparse.Namespace) -> StableDiffusion3Pipeline:
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
        getattr(pipeline, name).eval()  # T5 has dropout
    return pipeline.to(args.device)


def save_half(pipeline: DiffusionPipeline, folder: Path, most: float = MAX_FOLDER_MIB) -> None:
    """Writes the pipeline in float16; what would overflow or outgrow the limits is an error."""
    largest = torch.finfo(torch.float16).max
    for name, part in pipeline.components.items():
        for key, value in part.state_dict().items() if isinstance(part, torch.nn.Module) else ():
            if value.is_floating_point() and not value.abs().max() < largest:
                raise RuntimeError(f"{name}.{key} does not fit in float16 or is not finite")
    pipeline.to(torch.float16).save_pretrained(folder)
    for path in folder.glob("text_encoder*/config.json"):
        # transformers loads text encoders in the type written here, diffusers all else in float32:
        # a plain from_pretrained would mix the two.
        config = json.loads(path.read_text()) | {"dtype": "float32"}
        path.write_text(json.dumps(config, indent=2) + "\n")
    sizes = {path: path.stat().st_size / 2**20 for path in folder.rglob("*") if path.is_file()}
    if sum(sizes.values()) > most or max(sizes.values()) > MAX_FILE_MIB:
        raise RuntimeError(
            f"{folder} holds {sum(sizes.values()):.1f} MiB, its largest file "
            f"{max(sizes.values()):.1f}; at most {most:g} and {MAX_FILE_MIB} may be, "
            "lower --width, --layers or --text-width"
        )


def main(argv: list[str] | None = None) -> None:
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
    save_half(pipeline, args.out)
    log = {"vae": vae_log, "flow": flow_log}
    args.out.joinpath("training.json").write_text(json.dumps(log))

    # Measured on what was written, so that rounding to half precision is in the figures.
    pipeline = StableDiffusion3Pipeline.from_pretrained(args.out)
    pipeline.to(device).set_progress_bar_config(disable=True)
    diffusers_logging.set_verbosity_error()  # a warning per call that short T5 prompts are cut
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
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        steps_done={name: entries[-1]["step"] + 1 for name, entries in log.items()},
        parameters={name: getattr(pipeline, name).num_parameters() for name in COMPONENTS},
    )
    print(json.dumps({"ocr": scores, "minutes": round(minutes, 2), "out": str(args.out)}))
