"""Few-step models: make a small one, and see how it learns with each sampler.

    python scripts/few_steps.py distil --out logs/tiny-4-steps
    python scripts/few_steps.py compare logs/tiny-4-steps --seeds 1 2 3 --out docs/results/few_steps

`distil` teaches the small model to go from each of its few noise levels straight to where the many
steps of the teacher lead from there (a consistency model, Song et al. 2023, with the teacher's end
computed), so that it draws by noising again: cps at noise 1. `compare` trains it with cps at noise
1, with flow and with ode, and prints score and sharpness before and after, drawn by each.
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
from compare import make_folders, with_range
from runs import SIGNS, Run, train_all
from tiny.loop import Learner, fit
from tiny.options import Options
from tiny.pretrain import save_half
from torch import Tensor

from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.data.prompts import Prompt, load_prompts
from flow_grpo.draw.evaluation import Exchange, find_candidates
from flow_grpo.draw.models import ModelAdapter, Schedule, load_adapter
from flow_grpo.draw.rollout import Denoiser, Dynamics, eval_generators, initial_noise
from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward, close_scorers

MODEL, SIZE, TOKENS = "assets/tiny-sd3", (32, 96), 8
TOY = {"steps": 2, "batch_size": 4, "parts": 2, "prompts": 4, "device": "cpu"}
# How each draws, and what trains with it; the clip of cps is narrower, as everywhere.
SAMPLERS: dict[str, tuple[Dynamics, str, list[str]]] = {
    "cps 1": (
        Dynamics(None, "cps", 1.0),
        "tiny_ocr",
        ["sample.sde_type=cps", "sample.noise_level=1.0", "train.clip_range=1e-4"],
    ),
    "flow": (Dynamics(None, "flow", 0.7), "tiny_ocr", []),
    "ode": (Dynamics(None), "tiny_awm", []),
}


def finer(schedule: Schedule, parts: int) -> Schedule:
    """Each step cut into so many of one length."""
    sigmas, unit = schedule.sigmas, schedule.timesteps[0] / schedule.sigmas[0]
    shares = np.arange(parts) / parts
    every = [float(a + share * (b - a)) for a, b in pairwise(sigmas) for share in shares]
    return Schedule((*every, sigmas[-1]), tuple(unit * sigma for sigma in every))


def endpoint(teacher: Denoiser, x: Tensor, conditioning: object, start: int) -> Tensor:
    """Where the steps of the teacher lead from its step `start`."""
    whole = teacher.dynamics.schedule
    rest = Schedule(whole.sigmas[start:], whole.timesteps[start:])
    dynamics = replace(teacher.dynamics, schedule=rest)
    return replace(teacher, dynamics=dynamics).sample(x, conditioning).final


def distil(argv: list[str]) -> None:
    parser = Options("Distil a few-step model from the small one.", out="", time_limit=240.0)
    parser.add_argument("--levels", type=int, default=4, help="steps of the student")
    parser.add_argument("--parts", type=int, default=4, help="of each, that the teacher takes")
    parser.add_argument("--guidance", type=float, default=2.0, help="of the teacher, learned too")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--prompts", type=int, default=0, help="of each set; 0 means all")
    args = parser.read(argv, "scripts/few_steps.py distil", TOY)
    adapter = load_adapter(MODEL, device=args.device, max_sequence_length=TOKENS)
    sets = (load_prompts(f"dataset/{name}", "train") for name in ("ocr", "scenes"))
    prompts = [each.prompt for own in sets for each in own[: args.prompts or None]]
    adapter.encode_ahead([*prompts, ""])
    levels = adapter.schedule(args.levels, *SIZE)
    fine = Dynamics(finer(levels, args.parts), guidance_scale=args.guidance)
    teacher = Denoiser(adapter, adapter.transformer, fine)
    student = replace(
        teacher,
        transformer=copy.deepcopy(adapter.transformer).train().requires_grad_(),
        dynamics=Dynamics(levels),
    )
    rng, noise = np.random.default_rng(args.seed), torch.Generator().manual_seed(args.seed)
    shape = (args.batch_size, *adapter.latent_shape(*SIZE))
    learner = Learner(student.transformer.parameters())

    def miss(x: Tensor, level: int, conditioning: object, end: Tensor) -> Tensor:
        velocity = student.velocity(x, levels.timesteps[level], conditioning)
        return (x - levels.sigmas[level] * velocity - end).abs().mean()

    def step() -> Tensor:
        learner.begin()
        conditioning = adapter.encode(
            [*rng.choice(prompts, args.batch_size)], [""] * args.batch_size
        )
        first, again = (torch.randn(shape, generator=noise).to(args.device) for _ in range(2))
        x0 = endpoint(teacher, first, conditioning, 0)
        level = int(rng.integers(1, args.levels))
        sigma = levels.sigmas[level]
        x = (1 - sigma) * x0 + sigma * again
        end = endpoint(teacher, x, conditioning, level * args.parts)
        loss = miss(first, 0, conditioning, x0) + miss(x, level, conditioning, end)
        learner.update(loss)
        return loss.detach()

    limits = {"steps": args.steps, "seconds": args.time_limit, "peak_lr": args.lr}
    log = fit(learner, lambda _: step, **limits, name="distil")
    learner.use_average()
    adapter.transformer.load_state_dict(student.transformer.state_dict())
    save_half(adapter.pipeline, args.out)
    args.out.joinpath("training.json").write_text(json.dumps({"command": args.command, "log": log}))
    print(json.dumps({"out": str(args.out), "steps": log[-1]["step"] + 1, "loss": log[-1]["loss"]}))


def sharpness(images: Tensor) -> float:
    """How far a pixel is from the mean of its four neighbours, root mean square over pictures (N,
    3, H, W) in [0, 1]: blur takes it away."""
    grey = images.float().mean(1)
    inner = grey[:, 1:-1, 1:-1]
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return float((inner - around / 4).square().mean().sqrt())


def measure(
    adapter: ModelAdapter,
    dynamics: Dynamics,
    prompts: list[Prompt],
    score: Callable[[Tensor, list[str]], float],
) -> tuple[float, float]:
    """Score and sharpness of one picture per prompt, all with noise of their own."""
    shape, size = adapter.latent_shape(*SIZE), 32
    noisy = range(0 if dynamics.kind == "ode" else len(dynamics.schedule) - 1)
    denoiser, images = Denoiser(adapter, adapter.transformer, dynamics), []
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        generators = eval_generators(0, list(range(start, start + len(part))))
        noise = initial_noise(generators, shape, adapter.device)
        drawn = denoiser.sample(noise, denoiser.encode(part), steps=noisy, generators=generators)
        images.append(adapter.decode(drawn.final))
    pictures = torch.cat(images)
    return score(pictures, [p.prompt for p in prompts]), sharpness(pictures)


def compare(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Train a few-step model with each sampler.")
    parser.add_argument("model", help="folder of the few-step model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=0, help="to measure with; 0 means all")
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side")
    parser.add_argument("--logdir", type=Path, default=Path("logs/few_steps"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="without .md")
    args = parser.parse_args(argv)
    make_folders(args.out.parent, *(args.logdir / name.replace(" ", "") for name in SAMPLERS))
    fields = {"pretrained.model": args.model, "num_epochs": args.epochs, "save_freq": args.epochs}
    fields |= {f"sample.{n}": v for n, v in {"num_steps": args.steps, "sde_window_size": 0}.items()}
    fields |= {"sample.eval_num_steps": args.steps, "eval_freq": args.epochs}
    common = [f"--config.{name}={value}" for name, value in fields.items()]
    trained = {}
    for name, (_, preset, own) in SAMPLERS.items():
        logdir, runs = (
            args.logdir / name.replace(" ", ""),
            [Run(SIGNS, preset, s) for s in args.seeds],
        )
        overrides = [*common, *(f"--config.{each}" for each in own)]
        if not train_all(runs, logdir, overrides, args.jobs):
            raise UserError(f"not all runs with {name} ended; see {logdir}")
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
    """Score / sharpness, drawn by each sampler: of the model as it was, and trained with each."""
    schedule = adapter.schedule(steps, *SIZE)
    rows = [["trained with", *(f"drawn by {name}" for name in SAMPLERS)], ["---"] * 4]
    for name, words in {"nothing yet": ["base"], **trained}.items():
        candidates = find_candidates(words)
        exchange, found = Exchange(adapter, candidates), []
        for candidate in candidates:
            with exchange.applied(candidate) as own:
                found.append(
                    [
                        measure(own, replace(dynamics, schedule=schedule), prompts, score)
                        for dynamics, *_ in SAMPLERS.values()
                    ]
                )
        cells = [
            " / ".join(with_range(list(v)) for v in zip(*by, strict=True))
            for by in zip(*found, strict=True)
        ]
        rows.append([name, *cells])
    head = (
        f"Score / sharpness of {len(prompts)} held-out words in {steps} steps, means over seeds\n"
    )
    return (
        head
        + "(lowest to highest).\n\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in rows)
        + "\n"
    )


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("distil", "compare"))
    known, rest = parser.parse_known_args(argv)
    told_plainly(partial({"distil": distil, "compare": compare}[known.what], rest), debug=False)


if __name__ == "__main__":
    main()
