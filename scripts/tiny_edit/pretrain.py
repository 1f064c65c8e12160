"""Makes the small model that edits: draws scenes, trains encoders and transformer, measures."""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxKontextPipeline
from tiny.flow import enlarge_embeddings
from tiny.graphs import graphed
from tiny.loop import Learner, fit
from tiny.options import Options
from tiny.pictures import HEIGHT, WIDTH
from tiny.pretrain import save_half
from torch import Tensor
from untrained.small.flux_kontext import build

from flow_grpo.draw.models.flux import places
from tiny_edit.card import draw_tries, measure, sample_grid, write_card
from tiny_edit.data import draw_edits
from tiny_edit.edits import WORDS, edits_of, source_scenes
from tiny_edit.tables import EditTables

TRAINING_TIME_SHARE = 0.85  # of the time limit; the rest is for measuring
MAX_FOLDER_MIB = 6
TRAINED = ("transformer", "text_encoder", "text_encoder_2")
TOY = {
    "steps": 3,
    "batch_size": 8,
    "heads": 1,
    "scenes": 1,
    "eval_edits": 4,
    "tries": 2,
    "device": "cpu",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Options(__doc__.splitlines()[0], out="assets/tiny-edit", time_limit=300.0)
    add = parser.add_argument
    add("--steps", type=int, default=10**6, help="at most; the time limit ends it before")
    add("--batch-size", type=int, default=2048)
    add("--lr", type=float, default=1e-3, help="peak")
    add("--heads", type=int, default=4, help="of the transformer, 32 wide")
    add("--wrong", type=float, default=0.4, help="share of targets spoiled on purpose")
    add("--scenes", type=int, default=10**6, help="at most so many to learn from")
    add("--eval-edits", type=int, default=192, help="held-out edits to score at the end")
    add("--tries", type=int, default=8, help="at each of them")
    args = parser.read(argv, "scripts/pretrain_tiny_edit.py", TOY)
    if not 0 <= args.wrong <= 1:
        parser.fail(f"--wrong must be from 0 to 1, got {args.wrong:g}")
    return args


def build_pipeline(heads: int, seed: int) -> FluxKontextPipeline:
    """With the VAE of assets/tiny-sd3, which knows these scenes."""
    vae = AutoencoderKL.from_pretrained("assets/tiny-sd3", subfolder="vae").requires_grad_(False)
    parts = build(
        heads=heads,
        head_width=32,
        layers=2,
        single_layers=3,
        text_width=64,
        latent_channels=vae.config.latent_channels,
        words=WORDS,
        guidance_embeds=False,
        seed=seed,
    ).components
    pipeline = FluxKontextPipeline(**{**parts, "vae": vae})
    enlarge_embeddings(pipeline.text_encoder)
    return pipeline


def train(args: argparse.Namespace, pipeline: FluxKontextPipeline, end: float) -> list[dict]:
    """Trains in place until the clock shows `end`; the VAE stays as it is."""
    device = torch.device(args.device)
    scenes = source_scenes()["train"][: args.scenes]
    tables = EditTables(pipeline, [edit for s in scenes for edit in edits_of(s)], args.wrong)
    learner = Learner(p for name in TRAINED for p in getattr(pipeline, name).parameters())
    shift = pipeline.scheduler.config.base_shift  # of small pictures, nearly
    unit = 2 * pipeline.vae_scale_factor
    size = HEIGHT // unit, WIDTH // unit
    img_ids = torch.cat([places(*size, tables.latents, picture) for picture in (0, 1)])
    txt_ids = img_ids.new_zeros(tables.t5_ids.shape[1], 3)

    def step(generator: torch.Generator) -> Tensor:
        learner.begin()
        batch = tables.batch(args.batch_size, generator)
        noise = torch.randn(batch.target.shape, generator=generator, device=device)
        # Uniform, then shifted as the sampler does: training is dense where sampling is.
        sigma = torch.rand(args.batch_size, generator=generator, device=device)
        sigma = torch.sigmoid(torch.logit(sigma, eps=1e-6) + shift)
        noisy = torch.lerp(batch.target, noise, sigma[:, None, None])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # All texts, which are few, once; in float32, as the gradients of many rows add up.
            embeds = pipeline.text_encoder_2(tables.t5_ids)[0].float()
            pooled = pipeline.text_encoder(tables.clip_ids).pooler_output.float()
            velocity = pipeline.transformer(
                hidden_states=torch.cat([noisy, batch.source], 1),
                timestep=sigma,
                encoder_hidden_states=embeds.index_select(0, batch.text),
                pooled_projections=pooled.index_select(0, batch.text),
                img_ids=img_ids,
                txt_ids=txt_ids,
                return_dict=False,
            )[0][:, : noisy.shape[1]]
        loss = F.mse_loss(velocity.float(), noise - batch.target)
        learner.update(loss)
        return loss.detach()

    generator = torch.Generator(device).manual_seed(args.seed)
    step_once = graphed(step, generator)
    log = fit(
        learner,
        lambda _: step_once,
        steps=args.steps,
        seconds=max(1.0, end - time.monotonic()),
        peak_lr=args.lr,
        name="pretraining",
    )
    learner.use_average()
    return log


def main(argv: list[str] | None = None) -> None:
    start = time.monotonic()
    args = parse_args(argv)
    device = torch.device(args.device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients are wrong for such a small model
    pipeline = build_pipeline(args.heads, args.seed).to(device)
    log = train(args, pipeline, start + TRAINING_TIME_SHARE * args.time_limit)
    save_half(pipeline, args.out, MAX_FOLDER_MIB)
    args.out.joinpath("training.json").write_text(json.dumps(log))

    # Measured on what was written, so that rounding to half precision is in the figures.
    pipeline = FluxKontextPipeline.from_pretrained(args.out)
    pipeline.to(device).set_progress_bar_config(disable=True)
    edits = draw_edits("test", args.eval_edits, seed=args.seed + 2)  # not those of dataset/edits
    tries = draw_tries(pipeline, edits, args.tries)
    sample_grid(edits, tries).save(args.out / "samples.png")
    scores = measure(edits, tries)
    minutes = (time.monotonic() - start) / 60
    write_card(
        args.out,
        args,
        scores=scores,
        minutes=minutes,
        steps=log[-1]["step"] + 1,
        parameters={n: getattr(pipeline, n).num_parameters() for n in (*TRAINED, "vae")},
    )
    done = {"scores": scores, "steps": log[-1]["step"] + 1, "minutes": round(minutes, 2)}
    print(json.dumps({**done, "loss": log[-1]["loss"], "out": str(args.out)}))
