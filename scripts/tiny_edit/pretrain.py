"""Train the small image-editing model from scratch on synthetic scenes, and evaluate it."""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxKontextPipeline
from tiny.flow import enlarge_embeddings
from tiny.graphs import capture_cuda_graph
from tiny.images import HEIGHT, WIDTH
from tiny.loop import Learner, fit
from tiny.options import Options
from tiny.saving import save_pipeline_fp16
from torch import Tensor
from untrained.small.flux_kontext import build

from flow_grpo.diffusion.models.flux import position_ids
from tiny_edit.card import measure, sample_grid, sample_tries, write_card
from tiny_edit.data import draw_edits
from tiny_edit.edits import WORDS, list_edits, source_scenes
from tiny_edit.tables import EditTables

TRAINING_TIME_SHARE = 0.85  # of the time limit; the rest is for evaluation
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
    """Parse the command line."""
    parser = Options(__doc__.splitlines()[0], out="assets/tiny-edit", time_limit=300.0)
    add = parser.add_argument
    add("--steps", type=int, default=10**6, help="maximum; the time limit usually ends training")
    add("--batch-size", type=int, default=2048)
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--heads", type=int, default=4, help="transformer heads, 32 wide each")
    add("--wrong", type=float, default=0.4, help="fraction of wrong targets")
    add("--scenes", type=int, default=10**6, help="maximum number of training scenes")
    add("--eval-edits", type=int, default=192, help="held-out edits for the evaluation")
    add("--tries", type=int, default=8, help="samples per held-out edit")
    args = parser.read(argv, "scripts/pretrain_tiny_edit.py", TOY)
    if not 0 <= args.wrong <= 1:
        parser.fail(f"--wrong={args.wrong:g} must be from 0 to 1")
    return args


def build_pipeline(heads: int, seed: int) -> FluxKontextPipeline:
    """Build the pipeline with the VAE of assets/tiny-sd3, which was trained on such scenes."""
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
    """Train in place with a frozen VAE until the monotonic clock reaches `end`."""
    device = torch.device(args.device)
    scenes = source_scenes()["train"][: args.scenes]
    tables = EditTables(pipeline, [edit for s in scenes for edit in list_edits(s)], args.wrong)
    learner = Learner(p for name in TRAINED for p in getattr(pipeline, name).parameters())
    shift = pipeline.scheduler.config.base_shift  # approximately, for small images
    unit = 2 * pipeline.vae_scale_factor
    size = HEIGHT // unit, WIDTH // unit
    img_ids = torch.cat([position_ids(*size, tables.latents, image) for image in (0, 1)])
    txt_ids = img_ids.new_zeros(tables.t5_ids.shape[1], 3)

    def step(generator: torch.Generator) -> Tensor:
        learner.begin()
        batch = tables.batch(args.batch_size, generator)
        noise = torch.randn(batch.target.shape, generator=generator, device=device)
        # Shifted like the sampler's sigmas, so that training covers what sampling visits.
        sigma = torch.rand(args.batch_size, generator=generator, device=device)
        sigma = torch.sigmoid(torch.logit(sigma, eps=1e-6) + shift)
        noisy = torch.lerp(batch.target, noise, sigma[:, None, None])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Encode each of the few texts once; in float32, as gradients of many rows add up.
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
    step_once = capture_cuda_graph(step, generator)
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
    """Train the small editing model, evaluate it, and write it with its model card."""
    start = time.monotonic()
    args = parse_args(argv)
    device = torch.device(args.device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # wrong gradients for a model this small
    pipeline = build_pipeline(args.heads, args.seed).to(device)
    log = train(args, pipeline, start + TRAINING_TIME_SHARE * args.time_limit)
    save_pipeline_fp16(pipeline, args.out, MAX_FOLDER_MIB)
    args.out.joinpath("training.json").write_text(json.dumps(log))

    # Evaluate the saved model, so that the results include rounding to half precision.
    pipeline = FluxKontextPipeline.from_pretrained(args.out)
    pipeline.to(device).set_progress_bar_config(disable=True)
    edits = draw_edits("test", args.eval_edits, seed=args.seed + 2)  # differ from dataset/edits
    tries = sample_tries(pipeline, edits, args.tries)
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
