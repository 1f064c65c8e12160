"""Distil a small few-step model and compare how it trains with each sampler.

    python scripts/few_steps.py distil --out logs/tiny-4-steps
    python scripts/few_steps.py compare logs/tiny-4-steps --seeds 1 2 3 --out docs/results/few_steps

`distil` trains the small model to jump from each of its few noise levels directly to the endpoint
of the teacher's many steps (a consistency model, Song et al. 2023, with the endpoint computed by
the teacher). It samples by re-noising, which is cps at noise level 1. `compare` trains it with cps
at noise level 1, with flow and with ode, and prints score and sharpness before and after training
for each sampler.
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from compare_utils import format_range, make_directories
from runs import SIGNS, Run, train_all
from tiny.loop import Learner, fit
from tiny.options import Options
from tiny.saving import save_pipeline_fp16
from torch import Tensor

from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error
from flow_grpo.data.prompts import Prompt, load_prompts
from flow_grpo.diffusion.candidates import WeightSwapper, parse_diffusion_candidates
from flow_grpo.diffusion.models import ModelAdapter, Schedule, load_adapter
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, eval_generators, initial_noise
from flow_grpo.errors import UserError
from flow_grpo.report.console import markdown_table
from flow_grpo.rewards import build_reward, close_scorers

MODEL, SIZE, TOKENS = "assets/tiny-sd3", (32, 96), 8
TOY = {"steps": 2, "batch_size": 4, "parts": 2, "prompts": 4, "device": "cpu"}
# dynamics, preset and overrides of each sampler; cps needs a narrower clip range
SAMPLERS: dict[str, tuple[Dynamics, str, list[str]]] = {
    "cps 1": (
        Dynamics(None, "cps", 1.0),
        "tiny_ocr",
        ["sample.sde_type=cps", "sample.noise_level=1.0", "train.clip_range=1e-4"],
    ),
    "flow": (Dynamics(None, "flow", 0.7), "tiny_ocr", []),
    "ode": (Dynamics(None), "tiny_awm", []),
}


def refine_schedule(schedule: Schedule, parts: int) -> Schedule:
    """Split each step of a schedule into `parts` equal steps."""
    sigmas, unit = schedule.sigmas, schedule.timesteps[0] / schedule.sigmas[0]
    fractions = np.arange(parts) / parts
    fine = [float(a + fraction * (b - a)) for a, b in pairwise(sigmas) for fraction in fractions]
    return Schedule((*fine, sigmas[-1]), tuple(unit * sigma for sigma in fine))


def teacher_endpoint(teacher: Denoiser, x: Tensor, conditioning: object, start: int) -> Tensor:
    """Denoise `x` with the teacher from step `start` to the end."""
    full = teacher.dynamics.schedule
    remaining = Schedule(full.sigmas[start:], full.timesteps[start:])
    dynamics = replace(teacher.dynamics, schedule=remaining)
    return replace(teacher, dynamics=dynamics).sample(x, conditioning).final


def distil(argv: list[str]) -> None:
    """Distil a few-step student from the bundled model and write it to --out."""
    parser = Options("Distil a few-step model from the small one.", out="", time_limit=240.0)
    parser.add_argument("--levels", type=int, default=4, help="steps of the student")
    parser.add_argument("--parts", type=int, default=4, help="teacher steps per student step")
    parser.add_argument("--guidance", type=float, default=2.0, help="the teacher's, distilled too")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--prompts", type=int, default=0, help="prompts per set; 0 means all")
    args = parser.read(argv, "scripts/few_steps.py distil", TOY)
    adapter = load_adapter(MODEL, device=args.device, max_sequence_length=TOKENS)
    sets = (load_prompts(f"dataset/{name}", "train") for name in ("ocr", "scenes"))
    prompts = [each.prompt for prompts in sets for each in prompts[: args.prompts or None]]
    adapter.precompute_embeddings([*prompts, ""])
    levels = adapter.schedule(args.levels, *SIZE)
    fine = Dynamics(refine_schedule(levels, args.parts), guidance_scale=args.guidance)
    teacher = Denoiser(adapter, adapter.transformer, fine)
    student = replace(
        teacher,
        transformer=copy.deepcopy(adapter.transformer).train().requires_grad_(),
        dynamics=Dynamics(levels),
    )
    rng, noise = np.random.default_rng(args.seed), torch.Generator().manual_seed(args.seed)
    shape = (args.batch_size, *adapter.latent_shape(*SIZE))
    learner = Learner(student.transformer.parameters())

    def endpoint_error(x: Tensor, level: int, conditioning: object, end: Tensor) -> Tensor:
        velocity = student.velocity(x, levels.timesteps[level], conditioning)
        return (x - levels.sigmas[level] * velocity - end).abs().mean()

    def step() -> Tensor:
        """Take one optimizer step of the student and return the loss."""
        learner.begin()
        conditioning = adapter.encode(
            [*rng.choice(prompts, args.batch_size)], [""] * args.batch_size
        )
        x1, fresh_noise = (torch.randn(shape, generator=noise).to(args.device) for _ in range(2))
        x0 = teacher_endpoint(teacher, x1, conditioning, 0)
        level = int(rng.integers(1, args.levels))
        sigma = levels.sigmas[level]
        x = (1 - sigma) * x0 + sigma * fresh_noise
        end = teacher_endpoint(teacher, x, conditioning, level * args.parts)
        loss = endpoint_error(x1, 0, conditioning, x0)
        loss = loss + endpoint_error(x, level, conditioning, end)
        learner.update(loss)
        return loss.detach()

    limits = {"steps": args.steps, "seconds": args.time_limit, "peak_lr": args.lr}
    log = fit(learner, lambda _: step, **limits, name="distil")
    learner.use_average()
    adapter.transformer.load_state_dict(student.transformer.state_dict())
    save_pipeline_fp16(adapter.pipeline, args.out)
    args.out.joinpath("training.json").write_text(json.dumps({"command": args.command, "log": log}))
    print(json.dumps({"out": str(args.out), "steps": log[-1]["step"] + 1, "loss": log[-1]["loss"]}))


def sharpness(images: Tensor) -> float:
    """Return the RMS difference between pixels and the mean of their four neighbours.

    Args:
        images: (N, 3, H, W) in [0, 1].
    """
    grey = images.float().mean(1)
    inner = grey[:, 1:-1, 1:-1]
    neighbours = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return float((inner - neighbours / 4).square().mean().sqrt())


def measure(
    adapter: ModelAdapter,
    dynamics: Dynamics,
    prompts: list[Prompt],
    score: Callable[[Tensor, list[str]], float],
) -> tuple[float, float]:
    """Return score and sharpness of one image per prompt, with noise seeded per prompt."""
    shape, batch_size = adapter.latent_shape(*SIZE), 32
    sde_steps = range(0 if dynamics.kind == "ode" else len(dynamics.schedule) - 1)
    denoiser, batches = Denoiser(adapter, adapter.transformer, dynamics), []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        generators = eval_generators(0, list(range(start, start + len(batch))))
        noise = initial_noise(generators, shape, adapter.device)
        texts = denoiser.encode(batch)
        sampled = denoiser.sample(noise, texts, steps=sde_steps, generators=generators)
        batches.append(adapter.decode(sampled.final))
    images = torch.cat(batches)
    return score(images, [p.prompt for p in prompts]), sharpness(images)


def compare(argv: list[str]) -> None:
    """Train a few-step model with each sampler and write the table of evaluations."""
    parser = argparse.ArgumentParser(description="Train a few-step model with each sampler.")
    parser.add_argument("model", help="directory of the few-step model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=0, help="evaluation prompts; 0 means all")
    parser.add_argument("--jobs", type=int, default=3, help="concurrent runs")
    parser.add_argument("--logdir", type=Path, default=Path("logs/few_steps"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="without .md")
    args = parser.parse_args(argv)
    make_directories(args.out.parent, *(args.logdir / name.replace(" ", "") for name in SAMPLERS))
    fields = {
        "pretrained.model": args.model,
        "num_epochs": args.epochs,
        "save_freq": args.epochs,
        "sample.num_steps": args.steps,
        "sample.sde_window_size": 0,
        "sample.eval_num_steps": args.steps,
        "eval_freq": args.epochs,
    }
    common = [f"--config.{name}={value}" for name, value in fields.items()]
    trained = {}
    for name, (_, preset, changes) in SAMPLERS.items():
        logdir = args.logdir / name.replace(" ", "")
        runs = [Run(SIGNS, preset, s) for s in args.seeds]
        overrides = [*common, *(f"--config.{each}" for each in changes)]
        if not train_all(runs, logdir, overrides, args.jobs):
            raise UserError(f"some runs with {name} failed", hint=f"see {logdir}")
        trained[name] = [str(logdir / run.name) for run in runs]
    adapter = load_adapter(args.model, device=args.device, max_sequence_length=TOKENS)
    prompts = load_prompts("dataset/ocr", "test")[: args.prompts or None]
    reward = build_reward({"ocr": 1.0})
    try:
        text = table(adapter, args.steps, prompts, trained, partial(mean_score, reward))
    finally:
        close_scorers(reward)
    Path(f"{args.out}.md").write_text(text, encoding="utf-8")
    print(text)


def mean_score(reward: Callable, images: Tensor, prompts: list[str]) -> float:
    return float(np.nanmean(reward(images, prompts)["avg"]))


def table(
    adapter: ModelAdapter,
    steps: int,
    prompts: list[Prompt],
    trained: dict[str, list[str]],
    score: Callable[[Tensor, list[str]], float],
) -> str:
    """Return a table of score and sharpness.

    A row is a training sampler, of which `trained` has the runs; a column is an evaluation sampler.
    """
    schedule = adapter.schedule(steps, *SIZE)
    rows = [["trained with", *(f"sampled with {name}" for name in SAMPLERS)]]
    for name, checkpoints in {"not trained": ["base"], **trained}.items():
        candidates = parse_diffusion_candidates(checkpoints)
        swapper = WeightSwapper(adapter, candidates)
        results = []  # by checkpoint: (score, sharpness) of each sampler
        for candidate in candidates:
            with swapper.applied(candidate) as model:
                results.append(
                    [
                        measure(model, replace(dynamics, schedule=schedule), prompts, score)
                        for dynamics, *_ in SAMPLERS.values()
                    ]
                )
        cells = [
            " / ".join(format_range(list(values)) for values in zip(*by_seed, strict=True))
            for by_seed in zip(*results, strict=True)
        ]
        rows.append([name, *cells])
    head = f"Score / sharpness of {len(prompts)} held-out words in {steps} steps, means over seeds"
    return "\n".join([head, "(lowest to highest).", "", markdown_table(rows), ""])


def main(argv: list[str] | None = None) -> None:
    """Run the subcommand `distil` or `compare`."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("distil", "compare"))
    known, rest = parser.parse_known_args(argv)
    exit_on_user_error(
        partial({"distil": distil, "compare": compare}[known.what], rest), debug=False
    )


if __name__ == "__main__":
    main()
